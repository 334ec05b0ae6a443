"""What a rank tries before work is lost, and how it says what went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_wlb.errors import CheckpointError, ConfigError, refuse_all
from megatron_wlb.runtime.rank_main import check_writable, rank_main, writing


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
