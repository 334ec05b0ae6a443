"""What a rank tries before work is lost, and how it says what went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.rank_main import check_writable, writing


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
