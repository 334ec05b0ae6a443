"""Megatron-LM's arguments -> the settings that planning is told."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_wlb.data.ramp import StepRamp
from megatron_wlb.runtime.megatron_lm import guards
from megatron_wlb.settings.command_line import add_flags
from megatron_wlb.settings.config import Config, WlbConfig, from_flat

logger = logging.getLogger(__name__)

ALONE = ("--wlb-device",)
"""Flags of ours that do not ask for plans."""

_OURS = {
    # Ours: Megatron's, where the name is another.
    "norm_epsilon": "layernorm_epsilon",
    "fp8_format": "fp8",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
}

_SAME = (
    # The model.
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
    "group_query_attention", "num_query_groups", "kv_channels", "position_embedding_type",
    "max_position_embeddings", "rotary_base", "rotary_percent", "rotary_interleaved",
    "normalization", "qk_layernorm", "swiglu", "add_qkv_bias",
    "untie_embeddings_and_output_weights", "make_vocab_size_divisible_by", "hidden_dropout",
    "attention_dropout", "transformer_impl", "mtp_num_layers", "mtp_loss_scaling_factor",
    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
    "v_head_dim", "rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim",
    # Its experts.
    "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_topk",
    "moe_z_loss_coeff", "moe_router_score_function", "moe_router_pre_softmax",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_dtype",
    "moe_grouped_gemm", "moe_token_dispatcher_type", "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    # The layout.
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce",
    "distributed_backend", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    # The batch, and what its memory depends on.
    "micro_batch_size", "global_batch_size", "decrease_batch_size_if_needed", "seed",
    "recompute_granularity", "recompute_method", "recompute_num_layers", "deterministic_mode",
    "fp8_param_gather", "first_last_layers_bf16", "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    # The data.
    "mock_data", "split", "seq_length",
)  # fmt: skip

_ONE_OR_MORE = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
"""Lists that Megatron makes a single value of where they have one."""

READ = frozenset(
    {
        *_SAME, *_OURS, "bf16", "optimizer", "disable_bias_linear", "no_overlap_p2p_communication",
        "data_path", "rampup_batch_size", "step_batch_size_schedule", "window_size",
        "window_attn_skip_freq", "fp8_recipe", "moe_layer_freq", *_ONE_OR_MORE,
    }
)  # fmt: skip
"""Settings, besides those that begin with ``wlb_``, that :func:`config_of` takes of Megatron's."""


def asks_for_plans(words: Sequence[str]) -> bool:
    """Whether a command line turns the plugin on: it has a flag of ours, other than the device."""
    flags = {word.split("=")[0] for word in words}
    return any(flag.startswith("--wlb-") and flag not in ALONE for flag in flags)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds our flags to Megatron's parser, in a group of their own, with their defaults.

    Help texts with a bare per cent sign, which some versions have, are made printable.
    """
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%%|%(?!\(\w+\))", "%%", action.help)
    add_flags(parser, "workload balance (megatron-wlb)", WlbConfig, defaults=True)
    return parser


def prepare(args: argparse.Namespace) -> None:
    """Sets what plans need of Megatron, before its own checks.

    Tokens of ragged micro-batches weigh the same only if the step is divided by them once. So the
    loss is a sum over tokens where Megatron's is a mean, and fp16 asks for two things more. One is
    that gradients are added up in fp32, as dividing them by the tokens would bring fp16 ones below
    its smallest number; the other is :func:`scale_losses`.
    """
    guards.turn_off(args)
    args.calculate_per_token_loss = True
    args.dataloader_type = "external"
    if args.fp16:
        args.accumulate_allreduce_grads_in_fp32 = True


def scale_losses(args: argparse.Namespace) -> None:
    """Makes loss scales of fp16 smaller by the power of two next to a step's tokens.

    Then the numbers that pass through the model are as large as in a mean. To be called after
    Megatron's own checks, which fill in the sizes of the batch that are not given.
    """
    if not args.fp16:
        return
    windows, schedule = args.global_batch_size, getattr(args, "step_batch_size_schedule", None)
    if schedule is not None:
        windows = StepRamp.parse(schedule, args.seq_length).sizes[-1]
    shift = (windows * args.seq_length - 1).bit_length()
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        if getattr(args, name) is not None:
            setattr(args, name, getattr(args, name) * 2.0**-shift)
    logger.info(
        "--fp16: gradients are added up in fp32; loss scales are 2^%d smaller, as the loss is a "
        "sum over the tokens of a step", shift,
    )  # fmt: skip


def config_of(args: argparse.Namespace) -> Config:
    """The settings that planning, batches and guards read, of arguments that Megatron has checked.

    Schedule, logs and checkpoints stay Megatron's: their settings keep their defaults here, and
    nothing reads them.
    """
    values: dict[str, Any] = {name: getattr(args, name) for name in _SAME}
    values |= {ours: getattr(args, theirs) for ours, theirs in _OURS.items()}
    values |= {name: value for name, value in vars(args).items() if name.startswith("wlb_")}
    values["bf16"] = args.bf16 or args.fp16  # which has the same sizes and rates
    values["optimizer"] = "sgd" if args.optimizer == "sgd" else "adam"  # for its memory
    values["disable_bias_linear"] = not args.add_bias_linear
    values["no_overlap_p2p_communication"] = (
        args.virtual_pipeline_model_parallel_size is not None and not args.overlap_p2p_comm
    )
    values["window_size"] = tuple(getattr(args, "window_size", None) or ())
    skipped = getattr(args, "window_attn_skip_freq", None)  # parsed: a number or a list
    values["window_attn_skip_freq"] = None if skipped is None else str(skipped)
    modules = getattr(args, "recompute_modules", None)  # core_attn if not given
    if values["recompute_granularity"] == "selective" and "core_attn" not in (
        modules or ["core_attn"]
    ):
        values["recompute_granularity"] = None  # what other modules save is not counted
    values["moe_layer_freq"] = str(args.moe_layer_freq)  # parsed likewise
    for name in _ONE_OR_MORE:
        given = getattr(args, name)
        values[name] = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if values["recompute_granularity"] is None:  # Megatron then reads neither
        values["recompute_method"] = values["recompute_num_layers"] = None
    values["fp8_recipe"] = str(getattr(args.fp8_recipe, "value", args.fp8_recipe))
    values["data_path"] = tuple(args.data_path or ())
    values["step_batch_size_schedule"] = getattr(args, "step_batch_size_schedule", None)
    if args.rampup_batch_size and not guards.ignores_ramps(args):
        values["rampup_batch_size"] = tuple(map(int, args.rampup_batch_size))
    if values["split"] is None:  # each split has its own corpora
        del values["split"]
    return from_flat(values)


def of_evaluation(args: argparse.Namespace, config: Config) -> Config:
    """The settings of evaluations, whose batches may have sizes of their own."""
    training = config.training
    return replace(
        config,
        training=replace(
            training,
            global_batch_size=getattr(args, "eval_global_batch_size", None)
            or training.global_batch_size,
            micro_batch_size=getattr(args, "eval_micro_batch_size", None)
            or training.micro_batch_size,
        ),
    )
