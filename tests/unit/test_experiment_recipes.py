"""``configs/experiment``: the rows of WLB-LLM's Table 1 and two models of experts, each dry-run."""

from __future__ import annotations

import dataclasses
import itertools
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.index import write_index
from helpers.layouts import some_of

from megatron_wlb.cost import load_hardware
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.planning.from_words import settings_of
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.run import MEMORY_SHARE
from megatron_wlb.settings.command_line import megatron_flags
from megatron_wlb.settings.recipe import read_recipe
from megatron_wlb.simulator.forecast import forecast

FOLDER = Path(__file__).parents[2] / "configs" / "experiment"
PAGE = (FOLDER.parents[1] / "docs" / "results" / "recipes.md").read_text()
TABLE_1 = {
    # Model-window: devices, (TP, CP, PP, DP).
    "550m-64k": (32, (2, 2, 4, 2)),
    "550m-128k": (32, (2, 4, 4, 1)),
    "7b-64k": (32, (4, 2, 4, 1)),
    "7b-128k": (64, (8, 2, 4, 1)),
    "30b-64k": (64, (8, 2, 4, 1)),
    "30b-128k": (128, (8, 4, 4, 1)),
    "70b-64k": (256, (16, 4, 4, 1)),
    "70b-128k": (256, (16, 4, 4, 1)),
}
WITH_EXPERTS = {
    # Model-window: devices, (TP, CP, PP, DP, EP), billions of parameters.
    "mixtral-8x7b-128k": (64, (2, 2, 4, 4, 8), 46.7),
    "deepseek-v3-128k": (1024, (4, 2, 16, 8, 64), 681),
    "mixtral-8x7b-128k-slim": (64, (2, 2, 4, 4, 8), 46.7),
    "deepseek-v3-128k-slim": (1024, (8, 2, 16, 4, 64), 681),
}
QUICK = WITH_EXPERTS.keys() - {"deepseek-v3-128k-slim"}
"""Forecasts of slices of 61 layers on 1024 devices take as long as all others together."""
BILLIONS = {"550m": 0.55, "7b": 6.74, "30b": 30, "70b": 70}
H100_GIB = load_hardware("h100-sxm").memory_gib


@cache
def forecast_of(name: str, *extra: str) -> SimpleNamespace:
    recipe = read_recipe(FOLDER / f"{name}.yaml", {})
    arguments = [*recipe.arguments, *extra]
    num_devices = recipe.num_nodes * recipe.devices_per_node
    return SimpleNamespace(**forecast(settings_of(arguments), num_devices))


def test_folder_has_the_rows_of_the_table() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*TABLE_1, *WITH_EXPERTS}


@pytest.mark.parametrize("name", some_of(WITH_EXPERTS, *QUICK))
def test_recipe_with_experts_is_its_model_and_fits(name: str) -> None:
    devices, layout, billions = WITH_EXPERTS[name]
    found = forecast_of(name)
    sizes = found.tp_size, found.cp_size, found.pp_size, found.dp_size, found.ep_size
    assert (found.num_devices, sizes) == (devices, layout)
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert found.window == 131072 < found.max_tokens <= found.fitting_tokens
    assert found.state_gib < found.peak_gib <= found.most_gib <= found.limit_gib
    assert found.speedup > 1.2
    model, _, packing = name.partition("-128k")
    assert found.packing == (packing.removeprefix("-") or "hold")
    config = settings_of(read_recipe(FOLDER / f"{name}.yaml", {}).arguments)
    sizes_of_model = dataclasses.replace(load_model(model), vocab_size=32000)
    assert model_shape(config, 32000) == sizes_of_model


@pytest.mark.parametrize("name", TABLE_1)
def test_recipe_is_its_row_and_fits(name: str) -> None:
    devices, layout = TABLE_1[name]
    model, _, kilotokens = name.partition("-")
    found = forecast_of(name)
    assert found.num_devices == devices
    assert (found.tp_size, found.cp_size, found.pp_size, found.dp_size) == layout
    assert found.vpp_size == 2  # "the interleaved 1F1B pipeline schedule"
    assert found.window == int(kilotokens[:-1]) * 1024
    # "The global batch size is set to PP_size × DP_size."
    assert found.micro_batches_a_rank == found.pp_size
    assert found.parameters / 1e9 == pytest.approx(BILLIONS[model], rel=0.02)
    assert 0.95 * H100_GIB * MEMORY_SHARE < found.limit_gib < H100_GIB * MEMORY_SHARE
    assert found.state_gib < found.peak_gib <= found.most_gib <= found.limit_gib
    assert found.window < found.max_tokens <= found.fitting_tokens
    # Balanced steps are faster, and no device goes beyond its peak.
    assert 1.01 < found.speedup < 1.6
    flops = 6 * found.parameters * found.tokens_per_s  # attention left out
    assert flops < devices * load_hardware("h100-sxm").peak_tflops * 1e12


