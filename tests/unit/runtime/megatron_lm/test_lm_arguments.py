"""What of Megatron-LM's arguments reaches planning, and which flags ask for plans."""

from __future__ import annotations

import argparse
import enum
from typing import Any

import pytest

from megatron_wlb.planning.from_config import model_shape, parallelism
from megatron_wlb.planning.layer_patterns import expert_layers
from megatron_wlb.runtime.megatron_lm import arguments
from megatron_wlb.settings.config import Config, WlbConfig

CHECKED: dict[str, Any] = {
    # After Megatron's validate_args.
    "num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4,
    "group_query_attention": True, "num_query_groups": 2, "kv_channels": 16,
    "position_embedding_type": "rope", "max_position_embeddings": 512, "rotary_base": 10000,
    "rotary_percent": 0.5, "rotary_interleaved": False, "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6, "qk_layernorm": True, "swiglu": True, "add_qkv_bias": True,
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
    "make_vocab_size_divisible_by": 64, "hidden_dropout": 0.1, "attention_dropout": 0.0,
    "transformer_impl": "local", "deterministic_mode": False,
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": False,
    "microbatch_group_size_per_vp_stage": 4, "context_parallel_size": 1,
    "sequence_parallel": True, "use_torch_fsdp2": False,
    "use_distributed_optimizer": True, "overlap_grad_reduce": False,
    "distributed_backend": "nccl", "micro_batch_size": 2, "global_batch_size": 32, "seed": 5,
    "decrease_batch_size_if_needed": True,
    "bf16": True, "recompute_granularity": "selective", "recompute_method": None,
    "recompute_num_layers": None, "split": "99,1,0", "seq_length": 512,
    "data_path": ["0.5", "a", "0.5", "b"], "mock_data": False, "lr": 3e-4, "optimizer": "adam",
    "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
    "fp8": None, "fp8_recipe": "delayed", "fp8_param_gather": False,
    "first_last_layers_bf16": False, "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1, "mtp_num_layers": None, "mtp_loss_scaling_factor": 0.1,
    "multi_latent_attention": False, "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rope_type": None, "rotary_scaling_factor": 1.0,
    "mscale": 1.0, "mscale_all_dim": 0.0,
    "num_experts": None, "moe_ffn_hidden_size": None, "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None, "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None, "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False, "moe_router_num_groups": None, "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None, "moe_router_enable_expert_bias": False,
    "moe_router_bias_update_rate": 1e-3, "moe_router_dtype": None, "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 2,
}  # fmt: skip


class Scaling(enum.StrEnum):
    """As Megatron's, which its parser may leave as it is."""

    blockwise = "blockwise"


def parse(*words: str) -> argparse.Namespace:
    parser = arguments.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return parser.parse_args(words)


def config(*words: str, **changes: Any) -> Config:
    return arguments.config_of(argparse.Namespace(**CHECKED | vars(parse(*words)) | changes))


def test_settings_of_model_and_layout_are_megatrons() -> None:
    found = config("--wlb-packing", "wlb", "--wlb-queue-thresholds", "100", "200", vocab_size=300)
    assert found.data.vocab_size == 300
    assert config(vocab_size=300, padded_vocab_size=384).data.vocab_size == 384  # the tokenizer's
    assert found.model.norm_epsilon == 1e-6
    assert found.model.disable_bias_linear
    assert found.model.num_query_groups == 2
    assert found.parallel.num_virtual_stages_per_pipeline_rank == 2
    assert found.parallel.no_overlap_p2p_communication
    assert found.parallel.microbatch_group_size_per_virtual_pipeline_stage == 4
    assert found.training.global_batch_size == 32
    assert found.training.micro_batch_size == 2
    assert found.training.decrease_batch_size_if_needed
    assert found.training.recompute_granularity == "selective"
    assert found.data.data_path == ("0.5", "a", "0.5", "b")
    assert found.wlb.wlb_packing == "wlb"
    assert found.wlb.wlb_queue_thresholds == (100, 200)


def test_selective_recomputation_counts_where_it_is_of_attention() -> None:
    assert config(recompute_modules=["mla_up_proj"]).training.recompute_granularity is None
    for modules in (None, ["core_attn"], ["mlp", "core_attn"]):
        found = config(recompute_modules=modules).training
        assert found.recompute_granularity == "selective"


def test_latents_are_those_of_megatrons_flags() -> None:
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 12, "v_head_dim": 14}
    found = config(multi_latent_attention=True, group_query_attention=False, **sizes)
    shape = model_shape(found, 128)
    assert shape.latent is not None
    assert {name: getattr(shape.latent, name) for name in sizes} == sizes
    assert shape.kv_channels == 12 + 64 and shape.num_query_groups == 4
    assert model_shape(config(), 128).latent is None


def test_experts_are_those_that_megatron_has_parsed() -> None:
    found = config(
        num_experts=16,
        moe_layer_freq=[0, *[1] * 7],
        moe_router_load_balancing_type=["seq_aux_loss", "global_aux_loss"],
        moe_aux_loss_coeff=[1e-3, 1e-4],
        expert_model_parallel_size=4,
    )
    assert found.model.num_experts == 16 and expert_layers(found.model) == [False, *[True] * 7]
    assert found.model.moe_router_load_balancing_type == ("seq_aux_loss", "global_aux_loss")
    assert found.model.moe_aux_loss_coeff == (1e-3, 1e-4)
    assert found.parallel.expert_model_parallel_size == 4
    assert config().model.moe_router_load_balancing_type == ("aux_loss",)
    assert config().model.moe_aux_loss_coeff == (0.0,)


