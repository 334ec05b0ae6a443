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
from typing import TypeAlias

import torch

from megatron_wlb.runtime.gpt.attention.kernels.kernel import (
    NO_DROPOUT,
    NO_WINDOW,
    Demand,
    LseKernel,
    Segments,
    VarlenKernel,
    join,
)

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
    if demand.reach_tokens is not None:
        return NO_WINDOW
    return NO_DROPOUT if demand.dropout else None


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    attend = partial(getattr(torch.ops.aten, OPERATIONS[0]), scale=scale)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    exact = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[1::-1], dtype=exact)  # [H, Tq]
    num_groups = key.shape[1]
    for (q, o, total), own, before in zip(
        _queries(segments, num_groups, query, out, lse.t()),
        *_keys(segments, causal, query.shape[1], key, value),
        strict=True,
    ):
        parts = [attend(q, *own, is_causal=True)] if causal else []
        if before[0].shape[2]:  # any keys
            parts.append(attend(q, *before))
        (late, late_lse), *early = parts
        o.copy_(late)
        total.copy_(late_lse)
        for part, part_lse in early:
            join(o, total, part, part_lse)
    return out, lse


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    differentiate = partial(getattr(torch.ops.aten, OPERATIONS[1]), scale=scale)
    d_query, d_key, d_value = (torch.empty_like(tensor) for tensor in (query, key, value))
    num_heads, num_groups = query.shape[1], key.shape[1]
    for (g, q, o, total, d_q), own, before, d_own, d_before in zip(
        _queries(segments, num_groups, grad, query, out, lse.t(), d_query),
        *_keys(segments, causal, num_heads, key, value),
        *_keys(segments, causal, num_groups, d_key, d_value),
        strict=True,
    ):
        parts = []
        for (k, v), d_pair, is_own in ((own, d_own, True), (before, d_before, False)):
            if k.shape[2]:
                part, *d_shared = differentiate(g, q, k, v, o, total, 0.0, is_own)
                _add_heads(d_shared, d_pair)
                parts.append(part)
        torch.add(*parts, out=d_q) if len(parts) > 1 else d_q.copy_(parts[0])
    return d_query, d_key, d_value


torch_cpu_varlen: VarlenKernel = LseKernel(_forward, _backward)


def _queries(
    segments: Segments, num_groups: int, *tensors: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views each segment of ``[Tq, H, …]`` as ``[G, H / G, q, …]``: the heads of each group."""
    lengths = list(segments.lengths_q)
    views = (t.view(len(t), num_groups, -1, *t.shape[2:]).movedim(0, 2) for t in tensors)
    return zip(*(torch.split(view, lengths, 2) for view in views), strict=True)


def _keys(
    segments: Segments, causal: bool, num_heads: int, *tensors: torch.Tensor
) -> tuple[Pairs, Pairs]:
    """Views each segment of ``[Tk, G, D]``, its own keys and those before them, as
    ``[G, H / G, k, D]``, each key/value head for all query heads of its group.

    Own keys are those of a causal mask.
    """
    lengths = [
        length
        for q, k in zip(segments.lengths_q, segments.lengths_k, strict=True)
        for length in ((k - q, q) if causal else (k, 0))
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
        if part.shape[1] == 1:
            total.copy_(part)
        else:
            torch.sum(part, 1, keepdim=True, out=total)
