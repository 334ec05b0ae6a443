"""Megatron-LM's own recipes, against Megatron-LM's own converter and parser.

``MEGATRON_LM_PATH`` is a checkout of core_v0.16.1.
"""

from __future__ import annotations

import os
import re
import string
import subprocess
from pathlib import Path

import pytest
import yaml

from megatron_wlb.errors import ConfigError
from megatron_wlb.recipe import _TextLoader, read_recipe
from megatron_wlb.runtime.megatron_lm.check_arguments import check

PATH = os.environ.get("MEGATRON_LM_PATH")
pytestmark = pytest.mark.skipif(not PATH, reason="MEGATRON_LM_PATH is not set")
TESTS = Path(PATH or "", "tests", "functional_tests")
RECIPES = sorted((TESTS / "test_cases").glob("*/*/model_config.yaml"))
EXPERIMENTS = sorted((Path(__file__).parents[2] / "configs" / "experiment").glob("*.yaml"))
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
}
AWKWARD = re.compile(r"^  --\S+: +(?!true|\"?\$)(?=.*[\[(|\\ ])", re.MULTILINE)
"""A value with brackets, backslashes or spaces: where the rules differ."""


def converted_by_megatron(recipe: Path) -> list[str]:
    """What the shell loop of Megatron's script makes of the recipe; ``yq`` is played by PyYAML."""
    script = (TESTS / "shell_test_utils" / "_run_training.sh").read_text()
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
    text = recipe.read_text()
    """Not NeMo's, and not an empty one."""
    return "\nMODEL_ARGS:\n  " in f"\n{text}" and "trainer.num_nodes" not in text


def awkward_recipes() -> list[Path]:
    """One recipe for each awkward value, and a plain one."""
    found: dict[str, Path] = {}
    for path in RECIPES:
        # The prompts of inference recipes have quotes that xargs refuses.
        if is_megatrons(path) and "--prompts" not in (text := path.read_text()):
            for line in text.splitlines() if AWKWARD.search(text) else ():
                if AWKWARD.match(line):
                    found.setdefault(line, path)
    plain = next(path for path in RECIPES if path.parent.name == "gpt3_mcore_te_tp2_pp2")
    return sorted({*found.values(), plain})


def test_every_recipe_is_read() -> None:
    read = [path for path in RECIPES if is_megatrons(path)]
    assert len(read) > 200
    for path in read:
        recipe = read_recipe(path, VARIABLES)
        assert recipe.arguments and recipe.arguments[0].startswith("--"), path
        assert recipe.test_type
        assert recipe.unresolved == (), path


def test_recipes_become_the_arguments_that_megatrons_script_makes_of_them() -> None:
    chosen = awkward_recipes()
    assert len(chosen) > 8
    for path in chosen:
        assert list(read_recipe(path, VARIABLES).arguments) == converted_by_megatron(path), path


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_megatrons_own_parser_and_checks_take_table_1(path: Path) -> None:
    recipe = read_recipe(path, {})
    try:
        check(PATH or "", recipe.num_nodes * recipe.devices_per_node, recipe.arguments)
    except ConfigError as error:
        if "--context-parallel-size" in str(error) and "only 1 is supported yet" in str(error):
            pytest.xfail("Megatron takes it, but the launcher has no context parallelism yet")
        raise


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--context-parallel-size", "3"], "Megatron-LM in .* refuses .* world size .32. is not"),
        (["--no-such-flag"], "Megatron-LM in .* refuses .* unrecognized arguments: --no-such-flag"),
        (["--tp-comm-overlap"], "^--tp-comm-overlap does not work with --wlb-packing"),
    ],
)
def test_what_megatron_or_we_refuse_is_said(extra: list[str], message: str) -> None:
    recipe = read_recipe(EXPERIMENTS[0].with_name("550m-64k.yaml"), {})
    alone = ["--context-parallel-size", "1", "--global-batch-size", "16"]
    with pytest.raises(ConfigError, match=message):
        check(PATH or "", 32, [*recipe.arguments, *alone, *extra])
