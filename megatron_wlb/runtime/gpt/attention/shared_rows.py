"""Attention of documents that share rows: each sees its own, and those above it.

A document that shares (:attr:`.Sharing.above`) attends to the rows of its path that others run, and
to its own. They are rows of the micro-batch; or of a tree that runs in several, whose keys and
values have one buffer in each layer (:mod:`megatron_wlb.runtime.gpt.attention.slice_attention`).

A kernel that tells log-sum-exps attends to each run of rows above in one call of all queries that
see it, and to each segment's own in another (:class:`.JoinedRows`). So a prefix is read once for
all that share it, and nothing is copied. Any other kernel, and layers of a sliding window, get the
keys of each path one behind another: a copy of the prefix for each. Inside a micro-batch
context-parallel ranks gather keys by their rows anyhow
(:func:`megatron_wlb.plan.sharding.rank_layout`).

Gradients of shared keys and values are summed in at least fp32.

Legend: ``T`` tokens of the micro-batch, ``H`` query heads, ``G`` key/value heads, ``D`` head
dimension.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_wlb.plan import RowRun
from megatron_wlb.runtime.gpt.attention.joined_rows import (
    Halves,
    JoinedRows,
    RowsSeen,
    add_rows,
    merged,
    size,
    taken,
)
from megatron_wlb.runtime.gpt.attention.kernels import Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.kernels.kernel import KernelCall, LseKernel
from megatron_wlb.runtime.gpt.attention.key_exchange import free, regain


@dataclass(frozen=True, eq=False, slots=True)
class SharedRows:
    """What a micro-batch's segments share; made once, and used by every layer."""

    own: Segments
    """Each segment to itself."""
    own_rows: tuple[slice, ...]
    """The rows of these keys, one run behind another."""
    above: tuple[RowsSeen, ...]
    paths: Segments
    """Each segment to its path; of a sliding window to the keys in reach."""
    path_rows: tuple[slice, ...]
    """The rows of these keys."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        above: Sequence[Sequence[RowRun]],
        device: torch.device | str,
        reach_tokens: int | None = None,
        start: int = 0,
        chunks: Sequence[Sequence[int]] | None = None,
    ) -> SharedRows | None:
        """``lengths`` are those of all segments, padding too, the first at row ``start``; ``above``
        are the rows before each. A context-parallel rank has ``chunks`` of them: of each its first
        token, queries, and its segment's own keys; None: all segments whole.

        None where the rank has no chunk.
        """
        ends = [0, *accumulate(lengths)]
        if chunks is None:
            chunks = list(zip(ends, lengths, lengths, strict=False))
        if not chunks:
            return None
        sharing: dict[RowRun, list[slice]] = {}
        own_rows: list[slice] = []
        path_rows: list[slice] = []
        num_keys: list[int] = []
        at = 0
        for token, queries, own in chunks:
            segment = bisect_right(ends, token) - 1
            before = above[segment] if segment < len(above) else ()
            for rows in before:
                sharing.setdefault(rows, []).append(slice(at, at + queries))
            first = start + ends[segment]
            own_rows.append(slice(first, first + own))
            runs = [*(slice(*rows) for rows in before), own_rows[-1]]
            if reach_tokens is not None:
                runs = _last(runs, queries + reach_tokens - 1)
            num_keys.append(sum(map(size, runs)))
            path_rows += runs
            at += queries
        _, num_queries, num_own = zip(*chunks, strict=True)
        return cls(
            Segments.of(num_queries, num_own, device, reach_tokens),
            merged(own_rows),
            tuple(RowsSeen.of(slice(*rows), own, device) for rows, own in sharing.items()),
            Segments.of(num_queries, num_keys, device, reach_tokens),
            merged(path_rows),
        )

    def call(
        self,
        query: torch.Tensor,
        halves: Halves,
        kernel: VarlenKernel,
        scale: float,
        *,
        keep: bool,
        may_join: bool,
    ) -> JoinedRows | CopiedRows:
        """``[q, H, D]`` queries to keys and values of all rows. With ``keep``, and gradients
        enabled, it can be differentiated. ``may_join`` says that the kernel was seen to give the
        same in two parts.
        """
        several = self.own.reach_tokens is None and len(self.path_rows) > 1
        if isinstance(kernel, LseKernel) and may_join and several:
            return JoinedRows(kernel, query, halves, scale, self.own, self.own_rows, self.above)
        return CopiedRows(self, query, halves, kernel, scale, keep)

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


class CopiedRows:
    """Queries to the keys of their paths. Copies of these are given back behind the forward, and
    made again for the backward.
    """

    def __init__(
        self,
        shared: SharedRows,
        query: torch.Tensor,
        halves: Halves,
        kernel: VarlenKernel,
        scale: float,
        keep: bool,
    ) -> None:
        self._halves, self._rows = halves, shared.path_rows
        key, value = (taken(half, self._rows) for half in halves)
        self._call = KernelCall.of(kernel, query, key, value, shared.paths, scale, keep)
        self.out = self._call.out
        self._copies = self._call.inputs[1:] if len(self._rows) > 1 else ()
        for copied in self._copies:
            free(copied)

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """What is kept for the backward, but keys and values."""
        return self._call.kept

    def backward(self, grad: torch.Tensor, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """As :meth:`.JoinedRows.backward`."""
        for half, copied in zip(self._halves, self._copies, strict=False):
            with torch.no_grad(), _unsafe_preserve_version_counter(copied):
                torch.cat([half[run] for run in self._rows], out=regain(copied))
        grad_query, *grads = self._call.backward(grad)
        for copied in self._copies:
            free(copied)
        add_rows(sums, grads, self._rows)
        return grad_query


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        run: Callable[..., JoinedRows | CopiedRows],
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


def _last(runs: Sequence[slice], number: int) -> list[slice]:
    """The last rows of some runs."""
    kept: list[slice] = []
    for run in reversed(runs):
        if number > 0:
            kept.insert(0, slice(max(run.start, run.stop - number), run.stop))
            number -= size(run)
    return kept
