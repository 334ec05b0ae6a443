"""A GPTModel as another trainer would build it: by Megatron alone, on this rank of its groups."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_wlb.runtime.compat.norm import TorchNorm

VOCAB_SIZE = 64


def stock_gpt(
    core_attention: str = "", core_scale: Any = None, of_gpt: Any = (), **changed: Any
) -> GPTModel:
    """Four layers, with weights that context-parallel ranks have alike.

    ``of_gpt`` is changed in what the model takes, the rest in its configuration. ``core_attention``
    names a class in place of Megatron's own, which is not called. Under context parallelism there
    is one in any case, as Megatron's knows none.
    """
    torch.manual_seed(mpu.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    pp_size = mpu.get_pipeline_model_parallel_world_size()
    cp_size = mpu.get_context_parallel_world_size()
    settings: dict[str, Any] = dict(
        num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
        tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=pp_size, context_parallel_size=cp_size,
        pipeline_dtype=torch.float32, variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall", cuda_graph_modules=[],
    )  # fmt: skip
    settings |= changed
    spec: Any = get_gpt_layer_local_spec(normalization=settings["normalization"])
    if cp_size > 1 or core_attention:
        known = {
            "__init__": lambda self, **_: torch.nn.Module.__init__(self),
            "__module__": "megatron.core.extensions.transformer_engine",
            "softmax_scale": core_scale,
        }
        kind = type(core_attention or "TEDotProductAttention", (torch.nn.Module,), known)
        spec.submodules.self_attention.submodules.core_attention = kind
    if settings.get("sequence_parallel"):  # which Megatron's own torch norm refuses
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
        spec = TransformerBlockSubmodules([spec] * (4 // pp_size), TorchNorm)
    given: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE, max_sequence_length=512, position_embedding_type="rope",
        pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return GPTModel(TransformerConfig(**settings), spec, **given | dict(of_gpt))
