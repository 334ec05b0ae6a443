"""Megatron's recipe files as command lines. ``tests/integration/test_megatron_recipes.py`` holds
them to Megatron's own converter where a checkout is there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.settings.recipe import launch_command, quoted, read_recipe

RECIPE = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  NUM_NODES: 3
  GPUS_PER_NODE: 4
  CUBLAS_WORKSPACE_CONFIG: :4096:8
  ROOT: ${HOME_OF_DATA}/x
BASE: &BASE
  --seq-length: 1024
  --lr: 0.00015
TEST_TYPE: ckpt-resume # a comment
AFTER_SCRIPT: |
  rm -rf ${SAVE}
MODEL_ARGS:
  <<: *BASE
  --min-lr: 1.0e-5
  --lr-warmup-fraction: .01
  --weight-decay: 1e-2
  --bf16: true
  --no-masked-softmax-fusion:
    true
  --split: 949,50,1
  --spec: "[module.path its_name]"
  --spec-of-yaml: [module.path its_name]
  --moe-layer-freq: ([0]*3+[1]*12)
  --layout: Et*2\\\\|\\\\(tt\\\\|\\\\)*5tL
  --prompts: "two words"
  --dropped: ""
  --zero: 0
  --decoder: null
  --data-path: ${DATA}/a_${DATA}
  --cache: $CACHE/b
MODEL_ARGS_2:
  --seq-length: 7
"""
ARGUMENTS = [
    *("--seq-length", "1024", "--lr", "0.00015", "--min-lr", "1.0e-5"),
    *("--lr-warmup-fraction", ".01", "--weight-decay", "1e-2", "--bf16"),
    *("--no-masked-softmax-fusion", "--split", "949,50,1"),
    *("--spec", "module.path", "its_name", "--spec-of-yaml", "module.path", "its_name"),
    *("--moe-layer-freq", "([0]*3+[1]*12)", "--layout", "Et*2|(tt|)*5tL"),
    *("--prompts", "two words", "--zero", "0", "--decoder", "null"),
    *("--data-path", "/d/a_/d", "--cache", "/c/b"),
]
VARIABLES = {"DATA": "/d", "CACHE": "/c", "HOME_OF_DATA": "/h"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model_config.yaml"
    path.write_text(RECIPE)
    return path


def test_arguments_keep_order_and_text(path: Path) -> None:
    recipe = read_recipe(path, VARIABLES)
    assert list(recipe.arguments) == ARGUMENTS
    assert recipe.environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert recipe.environment["ROOT"] == "/h/x"
    assert (recipe.num_nodes, recipe.devices_per_node) == (3, 4)
    assert (recipe.test_type, recipe.mode) == ("ckpt-resume", "pretraining")
    assert recipe.scripts == ("AFTER_SCRIPT",)
    assert recipe.unresolved == ()
    recipe.require_resolved()


def test_unset_variables_are_named(path: Path) -> None:
    recipe = read_recipe(path, {"CACHE": "/c"})
    assert recipe.unresolved == ("DATA", "HOME_OF_DATA")  # not SAVE, which only a script has
    with pytest.raises(ConfigError, match="not set: DATA, HOME_OF_DATA; set them"):
        recipe.require_resolved()


@pytest.mark.parametrize(("number", "devices"), [(1, 8), (2, 2), (3, 4)])
def test_each_run_has_its_own_number_of_devices(tmp_path: Path, number: int, devices: int) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(
        "MODEL_ENV_VARS: {MODEL_ARGS_2: {GPUS_PER_NODE: 2}, MODEL_ARGS_3: {GPUS_PER_NODE: 4}}\n"
        "MODEL_ARGS: {--lr: 1}\nMODEL_ARGS_2: {--lr: 2}\nMODEL_ARGS_3: {--lr: 3}\n"
    )
    recipe = read_recipe(path, {}, run_number=number)
    assert (recipe.devices_per_node, recipe.arguments[1]) == (devices, str(number))


def test_launch_command_appends_what_overrides(path: Path) -> None:
    recipe = read_recipe(path, VARIABLES, run_number=2)
    command = launch_command(
        recipe, "/m/pretrain_gpt.py", ["--nproc-per-node", "4"], ["--seq-length", "9"]
    )
    assert command == [
        *("python", "-m", "megatron_wlb.torchrun", "--nproc-per-node", "4"),
        *("-m", "megatron_wlb.launch", "/m/pretrain_gpt.py"),
        *("--seq-length", "7", "--seq-length", "9"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ENV_VARS: {}", "there is no MODEL_ARGS"),
        ("MODEL_ARGS:", "there is no MODEL_ARGS"),
        (
            "MODEL_ARGS: {}\nMODEL_ENV_VARS: {MODEL_ARGS: 8}",
            "MODEL_ARGS is '8'; give `NAME: value`",
        ),
        ("- a", "expected names and values"),
        ("MODEL_ARGS: {trainer.devices: 8}", "trainer.devices is not a flag; a recipe of another"),
        ("MODEL_ARGS: {--lr: {a: 1}}", "--lr is {'a': '1'}; give a plain value"),
        ("MODEL_ARGS: [", "while parsing a flow"),
        ("ENV_VARS: [A, B]\nMODEL_ARGS: {--lr: 1}", "ENV_VARS is .*; give `NAME: value`"),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_recipe(path, {})
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_and_bad_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_recipe(tmp_path / "absent.yaml", {})
    path = tmp_path / "r.yaml"
    path.write_text("ENV_VARS: {NUM_NODES: none}\nMODEL_ARGS: {--lr: 1}")
    with pytest.raises(ConfigError, match="NUM_NODES is 'none'; give a number"):
        _ = read_recipe(path, {}).num_nodes


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("plain", "plain"),
        ("", "''"),
        ("two words", "'two words'"),
        ("${X}", '"${X}"'),
        ("$X/a b", "\"$X\"'/a b'"),
        ("a!${X}${X}`", "'a!'\"${X}\"\"${X}\"'`'"),
        ("${Y}$Xa", "'${Y}$Xa'"),
    ],
)
def test_quoted_word_expands_the_given_variables_alone(word: str, shown: str) -> None:
    assert quoted(word, {"X"}) == shown
