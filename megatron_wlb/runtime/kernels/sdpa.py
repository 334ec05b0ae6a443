"""torch's scaled-dot-product attention, one call a document: any device, any dtype.

The CPU's kernel has no packed form; a call costs about 20 µs there, which only documents of a few
dozen tokens notice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention


def sdpa_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """See :class:`megatron_wlb.runtime.kernels.VarlenKernel`."""
    outputs = []
    start = 0
    for length in lengths:
        stop = start + length
        q, k, v = query[start:stop], key[start:stop], value[start:stop]
        start = stop
        # [d, H, D] -> [1, H, d, D]
        out = scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)
