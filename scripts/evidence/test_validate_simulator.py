"""The validation runs and keeps its figures; on a machine that others share they are not judged."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from _running import run_script

run = partial(run_script, "validate_simulator.py", COLUMNS="160")
SHORT = "--rounds 6 --repeats 2 --memory-rounds 1 --seq-length 256 --micro-batches 4"


@pytest.fixture(scope="module")
def kept(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validation")
    done = run(
        "--layouts pp2 --packings original hold+shape slim --json", SHORT,
        "--corpus", corpus, "--keep", folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "figures.json").write_text(done.stdout)
    return folder


def test_validation_compares_simulated_and_measured_steps(kept: Path) -> None:
    figures = json.loads((kept / "figures.json").read_text())
    assert [row["packing"] for row in figures["rows"]] == ["original", "hold+shape", "slim"]
    assert figures["step_time_mape"] > 0
    assert 0 < figures["memory_mape"] < 0.1
    for row in figures["rows"]:
        assert row["layout"] == "pp2" and row["num_steps"] == 4
        # The schedule is understood, whatever else the machine does.
        assert row["replay_error"] < 0.5
        for what in ("work", "tokens"):
            ratio = row[f"simulated_{what}_per_s"] / row[f"measured_{what}_per_s"]
            assert 1 / 20 < ratio < 20
        assert row["measured_work_per_s"] < 2.5  # ranks, on a machine of two cores or more
    layout = figures["layouts"]["pp2"]
    assert len(layout["pairs"]) == 3 and 0 <= layout["pairs_apart"] <= 3
    assert 0 < layout["repeat_error"] < 20
    assert isinstance(figures["ranking_agrees"], bool)


def test_validation_judges_again_what_was_kept(kept: Path) -> None:
    done = run("--layouts", "pp2", "--keep", str(kept), "--reuse", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((kept / "figures.json").read_text())
    assert "step time: MAPE" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rounds 5", "error: --rounds is 5; use at least 6"),
        ("--repeats 0", "error: --repeats is 0; use at least 1"),
        ("--reuse", "error: --reuse needs the folder of the recordings; give --keep FOLDER"),
        (f"--corpus none {SHORT} --layouts pp4 --micro-batches 0", "error: "),
        (f"--corpus none {SHORT} --layouts pp2-vpp2 --packings slim",
         "error: slim packing does not run with PP=2, VPP=2; give others"),
    ],
)  # fmt: skip
def test_validation_refuses_before_it_trains(words: str, message: str) -> None:
    done = run(words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(message)
