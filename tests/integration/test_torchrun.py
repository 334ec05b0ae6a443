"""What stands below an error, and the exit code: of our torchrun, and of torch's where we crash."""

from __future__ import annotations

import sys
from pathlib import Path

from rank_runs import Finished, assert_refused, spawn

from megatron_wlb.errors import ConfigError


def torchrun(folder: Path, script: str, program: str = "megatron_wlb.torchrun") -> Finished:
    """Two processes of the launcher under our torchrun, or torch's."""
    command = [sys.executable, "-m", program, "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "megatron_wlb.launch", script]
    return spawn(folder, command).wait()


def test_an_error_under_our_torchrun_is_all_that_is_said_and_its_exit_code(tmp_path: Path) -> None:
    finished = torchrun(tmp_path, "nope.py")
    assert_refused(finished, ConfigError.exit_code, "nope.py is not a file", "give the path")
    assert finished.output.count("\n") == 1


def test_torchs_own_report_ends_with_the_error(tmp_path: Path) -> None:
    finished = torchrun(tmp_path, "nope.py", "torch.distributed.run")
    assert finished.code == 1
    *_, error, hint, _ = finished.output.strip().splitlines()
    assert "error: nope.py is not a file; give the path" in error
    assert "`python -m megatron_wlb.torchrun` in its place leaves it out" in hint


def test_a_crash_under_our_torchrun_has_torchs_report(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("raise ValueError('a bug')")
    finished = torchrun(tmp_path, "crash.py")
    assert finished.code == 1
    for fragment in ("ValueError: a bug", "failed (exitcode: 1)", "ChildFailedError"):
        assert fragment in finished.output
