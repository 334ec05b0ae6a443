"""Measures an attention kernel over query and key lengths: an :class:`AttentionProfile`.

A point of the grid is a call of many like chunks, as a single one fills no GPU. Calls of unlike
chunks, as shards of documents have them, then tell how much more a chunk takes there. Calls take
turns, so that a busy or hot machine slows all of them alike. On a GPU the median of a call's
repeats counts; on a CPU the least, as what else the machine runs only adds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeAlias

import numpy as np
import torch

from megatron_wlb.cost.attention_latency import AttentionProfile, Floats, Ints
from megatron_wlb.data.lengths import REFERENCE_WINDOW, sample_lengths
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan.sharding import shard_arrays
from megatron_wlb.plan.sharding.select import PER_DOCUMENT, PER_SEQUENCE
from megatron_wlb.runtime.device_clock import Clock
from megatron_wlb.runtime.emulation.heap import keep_freed_memory
from megatron_wlb.runtime.gpt.attention.kernels import (
    CANDIDATES,
    Demand,
    Segments,
    VarlenKernel,
    choose_kernel,
)

logger = logging.getLogger(__name__)

Call: TypeAlias = tuple[Ints, Ints]
"""Query and key lengths of a call's chunks."""

TILES = ((1, 1), (64, 1), (64, 64), (128, 1), (128, 64), (128, 128))
"""Query and key tiles to explain times by; those are taken that predict best between the points."""

CLEARLY = 0.7
"""The share of the error without tiles that tiles may leave, to be taken."""

CUDA_QUERY_TOKENS = 16384
"""Queries of a call, to fill a GPU several times over."""
CPU_KEY_TOKENS = 2048
"""Keys of a call: enough chunks that starting them cold is no large share, as in real calls."""
NUM_MIXES = 6
"""Micro-batches of unlike documents; each makes eight calls."""
MIXED_CP_SIZES = (4, 16)
"""Over which these are sharded: into chunks for which one more hardly counts, or most of all."""
MIX_SEED = 2**31
"""Added to the seed of these, so that they are not the documents that anything is judged by."""
MAX_CHUNKS = 64
"""On the CPU, which runs chunk after chunk."""
KEY_BYTES = 2**32
"""Most bytes of the gradients of a call's keys, and of its values, as flash-attention 2 holds them:
for every query head, before it adds up those of a key/value head."""


class AttentionTimer:
    """Times calls of a kernel, forward and backward, on random numbers.

    What training writes right before a call is read right before it here, so that caches hold as
    much of it: queries, keys and values; for the backward pass keys and values, which are gathered
    again, and the output's gradient.

    A call has at most ``query_tokens`` queries and ``key_tokens`` keys.
    """

    def __init__(
        self, kernel: VarlenKernel, demand: Demand, query_tokens: int, key_tokens: int, seed: int
    ) -> None:
        if demand.device.type == "cpu":
            keep_freed_memory()
        generator = torch.Generator(demand.device).manual_seed(seed)

        def draw(num_tokens: int, num_heads: int) -> torch.Tensor:
            return torch.randn(
                num_tokens, num_heads, demand.head_dim,
                device=demand.device, dtype=demand.dtype, generator=generator,
            )  # fmt: skip

        self._kernel, self._scale = kernel, demand.head_dim**-0.5
        self._device = demand.device
        self._clocks = Clock(demand.device), Clock(demand.device)
        self.clock = self._clocks[0].name
        """What its times are."""
        self._query, self._grad = (draw(query_tokens, demand.num_heads) for _ in range(2))
        self._key, self._value = (draw(key_tokens, demand.num_groups) for _ in range(2))

    def __call__(self, queries: Ints, keys: Ints) -> tuple[float, float]:
        """µs of one call with such chunks, forward and backward."""
        if not len(queries):
            return 0.0, 0.0
        segments = Segments.of(queries.tolist(), keys.tolist(), self._device)
        num_queries, num_keys = sum(segments.lengths_q), sum(segments.lengths_k)
        query, key, value = (
            tensor[:num].detach().requires_grad_()
            for tensor, num in (
                (self._query, num_queries), (self._key, num_keys), (self._value, num_keys),
            )
        )  # fmt: skip
        outputs: list[torch.Tensor] = []

        def forward() -> None:
            outputs.append(self._kernel(query, key, value, segments, self._scale))

        grad = self._grad[:num_queries]
        _read(query, key, value)
        forward_us = self._clocks[0](forward)
        _read(key, value, grad)
        backward_us = self._clocks[1](
            lambda: torch.autograd.grad(outputs.pop(), (query, key, value), grad)
        )
        return forward_us, backward_us


