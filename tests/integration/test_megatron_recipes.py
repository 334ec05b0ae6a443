"""Recipes, against Megatron-LM's own converter and parser: those of the installed megatron-core, or
of the checkout that ``MEGATRON_LM_PATH`` names.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.one_process import one_process
from megatron_lm_runs import BOTH, MEGATRON_LM, PATH, PP2

from megatron_wlb.cli.main import main
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning import guards
from megatron_wlb.planning.from_config import run_of
from megatron_wlb.planning.from_words import settings_of, settings_of_script
from megatron_wlb.planning.run import Run
from megatron_wlb.runtime.megatron_lm import dry_run
from megatron_wlb.settings.config import Config, flag_of
from megatron_wlb.settings.recipe import _TextLoader, read_recipe
from megatron_wlb.simulator.forecast import forecast

TESTS = Path(PATH or "", "tests", "functional_tests")
SCRIPT = TESTS / "shell_test_utils" / "_run_training.sh"
RECIPES = sorted((TESTS / "test_cases").glob("*/*/model_config.yaml"))
FOLDER = Path(__file__).parents[2] / "configs" / "experiment"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
VARIABLES = {
    "DATA_PATH": "/data",
    "DATA_CACHE_PATH": "/cache",
    "CHECKPOINT_SAVE_PATH": "/save",
    "CHECKPOINT_LOAD_PATH": "/load",
    "TENSORBOARD_PATH": "/logs",
    "INFERENCE_OUTPUT_PATH": "/out",
    "REPEAT": "1",
    "WANDB_SAVE_PATH": "/wandb",
    "WANDB_EXPERIMENT": "one two",
    "DATA_BLEND": "[30 /data/a 70 /data/b]",
    "TOKENIZER_TYPE": "NullTokenizer",
    "TOKENIZER_MODEL_PATH": "/tokenizer",
}
AWKWARD = re.compile(r"^  --\S+: +(?!true|\"?\$)(?=.*[\[(|\\ ])", re.MULTILINE)
"""A value with brackets, backslashes or spaces: where the rules differ."""


def converted_by_megatron(recipe: Path) -> list[str]:
    """What the shell loop of Megatron's script makes of the recipe; ``yq`` is played by PyYAML."""
    script = SCRIPT.read_text()
    start = script.index('TRAINING_PARAMS_FROM_CONFIG=""', script.index('export KEY="MODEL_ARGS"'))
    stop = script.index("\n", script.index("eval ", start))
    text = string.Template(recipe.read_text()).safe_substitute(VARIABLES)
    values = yaml.load(text, Loader=_TextLoader)["MODEL_ARGS"]
    for flag, value in values.items():
        if isinstance(value, list):  # unquoted brackets are a YAML list
            values[flag] = f"[{' '.join(value)}]"
    lines = "".join(f"{flag}: {value}\n" for flag, value in values.items() if value != "")
    done = subprocess.run(
        ["bash", "-fc", f"{script[start:stop]}\nprintf '%s\\0' \"${{TRAINING_PARAMS_ARRAY[@]}}\""],
        env={**os.environ, "TRAINING_PARAMS_STR": lines.rstrip("\n")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\0")[:-1]


def is_megatrons(recipe: Path) -> bool:
    """Not NeMo's, and not an empty one."""
    text = recipe.read_text()
    return "\nMODEL_ARGS:\n  " in f"\n{text}" and "trainer.num_nodes" not in text


def awkward_recipes() -> list[Path]:
    """One recipe for each awkward value, and a plain one."""
    found: dict[str, Path] = {}
    for path in RECIPES:
        # The prompts of inference recipes have quotes that xargs refuses. Variables of the recipe's
        # own are the reader's alone.
        text = path.read_text()
        known = set(re.findall(r"\$\{(\w+)\}", text.split("MODEL_ARGS:")[-1])) <= set(VARIABLES)
        if is_megatrons(path) and known and "--prompts" not in text:
            for line in text.splitlines() if AWKWARD.search(text) else ():
                if AWKWARD.match(line):
                    found.setdefault(line, path)
    plain = next(path for path in RECIPES if path.parent.name == "gpt3_mcore_te_tp2_pp2")
    return sorted({*found.values(), plain})


needs_tests = pytest.mark.skipif(
    not RECIPES, reason="MEGATRON_LM_PATH has no tests/functional_tests"
)


@pytest.mark.checkout
@needs_tests
def test_every_recipe_is_read() -> None:
    read = [path for path in RECIPES if is_megatrons(path)]
    assert len(read) > 200
    for path in read:
        recipe = read_recipe(path, VARIABLES)
        assert recipe.arguments and recipe.arguments[0].startswith("--"), path
        assert recipe.test_type or "TEST_TYPE" not in path.read_text()
        assert recipe.unresolved == (), path


@pytest.mark.checkout
@pytest.mark.skipif(not SCRIPT.is_file(), reason=f"MEGATRON_LM_PATH has no {SCRIPT.name}")
def test_recipes_become_the_arguments_that_megatrons_script_makes_of_them() -> None:
    chosen = awkward_recipes()
    assert len(chosen) > 8
    for path in chosen:
        assert list(read_recipe(path, VARIABLES).arguments) == converted_by_megatron(path), path


def with_flags(name: str, *extra: str) -> tuple[int, list[str]]:
    """World size and flags of a recipe of Table 1."""
    recipe = read_recipe(FOLDER / f"{name}.yaml", {})
    return recipe.num_nodes * recipe.devices_per_node, [*recipe.arguments, *extra]


REFUSED = {
    # Extra flags: what is said of them, by Megatron or by us.
    ("--context-parallel-size", "3"): "32 processes do not divide by TP × PP × CP",
    ("--min-lr", "1"): "Megatron-LM refuses the arguments: ",
    ("--no-such-flag",): "unknown flag --no-such-flag; see --help",
    ("--yaml-cfg", "run.yaml"): "--yaml-cfg does not work with --wlb-packing",
    ("--softmax-type", "learnable"): "--softmax-type learnable does not work with --wlb-packing",
    ("--kv-channels", "many"): "argument --kv-channels: invalid int value",
}


ADDED = {
    "--data-path": "corpus", "--tokenizer-type": "NullTokenizer", "--train-iters": "10",
    "--lr": "1e-4", "--eval-interval": "1000",
}  # fmt: skip
"""Values of what a recipe of ``wlb plan`` says is left to add."""


def searched(folder: Path) -> tuple[int, list[str]]:
    """World size and flags of what ``wlb plan`` writes, with the run added."""
    path = folder / "best.yaml"
    command = ["plan", "--distribution", "reference", "--model", "7b", "--num-devices", "8"]
    command += ["--window", "8192", "--num-micro-batches", "16", "--steps", "2", "--refine", "1"]
    assert main([*command, "--packing", "hold", "--out", str(path)]) == 0
    recipe = read_recipe(path, {})
    left = re.findall(r"--[a-z-]+", path.read_text().partition("# Left to add: ")[2].split(";")[0])
    added = [word for pair in zip(left, map(ADDED.get, left), strict=True) for word in pair if word]
    return recipe.num_nodes * recipe.devices_per_node, [*recipe.arguments, *added]


def in_fp8() -> dict[str, tuple[int, list[str]]]:
    """World size and flags of Megatron's own GPTs in FP8, by the recipe's name, on plans.

    Those on its FSDP are refused for that.
    """
    found = {}
    for path in RECIPES:
        text, name = path.read_text(), path.parent.name
        if path.parts[-3] == "gpt" and "--fp8-format" in text and "fsdp" not in name:
            recipe = read_recipe(path, VARIABLES)
            if recipe.mode == "pretraining" and "inference" not in name:
                flags = [*recipe.arguments, "--wlb-packing", "hold"]
                found[name] = recipe.num_nodes * recipe.devices_per_node, flags
    return found


IN_FP8 = sorted(in_fp8()) if PATH else []


@pytest.fixture(scope="module")
def megatron() -> Iterator[Callable[..., Any]]:
    """Calls functions where Megatron's parser is imported."""
    with one_process() as call:
        if PATH:
            call(sys.path.insert, 0, PATH)
        yield call


def refusal(megatron: Callable[..., Any], num_devices: int, flags: list[str]) -> str:
    """What Megatron's parser and checks, then ours, say against flags."""
    try:
        # As the recipes of deterministic runs have it.
        megatron(dry_run.settings, flags, num_devices, environment={"NCCL_ALGO": "Ring"})
    except ConfigError as error:
        return str(error)
    return ""


def runs(
    megatron: Callable[..., Any], num_devices: int, flags: list[str], planned: Config
) -> tuple[Run, Run]:
    """What forecasts are made of: by Megatron's parser, and by what planning reads by itself."""
    config = megatron(dry_run.settings, flags, num_devices)
    assert config.wlb == planned.wlb
    # What Megatron fills in without effect.
    parallel = config.parallel
    if parallel.expert_tensor_parallel_size == parallel.tensor_model_parallel_size:
        parallel = dataclasses.replace(parallel, expert_tensor_parallel_size=None)
        config = dataclasses.replace(config, parallel=parallel)
    if not config.model.disable_bias_linear:
        model = dataclasses.replace(config.model, add_qkv_bias=False)
        config = dataclasses.replace(config, model=model)
    dp_size = guards.data_parallel_size(planned, num_devices)
    one, other = (run_of(settings, 32000, dp_size) for settings in (config, planned))
    return one.executed(kernels="fused"), other.executed(kernels="fused")  # as on a GPU


@pytest.mark.parametrize("name", NAMES)
def test_megatrons_own_parser_reads_table_1_as_the_page_does(
    megatron: Callable[..., Any], name: str
) -> None:
    """``test_experiment_recipes.py`` holds the page to forecasts of what planning reads."""
    num_devices, flags = with_flags(name)
    one, other = runs(megatron, num_devices, flags, settings_of(flags))
    assert one == other


@pytest.mark.parametrize("more", ["", "--swiglu --fp16", "--num-experts 8 --bf16"])
def test_what_is_not_given_is_megatrons_where_planning_reads_by_itself(
    megatron: Callable[..., Any], more: str
) -> None:
    flags = (
        "--num-layers 4 --hidden-size 768 --num-attention-heads 4 --max-position-embeddings 512 "
        "--seq-length 512 --micro-batch-size 1 --global-batch-size 16 --mock-data --lr 1e-4 "
        f"--train-iters 9 --eval-interval 9 --vocab-size 99 --wlb-packing hold {more}"
    ).split()
    one, other = runs(megatron, 2, flags, settings_of_script(flags))
    assert one == other


@pytest.mark.checkout
@needs_tests
@pytest.mark.parametrize("name", IN_FP8)
def test_megatrons_own_recipes_in_fp8_run_on_plans(megatron: Callable[..., Any], name: str) -> None:
    assert refusal(megatron, *in_fp8()[name]) == ""


@pytest.mark.parametrize("extra", REFUSED)
def test_what_megatron_or_we_refuse_is_said(
    megatron: Callable[..., Any], extra: tuple[str, ...]
) -> None:
    said = refusal(megatron, *with_flags("550m-64k", *extra))
    assert said.startswith(REFUSED[extra]) and "\n" not in said


def test_what_a_search_writes_is_taken_once_the_run_is_added(
    megatron: Callable[..., Any], tmp_path: Path
) -> None:
    num_devices, flags = searched(tmp_path)
    assert refusal(megatron, num_devices, flags) == ""
    for flag, says in (
        ("--data-path", "give --data-path"),
        ("--eval-interval", "add --eval-interval 1000"),
        ("--max-position-embeddings", "max_position_embeddings"),
    ):
        at = flags.index(flag)
        assert says in refusal(megatron, num_devices, [*flags[:at], *flags[at + 2 :]])


def test_dry_run_is_a_program_of_its_own_with_the_environment_of_the_recipe() -> None:
    num_devices, flags = with_flags("550m-64k", "--deterministic-mode")
    checkout = Path(PATH) if PATH else None
    found, told = dry_run.predict(flags, num_devices, checkout, {"NCCL_ALGO": "Ring"})
    expected = json.loads(json.dumps(forecast(settings_of(flags), num_devices)))
    assert found | {"ms_per_step": 0} == expected | {"ms_per_step": 0}
    assert told == []
    with pytest.raises(ConfigError, match="NCCL_ALGO"):
        dry_run.predict(flags, num_devices, checkout, {"NCCL_ALGO": "none"})


def test_recipe_trains(tmp_path: Path, corpus: Path) -> None:
    flags = MEGATRON_LM | BOTH | PP2 | {"data_path": "${CORPUS}", "train_iters": 9}
    flags |= {"wlb_packing": "hold", "wlb_hardware": "cpu", "wlb_device": "cpu"}
    recipe = {
        "ENV_VARS": {"GPUS_PER_NODE": 2, "OMP_NUM_THREADS": 1, "CUDA_DEVICE_MAX_CONNECTIONS": 1},
        "MODEL_ARGS": {flag_of(name): value for name, value in flags.items()},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.dump(recipe))
    words = ["recipe", "run", "recipe.yaml", "--", "--train-iters", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_wlb.cli.main", *words],
        env={**os.environ, "CORPUS": str(corpus), "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"iteration +(\d+)/ +3 .* lm loss: (\S+)", done.stdout)
    assert [int(iteration) for iteration, _ in found] == [1, 2, 3]
    # At first every byte is about as likely: log 256 = 5.545.
    assert 5 < float(found[2][1]) < float(found[0][1]) < 6.5
