from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_wlb.cli.model import read_model
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.planning.from_words import settings_of_script
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import table
from megatron_wlb.settings.recipe import read_recipe

SIZES = {
    "hidden_size": 1024, "ffn_hidden_size": 2560, "num_layers": 6, "num_attention_heads": 8,
    "group_query_attention": True, "num_query_groups": 8, "kv_channels": 128,
    "vocab_size": 1000, "swiglu": True,
}  # fmt: skip
SMALL = (
    "plan --distribution reference --window 4096 --num-micro-batches 4 --model small.yaml "
    "--num-devices 4 --memory-gib 1.2 --steps 2 --refine 2"
)
KEYS = {
    "tp_size", "cp_size", "pp_size", "vpp_size", "dp_size", "num_micro_batches", "recompute",
    "coarse_mfu", "mfu", "fits", "packing", "max_tokens", "peak_gib", "step_ms", "tokens_per_s",
    "speedup", "sharding",
}  # fmt: skip

LLAMA = {
    "num_layers": 4, "hidden_size": 512, "ffn_hidden_size": 1792, "num_attention_heads": 8,
    "group_query_attention": True, "num_query_groups": 2, "normalization": "RMSNorm",
    "swiglu": True, "disable_bias_linear": True, "position_embedding_type": "rope",
    "rotary_base": 500000, "use_rope_scaling": True, "untie_embeddings_and_output_weights": True,
    "vocab_size": 128256, "seq_length": 131072, "max_position_embeddings": 131072,
}  # fmt: skip
EXPERTS = LLAMA | {
    "kv_channels": 128, "norm_epsilon": 1e-6, "qk_layernorm": True, "rotary_base": 1000000,
    "use_rope_scaling": False, "num_experts": 8, "moe_router_topk": 4, "moe_ffn_hidden_size": 192,
    "moe_layer_freq": "[1,1,1,1]", "moe_router_load_balancing_type": ["global_aux_loss", "none"],
    "moe_aux_loss_coeff": [0.001, 0.0], "moe_router_dtype": "fp32", "moe_z_loss_coeff": 1e-5,
}  # fmt: skip
LATENTS = EXPERTS | {
    "group_query_attention": False, "kv_channels": None, "multi_latent_attention": True,
    "q_lora_rank": 96, "kv_lora_rank": 64, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64, "rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale": 0.7,
    "mtp_num_layers": 1, "moe_layer_freq": "([0]+[1]*3)", "moe_router_num_groups": 4,
    "moe_router_group_topk": 2, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
HYBRID = {name: value for name, value in EXPERTS.items() if name != "moe_layer_freq"} | {
    "num_layers": 8, "hybrid_layer_pattern": "*EG-M-*E/*E", "mtp_num_layers": 1,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 32,
    "linear_value_head_dim": 64, "mamba_num_heads": 16, "mamba_state_dim": 32,
}  # fmt: skip
OTHERS = {
    "fp8_format": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True,
    "window_size": "511,0", "window_attn_skip_freq": "2", "hidden_dropout": 0.2,
    "init_method_std": 0.01, "wlb_dp_merge": "off", "wlb_expert_imbalance": 1.5, "optimizer": "sgd",
}  # fmt: skip
STOCK = {  # by Megatron's own names and defaults, and with flags that no setting stands for
    "ENV_VARS": {"NCCL_ALGO": "Ring", "GPUS_PER_NODE": 2},
    "MODEL_ARGS": {
        "--num-layers": 4, "--hidden-size": 512, "--num-attention-heads": 8, "--swiglu": True,
        "--seq-length": 4096, "--max-position-embeddings": 8192, "--fp16": True,
        "--deterministic-mode": True, "--moe-per-layer-logging": True,
        "--recompute-activations": True, "--num-layers-per-virtual-pipeline-stage": 1,
        "--tokenizer-type": "NullTokenizer", "--vocab-size": 5000, "--lr-warmup-fraction": 0.01,
        "--lr-decay-style": "WSD", "--lr-wsd-decay-iters": 3,
        "--data-path": "[0.3 ${DATA}/a 0.7 ${DATA}/b]", "--train-iters": 9, "--lr": 1e-4,
        "--tensor-model-parallel-size": 2, "--sequence-parallel": True, "--eval-interval": 100,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(wlb) -> None:
    Path("small.yaml").write_text(yaml.safe_dump(SIZES))


@pytest.fixture
def plan(wlb):
    return lambda *words: wlb.json(SMALL, *words)


def test_json_has_the_ranking_the_rejected_and_the_command(plan) -> None:
    found = plan()
    assert found["simulated"] is True
    ranked = found["ranked"]
    assert all(row.keys() >= KEYS for row in ranked)
    mfu = [row["mfu"] for row in ranked if row["fits"]]
    assert len(mfu) > 3
    within = [row for row in ranked if row["fits"] and row["delay_mean"] <= 1.0]
    speeds = [round(row["speedup_over_best"], 3) for row in within]
    assert ranked[: len(within)] == within and speeds == sorted(speeds, reverse=True)
    for row in ranked:
        sizes = [row[f"{name}_size"] for name in ("tp", "cp", "pp", "dp")]
        assert sizes[0] * sizes[1] * sizes[2] * sizes[3] == 4
        assert row["peak_gib"] <= 0.95 * 1.2  # the headroom
    whys = {one["why"] for one in found["rejected"]}
    assert {"divisibility", "memory"} <= whys
    assert all(one["reason"] for one in found["rejected"])


def test_command_and_recipe_are_those_of_the_best(plan) -> None:
    found = plan("--out best.yaml --num-micro-batches 4 8")
    best = found["ranked"][0]
    words = shlex.split(found["command"])
    config = parse(words[words.index("megatron_wlb.launch") + 1 :])
    p = config.parallel
    assert (
        p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size,
        p.num_virtual_stages_per_pipeline_rank or 1,
    ) == tuple(best[f"{name}_size"] for name in ("tp", "cp", "pp", "vpp"))  # fmt: skip
    assert config.training.global_batch_size == best["num_micro_batches"]
    assert config.wlb.wlb_packing == best["packing"]
    assert config.model.num_layers == 6
    recipe = yaml.safe_load(Path("best.yaml").read_text())
    assert recipe["MODEL_ARGS"] == found["flags"]
    text = Path("best.yaml").read_text()
    assert "Simulated, not measured" in text
    assert (
        "Left to add: --data-path, --tokenizer-type, --train-iters, --lr, --eval-interval" in text
    )


@pytest.mark.parametrize(
    "model",
    [LLAMA, EXPERTS, HYBRID, LATENTS, LLAMA | OTHERS, STOCK],
    ids=["llama", "experts", "hybrid", "latents", "others", "stock"],
)
def test_command_and_recipe_make_the_model_that_was_planned(model: dict[str, Any], wlb) -> None:
    """As the launcher reads them, which has Megatron's defaults."""
    Path("model.yaml").write_text(yaml.safe_dump(model))
    words = SMALL.replace("small.yaml", "model.yaml").replace("1.2", "20")
    found = wlb.json(words, "--refine 1 --packing hold --out best.yaml")
    command = shlex.split(found["command"])
    flags = command[command.index("megatron_wlb.launch") + 1 :]
    recipe, planned = read_recipe("best.yaml", {}), read_model("model.yaml")
    for words in (flags, recipe.arguments):
        built = settings_of_script(words)
        assert model_shape(built, built.data.vocab_size or 0) == planned.shape
        assert built.data.seq_length == 4096 and built.training.bf16
        for name, value in planned.config.flat().items():
            counts = planned.shape.experts or not name.startswith("moe_")
            if value is None or not counts or table()[name].searched or table()[name].layout:
                continue
            got = built.flat()[name]  # of patterns with brackets around them
            assert got == value or str(got).strip("()") == str(value).strip("()"), name
    others = {
        "--lr-decay-style",
        "--lr-wsd-decay-iters",
        "--lr-warmup-fraction",
        "--tokenizer-type",
        "--moe-per-layer-logging",
        "--fp16",
    }
    assert (others <= {*flags}) == (model is STOCK)
    if model is STOCK:
        assert not {"--recompute-activations", "--num-layers-per-virtual-pipeline-stage"} & {*flags}
        assert "${DATA}/b" in flags and recipe.unresolved == ("DATA",)
        assert command[:2] == ["NCCL_ALGO=Ring", "CUDA_DEVICE_MAX_CONNECTIONS=1"]
        assert recipe.environment["NCCL_ALGO"] == "Ring" and recipe.devices_per_node == 4
        assert "# Left to add: nothing;" in Path("best.yaml").read_text()


def test_table_ranks_and_says_what_cannot_run(wlb) -> None:
    out = wlb(SMALL, "--rows 2").out
    assert "What cannot run" in out and "do not divide" in out and "Fastest within " in out
    assert "simulated: 2 steps of each, seed 1234; mean delay up to 1 step (--max-delay)" in out
    assert "memory up to 1.1 GiB (5% left free)" in out
    assert "left to add: --data-path, --tokenizer-type, --train-iters, --lr, --eval-inter" in out
    launcher = "-m megatron_wlb.launch --"
    assert f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 4 {launcher}" in out


def test_table_has_a_row_for_each_layout_and_for_each_packing_of_the_best(wlb, plan) -> None:
    ranked = plan()["ranked"]
    rows = [row for row in wlb(SMALL, "--rows 99").cells if len(row) == 16]
    layouts = [tuple(row[2:5]) for row in rows if row[1]]
    sizes = ("tp_size", "cp_size", "pp_size", "vpp_size", "dp_size", "recompute")
    assert len(layouts) == len(set(layouts)) == len({tuple(r[s] for s in sizes) for r in ranked})
    assert len(layouts) < len(ranked)
    assert rows[0][5] == ranked[0]["title"]
    others = [row[5] for row in rows if not row[1]]
    assert sorted([rows[0][5], *others]) == sorted(
        {r["title"] for r in ranked if all(r[s] == ranked[0][s] for s in sizes)}
    )


def test_what_is_above_a_limit_is_seen_without_colour(wlb) -> None:
    said = wlb(SMALL, "--rows 99 --max-delay 0 --packing original,wlb,hold")
    delays = [row[-2] for row in said.cells if len(row) == 16]
    marked = [one for one in delays if one.startswith("! ")]
    assert marked and marked == [one for one in delays if float(one.strip("! ")) > 0]
    assert "! is above the limit" in " ".join(said.out.split())


def test_table_counts_the_layouts_that_were_simulated(wlb) -> None:
    out = wlb(SMALL).out
    simulated, possible = map(int, re.findall(r"(\d+) simulated of (\d+) that can run", out)[0])
    slower = int(re.findall(r"slower by the coarse pass │ +(\d+)", out)[0])
    assert simulated >= 2 and simulated + slower == possible


def test_slices_are_tried_where_they_can_run(wlb, plan) -> None:
    def packings(words: str) -> set[str]:
        return {row["packing"] for row in plan(words)["ranked"]}

    assert "slim" in packings("--pp-size 4")
    assert "slim" in packings("--pp-size 2 --vpp-size 3")
    assert "slim" not in packings("--pp-size 1")
    Path("small.yaml").write_text(yaml.safe_dump(SIZES | {"num_experts": 4}))
    assert "slim" in packings("--pp-size 4 --memory-gib 20 --ep-size 1")
    assert "slim" in packings("--pp-size 2 --tp-size 1 --cp-size 1 --memory-gib 20 --ep-size 2")


@pytest.mark.parametrize("limit", ["0", "0.1", "3"])
def test_limit_of_delay_bounds_what_is_ranked_first(limit: str, plan) -> None:
    ranked = plan("--max-delay", limit)["ranked"]
    assert ranked[0]["delay_mean"] <= float(limit)
    for row in ranked:
        if row["delay_mean"] <= float(limit) and row["fits"]:
            assert round(ranked[0]["speedup_over_best"], 3) >= round(row["speedup_over_best"], 3)


def test_command_has_what_becomes_of_long_documents(plan) -> None:
    found = plan("--long-documents truncate")
    assert "--wlb-long-documents truncate" in found["command"]


def test_the_same_command_gives_the_same_ranking(plan) -> None:
    def ranked(*words: str):
        return [row | {"ms_per_step": 0} for row in plan(*words)["ranked"]]  # which is measured

    assert ranked() == ranked() != ranked("--seed 2")


def test_n_without_a_number_is_what_has_four_million_tokens(wlb) -> None:
    words = "plan --distribution reference --model small.yaml --num-devices 2 --tp-size 2"
    row = wlb.json(words, "--steps 1 --refine 1 --packing original")["ranked"][0]
    assert row["num_micro_batches"] * 131072 == 1 << 22


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--memory-gib 0.05", "no layout of 4 devices can run"),
        ("--memory-gib 0.68 --packing slim:1 --num-micro-batches 32 --pp-size 4 --vpp-size 1",
         "such as PP 4 (layers 1|2*2|1): slices of documents of 4096 tokens need 0."),
        ("--memory-gib -1", "--memory-gib is -1.0"),
        ("--num-devices 0", "--num-devices is 0; give at least 1"),
        ("--num-devices 63", "--num-devices is 63, but nodes have 8"),
        ("--tp-size 3", "no layout of 4 devices has tp_size 3"),
        ("--num-micro-batches 0", "--num-micro-batches is 0"),
        ("--packing hodl", "did you mean hold"),
        ("--packing ,", "--packing names none"),
        ("--packing hold,fixed-greedy+shape --pp-size 2", "cannot be shaped"),
        ("--packing fixed-solver:2+shape --pp-size 1", "cannot be shaped"),
        ("--expert-imbalance 0.5 --model experts.yaml", "--expert-imbalance is 0.5"),
        ("--hardware h1000", "unknown hardware h1000"),
        ("--refine 0", "--refine is 0"),
        ("--max-delay -1", "--max-delay is -1; give at least 0"),
        ("--headroom 1", "--headroom is 1; give a share"),
        ("--cost cost.json", "holds for the layout it was measured with"),
        ("--window 0", "--window is 0"),
        ("--model yarn.yaml", "--position-embedding-type yarn, which no run with --wlb-packing"),
        ("--out .", "is a folder"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_no_file(words: str, says: str, wlb) -> None:
    Path("experts.yaml").write_text(yaml.safe_dump(SIZES | {"num_experts": 4}))
    yarn = {"num_layers": 4, "position_embedding_type": "yarn"}
    Path("yarn.yaml").write_text(yaml.safe_dump(yarn))
    before = sorted(Path().rglob("*"))
    assert says in wlb.refusal(SMALL, "--out r.yaml", words)
    assert sorted(Path().rglob("*")) == before


def test_layouts_of_experts_are_searched_and_written(plan) -> None:
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 640, "moe_layer_freq": "[0]+[1]*5"}
    Path("small.yaml").write_text(yaml.safe_dump(SIZES | experts | {"disable_bias_linear": True}))
    found = plan("--out best.yaml --tp-size 1 --packing wlb")
    sizes = {row["ep_size"] for row in [*found["coarse"], *found["rejected"]]}
    assert sizes == {1, 2, 4}
    arguments = yaml.safe_load(Path("best.yaml").read_text())["MODEL_ARGS"]
    best = found["ranked"][0]
    assert arguments["--expert-model-parallel-size"] == best["ep_size"]
    assert arguments["--num-experts"] == 4 and arguments["--moe-layer-freq"] == "([0]+[1]*5)"
    only = plan("--ep-size 2 --packing wlb")
    assert {row["ep_size"] for row in only["coarse"]} == {2}
