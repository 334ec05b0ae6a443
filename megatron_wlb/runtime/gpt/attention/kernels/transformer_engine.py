"""TransformerEngine's ``DotProductAttention`` on packed (``thd``) tensors.

It chooses among cuDNN, flash-attn and its own kernels by rules that change with the version, so
what it computes for segments with more keys than queries is trusted only after ``check_kernel``
(:mod:`megatron_wlb.runtime.gpt.attention.kernels.selection`) has compared it on the device at hand.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from functools import cache
from typing import Any

import torch
from packaging.version import Version

from megatron_wlb.runtime.gpt.attention.kernels.flash import flash_obstacle
from megatron_wlb.runtime.gpt.attention.kernels.kernel import Demand, VarlenKernel, packed_kernel

MIN_VERSION = Version("2.2")
"""The mask type below is older, but earlier versions align it to the top left where the longest run
of queries is as long as that of keys."""
_MASK = "padding_causal_bottom_right"
_MULTIPLE = 64
"""What divides the longest lengths, which are bounds: some versions of cuDNN take no others."""
_DETERMINISM = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def obstacle(demand: Demand) -> str | None:
    """Why TransformerEngine cannot run this, or None."""
    if (reason := flash_obstacle(demand)) is not None:  # what its packed backends need too
        return reason
    try:
        version = importlib.metadata.version("transformer-engine")
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        return f"transformer_engine cannot be imported ({error})"
    if Version(version) < MIN_VERSION:
        return (
            f"transformer-engine {version} aligns its mask to the top left in some calls; it needs "
            f"{MIN_VERSION} or later"
        )
    if demand.deterministic and os.environ.get(_DETERMINISM) != "0":
        return f"it is deterministic only with {_DETERMINISM}=0 in the environment"
    return None


def build(demand: Demand) -> VarlenKernel:
    attention = importlib.import_module("transformer_engine.pytorch").DotProductAttention

    @cache  # a module for each number of heads: context parallelism may run them in groups
    def module(
        num_heads: int, num_groups: int, head_dims: tuple[int, int], scale: float
    ) -> torch.nn.Module:
        built: torch.nn.Module = attention(
            num_heads,
            head_dims[0] if len(set(head_dims)) == 1 else head_dims,
            num_gqa_groups=num_groups,
            attention_dropout=demand.dropout,
            qkv_format="thd",
            attn_mask_type=_MASK,
            softmax_scale=scale,
        )
        return built

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, **packed: Any
    ) -> torch.Tensor:  # [T, H·D]
        head_dims = query.shape[2], value.shape[2]
        run = module(query.shape[1], key.shape[1], head_dims, scale)
        for name in ("max_seqlen_q", "max_seqlen_kv"):
            packed[name] = -(-packed[name] // _MULTIPLE) * _MULTIPLE
        out: torch.Tensor = run(query, key, value, qkv_format="thd", attn_mask_type=_MASK, **packed)
        return out

    lengths = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    return packed_kernel(attend, *lengths, "scale")
