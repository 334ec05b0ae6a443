"""Attention of documents that share rows: each sees its own, and those above it.

A document that shares (:attr:`.Sharing.above`) attends to the rows of its path that others
run, and to its own. They are rows of the micro-batch; or of a tree that runs in several, whose keys
and values have one buffer in each layer
(:mod:`megatron_wlb.runtime.gpt.attention.slice_attention`).

A kernel that tells log-sum-exps attends to each run of rows above in one call of all queries that
see it, and to each segment's own in another; the calls are joined. So a prefix is read once for all
that share it, and nothing is copied. Any other kernel, layers of a sliding window, and
context-parallel ranks get the keys of each path one behind another: a copy of the prefix for each.
Inside a micro-batch such ranks gather keys by their rows anyhow
(:func:`megatron_wlb.plan.sharding.rank_layout`).

Gradients of shared keys and values are summed in at least fp32.

Legend: ``T`` tokens of the micro-batch, ``H`` query heads, ``G`` key/value heads, ``D`` head
dimension.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_wlb.plan import RowRun
from megatron_wlb.runtime.gpt.attention.kernels import Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.kernels.kernel import KernelCall, LseKernel, join
from megatron_wlb.runtime.gpt.attention.key_exchange import free, regain

Halves: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, ``[rows, G, D]`` each."""


@dataclass(frozen=True, eq=False, slots=True)
class RowsAbove:
    """A run of rows, and all that share it."""

    keys: slice
    queries: tuple[slice, ...]
    """By their numbers."""
    segments: Segments
    """All queries, which see all keys."""


