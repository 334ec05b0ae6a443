"""Queries that attend to several runs of rows: a kernel call a run, joined by log-sum-exps.

In backward each call gives its part of the gradients by the joint output and log-sum-exp.

Legend: ``q`` queries, ``H`` query heads, ``G`` key/value heads, ``D`` head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TypeAlias

import torch

from megatron_wlb.cost.attention_latency import TILE, key_parts
from megatron_wlb.runtime.gpt.attention.kernels import Segments
from megatron_wlb.runtime.gpt.attention.kernels.kernel import LseKernel, join

Halves: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, ``[rows, G, D]`` each."""


@cache
def num_processors(device: torch.device) -> int:
    """Blocks of a kernel that run at once: multiprocessors of a GPU, 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, eq=False, slots=True)
class RowsSeen:
    """A run of rows, and queries that see all of them."""

    keys: slice
    queries: tuple[slice, ...]
    """By their numbers, in runs apart from each other."""
    segments: Segments
    """All these queries and rows in one."""
    _in_parts: dict[int, Segments] = field(default_factory=dict)

    @classmethod
    def of(cls, keys: slice, queries: Iterable[slice], device: torch.device | str) -> RowsSeen:
        """``queries`` ascend, and may lie one behind another."""
        runs = merged(queries)
        return cls(keys, runs, Segments.of_unlike([sum(map(size, runs))], [size(keys)], device))

    def in_parts(self, parts: int) -> Segments:
        """The same queries once for each of so many parts of the rows, in whole tiles."""
        if parts not in self._in_parts:
            num_queries, num_keys = self.segments.max_q, self.segments.max_k
            # On the device, too: to copy them there would pin memory in the middle of a step.
            places = torch.arange(parts + 1, device=self.segments.cu_seqlens_q.device)
            starts = places * num_keys // parts // TILE * TILE
            starts[-1:].fill_(num_keys)
            cuts = [num_keys * at // parts // TILE * TILE for at in range(parts)]
            keys = [stop - start for start, stop in pairwise([*cuts, num_keys])]
            self._in_parts[parts] = Segments(
                (num_queries,) * parts,
                tuple(keys),
                (places * num_queries).int(),
                starts.int(),
                num_queries,
                max(keys),
            )
        return self._in_parts[parts]


class JoinedRows:
    """Queries to keys of their own, causally, and to all of the rows that they see besides.

    In forward a kernel has a block for each tile of queries and head. Where these leave processors
    of the device idle, the queries attend to several parts of the rows at once.
    """

    def __init__(
        self,
        kernel: LseKernel,
        query: torch.Tensor,
        halves: Halves,
        scale: float,
        own: Segments,
        own_rows: Sequence[slice],
        seen: Sequence[RowsSeen],
    ) -> None:
        """``query`` ``[q, H, D]``, with keys of ``own`` in ``own_rows``, one run behind another;
        ``halves`` are keys and values of all rows.
        """
        self.kernel, self.halves, self.scale = kernel, halves, scale
        self.own, self.own_rows, self.seen = own, own_rows, seen
        self.query = query.detach()
        key, value = (taken(half, own_rows) for half in halves)
        self.out, self.lse = kernel.forward(self.query, key, value, own, scale, causal=True)
        for rows in seen:
            queries = taken(self.query, rows.queries)
            blocks = -(-len(queries) // TILE) * queries.shape[1]
            parts = key_parts(blocks, num_processors(query.device))
            parts = min(parts, size(rows.keys) // TILE or 1)
            repeated = queries.expand(parts, *queries.shape).flatten(0, 1)
            key, value = self._keys(rows)
            found = kernel.forward(repeated, key, value, rows.in_parts(parts), scale, causal=False)
            pairs = (torch.split(part, len(queries)) for part in (found[0], found[1].t()))
            for out, lse in zip(*pairs, strict=True):
                for run, these in laid(rows.queries):
                    join(self.out[run], self.lse.t()[run], out[these], lse[these])

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """What is kept for the backward, but keys and values."""
        return self.query, self.out, self.lse

    def backward(self, grad: torch.Tensor, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradients of the queries. Those of keys and values are added to ``sums``
        ``[rows, G, D]``.
        """
        key, value = (taken(half, self.own_rows) for half in self.halves)
        given = grad, self.query, key, value, self.out, self.lse
        grad_query, *own = self.kernel.backward(*given, self.own, self.scale, causal=True)
        if len(self.seen) > 1:  # a sum of two is rounded once
            exact = torch.promote_types(grad_query.dtype, torch.float32)
            grad_query = grad_query.to(exact)
        add_rows(sums, own, self.own_rows)
        for rows in self.seen:
            of, query, out = (taken(t, rows.queries) for t in (grad, self.query, self.out))
            lse = taken(self.lse.t(), rows.queries).t()
            key, value = self._keys(rows)
            part, *halves = self.kernel.backward(
                of, query, key, value, out, lse.contiguous(), rows.segments, self.scale,
                causal=False,
            )  # fmt: skip
            for run, these in laid(rows.queries):
                grad_query[run] += part[these]
            add_rows(sums, halves, [rows.keys])
        return grad_query.to(self.query.dtype)

    def _keys(self, rows: RowsSeen) -> Halves:
        key, value = self.halves
        return key[rows.keys], value[rows.keys]


def size(run: slice) -> int:
    return int(run.stop - run.start)


def merged(runs: Iterable[slice]) -> tuple[slice, ...]:
    """The same rows, in fewer runs where one begins where the one before ends."""
    made: list[slice] = []
    for run in runs:
        if made and made[-1].stop == run.start:
            run = slice(made.pop().start, run.stop)
        made.append(run)
    return tuple(made)


def laid(runs: Iterable[slice]) -> Iterator[tuple[slice, slice]]:
    """Each run, and where it is where they lie one behind another."""
    at = 0
    for run in runs:
        yield run, slice(at, at := at + size(run))


def taken(tensor: torch.Tensor, runs: Sequence[slice]) -> torch.Tensor:
    """Some rows, one run behind another: a copy, unless it is one run."""
    return tensor[runs[0]] if len(runs) == 1 else torch.cat([tensor[run] for run in runs])


def add_rows(
    sums: Sequence[torch.Tensor], halves: Sequence[torch.Tensor], runs: Sequence[slice]
) -> None:
    """Adds gradients of rows that were :func:`taken`."""
    for total, half in zip(sums, halves, strict=True):
        for run, these in laid(runs):
            total[run] += half[these]
