"""Layers of a ``HybridModel`` on the CPU: Megatron has specs of TransformerEngine's modules alone.

Its column-parallel products have a layer's norm inside. Here the norm stands before, and tells
checkpoints the name that it has there, so that those of a GPT load.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_wlb.runtime.compat.norm import TorchNorm
from megatron_wlb.runtime.compat.patching import PatchSet

_INSIDE = "sharded_state_dict_keys_map"


def install_hybrid(patches: PatchSet) -> None:
    """Lets a HybridModel be built of Megatron's own modules; ``patches`` restores it."""
    # TransformerEngine's are the final norm, whatever the layers are, and those of queries and
    # keys, unless a spec has others.
    for module in (hybrid_block, attention):
        if hasattr(module, "TENorm"):
            patches.replace(module, "TENorm", TorchNorm)
    spec = hybrid_layer_specs.hybrid_stack_spec
    patches.replace(spec, "submodules", _local(spec.submodules))


def _local(stack: Any) -> Any:
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    made = {
        "attention_layer": _with(
            _attention(stack.attention_layer, "qkv"),
            input_layernorm=TorchNorm,
            **{_INSIDE: {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}},
        ),
        "mlp_layer": _with(
            stack.mlp_layer,
            pre_mlp_layernorm=TorchNorm,
            mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
            **{_INSIDE: {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}},
        ),
        "moe_layer": _with(
            stack.moe_layer,
            pre_mlp_layernorm=TorchNorm,
            mlp=get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False),
        ),
    }
    made["mamba_layer"] = _with(
        stack.mamba_layer,
        norm=TorchNorm,
        mixer=_with(
            stack.mamba_layer.submodules.mixer,
            in_proj=ColumnParallelLinear,
            out_proj=RowParallelLinear,
        ),
        **{_INSIDE: {"norm.": "mixer.in_proj.layer_norm_"}},
    )
    delta = _with(
        stack.gdn_layer.submodules.self_attention,
        in_proj=ColumnParallelLinear,
        out_norm=TorchNorm,
        out_proj=RowParallelLinear,
    )
    made["gdn_layer"] = _with(stack.gdn_layer, input_layernorm=TorchNorm, self_attention=delta)
    if hasattr(stack, "mla_layer"):  # from 0.19 on
        columns = "q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj"
        made["mla_layer"] = _with(_attention(stack.mla_layer, *columns), input_layernorm=TorchNorm)
    depth, *_ = stack.mtp_block_spec.submodules.layer_specs
    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), TorchNorm)
    ahead = _with(depth, eh_proj=ColumnParallelLinear, **norms)
    made["mtp_block_spec"] = _with(stack.mtp_block_spec, layer_specs=[ahead])
    return replace(stack, **made)


def _attention(layer: ModuleSpec, *columns: str) -> ModuleSpec:
    """A copy of a layer's spec whose attention has Megatron's own products."""
    parts = dict.fromkeys((f"linear_{name}" for name in columns), ColumnParallelLinear)
    own = _with(
        layer.submodules.self_attention,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
        **parts,
    )
    return _with(layer, self_attention=own)


def _with(spec: Any, **parts: Any) -> ModuleSpec:
    """A copy of a spec with other modules."""
    return ModuleSpec(spec.module, dict(spec.params), replace(spec.submodules, **parts))
