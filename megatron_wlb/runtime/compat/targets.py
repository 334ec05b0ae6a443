"""The names of Megatron that this package builds on, with the parameters it counts on: one table
a version.

Most are not public: a release may change them without a word, and some changes would not fail but
compute something else. So they are checked once, before anything is built, and from the source, so
that `wlb doctor` can say of a checkout whether it fits before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat.megatron_lm import MegatronLM, MegatronLM017
from megatron_wlb.runtime.compat.source import MegatronSource

logger = logging.getLogger(__name__)

_P2P = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_OPTIMIZER = "megatron.core.optimizer.optimizer:MegatronOptimizer"
_ROPE = "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding"
_MTP = "megatron.core.transformer.multi_token_prediction"
_LATENT = "megatron.core.transformer.multi_latent_attention"
_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_LOSS_OF_ROUTER = "self probs scores_for_aux_loss routing_map"
_TRAINING = "megatron.training.training"
_PRETRAIN = f"{_TRAINING}:pretrain"
_SET_UP = f"{_TRAINING}:setup_model_and_optimizer"
_SET_UP_TO_0_18 = "model_provider_func model_type checkpointing_context"
_SCHEDULE = (
    "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size "
    "forward_only p2p_communicator pg_collection"
)
IS_THERE: Final = "*"
"""Says in a table that a name must be bound in the module, whatever it takes."""

Table = Mapping[str, str]
"""``module:name`` -> parameters that must be there, in this order; any other has a default."""

CORE: Table = {
    f"{_P2P}.__init__": "self pp_group config",
    f"{_P2P}._communicate_shapes": "self tensor_send_next tensor_send_prev recv_prev recv_next",
    f"{_P2P}._communicate": (
        "self tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape wait_on_reqs"
    ),
    f"{_SCHEDULES}:get_forward_backward_func": "pp_size vp_size",
    f"{_SCHEDULES}:forward_backward_no_pipelining": _SCHEDULE,
    f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving": _SCHEDULE,
    f"{_SCHEDULES}:forward_backward_pipelining_with_interleaving": _SCHEDULE,
    f"{_SCHEDULES}:get_schedule_table": (
        "num_microbatches num_model_chunks microbatch_group_size_per_vp_stage"
    ),
    f"{_SCHEDULES}:deallocate_output_tensor": "out deallocate_pipeline_outputs",
    f"{_SCHEDULES}:forward_step": (
        "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store "
        "config cp_group_size is_first_microbatch current_microbatch is_last_stage"
    ),
    f"{_SCHEDULES}:check_first_val_step": "first_val_step forward_only cond",
    f"{_SCHEDULES}:backward_step": IS_THERE,  # with one parameter less from 0.17 on
    f"{_ROPE}.get_rotary_seq_len": (
        "self inference_context transformer transformer_input transformer_config packed_seq_params"
    ),
    f"{_ROPE}.forward": "self max_seq_len offset packed_seq",
    "megatron.core.transformer.dot_product_attention:DotProductAttention.forward": (
        "self query key value attention_mask attn_mask_type attention_bias packed_seq_params"
    ),
    f"{_LATENT}:MLASelfAttention.get_query_key_value_tensors": (
        "self hidden_states key_value_states position_ids packed_seq_params inference_context"
    ),
    f"{_LATENT}:MultiLatentAttention.forward": (
        "self hidden_states attention_mask packed_seq_params"
    ),
    f"{_LATENT}:HAVE_TE": IS_THERE,
    "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb": (
        "t freqs config mscale cp_group"
    ),
    "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__": "self fp8",
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec": (
        "qk_layernorm normalization"
    ),
    "megatron.core.models.gpt.gpt_model:GPTModel.__init__": (
        "self config transformer_layer_spec vocab_size max_sequence_length pre_process "
        "post_process share_embeddings_and_output_weights position_embedding_type rotary_percent "
        "rotary_base pg_collection vp_stage"
    ),
    "megatron.core.models.gpt.gpt_model:GPTModel.forward": (
        "self input_ids position_ids attention_mask labels packed_seq_params loss_mask"
    ),
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec": (
        "config spec use_transformer_engine vp_stage"
    ),
    f"{_MTP}:roll_tensor": "tensor shifts dims cp_group packed_seq_params",
    f"{_MTP}:MultiTokenPredictionLayer._checkpointed_forward": IS_THERE,
    f"{_MTP}:MTPLossLoggingHelper.track_mtp_metrics": (
        "loss_scale iteration writer wandb_writer total_loss_dict"
    ),
    f"{_ROUTER}.apply_z_loss": "self logits padding_mask",
    f"{_ROUTER}._apply_aux_loss": f"{_LOSS_OF_ROUTER} with_padding_mask",
    f"{_ROUTER}._apply_seq_aux_loss": f"{_LOSS_OF_ROUTER} seq_length bsz with_padding_mask",
    f"{_ROUTER}._apply_global_aux_loss": f"{_LOSS_OF_ROUTER} with_padding_mask",
    f"{_ROUTER}._apply_expert_bias": "self routing_map padding_mask",
    f"{_ROUTER}.attach_and_log_load_balancing_loss": (
        "self activation aux_loss_coeff aux_loss aux_loss_name reduce_group"
    ),
    "megatron.core.transformer.moe.moe_layer:MoELayer.forward": (
        "self hidden_states intermediate_tensors padding_mask"
    ),
    "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu": IS_THERE,
    "megatron.core.tensor_parallel.mappings:_gather_along_first_dim": (
        "input_ group output_split_sizes"
    ),
    "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim": (
        "input_ group input_split_sizes"
    ),
    "megatron.core.transformer.transformer_block:TransformerBlockSubmodules": IS_THERE,
    "megatron.core.transformer.module:Float16Module": "self config module",
    "megatron.core.packed_seq_params:PackedSeqParams": IS_THERE,
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads": (
        "model num_tokens pg_collection"
    ),
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__": (
        "self config ddp_config module disable_bucketing pg_collection"
    ),
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.scale_gradients": (
        "self scaling_factor"
    ),
    f"{_OPTIMIZER}.get_parameters": "self",
    f"{_OPTIMIZER}.get_grad_stats_parallel_group": "self",
    f"{_OPTIMIZER}.prepare_grads": "self",
    f"{_OPTIMIZER}.step_with_ready_grads": "self",
    "megatron.core.optimizer:get_megatron_optimizer": "config model_chunks pg_collection",
    "megatron.core.optimizer:Adam": IS_THERE,
    "megatron.core.optimizer:USING_PYTORCH_OPTIMIZER": IS_THERE,
    "megatron.core.optimizer.distrib_optimizer:Adam": IS_THERE,
    "megatron.core.process_groups_config:ProcessGroupCollection.use_mpu_process_groups": (
        "cls required_pgs"
    ),
    "megatron.core.parallel_state:initialize_model_parallel": (
        "tensor_model_parallel_size pipeline_model_parallel_size "
        "virtual_pipeline_model_parallel_size context_parallel_size"
    ),
    "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed": "seed force_reset_rng",
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state": "new_state device graph_safe",
    "megatron.core.dist_checkpointing.optimizer:to_local_if_dtensor": "tensor",
    "megatron.core.distributed.torch_fully_sharded_data_parallel:DeviceMesh": IS_THERE,
    "megatron.core.parallel_state:get_nccl_options": "pg_name nccl_comm_cfgs",
    "megatron.core.dist_checkpointing.serialization:save": "sharded_state_dict checkpoint_dir",
    "megatron.core.dist_checkpointing.serialization:load": "sharded_state_dict checkpoint_dir",
    "megatron.core.datasets.indexed_dataset:IndexedDataset": IS_THERE,
}
"""The names of ``megatron.core``: alike in all versions of the tables."""

_TRAINING_ALWAYS: Table = {
    f"{_TRAINING}:get_forward_backward_func": IS_THERE,
    f"{_TRAINING}:save_checkpoint": IS_THERE,
    f"{_TRAINING}:load_checkpoint": IS_THERE,
    f"{_TRAINING}:maybe_finalize_async_save": IS_THERE,
    f"{_TRAINING}:build_train_valid_test_data_iterators": (
        "build_train_valid_test_datasets_provider"
    ),
    f"{_TRAINING}:train_step": (
        "forward_step_func data_iterator model optimizer opt_param_scheduler config "
        "forward_backward_func"
    ),
    f"{_TRAINING}:evaluate": (
        "forward_step_func data_iterator model process_non_loss_data_func config"
    ),
    f"{_TRAINING}:training_log": (
        "loss_dict total_loss_dict learning_rate iteration loss_scale report_memory_flag "
        "skipped_iter grad_norm params_norm num_zeros_in_grad max_attention_logit"
    ),
    f"{_TRAINING}:num_floating_point_operations": "args batch_size",
    f"{_TRAINING}:dummy_train_step": "data_iterator",
    f"{_TRAINING}:compute_throughputs_and_append_to_progress_log": (
        "iteration num_floating_point_operations_so_far"
    ),
    "megatron.training.arguments:add_megatron_arguments": "parser",
    "megatron.training.arguments:parse_args": "extra_args_provider ignore_unknown_args",
    "megatron.training.arguments:validate_args": "args defaults",
    "megatron.training.arguments:get_device_arch_version": IS_THERE,
    "megatron.training.arguments:core_transformer_config_from_args": IS_THERE,
    "megatron.training.async_utils:maybe_finalize_async_save": "blocking terminate",
    "megatron.training.checkpointing:save_checkpoint": (
        "iteration model optimizer opt_param_scheduler num_floating_point_operations_so_far"
    ),
    "megatron.training.checkpointing:load_checkpoint": (
        "ddp_model optimizer opt_param_scheduler load_arg strict"
    ),
    "megatron.training.checkpointing:generate_state_dict": (
        "args model optimizer opt_param_scheduler rng_state iteration"
    ),
    "megatron.training.checkpointing:_load_base_checkpoint": "load_dir args rank0",
    "megatron.training.checkpointing:_get_checkpoint_format": "checkpoint_name args",
    "megatron.training.checkpointing:_load_global_dist_base_checkpoint": (
        "load_dir args rank0 sharded_state_dict iteration release"
    ),
    "megatron.training.checkpointing:get_checkpoint_name": (
        "checkpoints_path iteration release return_base_dir"
    ),
    f"{_TRAINING}:checkpoint_and_decide_exit": (
        "model optimizer opt_param_scheduler iteration num_floating_point_operations_so_far "
        "checkpointing_context train_data_iterator"
    ),
    "megatron.training.initialize:_compile_dependencies": "",
    "megatron.training.initialize:_initialize_distributed": (
        "get_embedding_ranks get_position_embedding_ranks store"
    ),
    "megatron.training.initialize:_warmup_jit_function": "",
    "megatron.training.global_vars:get_args": "",
    "megatron.training.global_vars:_build_tokenizer": "args",
    "megatron.training.utils:get_blend_and_blend_per_split": IS_THERE,
}
_TRAINING_FROM_0_18: Table = {
    # Arguments are parsed before `pretrain`, which takes the configuration that comes of them.
    **_TRAINING_ALWAYS,
    "megatron.training.arguments:parse_and_validate_args": (
        "extra_args_provider ignore_unknown_args args_defaults"
    ),
    "megatron.training.argument_utils:pretrain_cfg_container_from_args": "args",
    "megatron.training.initialize:initialize_megatron": "allow_no_cuda store",
    "megatron.training.utils.log_utils:append_to_progress_log": "save_dir string",
}
_TRAINING_0_19: Table = {
    **_TRAINING_FROM_0_18,
    _PRETRAIN: (
        "cfg_container train_valid_test_dataset_provider model_type forward_step_func "
        "model_provider p2p_communicator pg_collection"
    ),
    _SET_UP: "model_type model_provider_func checkpointing_context cfg_container pg_collection",
}
_TRAINING_0_18: Table = {
    **_TRAINING_FROM_0_18,
    _PRETRAIN: (
        "cfg_container train_valid_test_dataset_provider model_provider model_type "
        "forward_step_func"
    ),
    _SET_UP: _SET_UP_TO_0_18,
}
_TRAINING_0_17: Table = {
    **_TRAINING_ALWAYS,
    _PRETRAIN: (
        "train_valid_test_dataset_provider model_provider model_type forward_step_func "
        "extra_args_provider args_defaults"
    ),
    _SET_UP: _SET_UP_TO_0_18,
    "megatron.training.initialize:initialize_megatron": (
        "extra_args_provider args_defaults ignore_unknown_args allow_no_cuda parsed_args"
    ),
    "megatron.training.initialize:validate_args": IS_THERE,
    "megatron.training.utils:append_to_progress_log": "string",
}


@dataclass(frozen=True)
class Version:
    """What is hooked in one version, and how far that was tried."""

    tested: bool
    """Whether the launcher's tests and the ragged pipelines pass with it."""
    training: Table
    """The names of ``megatron.training``; those of ``megatron.core`` are :data:`CORE` in all."""
    forward_step: str
    """The forward step of its ``pretrain_gpt.py``, loss and batch included, as
    :func:`megatron_wlb.runtime.compat.script.fingerprint` names it."""
    datasets: str
    """Its provider of data sets, likewise."""
    adapter: MegatronLM = field(default_factory=MegatronLM)
    """How ``megatron.training`` is spoken to."""


