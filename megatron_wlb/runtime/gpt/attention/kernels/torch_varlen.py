"""torch's own FlashAttention 2 for packed segments; NVIDIA GPUs.

Its operations are called as ``torch.nn.attention.varlen`` calls them, because that function has
neither a causal mask with grouped heads (torch 2.10, 2.11) nor the same parameters in two versions.
A causal mask is aligned to the bottom right, as in FlashAttention 2.1 and later. The backward pass
is deterministic under ``torch.use_deterministic_algorithms``.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_wlb.runtime.gpt.attention.kernels.flash import flash_obstacle
from megatron_wlb.runtime.gpt.attention.kernels.kernel import (
    Demand,
    LseKernel,
    Segments,
    VarlenKernel,
    packed_kernel,
)

OPERATIONS = ("_flash_attention_forward", "_flash_attention_backward")


def obstacle(demand: Demand) -> str | None:
    """Why torch's packed attention cannot run this, or None."""
    if not all(hasattr(torch.ops.aten, name) for name in OPERATIONS):
        return f"torch {torch.__version__} has no packed flash attention"
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
    if not demand.dropout:
        return LseKernel(_forward, _backward)

    # By torch's own derivative, which keeps the random numbers' state between the two operations.
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **packed: Any) -> Any:
        left, right = packed.pop("window_size", (None, None))
        *lengths, scale = packed.values()
        operation = getattr(torch.ops.aten, OPERATIONS[0])
        sliding = {"window_size_left": left, "window_size_right": right}
        dropped = (demand.dropout, True, False)
        return operation(query, key, value, *lengths, *dropped, scale=scale, **sliding)

    return packed_kernel(attend, "cu_seqlens_q", "cu_seqlens_k", "max_q", "max_k", "scale")


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    s = segments
    lengths = (s.cu_seqlens_q, s.cu_seqlens_k, s.max_q, s.max_k)
    attend = getattr(torch.ops.aten, OPERATIONS[0])
    options = {"scale": scale, **_sliding(s, causal)}
    out, lse, *_ = attend(query, key, value, *lengths, 0.0, causal, False, **options)
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
    s = segments
    lengths = (s.cu_seqlens_q, s.cu_seqlens_k, s.max_q, s.max_k)
    # Without dropout nothing reads the random numbers' state.
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, device=query.device)
    differentiate = getattr(torch.ops.aten, OPERATIONS[1])
    inputs = (query, key, value, out, lse)
    d_query, d_key, d_value = differentiate(
        grad, *inputs, *lengths, 0.0, causal, state, unused, scale=scale, **_sliding(s, causal)
    )
    return d_query, d_key, d_value


def _sliding(segments: Segments, causal: bool) -> dict[str, int]:
    if segments.reach_tokens is None or not causal:
        return {}
    return {"window_size_left": segments.reach_tokens - 1, "window_size_right": 0}
