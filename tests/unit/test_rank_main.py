"""What a rank tries before work is lost, and how it says what went wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_wlb.errors import CheckpointError, ConfigError, refuse_all
from megatron_wlb.rank_main import check_writable, rank_main, writing


def test_a_file_is_tried_on_the_rank_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be on another machine than rank 0."""
    (tmp_path / "file").touch()
    impossible = tmp_path / "file" / "metrics"
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        writer = int(rank)
        check_writable("--wlb-metrics", tmp_path / rank / "metrics", writer)
        assert (tmp_path / rank / "metrics").exists()
        check_writable("--wlb-metrics", impossible, 3 - writer)
        with pytest.raises(ConfigError, match=f"--wlb-metrics {impossible}: File exists"):
            check_writable("--wlb-metrics", impossible, writer)


def test_a_full_disk_is_one_line_that_names_the_flag() -> None:
    with (
        pytest.raises(CheckpointError, match="--wlb-metrics /dev/full: No space left on device"),
        writing("--wlb-metrics", "/dev/full"),
        Path("/dev/full").open("w") as stream,
    ):
        stream.write("x\n")


def test_each_error_is_a_line_on_stderr_and_in_torchruns_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delenv("RANK", raising=False)
    code = rank_main(lambda: refuse_all(["--a is wrong", "--b too"]), set_up_logs=False)
    assert code == ConfigError.exit_code
    told = "error: --a is wrong\nerror: --b too"
    assert capsys.readouterr().err == told + "\n"
    failure = ProcessFailure(0, 1, code, str(tmp_path / "error.json"))
    assert f"traceback : {told.splitlines()[0]}" in ChildFailedError("x", {0: failure}).format_msg()


def torchrun(module: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Two processes of the launcher."""
    command = [sys.executable, "-m", module, "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "megatron_wlb.launch", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_an_error_under_our_torchrun_is_the_last_line_and_its_exit_code() -> None:
    failed = torchrun("megatron_wlb.torchrun", "/nope.py")
    assert failed.returncode == ConfigError.exit_code
    (line,) = failed.stderr.splitlines()
    assert line.startswith("error: /nope.py is no file; give")


def test_an_error_under_torchrun_is_in_its_report() -> None:
    failed = torchrun("torch.distributed.run", "/nope.py")
    assert failed.returncode == 1
    assert "traceback : error: /nope.py is no file; give" in failed.stderr


def test_a_crash_under_our_torchrun_has_torchruns_report(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text("raise ValueError('a bug')")
    failed = torchrun("megatron_wlb.torchrun", script)
    assert failed.returncode == 1
    assert "ValueError: a bug" in failed.stderr
    assert "failed (exitcode: 1)" in failed.stderr and "ChildFailedError" in failed.stderr
