"""``wlb recipe show|run``: what is printed, and what is started."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_wlb.cli.main import main
from megatron_wlb.runtime.megatron_lm import dry_run

RECIPE = """
ENV_VARS:
  GPUS_PER_NODE: 2
  GREETING: "hello world"
MODEL_ARGS:
  --num-layers: 4
  --bf16: true
  --prompts: "it's two"
  --save: ${OUT}
TEST_TYPE: regular
BEFORE_SCRIPT: rm -rf /
"""


@pytest.fixture
def recipe(wlb, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    monkeypatch.setenv("OUT", "/out")
    Path("model_config.yaml").write_text(RECIPE)
    return "model_config.yaml"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "Megatron-LM").mkdir()
    (tmp_path / "Megatron-LM" / "pretrain_gpt.py").touch()
    return tmp_path / "Megatron-LM"


def test_show_prints_a_command_for_the_shell(recipe: str, wlb) -> None:
    captured = wlb("recipe show", recipe, "--megatron /m -- --lr 1e-4")
    exports, command = captured.out.split("python", 1)
    assert exports == "export GPUS_PER_NODE=2\nexport GREETING='hello world'\n"
    assert shlex.split(command.replace("\\\n", "")) == [
        *("-m", "megatron_wlb.torchrun", "--nproc-per-node", "2"),
        *("-m", "megatron_wlb.launch", "/m/pretrain_gpt.py"),
        *("--num-layers", "4", "--bf16", "--prompts", "it's two", "--save", "/out"),
        *("--lr", "1e-4"),
    ]
    assert captured.err == f"note: BEFORE_SCRIPT of the recipe is not run; see {recipe}\n"


def test_show_prints_json(recipe: str, wlb) -> None:
    shown = wlb.json("recipe show", recipe, "--nnodes 4 --rdzv-endpoint a:1")
    assert shown["arguments"][:3] == ["--num-layers", "4", "--bf16"]
    command = " ".join(shown["command"])
    assert "--nnodes 4 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint a:1" in command


@pytest.mark.parametrize("has_checkout", [True, False])
def test_run_becomes_torchrun(
    recipe: str, checkout: Path, has_checkout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def execve(*call: Any) -> None:
        started.append(call)
        raise SystemExit  # this process is another one now

    monkeypatch.setattr(os, "execve", execve)
    argv = ["recipe", "run", recipe, "--log-dir", "logs"]
    argv += ["--megatron", str(checkout)] if has_checkout else []
    with pytest.raises(SystemExit):
        main([*argv, "--", "--train-iters", "3"])
    ((program, command, environment),) = started
    assert program == command[0] == sys.executable
    assert command[1:8] == [
        *("-m", "megatron_wlb.torchrun", "--nproc-per-node", "2", "--log-dir", "logs", "--tee")
    ]
    script = [str(checkout / "pretrain_gpt.py")] if has_checkout else []
    assert command[8:-7] == ["3", "-m", "megatron_wlb.launch", *script, "--num-layers", "4"]
    assert command[-4:] == ["--save", "/out", "--train-iters", "3"]
    assert environment["GREETING"] == "hello world"
    assert environment["OUT"] == "/out"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--script train_rl.py", "--script train_rl.py is in a checkout; give --megatron PATH"),
        ("--megatron /nowhere", "/nowhere/pretrain_gpt.py is no file"),
        ("--megatron Megatron-LM --script train_rl.py", "train_rl.py is no file"),
        ("--megatron Megatron-LM --nnodes 2", "runs on 2 nodes; give --rdzv-endpoint"),
        ("--megatron Megatron-LM --nproc-per-node 0", "--nproc-per-node is 0; give at"),
        ("--dry-run --megatron /nowhere -- --wlb-packing hold",
         "--megatron /nowhere has no megatron/training"),
        ("--dry-run", "has no --wlb-… flag: it runs as stock Megatron does"),
        ("--megatron Megatron-LM -- unset", "has variables that are not set: OUT"),
    ],
)  # fmt: skip
def test_run_refuses_what_cannot_start(
    recipe: str, checkout: Path, options: str, message: str, wlb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    if "unset" in options:
        monkeypatch.delenv("OUT")
    assert message in wlb("recipe run", recipe, options, status=2).err


def test_dry_run_that_takes_too_long_is_one_line(
    recipe: str, wlb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "TIMEOUT_S", 0.001)
    error = wlb.refusal("recipe run", recipe, "--dry-run -- --wlb-packing hold")
    assert error.endswith("in 0.001 s; try again when the machine has less to do")


def test_shown_command_expands_unset_variables_and_nothing_else(
    wlb, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("recipe.yaml").write_text(
        "ENV_VARS: {RUN: one, LOGS: '${ROOT}/logs', NUM_NODES: 2}\n"
        "MODEL_ARGS:\n"
        "  --save: ${ROOT}/it's/$RUN/`x`\n"
        "  --data-path: $ROOT/a\n"
        "  --prompts: ${SET}\n"
        "  --pattern: '!a*b$(ls)'\n"
    )
    monkeypatch.setenv("SET", "a $HOME `ls` b")
    monkeypatch.delenv("ROOT", raising=False)
    captured = wlb("recipe show recipe.yaml --megatron /m")
    assert "note: not set in the environment: ROOT" in captured.err
    shown = captured.out.replace("python -m", "printf '%s\\0' \"$LOGS\"", 1)
    done = subprocess.run(
        ["bash", "-c", shown],
        env={"ROOT": "/two words/$x", "MASTER_ADDR": "first", "HOME": "/home"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split("\0")[:-1]
    assert words[0] == "/two words/$x/logs"
    assert words[words.index("--rdzv-endpoint") + 1] == "first:29500"
    assert words[words.index("--save") :] == [
        *("--save", "/two words/$x/it's/one/`x`", "--data-path", "/two words/$x/a"),
        *("--prompts", "a $HOME `ls` b", "--pattern", "!a*b$(ls)"),
    ]
