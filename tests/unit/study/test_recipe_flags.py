"""Recipes of layouts are read back by the trainer's own settings."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_wlb.cost import Execution, Parallelism, Recompute, load_hardware
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.planning import from_config as planning
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import WlbConfig, from_flat
from megatron_wlb.settings.recipe import read_recipe
from megatron_wlb.study import write_recipe as recipe

ODD: dict[str, Any] = {
    "num_layers": 12, "hidden_size": 384, "ffn_hidden_size": 1000, "num_attention_heads": 6,
    "group_query_attention": True, "num_query_groups": 2, "kv_channels": 32, "vocab_size": 5000,
    "normalization": "RMSNorm", "disable_bias_linear": True, "add_qkv_bias": True,
    "qk_layernorm": True, "attention_output_gate": True, "rotary_percent": 0.5,
}  # fmt: skip
SLIDES = {"window_size": (299, 0)}
SOME_SLIDE = SLIDES | {"window_attn_skip_freq": "5"}
EXPERTS = {
    "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 96, "moe_latent_size": 48,
    "moe_layer_freq": "[0]+[1]*11", "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 48, "kv_lora_rank": 64, "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16, "v_head_dim": 24, "group_query_attention": False,
    "attention_output_gate": False, "rotary_percent": 1.0,
}  # fmt: skip
FULL = Recompute("full", "uniform", 1)


def sections(scenario: Run, text: str, model: dict[str, Any]) -> dict[str, recipe.Flags]:
    variant = PackingSettings.parse(text, scenario.window, 3 * scenario.window // 2)
    batch = {"seq_length": scenario.window, "global_batch_size": scenario.num_micro_batches}
    told = WlbConfig(wlb_cp_sharding="hybrid", wlb_hardware="h200")
    return {
        "Model": recipe.flags_of(model),
        "Layout": recipe.flags_of(recipe.layout_settings(scenario)),
        "Batch": recipe.flags_of(batch | {"bf16": True}),
        "Workload balance": recipe.flags_of(recipe.balance_settings(scenario, variant, told)),
    }


@pytest.mark.parametrize(
    ("more", "layout", "recompute", "packing"),
    [
        ({}, Parallelism(2, 2, 2, 2, 1, sequence_parallel=True), Recompute(), "wlb:3"),
        ({}, Parallelism(pp_size=2), FULL, "hold:4+shape"),
        ({}, Parallelism(pp_size=4, stage_layers=(4, 3, 3, 2)), FULL, "original"),
        ({}, Parallelism(pp_size=4, stage_layers=(3, 4, 3, 2)), FULL, "original"),
        ({}, Parallelism(pp_size=2, vpp_size=2, stage_layers=(3, 4, 4, 1)), FULL, "original"),
        (SLIDES, Parallelism(pp_size=2), FULL, "original"),
        (SOME_SLIDE, Parallelism(pp_size=4, stage_layers=(4, 3, 3, 2)), FULL, "original"),
        (
            EXPERTS,
            Parallelism(2, 2, 2, dp_size=2, sequence_parallel=True, ep_size=8, etp_size=1),
            FULL,
            "hold",
        ),
        (
            SOME_SLIDE | EXPERTS | {"moe_layer_freq": "1"},
            Parallelism(pp_size=2, dp_size=2, ep_size=2, etp_size=1),
            FULL,
            "original",
        ),
        (
            {"position_embedding_type": "none"},
            Parallelism(),
            Recompute("selective"),
            "fixed-greedy:2",
        ),
        (SLIDES | {"mtp_num_layers": 1}, Parallelism(pp_size=2), FULL, "wlb"),
        (
            LATENT | EXPERTS | {"mtp_num_layers": 2},
            Parallelism(pp_size=4, dp_size=4, ep_size=4, etp_size=1, stage_layers=(4, 3, 4, 1)),
            FULL,
            "hold",
        ),
    ],
)
def test_flags_are_read_back_as_the_same_model_layout_and_batch(
    more: dict[str, Any], layout: Parallelism, recompute: Recompute, packing: str
) -> None:
    model = ODD | more
    shape = planning.model_shape(from_flat(model), 5000)
    scenario = Run(
        padded_vocabulary(shape, layout.tp_size),
        Execution(layout, recompute),
        load_hardware("h200"),
        4096,
        8,
    )
    parts = sections(scenario, packing, model)
    flags = {flag: value for part in parts.values() for flag, value in part.items()}
    command = recipe.command(flags, scenario.num_devices, 8)
    words = shlex.split(command)
    config = parse(words[words.index("megatron_wlb.launch") + 1 :])
    assert planning.model_shape(config, 5000) == shape
    assert planning.parallelism(config, layout.dp_size) == layout
    assert planning.recompute(config) == recompute
    assert config.training.bf16 and config.parallel.use_distributed_optimizer
    assert config.data.seq_length == 4096 and config.training.global_batch_size == 8
    wlb = config.wlb
    assert wlb.wlb_packing == packing.partition(":")[0]
    assert wlb.wlb_hardware == "h200"
    if layout.cp_size > 1:
        assert wlb.wlb_cp_sharding == "hybrid"
    if packing == "wlb:3":
        assert wlb.wlb_queue_thresholds == (1024, 2048, 3072)
    if packing == "hold:4+shape":
        assert wlb.wlb_look_ahead == 4 and wlb.wlb_shape == "on"
        assert wlb.wlb_max_tokens == 6144


def test_recipe_file_has_the_same_flags_as_the_command() -> None:
    shape = load_model("7b")
    layout = Parallelism(tp_size=8, pp_size=4, sequence_parallel=True)
    scenario = Run(
        padded_vocabulary(shape, 8), Execution(layout), load_hardware("h100-sxm"), 4096, 8
    )
    parts = sections(scenario, "wlb:2", ODD)
    text = recipe.recipe(parts, 32, 8, "two lines\nof remarks: yes")
    assert text.startswith("# two lines\n# of remarks: yes\n")
    content = yaml.safe_load(text)
    flags = {flag: value for part in parts.values() for flag, value in part.items()}
    assert content["MODEL_ARGS"] == flags | {"--wlb-queue-thresholds": ["1365 2730"]}
    assert content["ENV_VARS"]["NUM_NODES"] == 4 and content["ENV_VARS"]["GPUS_PER_NODE"] == 8
    command = recipe.command(flags, 32, 8)
    assert command.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 --nnodes")
    assert "--wlb-queue-thresholds 1365 2730" in command
    assert "--nnodes" not in recipe.command(flags, 4, 8)


def test_recipe_file_is_read_back_as_the_command_is(tmp_path: Path) -> None:
    shape = load_model("7b")
    layout = Parallelism(tp_size=8, pp_size=4, sequence_parallel=True)
    scenario = Run(
        padded_vocabulary(shape, 8), Execution(layout), load_hardware("h100-sxm"), 4096, 8
    )
    variant = PackingSettings.parse("wlb:3", 4096, 6144)
    uneven = scenario.executed(parallelism=replace(layout, stage_layers=(9, 8, 10, 5)))
    told = WlbConfig(wlb_hardware="my machine.yaml")
    parts = {
        "Model": recipe.flags_of(ODD | SOME_SLIDE),
        "Layout": recipe.flags_of(recipe.layout_settings(uneven)),
        "Balance": recipe.flags_of(recipe.balance_settings(scenario, variant, told)),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.recipe(parts, 32, 8, ""))
    flags = {flag: value for part in parts.values() for flag, value in part.items()}
    command = shlex.split(recipe.command(flags, 32, 8))
    words = command[command.index("megatron_wlb.launch") + 1 :]
    assert list(read_recipe(path, {}).arguments) == words
    limited = replace(scenario, memory_gib=60.31), PackingSettings.parse("slim", 4096, 6144)
    assert recipe.balance_settings(*limited, told)["wlb_memory_gib"] == 60.31  # as it was searched
    # Megatron's script has two shells read the value, which a pipe would end.
    assert r"--pipeline-model-parallel-layout: Et*9\\|t*8\\|t*10\\|t*5L" in path.read_text()
    wlb = parse(words).wlb
    assert wlb.wlb_queue_thresholds == (1024, 2048, 3072)
    assert wlb.wlb_hardware == "my machine.yaml"
