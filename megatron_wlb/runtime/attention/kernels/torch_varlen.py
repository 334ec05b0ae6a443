"""``torch.nn.attention.varlen``: FlashAttention 2 as torch carries it; NVIDIA GPUs.

``window_size=(-1, 0)`` is causal, aligned to the bottom right as FlashAttention 2.1 and later are.
Its backward pass is deterministic under ``torch.use_deterministic_algorithms``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from megatron_wlb.runtime.attention.kernels.base import Demand, VarlenKernel, packed_kernel
from megatron_wlb.runtime.attention.kernels.flash import flash_obstacle


def obstacle(demand: Demand) -> str | None:
    """Why torch's packed attention cannot run this, or None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    missing = {"scale", "window_size", "enable_gqa"} - set(
        inspect.signature(varlen_attn).parameters
    )
    if missing:
        return f"varlen_attn of torch {torch.__version__} has no {min(missing)}"
    reason = flash_obstacle(demand)
    if reason is None and not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    if reason is None and demand.deterministic and not deterministic_mode():
        return "it is deterministic only under torch.use_deterministic_algorithms(True)"
    return reason


def deterministic_mode() -> bool:
    """Whether torch raises rather than run what is not deterministic; to warn is not enough."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def build(demand: Demand) -> VarlenKernel:
    from torch.nn.attention.varlen import varlen_attn

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **packed: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        grouped = query.shape[1] != key.shape[1]
        return varlen_attn(query, key, value, window_size=(-1, 0), enable_gqa=grouped, **packed)

    return packed_kernel(attend, "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale")
