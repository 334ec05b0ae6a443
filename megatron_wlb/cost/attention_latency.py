"""Latency of an attention kernel by query and key length: measured tables, or rates of a machine.

A variable-length call runs many chunks at once, each of ``q`` queries that attend causally
(bottom-right aligned) to ``k`` keys, ``q ≤ k``. The call's time is the sum of its chunks' *shares*
and an overhead a call; a share is what one more such chunk adds to a call that fills the device
(WLB-LLM §5.3 predicts single calls). FLOPs alone do not predict it: a kernel works on whole tiles,
and reaches less on few of them (§5.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.document import LEAST_US, MOST_US
from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import real_number, record, shown, whole_number

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

MAX_LENGTH = 1 << 24
"""The longest that a profile may hold, in tokens: each has its place in memory."""
BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass in forwards: flash attention computes the scores again."""


TILE = 128
"""Queries of a block: what one processor of the device works on at a time (FlashAttention 2, 3)."""
MOST_KEY_PARTS = 4
"""The most parts in which queries attend to the rows before them: each is joined to the rest."""
WORTH_A_PART = 0.03
"""Share of the device's processors that another part must fill."""


def filled(num_blocks: int, num_processors: int) -> float:
    """The share of processors that work, in the mean, while equal blocks run in waves."""
    waves = num_blocks / num_processors
    return waves / math.ceil(waves)


@cache
def key_parts(num_blocks: int, num_processors: int) -> int:
    """In how many parts of the keys few blocks of queries attend, so that they fill the device.

    Forward only: backward has a block for each tile of keys.
    """
    return max(
        range(1, MOST_KEY_PARTS + 1),
        key=lambda parts: filled(num_blocks * parts, num_processors) - WORTH_A_PART * parts,
    )


class AttentionLatency(Protocol):
    """Predicts variable-length attention calls of one layer on one device."""

    @property
    def call_us(self) -> tuple[float, float]:
        """Forward and backward overhead of a call, whatever it holds."""
        ...

    def chunk_us(self, queries: Ints, keys: Ints) -> tuple[Floats, Floats]:
        """What each chunk adds to a call's forward and backward, in µs. Broadcasts."""
        ...


