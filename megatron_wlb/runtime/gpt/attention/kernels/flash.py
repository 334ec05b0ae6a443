"""The flash-attn packages: version 2 (``flash_attn``) and 3 (``flash_attn_interface``, Hopper).

Version 3 is a module of its own where it was built from the sources' folder ``hopper``; its wheels
have it in the package ``flash_attn_3``, some of them in both places.

Both align a causal mask to the bottom right (version 2 since 2.1), and take a flag for a
deterministic backward pass (since 2.4.1). Version 3 has no dropout.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron_wlb.runtime.gpt.attention.kernels.kernel import (
    NO_DROPOUT,
    Demand,
    LseKernel,
    Segments,
    VarlenKernel,
    packed_kernel,
)

_MODULES = {
    2: ("flash_attn",),
    3: ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
}

_NEEDED = ("causal", "softmax_scale", "deterministic", "cu_seqlens_k", "max_seqlen_k")


def flash_obstacle(demand: Demand) -> str | None:
    """Why no FlashAttention 2 or 3 can run this, or None."""
    if demand.device.type != "cuda":
        return f"it needs a GPU, and the device is {demand.device.type}"
    if torch.version.hip is not None:
        return "it is known here for NVIDIA GPUs only"
    if torch.cuda.get_device_capability(demand.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 (Ampere) or later"
    if demand.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, and the dtype is {str(demand.dtype).removeprefix('torch.')}"
    if demand.head_dim > 256 or demand.head_dim % 8:
        return (
            f"it needs a head dimension of at most 256 and a multiple of 8, not {demand.head_dim}"
        )
    return None


def obstacle(version: int, demand: Demand) -> str | None:
    """Why that version of flash-attn cannot run this, or None."""
    if (reason := flash_obstacle(demand)) is not None:
        return reason
    if version == 3 and torch.cuda.get_device_capability(demand.device)[0] != 9:
        return "it needs a GPU of compute capability 9.x (Hopper)"
    if version == 3 and demand.dropout:
        return NO_DROPOUT
    try:
        parameters = inspect.signature(_function(version)).parameters
    except (ImportError, OSError, AttributeError) as error:  # OSError: built for another torch
        names = " or ".join(_MODULES[version])
        return f"flash_attn_varlen_func of {names} cannot be imported ({error})"
    needed = (*_NEEDED, "window_size") if demand.reach_tokens is not None else _NEEDED
    missing = [name for name in needed if name not in parameters]
    if missing:
        return f"flash_attn_varlen_func of flash-attn {version} has no {missing[0]}; it is too old"
    return None


def build(version: int, demand: Demand) -> VarlenKernel:
    drops = {"dropout_p": demand.dropout} if demand.dropout else {}
    attend = partial(_function(version), causal=True, deterministic=demand.deterministic, **drops)
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return packed_kernel(attend, *lengths, "softmax_scale")


def build_lse(version: int, demand: Demand) -> VarlenKernel:
    """The same kernel by the package's inner functions, which tell log-sum-exps.

    Their parameters are those of version 2.7 and later, and of version 3 as it is in 2.7.3 and
    later. Raises whatever the package does if they are others, when it is called.
    """
    if version == 2:
        module = _module(["flash_attn.flash_attn_interface"])
        forward, backward = module._flash_attn_varlen_forward, module._flash_attn_varlen_backward
        dropout: dict[str, Any] = {"dropout_p": 0.0}
        unused = {**dropout, "softcap": 0.0, "alibi_slopes": None}
    else:
        module = _module(_MODULES[3])
        forward, backward = module._flash_attn_forward, module._flash_attn_backward
        dropout = unused = {}

    def lengths(s: Segments, scale: float) -> dict[str, Any]:
        return {
            "cu_seqlens_q": s.cu_seqlens_q,
            "cu_seqlens_k": s.cu_seqlens_k,
            "max_seqlen_q": s.max_q,
            "max_seqlen_k": s.max_k,
            "softmax_scale": scale,
        }

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        said = lengths(segments, scale) | dropout
        tensors = query, key, value
        out, lse, *_ = forward(*tensors, **fitted(forward, len(tensors), said, segments, causal))
        return out, lse

    def differentiate(
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
        d_query, d_key, d_value = (torch.empty_like(t) for t in (query, key, value))
        said = lengths(segments, scale) | unused
        said |= {"dq": d_query, "dk": d_key, "dv": d_value, "deterministic": demand.deterministic}
        tensors = grad, query, key, value, out, lse
        backward(*tensors, **fitted(backward, len(tensors), said, segments, causal))
        return d_query, d_key, d_value

    return LseKernel(attend, differentiate)


def fitted(
    function: Callable[..., Any],
    num_tensors: int,
    said: dict[str, Any],
    segments: Segments,
    causal: bool,
) -> dict[str, Any]:
    """``said`` and the mask as ``function`` calls them after its first ``num_tensors`` parameters.

    Versions of 3 have other names, and parameters without a default, which may be None.
    """
    signature = inspect.signature(function)
    rest = list(signature.parameters.values())[num_tensors:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = {p.name: None for p in rest if p.default is p.empty and p.kind in named}
    # torch makes operations of some, whose parameters are in a schema.
    known = str(getattr(function, "_schema", None) or signature)
    said = said | {"is_causal" if "is_causal" in known else "causal": causal}
    left, right = -1, -1
    if segments.reach_tokens is not None and causal:
        left, right = segments.reach_tokens - 1, 0
    if "window_size_left" in known:
        said |= {"window_size_left": left, "window_size_right": right}
    elif left >= 0 or "window_size" in needed:
        said |= {"window_size": (left, right)}
    return needed | said


def _function(version: int) -> Callable[..., Any]:
    function: Callable[..., Any] = _module(_MODULES[version]).flash_attn_varlen_func
    return function


def _module(names: Sequence[str]) -> Any:
    *others, last = names
    for name in others:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return importlib.import_module(last)
