"""Settings -> Megatron's own GPT, with packed attention in each layer, wrapped for DP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_wlb.config import Config
from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.attention import DocumentAttention
from megatron_wlb.runtime.norm import TorchNorm
from megatron_wlb.runtime.planning import padded_vocab_size
from megatron_wlb.runtime.rope import use_document_positions


@dataclass(frozen=True)
class Model:
    """The model chunks of this rank (one, or VPP of them), wrapped, and what they share."""

    config: TransformerConfig
    groups: ProcessGroupCollection
    chunks: list[torch.nn.Module]
    gpts: list[GPTModel]


def transformer_config(config: Config) -> TransformerConfig:
    """Megatron's configuration of the model, with what ragged micro-batches need."""
    model, parallel, training = config.model, config.parallel, config.training
    vpp = parallel.num_virtual_stages_per_pipeline_rank
    overlap = vpp is not None and not parallel.no_overlap_p2p_communication
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups if model.group_query_attention else None,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_layernorm,
        gated_linear_unit=model.swiglu,
        activation_func=torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        add_bias_linear=not model.disable_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        rotary_interleaved=model.rotary_interleaved,
        apply_rope_fusion=False,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
        bf16=training.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vpp,
        microbatch_group_size_per_vp_stage=(
            parallel.microbatch_group_size_per_virtual_pipeline_stage
            or parallel.pipeline_model_parallel_size
        ),
        sequence_parallel=parallel.sequence_parallel,
        overlap_p2p_comm=overlap,
        # Batched p2p cannot overlap, and with VPP and PP=2 it mixes up activations and gradients.
        batch_p2p_comm=vpp is None,
        deallocate_pipeline_outputs=True,
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
        # Ragged micro-batches weigh tokens rightly only with one division, over the whole step.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        # Megatron refuses variable lengths with its default dispatcher, even for dense models.
        moe_token_dispatcher_type="alltoall",
        cuda_graph_scope=[],
    )


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's local layer, with packed attention and norms that allow sequence parallelism."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    spec.submodules.input_layernorm = TorchNorm
    spec.submodules.pre_mlp_layernorm = TorchNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = DocumentAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    return spec


def build_model(config: Config, vocab_size: int, *, wrap: bool = True) -> Model:
    """Builds this rank's chunks; Megatron's process groups must exist.

    Args:
        config: settings, already checked (:mod:`megatron_wlb.runtime.guards`).
        vocab_size: of the tokenizer; padded here.
        wrap: whether to wrap for data parallelism (needed to train).

    Raises:
        CompatibilityError: Megatron built another core attention than ours.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    core = transformer_config(config)
    pp_rank, pp_size = groups.pp.rank(), groups.pp.size()
    vpp = core.virtual_pipeline_model_parallel_size or 1
    gpts = []
    for chunk in range(vpp):
        vp_stage = chunk if vpp > 1 else None
        gpt = GPTModel(
            config=core,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[layer_spec(core)] * get_num_layers_to_build(core, vp_stage=vp_stage),
                layer_norm=TorchNorm,
            ),
            vocab_size=padded_vocab_size(config, vocab_size),
            max_sequence_length=config.model.max_position_embeddings or config.data.seq_length,
            pre_process=pp_rank == 0 and chunk == 0,
            post_process=pp_rank == pp_size - 1 and chunk == vpp - 1,
            share_embeddings_and_output_weights=(
                not config.model.untie_embeddings_and_output_weights
            ),
            position_embedding_type=config.model.position_embedding_type,
            rotary_percent=config.model.rotary_percent,
            rotary_base=config.model.rotary_base,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        use_document_positions(gpt)
        for layer in gpt.decoder.layers:
            installed = type(layer.self_attention.core_attention)
            if installed is not DocumentAttention:
                raise CompatibilityError(
                    f"Megatron built {installed.__name__} where DocumentAttention was specified; "
                    "this megatron-core is not one that megatron-wlb knows"
                )
        gpts.append(gpt.to("cuda"))
    chunks: list[torch.nn.Module] = list(gpts)
    if config.training.bf16:
        chunks = [Float16Module(core, chunk) for chunk in chunks]
    if wrap:
        chunks = _wrap(config, core, chunks)
    return Model(core, groups, chunks, gpts)


def _wrap(
    config: Config, core: TransformerConfig, chunks: list[torch.nn.Module]
) -> list[torch.nn.Module]:
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
    )
    wrapped = [
        DistributedDataParallel(core, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        # All replicas start from the weights of the first one.
        chunk.broadcast_params()
    core.finalize_model_grads_func = finalize_model_grads
    if config.parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        start = [chunk.start_grad_sync for chunk in wrapped]
        core.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
        core.grad_sync_func = start if len(wrapped) > 1 else start[0]
    return wrapped
