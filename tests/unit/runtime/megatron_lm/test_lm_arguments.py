"""What of Megatron-LM's arguments reaches planning, and which flags ask for plans."""

from __future__ import annotations

import argparse
import enum
from operator import attrgetter
from typing import Any

import pytest

from megatron_wlb.planning.from_config import model_shape, parallelism
from megatron_wlb.planning.layer_patterns import expert_layers
from megatron_wlb.runtime.megatron_lm import arguments
from megatron_wlb.settings.config import Config, WlbConfig, table
from megatron_wlb.settings.packings import PACKINGS
from megatron_wlb.settings.setting import SAME

CHECKED: dict[str, Any] = {
    # After Megatron's validate_args: our defaults by Megatron's names, and what differs from them.
    name if known.script == SAME else known.script: value
    for name, value in Config().flat().items()
    if (known := table()[name]).script
} | {
    "num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "group_query_attention": True,
    "num_query_groups": 2, "kv_channels": 16, "layernorm_epsilon": 1e-6,
    "add_bias_linear": False, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": False,
    "microbatch_group_size_per_vp_stage": 4, "sequence_parallel": True,
    "micro_batch_size": 2, "global_batch_size": 32, "decrease_batch_size_if_needed": True,
    "bf16": True, "fp16": False, "recompute_granularity": "selective", "split": "99,1,0",
    "data_path": ["0.5", "a", "0.5", "b"], "optimizer": "adam", "fp8_recipe": "delayed",
    "moe_layer_freq": 1, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0,
}  # fmt: skip


class Scaling(enum.StrEnum):
    """As Megatron's, which its parser may leave as it is."""

    blockwise = "blockwise"


def parse(*words: str) -> argparse.Namespace:
    parser = arguments.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return parser.parse_args(words)


def config(*words: str, **changes: Any) -> Config:
    return arguments.config_of(argparse.Namespace(**CHECKED | vars(parse(*words)) | changes))


FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
ONE_CHUNK = {"virtual_pipeline_model_parallel_size": None}
EXPERTS: dict[str, Any] = {
    "num_experts": 16, "moe_layer_freq": [0, *[1] * 7], "expert_model_parallel_size": 4,
    "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [1e-3, 1e-4],
}  # fmt: skip
SETTINGS: list[tuple[dict[str, Any], str, Any]] = [
    ({"vocab_size": 300}, "data.vocab_size", 300),
    ({"vocab_size": 300, "padded_vocab_size": 384}, "data.vocab_size", 384),  # the tokenizer's
    ({}, "model.norm_epsilon", 1e-6),
    ({}, "model.disable_bias_linear", True),
    ({}, "model.num_query_groups", 2),
    ({}, "parallel.num_virtual_stages_per_pipeline_rank", 2),
    ({}, "parallel.microbatch_group_size_per_virtual_pipeline_stage", 4),
    ({}, "parallel.no_overlap_p2p_communication", True),
    # Without virtual stages Megatron turns the overlap off by itself.
    (
        {"virtual_pipeline_model_parallel_size": None},
        "parallel.no_overlap_p2p_communication",
        False,
    ),
    ({}, "training.global_batch_size", 32),
    ({}, "training.decrease_batch_size_if_needed", True),
    ({}, "data.data_path", ("0.5", "a", "0.5", "b")),
    ({"split": None, "data_path": None}, "data.data_path", ()),
    ({"split": None, "data_path": None}, "data.split", Config().data.split),
    # Selective recomputation counts where it is of attention.
    ({"recompute_modules": ["mla_up_proj"]}, "training.recompute_granularity", None),
    ({"recompute_modules": None}, "training.recompute_granularity", "selective"),
    ({"recompute_modules": ["mlp", "core_attn"]}, "training.recompute_granularity", "selective"),
    # Megatron reads these only beside the first.
    (FULL, "training.recompute_num_layers", 1),
    (FULL | {"recompute_granularity": None}, "training.recompute_num_layers", None),
    ({"fp8": "hybrid", "fp8_recipe": Scaling.blockwise}, "training.fp8_recipe", "blockwise"),
    ({"fp8": "hybrid"}, "training.fp8_format", "hybrid"),
    (EXPERTS, "model.moe_router_load_balancing_type", ("seq_aux_loss", "global_aux_loss")),
    (EXPERTS, "model.moe_aux_loss_coeff", (1e-3, 1e-4)),
    ({}, "model.moe_router_load_balancing_type", ("aux_loss",)),
    ({"wlb_queue_thresholds": (100, 200)}, "wlb.wlb_queue_thresholds", (100, 200)),
]


@pytest.mark.parametrize(("changes", "name", "value"), SETTINGS)
def test_settings_are_those_that_megatron_has_checked(
    changes: dict[str, Any], name: str, value: Any
) -> None:
    found = attrgetter(name)(config(**changes))
    assert found == value and type(found) is type(value)


def test_patterns_of_experts_are_those_that_megatron_has_parsed() -> None:
    assert expert_layers(config(**EXPERTS).model) == [False, *[True] * 7]


def test_latents_are_those_of_megatrons_flags() -> None:
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 12, "v_head_dim": 14}
    found = config(multi_latent_attention=True, group_query_attention=False, **sizes)
    shape = model_shape(found, 128)
    assert shape.latent is not None
    assert {name: getattr(shape.latent, name) for name in sizes} == sizes
    assert shape.kv_channels == 12 + 64 and shape.num_query_groups == 4
    assert model_shape(config(), 128).latent is None


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


def test_evaluations_have_the_sizes_that_they_are_given() -> None:
    args = argparse.Namespace(eval_global_batch_size=8, eval_micro_batch_size=None)
    training = arguments.of_evaluation(args, config()).training
    assert (training.global_batch_size, training.micro_batch_size) == (8, 2)
    args.eval_micro_batch_size = 4
    assert arguments.of_evaluation(args, config()).training.micro_batch_size == 4
    older = arguments.of_evaluation(argparse.Namespace(), config())
    assert older == config()


def test_flags_have_the_defaults_of_the_settings_and_a_group_of_their_own() -> None:
    default = WlbConfig()
    for name, value in vars(parse()).items():
        assert value == getattr(default, name)
    parser = arguments.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    text = parser.format_help()
    assert "workload balance" in text
    shown = " ".join(text.split())
    assert f"--wlb-packing {{{','.join(PACKINGS)},auto}}" in shown


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
