"""What a recording says while it is made, and how it is read back."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_wlb.bench.recording import Recording, make, progress_of
from megatron_wlb.errors import ConfigError


def test_progress_is_lines_at_once_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with progress_of("training pp2", Console(file=out, width=20)) as progress:
        assert out.getvalue() == "training pp2: starting\n"
        progress(3, 12)
        assert out.getvalue().splitlines()[1:] == ["training pp2: round 3 of 12 after 0 s"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": [{"loss": 1}]}', None])
def test_reader_refuses_what_is_no_recording(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"is no recording .* record it again"):
        Recording.read(path)


def test_recording_that_fails_names_each_error_and_the_log(tmp_path: Path) -> None:
    path = tmp_path / "pp2.json"
    console = Console(file=io.StringIO())
    with pytest.raises(ConfigError) as caught:
        make("training pp2", 1, path, console, ["--rounds", "1", "--ward", "2", "--mirco", "3"])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("training pp2 failed: unknown flag --ward")
    assert lines[-1].startswith("unknown flag --mirco") and f"({tmp_path / 'pp2.log'})" in lines[-1]
    log = path.with_suffix(".log").read_text()
    assert "error: unknown flag --ward" in log and "Traceback" not in log
    assert not path.exists() or not json.loads(path.read_text() or "0")
