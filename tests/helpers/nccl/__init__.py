"""Whether what ranks ask of torch.distributed could end under NCCL: a checker without GPUs.

:mod:`.rules` decides it for programs, :mod:`.record` takes the programs of gloo runs, and
:mod:`.executor` those of the executor of slices, without a model and without peers.
"""
