"""Megatron-LM's own recipes, against Megatron-LM's own converter and parser.

``MEGATRON_LM_PATH`` is a checkout.
"""

from __future__ import annotations

import json
import os
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from megatron_lm_runs import BOTH, MEGATRON_LM, PATH, PP2

from megatron_wlb.cli.main import main
from megatron_wlb.errors import ConfigError
from megatron_wlb.runtime.megatron_lm import words
from megatron_wlb.runtime.megatron_lm.check_arguments import check
from megatron_wlb.settings.config import flag_of
from megatron_wlb.settings.recipe import _TextLoader, read_recipe

pytestmark = pytest.mark.launcher
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


@needs_tests
def test_every_recipe_is_read() -> None:
    read = [path for path in RECIPES if is_megatrons(path)]
    assert len(read) > 200
    for path in read:
        recipe = read_recipe(path, VARIABLES)
        assert recipe.arguments and recipe.arguments[0].startswith("--"), path
        assert recipe.test_type or "TEST_TYPE" not in path.read_text()
        assert recipe.unresolved == (), path


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
    # Extra flags: what is said of them, by Megatron.
    ("--context-parallel-size", "3"): r"world size \(32\) is not divisible",
    ("--no-such-flag",): "unrecognized arguments: --no-such-flag",
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
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By recipe or extra flags what Megatron's parser and checks, then our guards, say against it.

    All in one process, as importing Megatron takes seconds.
    """
    lines = {name: with_flags(name) for name in NAMES}
    lines |= {" ".join(extra): with_flags("550m-64k", *extra) for extra in REFUSED}
    lines |= in_fp8()
    world_size, flags = lines["searched"] = searched(tmp_path_factory.mktemp("searched"))
    for flag in ("--data-path", "--eval-interval", "--max-position-embeddings"):
        at = flags.index(flag)
        lines[f"searched, without {flag}"] = (world_size, [*flags[:at], *flags[at + 2 :]])
    code = (
        "import contextlib, json, sys, tempfile\n"
        "from megatron_wlb.runtime.megatron_lm.check_arguments import main\n"
        "said = {}\n"
        "for name, (world_size, flags) in json.loads(sys.argv[2]).items():\n"
        # A file: Megatron asks stderr for its number where transformers is installed.
        "    with tempfile.TemporaryFile('w+') as stream:\n"
        "      with contextlib.redirect_stderr(stream):\n"
        "        try:\n"
        "            failed = main([sys.argv[1], str(world_size), *flags])\n"
        "        except (AssertionError, SystemExit) as error:\n"
        "            failed = True\n"
        "            if isinstance(error, AssertionError):\n"
        "                print(error, file=sys.stderr)\n"
        "      stream.seek(0)\n"
        "      lines = stream.read().strip().splitlines()\n"
        "    said[name] = lines[-1] if failed else ''\n"
        "print(json.dumps(said))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, PATH or "", json.dumps(lines)],
        env={**os.environ, "NCCL_ALGO": "Ring"},  # as the recipes of deterministic runs have it
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_megatrons_own_parser_and_checks_take_table_1(said: dict[str, str], name: str) -> None:
    assert said[name] == ""


@needs_tests
@pytest.mark.parametrize("name", IN_FP8)
def test_megatrons_own_recipes_in_fp8_run_on_plans(said: dict[str, str], name: str) -> None:
    assert said[name] == ""


@pytest.mark.parametrize("extra", REFUSED)
def test_what_megatron_or_we_refuse_is_said(said: dict[str, str], extra: tuple[str, ...]) -> None:
    assert re.search(REFUSED[extra], said[" ".join(extra)])


def test_what_a_search_writes_is_taken_once_the_run_is_added(said: dict[str, str]) -> None:
    assert said["searched"] == ""
    assert "give --data-path" in said["searched, without --data-path"]
    assert "give it, as in --eval-interval" in said["searched, without --eval-interval"]
    refusal = said["searched, without --max-position-embeddings"]
    assert "max_position_embeddings argument is None" in refusal


def test_dry_run_sets_the_environment_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    world_size, flags = with_flags("550m-64k", "--deterministic-mode")
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
    check(PATH or "", world_size, flags, environment)  # raises without NCCL_ALGO


def test_defaults_without_a_checkout_are_megatrons() -> None:
    code = (
        "import json, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from megatron_wlb.runtime.megatron_lm import cpu\n"
        "cpu.install()\n"
        "import argparse\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))\n"
        "found = vars(parser.parse_args([]))\n"
        "print(json.dumps({name: found[name] for name in json.loads(sys.argv[2])}))\n"
    )
    wanted = words.DEFAULTS | words._OF_GUARDS | dict.fromkeys(words._REQUIRED)
    done = subprocess.run(
        [sys.executable, "-c", code, PATH or "", json.dumps(list(wanted))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == wanted


def test_dry_run_asks_megatron() -> None:
    world_size, flags = with_flags("550m-64k", "--no-such-flag")
    with pytest.raises(ConfigError, match=r"Megatron-LM in .* refuses .*: --no-such-flag; correct"):
        check(PATH or "", world_size, flags)


def test_recipe_trains(tmp_path: Path, corpus: Path) -> None:
    flags = MEGATRON_LM | BOTH | PP2 | {"data_path": "${CORPUS}", "train_iters": 9}
    flags |= {"wlb_packing": "hold", "wlb_hardware": "cpu", "wlb_device": "cpu"}
    recipe = {
        "ENV_VARS": {"GPUS_PER_NODE": 2, "OMP_NUM_THREADS": 1, "CUDA_DEVICE_MAX_CONNECTIONS": 1},
        "MODEL_ARGS": {flag_of(name): value for name, value in flags.items()},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.dump(recipe))
    words = ["recipe", "run", "recipe.yaml", "--megatron", PATH or "", "--", "--train-iters", "3"]
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
