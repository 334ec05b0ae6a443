"""What CI says of its tiers, where it takes a checkout of Megatron-LM from, and which Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTIONS = "sed -n '/^_.*() {/,/^}/p; /^OLDEST=/p' scripts/_env.sh"


def run_pytest(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    others = {k: v for k, v in os.environ.items() if k != "MEGATRON_LM_PATH" and "PYTEST" not in k}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        env=others | environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


MADE_UP = """
import pytest

@pytest.mark.launcher
@pytest.mark.parametrize("number", range(3))
def test_runs(number):
    assert number != FAILS

@pytest.mark.launcher
@pytest.mark.checkout
def test_reads_a_checkout():
    pass

@pytest.mark.launcher
def test_may_be_skipped():
    if SKIPS:
        pytest.skip("for a reason")

def test_of_no_tier():
    pass
"""


@pytest.mark.parametrize(
    ("least", "fails", "skips", "ran", "workers", "code"),
    [(4, 9, False, 4, 2, 0), (5, 9, False, 4, 0, 1), (3, 9, True, 3, 0, 1), (4, 1, False, 4, 0, 1)],
)
def test_a_run_fails_that_runs_too_few_tests_of_a_tier_or_skips_one(
    least: int, fails: int, skips: bool, ran: int, workers: int, code: int, tmp_path: Path
) -> None:
    file = tmp_path / "test_made_up.py"
    file.write_text(f"FAILS, SKIPS = {fails}, {skips}\n{MADE_UP}")
    # The file is elsewhere, so that the project's conftest.py is named.
    words = ["-c", "pyproject.toml", "-p", "conftest", "-n", str(workers), str(file)]
    done = run_pytest("--must-run", f"launcher:{least}", *words, PYTHONPATH=f"{ROOT}:{ROOT}/tests")
    assert done.returncode == code, done.stdout
    passed, skipped = ran - (fails < 3), 1 + skips
    assert f"launcher    {passed:5d} passed      {ran - passed} failed  " in done.stdout
    assert f"{skipped:5d} skipped\n" in done.stdout
    assert "1 skipped: MEGATRON_LM_PATH names no checkout" in done.stdout
    said = f"{ran} launcher tests ran (at least {least} must), {skips:d} were skipped that need no"
    assert f"{'ERROR: ' if ran < least or skips else ''}{said}" in done.stdout.splitlines()[-2]


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


@pytest.mark.parametrize("inside", [".", "Megatron-LM-core_v0.19.0"])
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


def interpreter(folder: Path, version: str, *names: str, has_venv: bool = True) -> None:
    """Programs that answer as that Python does."""
    status = 3 if int(version.split(".")[1]) < 12 else int(not has_venv)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ("python3",):
        (folder / name).write_text(f"#!/bin/sh\necho {version}\nexit {status}\n")
        (folder / name).chmod(0o755)


def shell(folder: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What ``_env.sh`` does where a user has ``folder`` alone."""
    functions = subprocess.check_output(["bash", "-c", FUNCTIONS], cwd=ROOT, text=True)
    places = {"PATH": f"{folder}/bin", "HOME": f"{folder}", "VENV": f"{folder}/.venv"}
    return subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", f"{functions}\n{command}"],
        env=places | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def found_python(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return shell(folder, "_find_python", **environment)


@pytest.mark.parametrize(
    "place", ["bin", ".pyenv/versions/3.12.4/bin", ".local/share/uv/python/cpython-3.12.4/bin"]
)
def test_python_3_12_is_found_wherever_it_is(place: str, tmp_path: Path) -> None:
    interpreter(tmp_path / "bin", "3.11.9", "python3.11", "python")
    interpreter(tmp_path / "bin", "3.13.1", "python3.13")
    interpreter(tmp_path / ".pyenv/versions/3.11.9/bin", "3.11.9")
    interpreter(tmp_path / ".venv/bin", "3.12.1")
    interpreter(tmp_path / place, "3.12.4")
    environment = {"PATH": f"{tmp_path}/.venv/bin:{tmp_path}/bin"}
    assert found_python(tmp_path, **environment).stdout == f"{tmp_path / place}/python3\n"
    named = found_python(tmp_path, PYTHON="python3.13")
    assert named.stdout == f"{tmp_path}/bin/python3.13\n"


def test_without_a_fit_python_the_error_says_what_was_found(tmp_path: Path) -> None:
    interpreter(tmp_path / "bin", "3.11.9", "old")
    interpreter(tmp_path / "bin", "3.12.3", "bare", has_venv=False)
    remedies = "'uv python install 3.12', 'pyenv install 3.12' or 'apt-get install python3.12-venv'"
    for name, said in {
        "old": f"{tmp_path}/bin/old (3.11.9, too old)",
        "bare": f"{tmp_path}/bin/bare (3.12.3, without venv (Debian and Ubuntu have it in "
        "python3.12-venv))",
        "none": "none (no Python that starts)",
    }.items():
        done = found_python(tmp_path, PYTHON=name)
        assert done.returncode == 1 and not done.stdout
        assert done.stderr == (
            f"error: needs Python 3.12 or newer with venv and ensurepip; found: {said}. Get one "
            f"with {remedies}, or name one with PYTHON=/path/to/python3.\n"
        )