def pairs(queries: Ints, keys: Ints, tile_queries: int = 1, tile_keys: int = 1) -> Ints:
    """Query-key pairs that the kernel computes: it takes whole tiles that have any.

    ``tile_queries`` has to be a multiple of ``tile_keys``. Tiles of 1 count the exact pairs,
    ``q · k - q · (q - 1) / 2``.
    """
    rows = -(-queries // tile_queries)
    # Keys before the chunk, seen by all rows; then the diagonal's tiles; the last row sees all.
    before = -(-(keys - queries) // tile_keys)
    diagonal = tile_queries // tile_keys * (rows * (rows - 1) // 2)
    tiles: Ints = (rows - 1) * before + diagonal + -(-keys // tile_keys)
    return tiles * (tile_queries * tile_keys)


def pairs_in_reach(queries: Ints, keys: Ints, reach_tokens: int) -> Ints:
    """The exact pairs where a query sees ``reach_tokens`` keys at most, its own the last."""
    # The others are those of a chunk that ends as much earlier: causal again.
    beyond = np.maximum(keys - reach_tokens, 0)
    seen: Ints = pairs(queries, keys) - pairs(np.minimum(queries, beyond), beyond)
    return seen


def forward_flops(num_heads: int, head_dim: int, num_pairs: float) -> float:
    """QKᵀ and PV, a multiplication and an addition each."""
    return 4.0 * num_heads * head_dim * num_pairs


@dataclass(frozen=True, slots=True)
class AnalyticAttention:
    """Whole tiles at one rate: what to go by before anything is measured.

    The tile is FlashAttention's (§5.2). Each tile of queries costs ``row_overhead`` tiles of keys
    more, for loading it, writing its output and filling the pipeline: assumed, but flash-attn 3
    on an H100 fits it within 5 % in windows of 16,384 tokens and more (docs/results/gpu.md).
    """

    num_heads: int
    """Heads on this device, as all sizes here."""
    head_dim: int
    tflops: float
    """10¹² FLOP/s that attention of long documents reaches."""
    tile: int = TILE
    row_overhead: float = 1.0

    @property
    def call_us(self) -> tuple[float, float]:
        return 0.0, 0.0

    def chunk_us(self, queries: Ints, keys: Ints) -> tuple[Floats, Floats]:
        rows = -(-queries // self.tile)
        overhead = self.row_overhead * rows * self.tile**2
        pair_us = forward_flops(self.num_heads, self.head_dim, 1) / (self.tflops * 1e6)
        forward = (pairs(queries, keys, self.tile, self.tile) + overhead) * pair_us
        return forward, BACKWARD_FLOPS * forward


@dataclass(frozen=True, slots=True)
class SlidingAttention:
    """The mean over layers of which some have a sliding window.

    A chunk takes there what its pairs do at the rate of the same queries with only the keys in
    reach, causally: how much better or worse kernels run a window is not measured.
    """

    latency: AttentionLatency
    """Attention of a layer that has no window."""
    reach_tokens: int
    """The most keys that a query sees in the others, its own too."""
    share: float
    """How many of the layers these are."""

    @property
    def call_us(self) -> tuple[float, float]:
        return self.latency.call_us

    def chunk_us(self, queries: Ints, keys: Ints) -> tuple[Floats, Floats]:
        in_reach = np.minimum(keys, queries + self.reach_tokens - 1)
        seen = pairs_in_reach(queries, keys, self.reach_tokens) / pairs(queries, in_reach)
        windowed = self.latency.chunk_us(queries, in_reach)
        if self.share == 1:
            return seen * windowed[0], seen * windowed[1]
        whole = self.latency.chunk_us(queries, keys)
        forward, backward = (
            (1 - self.share) * full + self.share * seen * near
            for full, near in zip(whole, windowed, strict=True)
        )
        return forward, backward


@dataclass(frozen=True)
class AttentionProfile:
    """Measured shares on a grid of query and key lengths, interpolated.

    Between grid points the time a computed pair is a power of both lengths (linear on logarithmic
    axes), where whole tiles count as computed. In the cells on the diagonal, which have no point
    with more queries than keys, it is the plane through the other three.

    Chunks that start their document (``q = k``) have a table of their own, because kernels may run
    them by other code: torch's on the CPU needs a mask only for the others.

    Raises :class:`ConfigError` for a table that is not one; :meth:`chunk_us` does beyond it,
    unless told to extrapolate, which keeps the rate of the longest length.
    """

    kernel: str
    machine: str
    """The machine and software of the measurement."""
    dtype: str
    """The numbers' type by torch's name, such as ``bfloat16``."""
    num_heads: int
    num_groups: int
    """Key/value heads."""
    head_dim: int
    tile_queries: int
    tile_keys: int
    lengths: tuple[int, ...]
    """Lengths of queries and of keys, ascending from 1."""
    forward_us: tuple[tuple[float, ...], ...]
    """A row a query length; in it a share for each key length from that length on. The first has
    one key more than queries, as the chunk does not start its document."""
    backward_us: tuple[tuple[float, ...], ...]
    whole_forward_us: tuple[float, ...]
    """Shares of as many queries as keys, for each length."""
    whole_backward_us: tuple[float, ...]
    call_forward_us: float = 0.0
    call_backward_us: float = 0.0
    unlike_forward_us: float = 0.0
    """What a chunk takes more beside unlike ones than the tables say, which hold like ones."""
    unlike_backward_us: float = 0.0
    spread: float = 0.0
    """Median over the grid of the quartiles' distance of a point's repeats, over its time."""
    error: float = 0.0
    """Median of ``|predicted ÷ measured - 1|`` at lengths off the grid."""
    extrapolate: bool = False

    def __post_init__(self) -> None:
        n = len(self.lengths)
        rising = all(a < b for a, b in zip(self.lengths, self.lengths[1:], strict=False))
        if n < 2 or self.lengths[0] != 1 or not rising:
            raise ConfigError(
                f"attention profile: lengths {shown(list(self.lengths))}; give two or more, "
                "ascending from 1"
            )
        whole_number("attention profile: the longest of lengths", self.lengths[-1], 1, MAX_LENGTH)
        for name in ("forward_us", "backward_us"):
            if [len(row) for row in getattr(self, name)] != list(range(n, 0, -1)):
                raise ConfigError(
                    f"attention profile: {name} needs a row for each of {n} lengths, with a time "
                    "for each key length from that on; measure again"
                )
        wholes = (self.whole_forward_us, self.whole_backward_us)
        if any(len(row) != n for row in wholes):
            raise ConfigError(
                f"attention profile: whole_forward_us and whole_backward_us need a time for each "
                f"of {n} lengths; measure again"
            )
        rows: dict[str, Iterable[float]]
        rows = {"whole_forward_us": wholes[0], "whole_backward_us": wholes[1]}
        rows |= {name: chain(*getattr(self, name)) for name in ("forward_us", "backward_us")}
        for name, times_us in rows.items():
            for us in times_us:
                real_number(f"attention profile: {name}", us, LEAST_US, MOST_US)
        for name in ("call_forward_us", "call_backward_us", "unlike_forward_us",
                     "unlike_backward_us", "spread", "error"):  # fmt: skip
            real_number(f"attention profile: {name}", getattr(self, name), 0, MOST_US)
        for name in ("num_heads", "num_groups", "head_dim", "tile_queries", "tile_keys"):
            whole_number(f"attention profile: {name}", getattr(self, name), 1, MAX_LENGTH)
        if self.tile_queries % self.tile_keys:
            raise ConfigError(
                f"attention profile: tiles of {self.tile_queries} × {self.tile_keys}; give a query "
                "tile that is a multiple of the key tile"
            )

    @property
    def call_us(self) -> tuple[float, float]:
        return self.call_forward_us, self.call_backward_us

    @cached_property
    def _cells(self) -> tuple[Ints, Floats]:
        """The grid cell of each number of tokens, and where in it, 0 to 1 on a logarithmic axis."""
        tokens = np.arange(1, self.lengths[-1] + 1)
        i = np.searchsorted(self.lengths[1:-1], tokens, side="right")
        axis = np.log2(self.lengths)
        u = (np.log2(tokens) - axis[i]) / (axis[i + 1] - axis[i])
        return np.concatenate([[0], i]), np.concatenate([[0.0], u])

    @cached_property
    def _planes(self) -> tuple[Floats, Floats]:
        """The logarithm of each cell's and pass's time a pair: ``a + b·u + c·v + d·u·v``."""
        return (
            self._fit(self.forward_us, self.whole_forward_us),
            self._fit(self.backward_us, self.whole_backward_us),
        )

    def _pairs(self, queries: Ints, keys: Ints) -> Ints:
        return pairs(queries, keys, self.tile_queries, self.tile_keys)

    def _fit(self, rows: Sequence[Sequence[float]], whole: Sequence[float]) -> Floats:
        """Fits the cells, ``[4, cells]``: the grid's, row by row, then those of whole documents."""
        n, lengths = len(rows), np.array(self.lengths)
        table = np.zeros((n, n))
        for i, row in enumerate(rows):
            keys = np.concatenate([[lengths[i] + 1], lengths[i + 1 :]])
            table[i, i:] = np.log(np.array(row) / self._pairs(lengths[i], keys))
        # Below the diagonal, so that its cells are planes; nothing else there is ever read.
        for i in range(n - 1):
            table[i + 1, i] = table[i, i] + table[i + 1, i + 1] - table[i, i + 1]
        a = table[:-1, :-1]
        b, c, d = table[1:, :-1] - a, table[:-1, 1:] - a, table[1:, 1:] - a
        line = np.log(np.array(whole) / self._pairs(lengths, lengths))
        lines = np.stack([line[:-1], np.diff(line), 0 * line[1:], 0 * line[1:]])
        return np.concatenate([np.stack([a, b, c, d - b - c]).reshape(4, -1), lines], axis=1)

    def chunk_us(self, queries: Ints, keys: Ints) -> tuple[Floats, Floats]:
        """Does what :meth:`AttentionLatency.chunk_us` promises."""
        longest = int(np.max(keys, initial=1))
        if longest > self.lengths[-1] and not self.extrapolate:
            raise ConfigError(
                f"the attention profile ({self.kernel}) ends at {self.lengths[-1]} tokens, but "
                f"{longest} were asked for; run `wlb profile --longest {longest}`, or allow it "
                "with --wlb-cost-extrapolate"
            )
        cells, places = self._cells
        q, k = (np.minimum(tokens, self.lengths[-1]) for tokens in (queries, keys))
        # A whole document's cell is in the row below the grid's last.
        num_rows = len(self.lengths) - 1
        cell = np.where(queries == keys, num_rows, cells[q]) * num_rows + cells[k]
        u, v = places[q], places[k]
        computed = self._pairs(queries, keys)
        forward, backward = (
            computed * np.exp(a[cell] + b[cell] * u + (c[cell] + d[cell] * u) * v) + extra_us
            for (a, b, c, d), extra_us in zip(
                self._planes, (self.unlike_forward_us, self.unlike_backward_us), strict=True
            )
        )
        return forward, backward

    def tflops(self, queries: int, keys: int, *, backward: bool = False) -> float:
        """10¹² FLOP/s of exact pairs that a chunk reaches among its like: what Figure 10 shows."""
        q, k = np.array(queries), np.array(keys)
        extra_us = self.unlike_backward_us if backward else self.unlike_forward_us
        us = float(self.chunk_us(q, k)[int(backward)]) - extra_us
        flops = forward_flops(self.num_heads, self.head_dim, float(pairs(q, k)))
        return flops * (BACKWARD_FLOPS if backward else 1.0) / us / 1e6

    def with_heads(self, num_heads: int) -> AttentionProfile:
        """Scales to another number of heads, which a full device runs in proportion."""
        factor = num_heads / self.num_heads

        def scaled(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(us * factor for us in row) for row in rows)

        return replace(
            self,
            num_heads=num_heads,
            num_groups=max(1, round(self.num_groups * factor)),
            forward_us=scaled(self.forward_us),
            backward_us=scaled(self.backward_us),
            whole_forward_us=scaled([self.whole_forward_us])[0],
            whole_backward_us=scaled([self.whole_backward_us])[0],
        )

    def as_dict(self) -> dict[str, Any]:
        """The profile, JSON-able; inverse of :meth:`from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionProfile:
        """Reads a profile. Raises :class:`ConfigError` for a missing, unknown or wrong entry."""
        return record("attention profile: ", cls, values)


_scaled = lru_cache(maxsize=64)(AttentionProfile.with_heads)  # searches of layouts want few


def nearest_profile(
    profiles: Sequence[AttentionProfile],
    *,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    dtype: str,
) -> AttentionProfile | None:
    """The profile of such heads, scaled to their number; None where none was measured.

    Head dimension and dtype have to be the same; of several, the one with the nearest number of
    query heads a group, then of heads.
    """

    def distance(profile: AttentionProfile) -> tuple[float, float]:
        shared = profile.num_heads / profile.num_groups * num_groups / num_heads
        return abs(math.log(shared)), abs(math.log(profile.num_heads / num_heads))

    fitting = [p for p in profiles if (p.head_dim, p.dtype) == (head_dim, dtype)]
    return _scaled(min(fitting, key=distance), num_heads) if fitting else None
