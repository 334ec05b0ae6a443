"""torch's scaled-dot-product attention, segment by segment: any device, any dtype.

The CPU's kernel has no packed form; a call costs about 20 µs there, which only documents of a few
dozen tokens notice. With dropout that kernel cannot run, and torch holds three numbers of each pair
for the backward pass: ``12·H·q·k`` bytes in fp32, half of that for a whole document.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_wlb.runtime.gpt.attention.kernels.kernel import Demand, Segments, VarlenKernel

BLOCK_TOKENS = 512
"""Queries of a call where a segment has more keys than queries, or a sliding window.

Such a call takes a mask of all its pairs. In blocks, masks stay small and keys that no query of
the block sees are left out. That halves what dropout on the CPU holds, for whole documents too.
"""


def build(demand: Demand) -> VarlenKernel:
    return partial(sdpa_varlen, dropout=demand.dropout) if demand.dropout else sdpa_varlen


def sdpa_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Runs segment by segment; see :class:`VarlenKernel`."""
    attend = partial(_attend, scale=scale, grouped=query.shape[1] != key.shape[1], dropout=dropout)
    outputs = []
    queries = torch.split(query, list(segments.lengths_q))
    keys = torch.split(key, list(segments.lengths_k))
    values = torch.split(value, list(segments.lengths_k))
    for q, k, v in zip(queries, keys, values, strict=True):
        earlier, reach = len(k) - len(q), segments.reach_tokens or len(k)
        in_sight = not earlier and len(k) <= reach
        if in_sight and not (dropout and q.device.type == "cpu"):
            outputs.append(attend(q, k, v, mask=None))
            continue
        stop = earlier
        for block in torch.split(q, BLOCK_TOKENS):
            start, stop = stop, stop + len(block)
            first = max(0, start + 1 - reach)
            mask = torch.ones(len(block), stop - first, dtype=torch.bool, device=q.device)
            mask = mask.tril(start - first).triu(start + 1 - reach - first)
            outputs.append(attend(block, k[first:stop], v[first:stop], mask=mask))
    return torch.cat(outputs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    grouped: bool,
    dropout: float,
) -> torch.Tensor:
    """``[q, H, D], [k, G, D], [k, G, D] -> [q, H, D]``; causal without a mask."""
    out = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),  # [1, H, q, D]
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=grouped,
    )
    return out.squeeze(0).transpose(0, 1)
