"""What CI says of its tiers, and where it takes a checkout of Megatron-LM from."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTIONS = "sed -n '/^_checkout()/,/^}/p; /^_fail()/,/^}/p' scripts/_env.sh"


def run_pytest(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    others = {k: v for k, v in os.environ.items() if k != "MEGATRON_LM_PATH" and "PYTEST" not in k}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        env=others | environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_run_of_which_no_launcher_test_ran_fails_if_it_must() -> None:
    done = run_pytest("--must-run", "launcher", "tests/integration/test_megatron_lm_waits.py")
    assert done.returncode == 1, done.stdout
    assert "launcher        0 passed      0 failed      2 skipped" in done.stdout
    assert "2 skipped: MEGATRON_LM_PATH names no checkout" in done.stdout
    assert "ERROR: no test of the tier launcher ran" in done.stdout


def test_a_path_without_a_checkout_is_an_error(tmp_path: Path) -> None:
    done = run_pytest("tests/unit/test_tiers.py", MEGATRON_LM_PATH=str(tmp_path))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"MEGATRON_LM_PATH {tmp_path} has no pretrain_gpt.py; give a checkout" in done.stderr


def checkout_of(given: Path, environment: Path) -> subprocess.CompletedProcess[str]:
    command = f'VENV=$2; eval "$({FUNCTIONS})"; _checkout "$1"'
    return subprocess.run(
        ["bash", "-euc", command, "bash", str(given), str(environment)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("inside", [".", "Megatron-LM-core_v0.16.1"])
def test_an_archive_is_unpacked_once(inside: str, tmp_path: Path) -> None:
    tree, environment = tmp_path / "tree", tmp_path / "venv"
    tree.mkdir()
    (tree / "pretrain_gpt.py").write_text("a script")
    archive = tmp_path / "checkout.tar.xz"
    with tarfile.open(archive, "w:xz") as stream:
        stream.add(tree, inside)
    first = checkout_of(archive, environment)
    assert first.returncode == 0, first.stderr
    script = Path(first.stdout.rstrip("\n"), "pretrain_gpt.py")
    assert script.read_text() == "a script" and environment in script.parents
    written = script.stat().st_ctime_ns
    assert checkout_of(archive, environment).stdout == first.stdout
    assert script.stat().st_ctime_ns == written
    assert checkout_of(tree, environment).stdout == f"{tree}\n"


def test_what_holds_no_checkout_is_refused(tmp_path: Path) -> None:
    done = checkout_of(tmp_path, tmp_path / "venv")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path} has no pretrain_gpt.py; give a checkout")
    broken = tmp_path / "broken.tar.xz"
    broken.write_bytes(b"no archive")
    assert checkout_of(broken, tmp_path / "venv").returncode
    assert not [*(tmp_path / "venv" / "checkouts").glob("*/*")]
