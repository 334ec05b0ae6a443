"""The quickstart, small: what it leaves behind and what that says."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from _quickstart.recording import Recording
from _quickstart.report import WORK
from rank_runs import Finished, assert_refused, spawn

from megatron_wlb.data.corpus import Corpus
from megatron_wlb.errors import ConfigError

LAYOUTS = {"pp2": ["original", "hold", "slim"], "dp2": ["original", "hold"]}
ROUNDS = 6


def quickstart(folder: Path, *arguments: str, timeout_s: float = 180.0) -> Finished:
    command = [sys.executable, "-m", "_quickstart", *arguments]
    run = spawn(folder, command)
    run.deadline += timeout_s
    return run.wait()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one quickstart with both layouts leaves behind."""
    folder = tmp_path_factory.mktemp("quickstart")
    options = ["--seq-length", "512", "--rounds", str(ROUNDS), "--out", "out"]
    finished = quickstart(folder, *options)
    assert finished.code == 0, finished.output
    for name in ("tokens a second", "bubble share", "imbalance", "delay", "summary.json"):
        assert name in finished.output
    (folder / "printed.txt").write_text(finished.output)
    return folder / "out"


def test_first_table_is_shown_before_the_second_training_starts(out: Path) -> None:
    printed = (out.parent / "printed.txt").read_text()
    assert printed.count(WORK) == 1
    marks = [
        *("training pp2: round 1 of 7, about", "slim: does", "hold: does", WORK),
        *("work a second, over original", "idle time", "training dp2: round 1 of 7, about"),
        "summary.json",
    ]
    places = [printed.index(mark) for mark in marks]
    assert places == sorted(places), printed


@pytest.fixture(scope="module")
def summary(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return content


def test_summary_has_the_promised_keys(summary: dict[str, Any]) -> None:
    assert list(summary) == list(LAYOUTS)
    for name, layout in summary.items():
        assert list(layout["packings"]) == LAYOUTS[name]
        assert list(layout["speedup_over_original"]) == LAYOUTS[name]
        for figures in layout["packings"].values():
            assert set(figures) >= {
                "tokens_per_s",
                "work_per_s",
                "bubble_share",
                "step_time_s",
                "imbalance",
                "delay_steps",
                "loss",
            }
            assert set(figures["step_time_s"]) == {"min", "mean", "median", "max"}
        for speed in layout["speedup_over_original"].values():
            assert speed["work"] == pytest.approx(speed["tokens"] * speed["work_a_token"])


def numbers(value: Any) -> list[float]:
    """All numbers in nested dicts."""
    if isinstance(value, dict):
        return [number for v in value.values() for number in numbers(v)]
    return [value] if isinstance(value, int | float) else []


def test_summary_has_sane_figures(summary: dict[str, Any]) -> None:
    assert all(math.isfinite(number) for number in numbers(summary))
    for layout in summary.values():
        assert layout["rounds"] == ROUNDS
        assert 0 < layout["documents"]["cut_by_original"] < layout["documents"]["same"]
        for figures in layout["packings"].values():
            times = figures["step_time_s"]
            assert 0 < times["min"] <= times["median"] <= times["max"]
            assert figures["tokens_per_s"] > 0
            assert figures["work_per_s"] > 0
            assert 0 < figures["bubble_share"] < 1
            assert figures["imbalance"] >= 1
            assert 0 < figures["loss"] < math.log(256) + 0.5
        for name in {"original", "slim"} & set(layout["packings"]):
            assert layout["packings"][name]["delay_steps"] == 0
        assert layout["speedup_over_original"]["original"]["tokens"] == 1
        assert layout["speedup_over_original"]["original"]["work"] == 1
        assert layout["micro_batch_prediction_error"] > 0


def test_recordings_hold_the_steps_in_turns(out: Path) -> None:
    """Each round starts with another packing, and no operation lies outside its step."""
    for layout, (pp_size, dp_size, num_micro_batches) in {
        "pp2": (2, 1, 4),
        "dp2": (1, 2, 1),
    }.items():
        recording = Recording.read(out / f"{layout}.json")
        assert (recording.pp_size, recording.dp_size) == (pp_size, dp_size)
        packings, num_cut = LAYOUTS[layout], 0
        assert [(step.round, step.packing) for step in recording.steps] == [
            # The one before, to warm up, is not among them.
            (number, packings[(2 + number + turn) % len(packings)])
            for number in range(ROUNDS)
            for turn in range(len(packings))
        ]
        for step in recording.steps:
            counts = [num_micro_batches] * dp_size
            if step.packing == "slim":
                counts = [sum(own) for own in step.chains]
                num_cut += any(keys for rank in step.prefixes for m in rank for keys in m)
            assert [len(lengths) for lengths in step.lengths] == counts
            assert bool(step.chains) == (step.packing == "slim")
            num_run = sum(n for row in step.lengths for m in row for n in m)
            assert step.num_tokens <= num_run < 1.1 * step.num_tokens  # with padding
            assert sum(tokens for *_, tokens, _ in step.documents) == step.num_tokens
            assert len(step.intervals) == pp_size * dp_size
            assert step.plan_us > 0
            for process in step.intervals:
                kinds = [kind for kind, *_ in process]
                assert kinds.count("F") == kinds.count("B") == counts[0]
                times = [time for _, start, stop, _ in process for time in (start, stop)]
                assert times == sorted(times)
                assert step.start_us <= times[0]
                assert times[-1] <= step.stop_us
                assert all(cpu_us > 0 for *_, cpu_us in process)
        assert bool(num_cut) == ("slim" in packings)


def test_pictures_are_there(out: Path) -> None:
    whats = "lengths", "work", "timeline"
    for name in (f"{layout}-{what}" for layout in LAYOUTS for what in whats):
        picture = (out / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5000


@pytest.mark.long
def test_second_start_reuses_the_corpus(out: Path) -> None:
    (corpus,) = (out / "corpus").glob("*.idx")
    built = corpus.stat().st_mtime_ns
    options = ["--seq-length", "512", "--rounds", "4", "--layouts", "dp2", "--out", "out", "--json"]
    finished = quickstart(out.parent, *options)
    assert finished.code == 0, finished.output
    assert corpus.stat().st_mtime_ns == built
    printed = json.loads(finished.output.splitlines()[-1])
    assert list(printed) == ["dp2"]
    assert printed == json.loads((out / "summary.json").read_text())


def test_corpus_is_of_uneven_real_text(out: Path) -> None:
    (index,) = (out / "corpus").glob("*.idx")
    lengths = Corpus.open(index.with_suffix("")).lengths
    assert len(lengths) > 2000
    assert lengths.max() > 20 * lengths.mean()


def test_too_few_rounds_are_refused_before_training(tmp_path: Path) -> None:
    finished = quickstart(tmp_path, "--rounds", "3", "--out", "out")
    assert_refused(finished, ConfigError.exit_code, "--rounds is 3", "at least 4")
    assert not (tmp_path / "out").exists()


def test_unwritable_out_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finished = quickstart(tmp_path, "--out", "file")
    assert_refused(finished, 1, "file", "choose another --out")


def test_failed_training_names_the_cause_and_the_log(tmp_path: Path, out: Path) -> None:
    finished = quickstart(out.parent, "--out", "out", "--seq-length", "1", "--layouts", "dp2")
    assert_refused(finished, ConfigError.exit_code, "--seq-length is 1", "out/dp2.log")