VERSIONS: Mapping[str, Version] = {
    "0.16.1": Version(True, _TRAINING_0_17, "62cd2854c94e", "3941dac69ca7", MegatronLM017()),
    "0.17.1": Version(True, _TRAINING_0_17, "f5e8d7a393bf", "0afb5f79329b", MegatronLM017()),
    "0.18.2": Version(True, _TRAINING_0_18, "cabe277b4b45", "313315a344a8"),
    "0.19.2": Version(True, _TRAINING_0_19, "276656f016f4", "d999d1ae854a"),
    # Not released: Megatron's main.
    "0.20.0": Version(False, _TRAINING_0_19, "276656f016f4", "d999d1ae854a"),
}
"""One of each series, as of 0.19; the others of the series count as it does."""


def known(version: str) -> Version | None:
    """The version of the series that a version is of, or None."""
    return next((VERSIONS[v] for v in VERSIONS if _series(v) == _series(version)), None)


def check(*, source: MegatronSource | None = None, allow_untested: bool = False) -> None:
    """Checks the installed megatron-core, or ``source``, against the table, and
    ``megatron.training`` where it is there.

    ``allow_untested`` warns of an unknown version and holds it against the nearest table below,
    where a misfit still is an error.

    Raises :class:`CompatibilityError` for another version than those of the tables, or a name that
    is missing or takes other parameters.
    """
    source = source or MegatronSource.installed()
    version, found = source.version, known(source.version)
    if found is None:
        if not allow_untested:
            raise CompatibilityError(
                f"megatron-core {version} is installed; megatron-wlb knows {', '.join(VERSIONS)}: "
                "install one of them (constraints.txt has the tested one), or go on at your own "
                "risk with --wlb-allow-untested-megatron"
            )
        logger.warning(
            "megatron-core %s is unknown to megatron-wlb, which is checked with %s: compare the "
            "losses with a run of --wlb-packing original on a known one before you trust them",
            version,
            ", ".join(VERSIONS),
        )
    elif not found.tested:
        logger.warning(
            "megatron-core %s: names and signatures are checked, but training with it is tested "
            "less than with %s",
            version,
            ", ".join(v for v, known in VERSIONS.items() if known.tested),
        )
    for target, problem in problems(source).items():
        if problem:
            raise CompatibilityError(
                f"megatron-core {version}: {target} {problem}; it is not the released "
                f"one: install a release of {', '.join(VERSIONS)}"
            )


