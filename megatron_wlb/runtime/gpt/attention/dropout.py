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


def begin_stream(seed: int) -> None:
    """Starts this rank's stream, as the run's ``seed`` or a step's own says."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    own_seed = seed + FIRST_SEED + torch.distributed.get_rank()
    tracker.seeds_.discard(own_seed)  # it stays where a load has dropped the stream
    tracker.add(_name(), own_seed)


@contextlib.contextmanager
def own_numbers(seed: int) -> Iterator[None]:
    """Draws the device's random numbers from this rank's stream.

    The stream starts where there is none yet: in a new run, and after a checkpoint that has none of
    this rank (from another layout, or a run without dropout).
    """
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if _name() not in tracker.get_states():
        begin_stream(seed)
    with tracker.fork(_name()):
        yield


def _name() -> str:
    """The stream's name has the rank, because Megatron loads the streams of one rank on several."""
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return f"megatron-wlb-attention-{rank}"
