"""Random numbers of attention dropout: a stream of each rank's own in Megatron's tracker.

Megatron's streams are equal on all ranks that differ in neither tensor nor pipeline rank. But
context-parallel ranks have other queries, and may not drop by one pattern.

The tracker's streams are saved with checkpoints, and restored when activations are computed again.
So is this one: what is drawn then is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core import parallel_state, tensor_parallel

FIRST_SEED = 1_000_003
"""How far from the run's seed those of this stream begin: Megatron's are within some thousands."""


@contextlib.contextmanager
def own_numbers(seed: int) -> Iterator[None]:
    """Draws the device's random numbers from this rank's stream.

    The stream starts where there is none yet: in a new run, and after a checkpoint that has none of
    this rank (from another layout, or a run without dropout). Its name has the rank, because
    Megatron loads the streams of one rank on several.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker()
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    name = f"megatron-wlb-attention-{rank}"
    if name not in tracker.get_states():
        own_seed = seed + FIRST_SEED + torch.distributed.get_rank()
        tracker.seeds_.discard(own_seed)  # it stays where a load has dropped the stream
        tracker.add(name, own_seed)
    with tracker.fork(name):
        yield