def _read(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.detach().sum()


def grid(longest: int, breaks: Sequence[int] = ()) -> tuple[int, ...]:
    """1, 2, 4 … up to ``longest``, and both sides of each break.

    Raises :class:`ConfigError` below 2.
    """
    if longest < 2:
        raise ConfigError(f"the longest length is {longest}; give at least 2")
    lengths = {2**n for n in range(math.floor(math.log2(longest)) + 1)}
    sides = {side for at in breaks for side in (at - 1, at) if side < longest}
    return tuple(sorted(lengths | sides | {longest}))


def measure_attention(
    demand: Demand,
    kernel_name: str,
    *,
    longest: int,
    repeats: int,
    machine: str,
    seed: int = 0,
    num_checks: int = 24,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AttentionProfile:
    """The kernel's table up to ``longest`` queries and keys.

    Where a GPU's memory does not suffice, calls are measured anew with half as many keys, and where
    those are of the longest documents, up to half of ``longest``; a warning says so.

    By ``num_checks`` lengths off the grid tiles are chosen and the error is told. ``progress`` is
    called with the calls made and all calls.

    Raises:
        CompatibilityError: the kernel cannot run.
        ConfigError: sizes that no table can have, or a GPU without room for any.
    """
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}; give at least 1")
    name, kernel, *_ = choose_kernel(kernel_name, demand)
    key_bytes, mixed_bytes = KEY_BYTES, 2 * longest * _token_bytes(demand)  # each document twice
    while True:
        try:
            return _measured(
                demand, name, kernel, longest, key_bytes, repeats, machine, seed, num_checks,
                progress,
            )  # fmt: skip
        except torch.cuda.OutOfMemoryError:
            most_bytes = max(key_bytes, mixed_bytes) // 2
        # Only now, when all that the error holds is freed.
        key_bytes = min(key_bytes, most_bytes)
        if mixed_bytes > most_bytes:
            longest, mixed_bytes = longest // 2, mixed_bytes // 2
        if longest < 2:
            raise ConfigError(
                f"attention of {demand.num_heads} heads of {demand.head_dim} finds no memory on "
                f"{demand.device}; end what else runs there, or give fewer heads"
            )
        logger.warning(
            "out of memory: attention is measured anew with calls half as large, up to %d tokens",
            longest,
        )


def _measured(
    demand: Demand,
    name: str,
    kernel: VarlenKernel,
    longest: int,
    key_bytes: int,
    repeats: int,
    machine: str,
    seed: int,
    num_checks: int,
    progress: Callable[[int, int], None],
) -> AttentionProfile:
    """:func:`measure_attention` in calls of limited size."""
    lengths = grid(longest, CANDIDATES[name].breaks)
    parts = [(q, max(k, q + 1)) for i, q in enumerate(lengths) for k in lengths[i:]]
    wholes = [(n, n) for n in lengths]
    checks = _off_grid(longest, num_checks, seed)
    points = [*parts, *wholes, *checks]
    nums = [_num_chunks(demand, q, k, key_bytes) for q, k in points]
    mixed = _mixed_calls(longest, seed)
    calls: list[Call] = [
        (np.ones(1, np.int64), np.ones(1, np.int64)),
        *((np.full(num, q), np.full(num, k)) for num, (q, k) in zip(nums, points, strict=True)),
        *mixed,
    ]
    most_queries, most_keys = (max(int(call[i].sum()) for call in calls) for i in range(2))
    timer = AttentionTimer(kernel, demand, most_queries, most_keys, seed)
    times_us = _in_turn(timer, calls, repeats, progress)
    typical = np.median if demand.device.type == "cuda" else np.min
    all_us = typical(times_us, axis=1)  # [calls, 2]
    low_us, high_us = np.quantile(times_us, (0.25, 0.75), axis=1)
    single_us, typical_us, mixed_us = np.split(all_us, [1, len(points) + 1])
    # Of chunks of one token, a call of one and a call of many tell overhead and share apart.
    one = len(parts)
    share_us = (typical_us[one] - single_us[0]) / max(1, nums[one] - 1)
    call_us = np.maximum(single_us[0] - np.maximum(share_us, 0.0), 0.0)
    shares = np.maximum(typical_us - call_us, typical_us / 2) / np.array(nums)[:, None]
    part_shares, whole_shares, check_shares = np.split(
        shares, [len(parts), len(parts) + len(wholes)]
    )
    stops = np.cumsum(range(len(lengths), 0, -1))[:-1]
    rows = [_rounded(part) for part in np.split(part_shares, stops)]
    profile = AttentionProfile(
        kernel=name,
        machine=machine,
        dtype=str(demand.dtype).removeprefix("torch."),
        num_heads=demand.num_heads,
        num_groups=demand.num_groups,
        head_dim=demand.head_dim,
        tile_queries=1,
        tile_keys=1,
        lengths=lengths,
        forward_us=tuple(row[0] for row in rows),
        backward_us=tuple(row[1] for row in rows),
        whole_forward_us=_rounded(whole_shares)[0],
        whole_backward_us=_rounded(whole_shares)[1],
        call_forward_us=round(float(call_us[0]), 2),
        call_backward_us=round(float(call_us[1]), 2),
        spread=round(float(np.median((high_us - low_us) / all_us)), 4),
    )
    return _with_unlike(_with_tiles(profile, np.array(checks), check_shares), mixed, mixed_us)


def _token_bytes(demand: Demand) -> int:
    """The bytes of a key's gradient, see :data:`KEY_BYTES`."""
    return demand.num_heads * demand.head_dim * demand.dtype.itemsize


def _num_chunks(demand: Demand, queries: int, keys: int, key_bytes: int) -> int:
    cuda = demand.device.type == "cuda"
    fitting = key_bytes // _token_bytes(demand) // keys
    wanted = CUDA_QUERY_TOKENS // queries if cuda else min(MAX_CHUNKS, CPU_KEY_TOKENS // keys)
    return max(1, min(wanted, fitting))


def _off_grid(longest: int, number: int, seed: int) -> list[tuple[int, int]]:
    """Lengths between the grid's, evenly on logarithmic axes; every fourth a whole document."""
    random = np.random.default_rng(seed)
    drawn = np.sort(2 ** random.uniform(0, math.log2(longest), (number, 2)), axis=1).astype(int)
    return [(int(k if n % 4 == 0 else q), int(k)) for n, (q, k) in enumerate(drawn)]


def _in_turn(
    timer: AttentionTimer,
    calls: Sequence[Call],
    repeats: int,
    progress: Callable[[int, int], None],
) -> Floats:
    """µs ``[calls, repeats, 2]``, after a first round that loads and allocates."""
    times_us = np.empty((len(calls), repeats, 2))
    total = (repeats + 1) * len(calls)
    for turn in range(repeats + 1):
        for number, (queries, keys) in enumerate(calls):
            times_us[number, max(turn - 1, 0)] = timer(queries, keys)
            progress(turn * len(calls) + number + 1, total)
    return times_us


def _mixed_calls(longest: int, seed: int) -> list[Call]:
    """Makes the calls of the first and the last CP rank, for windows of reference lengths.

    The windows are scaled to ``longest``, and divided per sequence and per document.
    """
    multiple = 2 * max(MIXED_CP_SIZES)
    num_tokens = -(-longest // multiple) * multiple
    drawn = sample_lengths("reference", NUM_MIXES, seed=MIX_SEED + seed)
    stops = np.unique(np.cumsum(drawn) * num_tokens // REFERENCE_WINDOW)
    calls: list[Call] = []
    for number in range(NUM_MIXES):
        own = stops[(stops > number * num_tokens) & (stops <= (number + 1) * num_tokens)]
        lengths = np.diff(own, prepend=number * num_tokens).tolist()
        for cp_size, sharding in product(MIXED_CP_SIZES, (PER_SEQUENCE, PER_DOCUMENT)):
            ranks = shard_arrays(lengths, cp_size, sharding)
            calls += [(rows[:, 2] - rows[:, 1], rows[:, 2]) for rows in (ranks[0], ranks[-1])]
    return calls


def _with_unlike(
    profile: AttentionProfile, calls: Sequence[Call], times_us: Floats
) -> AttentionProfile:
    """Adds what a chunk takes more beside unlike ones, from measured calls, ``[calls, 2]``.

    One constant a pass, by least squares of relative errors, and none below 0. A factor is fitted
    with it and left out: by that much the machine was slower in these calls than in the table's.
    """
    extra_us = []
    like = replace(profile, extrapolate=True)  # windows are rounded up to what CP divides
    for number, call_us in enumerate(profile.call_us):
        like_us = [like.chunk_us(q, k)[number].sum() + call_us for q, k in calls]
        columns = np.array([like_us, [len(q) for q, _ in calls]]).T / times_us[:, [number]]
        (factor, constant_us), *_ = np.linalg.lstsq(columns, np.ones(len(calls)), rcond=None)
        extra_us.append(round(max(0.0, float(constant_us / factor)), 2))
    return replace(profile, unlike_forward_us=extra_us[0], unlike_backward_us=extra_us[1])


def _rounded(shares: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """``[points, 2]`` -> forward and backward, to five digits, as a file should have them."""
    forward, backward = (tuple(float(f"{us:.5g}") for us in column) for column in shares.T.tolist())
    return forward, backward


def _with_tiles(profile: AttentionProfile, checks: Ints, shares: Floats) -> AttentionProfile:
    """Adds the tiles that predict the measured shares off the grid best, and that error.

    It adds none unless they do clearly better: wrong ones, chosen by noise, predict jumps.
    """
    if not len(checks):
        return profile

    def error(tiled: AttentionProfile) -> float:
        predicted = np.stack(tiled.chunk_us(checks[:, 0], checks[:, 1]), axis=1)
        return float(np.median(np.abs(predicted / shares - 1)))

    tiled = [replace(profile, tile_queries=q, tile_keys=k) for q, k in TILES]
    best = min(tiled, key=error)
    if error(best) > CLEARLY * error(profile):
        best = profile
    return replace(best, error=round(error(best), 4))
