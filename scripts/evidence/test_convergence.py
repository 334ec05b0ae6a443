"""The short form of the study of learning: real runs, judged on the same held-out documents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from _running import run_script


def run(folder: Path) -> tuple[dict[str, Any], str]:
    done = run_script(
        "convergence.py",
        "--out",
        folder,
        "--json --small --seeds 1 --packings original hold --tokens 5e4 --looks 2",
        COLUMNS="200",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.long
def test_study_trains_packings_in_megatrons_loop_and_goes_on(tmp_path: Path) -> None:
    found, said = run(tmp_path)
    assert "2 runs, 0 of them there" in said
    last = {}
    for packing in ("original", "hold"):
        name = f"small-50000-tokens_{packing}_1"
        one = json.loads((tmp_path / f"{name}.json").read_text())
        assert one["steps"] == [4, 8] and one["tokens"][-1] == pytest.approx(5e4, rel=0.1)
        assert one["loss"][1] < one["loss"][0] - 0.1, "it learns"
        log = (tmp_path / f"{name}.log").read_text()
        told = re.findall(r"validation loss at iteration \d \| lm loss value: (\S+)", log)
        assert [float(loss) for loss in told] == pytest.approx(one["loss"], rel=1e-6)
        last[packing] = one["loss"][-1]
    ended = found["packings"]["hold"]["at the end"]
    assert ended["difference"] == last["hold"] - last["original"] != 0
    again, said = run(tmp_path)
    assert again == found and "2 runs, 2 of them there" in said