def test_no_overlap_is_told_only_where_there_are_virtual_stages() -> None:
    """Without them Megatron turns the overlap off by itself."""
    found = config(virtual_pipeline_model_parallel_size=None)
    assert not found.parallel.no_overlap_p2p_communication
    assert found.parallel.num_virtual_stages_per_pipeline_rank is None


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, None),
        ({"decoder_last_pipeline_num_layers": 8, "num_layers": 14}, (1, 1, 1, 4) * 2),
        ({"account_for_embedding_in_pipeline_split": True, "num_layers": 15}, (1, *[2] * 7)),
        ({"pipeline_model_parallel_layout": "Ett|(t|)*6L"}, (2, *[1] * 6, 0)),
    ],
)
def test_layers_of_stages_are_those_of_megatrons_flags(
    changes: dict[str, Any], layers: tuple[int, ...] | None
) -> None:
    found = parallelism(config(**changes))
    assert (found.pp_size, found.vpp_size, found.stage_layers) == (4, 2, layers)


def test_recipe_of_fp8_is_read_as_text() -> None:
    found = config(fp8="hybrid", fp8_recipe=Scaling.blockwise, fp8_param_gather=True).training
    assert (found.fp8_format, found.fp8_recipe) == ("hybrid", "blockwise")
    assert type(found.fp8_recipe) is str and found.fp8_param_gather
    assert config().training.fp8_format is None


def test_what_megatron_does_not_read_of_recomputation_is_not_read() -> None:
    training = config(recompute_granularity=None, recompute_num_layers=1).training
    assert training.recompute_num_layers is None
    full = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    assert config(**full).training.recompute_num_layers == 1


def test_evaluations_have_the_sizes_that_they_are_given() -> None:
    args = argparse.Namespace(eval_global_batch_size=8, eval_micro_batch_size=None)
    training = arguments.of_evaluation(args, config()).training
    assert (training.global_batch_size, training.micro_batch_size) == (8, 2)
    args.eval_micro_batch_size = 4
    assert arguments.of_evaluation(args, config()).training.micro_batch_size == 4
    older = arguments.of_evaluation(argparse.Namespace(), config())
    assert older == config()


def test_splits_with_their_own_paths_need_no_shares() -> None:
    found = config(split=None, data_path=None)
    assert found.data.data_path == ()
    assert found.data.split == Config().data.split


def test_flags_have_the_defaults_of_the_settings_and_a_group_of_their_own() -> None:
    default = WlbConfig()
    for name, value in vars(parse()).items():
        assert value == getattr(default, name)
    parser = arguments.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    text = parser.format_help()
    assert "workload balance" in text
    shown = " ".join(text.split())
    assert "--wlb-packing {original,fixed-greedy,fixed-solver,wlb,hold,slim,auto}" in shown


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        ([], False),
        (["--num-layers", "4"], False),
        (["--wlb-device", "cpu"], False),
        (["--wlb-device=cpu", "--bf16"], False),
        (["--wlb-packing", "original"], True),
        (["--wlb-packing=hold"], True),
        (["--wlb-device", "cpu", "--wlb-max-tokens", "4096"], True),
    ],
)
def test_any_flag_of_ours_but_the_device_asks_for_plans(words: list[str], asks: bool) -> None:
    assert arguments.asks_for_plans(words) is asks


def test_help_with_a_bare_per_cent_sign_is_printed() -> None:
    """As of a flag of 0.18, by which its own ``--help`` ends in an error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fraction", default=7, help="(50%) of %(default)s, 3%% more")
    assert "(50%) of 7, 3% more" in arguments.add_arguments(parser).format_help()


def test_fp16_scales_losses_by_the_batch_that_megatron_filled_in() -> None:
    """Sizes may be missing before its checks: of the batch, or given as --encoder-seq-length."""
    scales = {"loss_scale": None, "initial_loss_scale": 2.0**32, "min_loss_scale": 1.0}
    sizes = dict.fromkeys(("micro_batch_size", "global_batch_size", "seq_length"))
    args = argparse.Namespace(fp16=True, world_size=4, **scales, **sizes)
    arguments.prepare(args)
    assert args.accumulate_allreduce_grads_in_fp32 and args.calculate_per_token_loss
    args.micro_batch_size, args.global_batch_size, args.seq_length = 2, 8, 500
    arguments.scale_losses(args)
    assert {name: getattr(args, name) for name in scales} == {
        "loss_scale": None, "initial_loss_scale": 2.0**20, "min_loss_scale": 2.0**-12,
    }  # fmt: skip
    args.loss_scale = 1024.0
    arguments.scale_losses(args)
    assert args.loss_scale == 0.25
    args.step_batch_size_schedule = "0:8 1M:16"  # 2¹³ tokens, where --global-batch-size says none
    arguments.scale_losses(args)
    assert args.loss_scale == 0.25 * 2.0**-13
