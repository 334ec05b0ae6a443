"""Attention by its definition: what kernels and context parallelism must compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Each segment alone, its scores written out: ``[Tq, H, D], [Tk, G, D] ×2 -> [Tq, H, D]``.

    Query ``i`` of a segment sees keys ``0 … k - q + i``.
    """
    outputs = []
    first_q = first_k = 0
    for num_q, num_k in zip(lengths_q, lengths_k, strict=True):
        q = query[first_q : first_q + num_q]
        # Query head h takes key/value head h // (H / G).
        repeats = query.shape[1] // key.shape[1]
        k = key[first_k : first_k + num_k].repeat_interleave(repeats, dim=1)
        v = value[first_k : first_k + num_k].repeat_interleave(repeats, dim=1)
        first_q, first_k = first_q + num_q, first_k + num_k
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        seen = (
            torch.arange(num_k, device=query.device)[None, :]
            <= torch.arange(num_k - num_q, num_k, device=query.device)[:, None]
        )
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)