@dataclass(frozen=True, eq=False, slots=True)
class SharedRows:
    """What a micro-batch's segments share; made once, and used by every layer."""

    start: int
    """The row of the first query."""
    own: Segments
    """Each segment to itself."""
    above: tuple[RowsAbove, ...]
    paths: Segments
    """Each segment to its path; of a sliding window to the keys in reach."""
    keys: tuple[slice, ...]
    """The rows of these, one run behind another."""
    joins: bool = True
    """Whether calls of a kernel that tells log-sum-exps may be joined."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        above: Sequence[Sequence[RowRun]],
        device: torch.device | str,
        reach_tokens: int | None = None,
        start: int = 0,
    ) -> SharedRows:
        """``lengths`` are those of all segments, padding too, the first at row ``start``; ``above``
        are the rows before each.
        """
        sharing: dict[RowRun, list[slice]] = {}
        keys: list[slice] = []
        num_keys: list[int] = []
        for number, (first, last) in enumerate(pairwise([0, *accumulate(lengths)])):
            before = above[number] if number < len(above) else ()
            for rows in before:
                sharing.setdefault(rows, []).append(slice(first, last))
            runs = [*(slice(*rows) for rows in before), slice(start + first, start + last)]
            if reach_tokens is not None:
                runs = _last(runs, last - first + reach_tokens - 1)
            num_keys.append(sum(run.stop - run.start for run in runs))
            for run in runs:
                if keys and keys[-1].stop == run.start:
                    run = slice(keys.pop().start, run.stop)
                keys.append(run)
        return cls(
            start,
            Segments.of(lengths, device=device, reach_tokens=reach_tokens),
            tuple(
                RowsAbove(
                    slice(*rows),
                    tuple(queries),
                    Segments.of_unlike([sum(map(_size, queries))], [_size(slice(*rows))], device),
                )
                for rows, queries in sharing.items()
            ),
            Segments.of(lengths, num_keys, device, reach_tokens),
            tuple(keys),
        )

    @classmethod
    def of_chunks(
        cls,
        lengths: Sequence[int],
        above: Sequence[Sequence[RowRun]],
        begins: Sequence[int],
        chunks: Sequence[Sequence[int]],
        device: torch.device | str,
        reach_tokens: int | None,
        start: int,
    ) -> SharedRows | None:
        """The same of a context-parallel rank's ``chunks``, each some queries and their segment's
        own keys, whose first tokens are ``begins``. None where the rank has no chunk.
        """
        if not chunks:
            return None
        firsts = [0, *accumulate(lengths)]
        keys: list[slice] = []
        num_keys: list[int] = []
        for begin, (queries, own) in zip(begins, chunks, strict=True):
            segment = bisect_right(firsts, begin) - 1
            first = start + firsts[segment]
            runs = [*(slice(*rows) for rows in above[segment]), slice(first, first + own)]
            if reach_tokens is not None:
                runs = _last(runs, queries + reach_tokens - 1)
            num_keys.append(sum(map(_size, runs)))
            keys += runs
        queries_of = [queries for queries, _ in chunks]
        own_rows = Segments.of(queries_of, device=device, reach_tokens=reach_tokens)
        paths = Segments.of(queries_of, num_keys, device, reach_tokens)
        return cls(start, own_rows, (), paths, tuple(keys), joins=False)

    def call(
        self,
        query: torch.Tensor,
        halves: Halves,
        kernel: VarlenKernel,
        scale: float,
        *,
        keep: bool,
        may_join: bool,
    ) -> SharedCall:
        """``[q, H, D]`` queries to keys and values of all rows. With ``keep``, and gradients
        enabled, it can be differentiated. ``may_join`` says that the kernel was seen to give the
        same in two parts.
        """
        joins = may_join and self.joins and self.own.reach_tokens is None and len(self.keys) > 1
        if isinstance(kernel, LseKernel) and joins:
            return _JoinedRows(kernel, self, query, halves, scale)
        if len(self.keys) == 1:
            key, value = (half[self.keys[0]] for half in halves)
        else:
            key, value = (torch.cat([half[run] for run in self.keys]) for half in halves)
        call = KernelCall.of(kernel, query, key, value, self.paths, scale, keep)
        return _CopiedRows(call, self, halves)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernel: VarlenKernel,
        scale: float,
        *,
        may_join: bool,
    ) -> torch.Tensor:
        """``[T, H, D], [T, G, D], [T, G, Dv] -> [T, H, Dv]``, with all tokens on this rank;
        ``may_join`` is as in :meth:`call`.
        """
        apply: Any = _SharedAttention.apply
        run = partial(self.call, kernel=kernel, scale=scale, may_join=may_join)
        out: torch.Tensor = apply(query, key, value, run, torch.is_grad_enabled())
        return out


class SharedCall:
    """Queries to the rows that they see of shared keys and values: as many kernel calls as there
    are unlike runs, and one; or one of copied rows.
    """

    def __init__(self, shared: SharedRows, out: torch.Tensor) -> None:
        self.shared, self.out = shared, out

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """What is kept for the backward, but keys and values."""
        raise NotImplementedError

    def backward(self, grad: torch.Tensor, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradients of the queries. Those of keys and values are added to ``sums``."""
        raise NotImplementedError