@pytest.mark.parametrize("name", some_of([*TABLE_1, *WITH_EXPERTS], *TABLE_1, *QUICK))
def test_page_of_recipes_has_what_a_dry_run_predicts(name: str) -> None:
    found = forecast_of(name)
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    gains = f"{found.speedup:.2f}× | {found.net_speedup:.2f}×"
    assert row.endswith(f" | {found.most_gib:.1f} GiB | {found.step_ms / 1e3:.2f} s | {gains} |")
    assert row.count("|") == 9


@pytest.mark.parametrize("name", [*TABLE_1, *WITH_EXPERTS])
def test_recipe_has_flags_of_megatron_and_ours_only(name: str) -> None:
    arguments = read_recipe(FOLDER / f"{name}.yaml", {}).arguments
    flags = [argument for argument in arguments if argument.startswith("--")]
    assert len(flags) == len(set(flags)) > 30
    unknown = [f for f in flags if f not in megatron_flags() and not f.startswith("--wlb-")]
    assert unknown == []
    # What is saved is what a restart loads.
    values = dict(itertools.pairwise(arguments))
    assert values["--save"] == values["--load"] == "${CHECKPOINT_PATH}"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--wlb-max-tokens", "262144"], r"262144 tokens need 7\d\.\d GiB \(modelled\), above the"),
        (["--wlb-memory-gib", "30"], r"need \d\d\.\d GiB .* above the 30\.0 GiB"),
        (["--wlb-memory-gib", "2"], "weights, gradients and optimizer of pipeline rank 0 take"),
        (
            ["--seq-length=524288", "--max-position-embeddings=524288", "--wlb-max-tokens=600000"],
            "lower --seq-length, recompute",
        ),
        (["--tensor-model-parallel-size", "16"], "64 processes were started, but TP 16"),
        (["--attention-dropout", "1"], r"--attention-dropout is 1.*\[0, 1\)"),
        (
            ["--pipeline-model-parallel-size", "8", "--tensor-model-parallel-size", "4"],
            "between PP",
        ),
        (["--num-layers", "33"], "--num-layers is 33, which PP 4 × VPP 2 = 8 model chunks"),
        (["--micro-batch-size", "3"], "which --micro-batch-size 3 × DP 1 = 3 does not divide"),
        (["--global-batch-size", "3"], "must lie between PP 4 and the 3"),
        (["--use-megatron-fsdp"], "--use-megatron-fsdp is not modelled"),
        (["--num-experts", "9", "--expert-model-parallel-size", "2"], "--num-experts is 9, but"),
        (["--num-layer", "3"], "unknown flag --num-layer; did you mean --num-layers"),
        (["--wlb-hardware", "h1000"], "unknown hardware h1000"),
    ],
)
def test_what_cannot_run_is_refused(extra: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        forecast_of("7b-128k", *extra)


def test_memory_flag_makes_s_max_what_fits() -> None:
    recipe = list(read_recipe(FOLDER / "7b-128k.yaml", {}).arguments)
    at = recipe.index("--wlb-max-tokens")
    arguments = [*recipe[:at], *recipe[at + 2 :], "--wlb-memory-gib", "60"]
    found = SimpleNamespace(**forecast(settings_of(arguments), 64))
    assert found.max_tokens == found.fitting_tokens
    assert 59.5 < found.most_gib <= found.limit_gib == 60


def test_layers_per_virtual_stage_are_understood() -> None:
    flag = "--num-virtual-stages-per-pipeline-rank"
    recipe = list(read_recipe(FOLDER / "7b-128k.yaml", {}).arguments)
    at = recipe.index(flag)
    other = [*recipe[:at], "--num-layers-per-virtual-pipeline-stage", "4", *recipe[at + 2 :]]
    one, same = (forecast(settings_of(words), 64) for words in (other, recipe))
    assert one | {"ms_per_step": 0} == same | {"ms_per_step": 0}
    with pytest.raises(ConfigError, match="is 3, which does not divide the 8 layers"):
        settings_of([*other, "--num-layers-per-virtual-pipeline-stage=3"])


@pytest.fixture
def dry_run(wlb, dry_runs):
    """The forecast of a recipe with more flags, or the error where there is a ``status``."""

    def run(path: Path, words: str = "", status: int = 0) -> Any:
        argv = "recipe run", path, "--dry-run --json --", words
        return wlb.refusal(*argv, status=status) if status else json.loads(wlb(*argv).out)

    return run


def recipe_with(old: str, new: str) -> Path:
    """The recipe of 550M at 64K, changed."""
    path, text = Path("recipe.yaml"), (FOLDER / "550m-64k.yaml").read_text()
    path.write_text(text.replace(old, new))
    return path


def test_dry_run_command_prints_the_forecast(wlb, dry_run) -> None:
    path = FOLDER / "550m-64k.yaml"
    found = dry_run(path, "--wlb-packing wlb")
    assert (found["packing"], found["dp_size"]) == ("wlb", 2)
    assert "CHECKPOINT_PATH" in found["unresolved"]
    out, err = wlb("recipe run", path, "--dry-run")
    assert "simulated: 40 steps" in out and "TP 2 × CP 2 × PP 4 × DP 2" in out
    assert "not set in the environment" in err
    error = wlb.refusal("recipe run --dry-run", path, "--nnodes 3")
    assert "24 processes do not divide by TP × PP × CP = 16" in error


def test_dry_run_reads_the_environment_of_the_recipe(
    dry_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    recipe = recipe_with("ENV_VARS:", "ENV_VARS:\n  NCCL_ALGO: Tree")
    said = dry_run(recipe, "--deterministic-mode", status=2)
    assert said.startswith("Megatron-LM refuses the arguments: NCCL_ALGO='Tree'")
    dry_run(FOLDER / "550m-64k.yaml", "--deterministic-mode")


def test_dry_run_reads_the_file_of_settings(dry_run) -> None:
    recipe = recipe_with("  --wlb-packing: hold\n", "  --wlb-config: settings.yaml\n")
    Path("settings.yaml").write_text("wlb_packing: wlb\n")
    assert dry_run(recipe)["packing"] == "wlb"
    Path("settings.yaml").write_text("wlb_packing: wlb\nuse_varlen_dataset: true\n")
    assert "--use-varlen-dataset does not work" in dry_run(recipe, status=2)


def test_dry_run_takes_megatrons_default_of_attention_dropout(dry_run) -> None:
    assert dry_run(recipe_with("  --attention-dropout: 0.0\n", ""))["packing"]


def test_dry_run_is_of_the_corpora_that_are_there(dry_run) -> None:
    path = FOLDER / "550m-64k.yaml"
    write_index("short", [2048] * 600)
    write_index("long", [700, 65536, 3000, 20000] * 100)
    short, long, both = (
        dry_run(path, f"--data-path {words}") for words in ("short", "long", "0.5 short 0.5 long")
    )
    assert [one["lengths"] for one in (short, long, both)] == [
        "of short", "of long", "of short, long",
    ]  # fmt: skip
    # Equal documents are balanced already.
    assert short["speedup"] == pytest.approx(1, abs=0.05)
    assert long["speedup"] > 1.1
    assert short["tokens_per_s"] > long["tokens_per_s"]
    Path("long.bin").unlink()
    drawn = dry_run(path, "--data-path short long")["lengths"]
    assert drawn == "drawn from 'reference'; no corpus is at long"
    drawn = dry_run(path)["lengths"]  # a variable that is not set
    assert drawn == "drawn from 'reference'; no corpus is at ${DATA_PATH}"
    Path("short.bin").write_bytes(b"")
    assert "short.idx" in dry_run(path, "--data-path short", status=3)


def test_dry_run_is_of_the_mock_data_that_the_run_makes_up(dry_run) -> None:
    Path("even.txt").write_text("2048\n" * 600)
    path = recipe_with("--data-path: ${DATA_PATH}", "--mock-data: true")
    found = dry_run(path)
    assert found["lengths"] == "of mock data (distribution reference)"
    assert found["speedup"] > 1.1
    found = dry_run(path, "--wlb-mock-lengths even.txt")
    assert found["lengths"] == "of mock data (even.txt)"
    assert found["speedup"] == pytest.approx(1, abs=0.05)
    error = dry_run(path, "--data-path a", status=2)
    assert "--mock-data" in error and "leave one of them out" in error
