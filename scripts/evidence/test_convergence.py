"""The short form of the study of learning: real runs, judged on the same held-out documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _running import run_script


def run(folder: Path) -> tuple[dict[str, Any], str]:
    done = run_script(
        "convergence.py",
        "--out",
        folder,
        "--json --seeds 1 --packings original hold --tokens 3e4 --looks 1",
        COLUMNS="200",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.long
def test_study_trains_packings_from_the_same_weights_and_goes_on(tmp_path: Path) -> None:
    found, said = run(tmp_path)
    assert "2 runs, 0 of them there" in said
    looks = {
        packing: json.loads((tmp_path / f"30000_{packing}_1.json").read_text())["looks"]
        for packing in ("original", "hold")
    }
    for first, last in looks.values():
        assert first["tokens"] == 0 and last["tokens"] >= 3e4
        assert last["loss"] < first["loss"] - 0.5, "it learns"
    assert looks["original"][0]["losses"] == looks["hold"][0]["losses"]
    assert looks["original"][1]["losses"] != looks["hold"][1]["losses"]
    ended = found["packings"]["hold"]["at the end"]
    assert ended["difference"] == looks["hold"][1]["loss"] - looks["original"][1]["loss"]
    again, said = run(tmp_path)
    assert again == found and "2 runs, 2 of them there" in said