def problems(source: MegatronSource) -> dict[str, str | None]:
    """What is wrong with each hooked name, in words that follow it; None where it fits. The names
    of ``megatron.training`` count only where the source has it.
    """
    training = version_of(source.version).training if source.has_training else {}
    table = {**CORE, **training}
    return {target: _problem(source, target, expected) for target, expected in table.items()}


def version_of(version: str) -> Version:
    """The table of a version, or else the nearest one below, or the first."""
    below = [v for v in VERSIONS if _series(v) <= _series(version)]
    return VERSIONS[(below or list(VERSIONS)[:1])[-1]]


def adapter() -> MegatronLM:
    """How the installed ``megatron.training`` is spoken to."""
    return version_of(MegatronSource.installed().version).adapter


def needs_triton(version: str) -> bool:
    """Whether that megatron-core imports triton, whatever the device."""
    return _series(version) >= (0, 18)


def _series(version: str) -> tuple[int, ...]:
    """``0.17.0rc0`` -> ``(0, 17)``."""
    return tuple(int(part) for part in version.split(".")[:2])


def _problem(source: MegatronSource, target: str, expected: str) -> str | None:
    signature = source.signature(target)
    if signature is None:
        return "is missing"
    if expected == IS_THERE or (signature.is_open and not expected):
        return None
    wanted = expected.split()
    missing = [name for name in wanted if name not in signature.parameters]
    if missing and not signature.is_open:
        return f"lacks the parameter {missing[0]}"
    if [name for name in signature.parameters if name in wanted] != [
        name for name in wanted if name not in missing
    ]:
        return f"takes its parameters in another order than {expected.replace(' ', ', ')}"
    more = sorted(signature.required - set(wanted))
    return f"asks for the parameter {more[0]} too" if more else None
