"""torch's flash attention on the CPU, which knows only whole documents, made to take parts of them.

It aligns its causal mask to the top left. So a segment with more keys than queries runs as two
calls: its queries to the keys before them, which all of them see, and to their own, causally. The
two outputs are put together by their log-sum-exps (as by Ring Attention); with the joint ones each
call's own backward pass gives its part of the gradients. Nothing is masked, so nothing of the size
of queries × keys is ever held, and time grows with the pairs computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from megatron_wlb.runtime.attention.kernels.base import Demand, Segments, VarlenKernel

Pairs: TypeAlias = list[tuple[torch.Tensor, ...]]
"""Keys and values, or their gradients, of each segment."""

BREAKS = (192, 768)
"""Numbers of queries from which on torch's blocks have 64, and then 256 of them, instead of 32."""
OPERATIONS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


def obstacle(demand: Demand) -> str | None:
    """Why it cannot run this, or None."""
    if demand.device.type != "cpu":
        return f"it runs on the CPU, and the device is {demand.device.type}"
    if not all(hasattr(torch.ops.aten, name) for name in OPERATIONS):
        return f"torch {torch.__version__} has no flash attention for the CPU"
    return None


class _Attention(torch.autograd.Function):
    """All segments of a call in one node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float,
    ) -> torch.Tensor:
        attend = getattr(torch.ops.aten, OPERATIONS[0])
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        exact = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_empty(query.shape[:2], dtype=exact)
        num_groups = key.shape[1]
        for (q, o, total), own, before in zip(
            _queries(segments, num_groups, query, out, lse),
            *_keys(segments, query.shape[1], key, value),
            strict=True,
        ):
            late, late_lse = attend(q, *own, is_causal=True, scale=scale)
            if not before[0].shape[2]:  # no keys
                o.copy_(late)
                total.copy_(late_lse)
                continue
            early, early_lse = attend(q, *before, scale=scale)
            torch.logaddexp(early_lse, late_lse, out=total)
            share = (early_lse - total).exp_().unsqueeze(-1).to(o.dtype)
            torch.lerp(late, early, share, out=o)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        differentiate = partial(getattr(torch.ops.aten, OPERATIONS[1]), scale=ctx.scale)
        query, key, value, out, lse = ctx.saved_tensors
        d_query, d_key, d_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        num_heads, num_groups = query.shape[1], key.shape[1]
        for (g, q, o, total, d_q), own, before, d_own, d_before in zip(
            _queries(ctx.segments, num_groups, grad, query, out, lse, d_query),
            *_keys(ctx.segments, num_heads, key, value),
            *_keys(ctx.segments, num_groups, d_key, d_value),
            strict=True,
        ):
            late, *d_shared = differentiate(g, q, *own, o, total, 0.0, True)
            _add_heads(d_shared, d_own)
            if not before[0].shape[2]:
                d_q.copy_(late)
                continue
            early, *d_shared = differentiate(g, q, *before, o, total, 0.0, False)
            _add_heads(d_shared, d_before)
            torch.add(early, late, out=d_q)
        return d_query, d_key, d_value, None, None


torch_cpu_varlen: VarlenKernel = _Attention.apply


def _queries(
    segments: Segments, num_groups: int, *tensors: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views each segment of ``[Tq, H, …]`` as ``[G, H / G, q, …]``: the heads of each group."""
    lengths = list(segments.lengths_q)
    views = (t.view(len(t), num_groups, -1, *t.shape[2:]).movedim(0, 2) for t in tensors)
    return zip(*(torch.split(view, lengths, 2) for view in views), strict=True)


def _keys(segments: Segments, num_heads: int, *tensors: torch.Tensor) -> tuple[Pairs, Pairs]:
    """Views each segment of ``[Tk, G, D]``, its own keys and those before them, as
    ``[G, H / G, k, D]``, each key/value head for all query heads of its group.
    """
    lengths = [
        length
        for q, k in zip(segments.lengths_q, segments.lengths_k, strict=True)
        for length in (k - q, q)
    ]
    views = (
        tensor.transpose(0, 1).unsqueeze(1).expand(-1, num_heads // tensor.shape[1], -1, -1)
        for tensor in tensors
    )
    pairs = list(zip(*(torch.split(view, lengths, 2) for view in views), strict=True))
    return pairs[1::2], pairs[::2]


def _add_heads(parts: Sequence[torch.Tensor], totals: tuple[torch.Tensor, ...]) -> None:
    """Gradients of a key/value head are the sums over its query heads."""
    for part, total in zip(parts, totals, strict=True):
        torch.sum(part, 1, keepdim=True, out=total)