class _JoinedRows(SharedCall):
    def __init__(
        self,
        kernel: LseKernel,
        shared: SharedRows,
        query: torch.Tensor,
        halves: Halves,
        scale: float,
    ) -> None:
        self.kernel, self.scale, self.halves, self.query = kernel, scale, halves, query.detach()
        key, value = self._seen(slice(shared.start, shared.start + len(query)))
        out, self.lse = kernel.forward(self.query, key, value, shared.own, scale, causal=True)
        super().__init__(shared, out)
        for rows in shared.above:
            key, value = self._seen(rows.keys)
            part, part_lse = kernel.forward(
                _taken(self.query, rows.queries), key, value, rows.segments, scale, causal=False
            )
            for queries, these in _places(rows.queries):
                lse = self.lse[:, queries].t()
                join(out[queries], lse, part[these], part_lse[:, these].t())

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.out, self.lse

    def backward(self, grad: torch.Tensor, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        shared, lse = self.shared, self.lse
        own_rows = slice(shared.start, shared.start + len(grad))
        key, value = self._seen(own_rows)
        own, *grads = self.kernel.backward(
            grad, self.query, key, value, self.out, lse, shared.own, self.scale, causal=True
        )
        grad_query = own.to(torch.promote_types(own.dtype, torch.float32))
        for total, half in zip(sums, grads, strict=True):
            total[own_rows] += half
        for rows in shared.above:
            key, value = self._seen(rows.keys)
            given, query, out = (_taken(t, rows.queries) for t in (grad, self.query, self.out))
            lse = _taken(self.lse.t(), rows.queries).t().contiguous()
            part, *grads = self.kernel.backward(
                given, query, key, value, out, lse, rows.segments, self.scale, causal=False
            )
            for queries, these in _places(rows.queries):
                grad_query[queries] += part[these]
            for total, half in zip(sums, grads, strict=True):
                total[rows.keys] += half
        return grad_query.to(self.query.dtype)

    def _seen(self, rows: slice) -> Halves:
        key, value = self.halves
        return key[rows], value[rows]


class _CopiedRows(SharedCall):
    """Copies are given back behind the forward, and made again for the backward."""

    def __init__(self, call: KernelCall, shared: SharedRows, halves: Halves) -> None:
        super().__init__(shared, call.out)
        self._call, self._halves = call, halves
        for copied in self._copies:
            free(copied)

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        return self._call.kept

    @property
    def _copies(self) -> Sequence[torch.Tensor]:
        return self._call.inputs[1:] if len(self.shared.keys) > 1 else ()

    def backward(self, grad: torch.Tensor, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        for half, copied in zip(self._halves, self._copies, strict=False):
            with torch.no_grad(), _unsafe_preserve_version_counter(copied):
                torch.cat([half[run] for run in self.shared.keys], out=regain(copied))
        grad_query, *grads = self._call.backward(grad)
        for copied in self._copies:
            free(copied)
        for total, copied in zip(sums, grads, strict=True):
            for run, these in _places(self.shared.keys):
                total[run] += copied[these]
        return grad_query


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        run: Callable[..., SharedCall],
        keep: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(key, value)
        with torch.set_grad_enabled(keep):
            ctx.call = run(query, (key.detach(), value.detach()), keep=keep)
        out: torch.Tensor = ctx.call.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, ctx.call = ctx.call, None
        halves = ctx.saved_tensors
        exact = [torch.promote_types(half.dtype, torch.float32) for half in halves]
        sums = [torch.zeros_like(h, dtype=e) for h, e in zip(halves, exact, strict=True)]
        grad_query = call.backward(grad, sums)
        pairs = zip(sums, halves, strict=True)
        grads = [total.to(half.dtype) for total, half in pairs]
        return grad_query, *grads, None, None


def _size(run: slice) -> int:
    return int(run.stop - run.start)


def _places(runs: Sequence[slice]) -> Iterator[tuple[slice, slice]]:
    """Each run, and where it is where they lie one behind another."""
    at = 0
    for run in runs:
        yield run, slice(at, at := at + _size(run))


def _taken(tensor: torch.Tensor, runs: Sequence[slice]) -> torch.Tensor:
    """Some rows, one run behind another; runs that lie so are not copied."""
    merged = [runs[0]]
    for run in runs[1:]:
        if merged[-1].stop == run.start:
            run = slice(merged.pop().start, run.stop)
        merged.append(run)
    return tensor[merged[0]] if len(merged) == 1 else torch.cat([tensor[run] for run in merged])


def _last(runs: Sequence[slice], number: int) -> list[slice]:
    """The last rows of some runs."""
    kept: list[slice] = []
    for run in reversed(runs):
        if number > 0:
            kept.insert(0, slice(max(run.start, run.stop - number), run.stop))
            number -= run.stop - run.start
    return kept
