"""Attention of documents that share rows of a micro-batch: each sees its own, and those above.

A branch (:attr:`.MicroBatchPlan.parents`) attends to the rows of its path that others run, and to
its own. A kernel that tells log-sum-exps attends to each run of rows above in one call of all
queries that see it, and to each segment's own in another; the calls are joined. So a prefix is read
once for all that share it, and nothing is copied. Any other kernel, and layers of a sliding window,
get the keys of each path one behind another: a copy of the prefix for each branch. Over
context-parallel ranks keys are gathered by their rows anyhow
(:func:`megatron_wlb.plan.sharding.rank_layout`).

Gradients of shared keys and values are summed in at least fp32.

Legend: ``T`` tokens of the micro-batch, ``Tk`` keys of all paths, ``H`` query heads, ``G``
key/value heads, ``D`` head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from megatron_wlb.runtime.gpt.attention.kernels import Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.kernels.kernel import LseKernel, join


@dataclass(frozen=True, eq=False, slots=True)
class RowsAbove:
    """A run of rows, and all that share it."""

    keys: slice
    queries: tuple[slice, ...]
    segments: Segments
    """All queries, which see all keys."""


@dataclass(frozen=True, eq=False, slots=True)
class SharedRows:
    """What a micro-batch's segments share; made once, and used by every layer."""

    own: Segments
    """Each segment to itself."""
    above: tuple[RowsAbove, ...]
    paths: Segments
    """Each segment to its path; of a sliding window to the keys in reach."""
    keys: tuple[slice, ...]
    """The rows of these, one run behind another."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        above: Sequence[Sequence[slice]],
        device: torch.device | str,
        reach_tokens: int | None = None,
    ) -> SharedRows:
        """``lengths`` are those of all segments, padding too; ``above`` the rows before each."""
        sharing: dict[tuple[int, int], list[slice]] = {}
        keys: list[slice] = []
        num_keys: list[int] = []
        for number, (start, stop) in enumerate(pairwise([0, *accumulate(lengths)])):
            runs = [*(above[number] if number < len(above) else ()), slice(start, stop)]
            for run in runs[:-1]:
                sharing.setdefault((run.start, run.stop), []).append(runs[-1])
            if reach_tokens is not None:
                runs = _last(runs, stop - start + reach_tokens - 1)
            num_keys.append(sum(run.stop - run.start for run in runs))
            for run in runs:
                if keys and keys[-1].stop == run.start:
                    run = slice(keys.pop().start, run.stop)
                keys.append(run)
        return cls(
            Segments.of(lengths, device=device, reach_tokens=reach_tokens),
            tuple(
                RowsAbove(
                    slice(*run),
                    tuple(queries),
                    Segments.of_unlike(
                        [sum(q.stop - q.start for q in queries)], [run[1] - run[0]], device
                    ),
                )
                for run, queries in sharing.items()
            ),
            Segments.of(lengths, num_keys, device, reach_tokens),
            tuple(keys),
        )


def shared_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shared: SharedRows,
    kernel: VarlenKernel,
    scale: float,
) -> torch.Tensor:
    """``[T, H, D], [T, G, D], [T, G, Dv] -> [T, H, Dv]``, with all tokens on this rank."""
    joined: Any = _JoinedRows.apply
    copied: Any = _CopiedRows.apply
    if isinstance(kernel, LseKernel) and shared.own.reach_tokens is None:
        out: torch.Tensor = joined(query, key, value, shared, kernel, scale)
        return out
    key, value = (copied(half, shared.keys) for half in (key, value))
    return kernel(query, key, value, shared.paths, scale)


class _JoinedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        shared: SharedRows,
        kernel: LseKernel,
        scale: float,
    ) -> torch.Tensor:
        out, lse = kernel.forward(query, key, value, shared.own, scale, causal=True)
        for rows in shared.above:
            own = _taken(query, rows.queries)
            halves = key[rows.keys], value[rows.keys]
            part, part_lse = kernel.forward(own, *halves, rows.segments, scale, causal=False)
            at = 0
            for queries in rows.queries:
                these = slice(at, at := at + queries.stop - queries.start)
                join(out[queries], lse[:, queries].t(), part[these], part_lse[:, these].t())
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rest = shared, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        shared, kernel, scale = ctx.rest
        grads = kernel.backward(grad, query, key, value, out, lse, shared.own, scale, causal=True)
        exact = torch.promote_types(key.dtype, torch.float32)
        d_query, d_key, d_value = (part.to(exact) for part in grads)
        for rows in shared.above:
            taken = (_taken(t, rows.queries) for t in (grad, query))
            joint = _taken(out, rows.queries), _taken(lse.t(), rows.queries).t().contiguous()
            own, *halves = kernel.backward(
                *taken, key[rows.keys], value[rows.keys], *joint, rows.segments, scale, causal=False
            )
            at = 0
            for queries in rows.queries:
                d_query[queries] += own[at : (at := at + queries.stop - queries.start)]
            for total, half in zip((d_key, d_value), halves, strict=True):
                total[rows.keys] += half
        dtypes = query.dtype, key.dtype, value.dtype
        pairs = zip((d_query, d_key, d_value), dtypes, strict=True)
        return *(total.to(dtype) for total, dtype in pairs), None, None, None


class _CopiedRows(torch.autograd.Function):
    """``[T, G, D] -> [Tk, G, D]``: runs of rows one behind another."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, runs: tuple[slice, ...]) -> torch.Tensor:
        ctx.runs, ctx.num_rows = runs, len(rows)
        return torch.cat([rows[run] for run in runs])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        exact = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.num_rows, *grad.shape[1:], dtype=exact)
        at = 0
        for run in ctx.runs:
            total[run] += grad[at : (at := at + run.stop - run.start)]
        return total.to(grad.dtype), None


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
