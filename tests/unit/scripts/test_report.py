from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from _quickstart.recording import RecordedStep, Recording
from _quickstart.report import summarize, table
from rich.console import Console

from megatron_wlb.errors import ConfigError

# A pipeline of two stages that runs two micro-batches, 1F1B: the first stage runs F0 F1 B0 B1, the
# second one F0 B0 F1 B1. Times in µs from 100 on.

UNEVEN = [
    # F 2 and 4, B 3 and 5. The last backward waits for 19 and starts at 20.
    [("F", 100.0, 102.0), ("F", 102.0, 106.0), ("B", 106.0, 109.0), ("B", 120.0, 125.0)],
    # F 1 and 6, B 2 and 7.
    [("F", 102.0, 103.0), ("B", 103.0, 105.0), ("F", 106.0, 112.0), ("B", 112.0, 119.0)],
]
"""From 100 to 125, 14 and 16 of it busy. Replayed it takes 24: all waits are those of the data."""

EVEN = [
    # F 3, B 4 everywhere.
    [("F", 100.0, 103.0), ("F", 103.0, 106.0), ("B", 110.0, 114.0), ("B", 117.0, 121.0)],
    [("F", 103.0, 106.0), ("B", 106.0, 110.0), ("F", 110.0, 113.0), ("B", 113.0, 117.0)],
]
"""From 100 to 121, 14 and 14 of it busy; a replay takes as long."""

Intervals = list[list[tuple[str, float, float]]]


PLAN_US = 0.5
Documents = dict[str, tuple[int, float]]
"""Tokens and µs of work, by a document's letter."""


def record(
    packing: str,
    number: int,
    step_us: float,
    documents: Documents,
    loss: float,
    imbalance: float,
    delay_steps: float,
    predicted_us: list[list[float]],
    intervals: Intervals,
) -> RecordedStep:
    num_tokens = sum(tokens for tokens, _ in documents.values())
    return RecordedStep(
        packing, number, 95.0, 95.0 + step_us - PLAN_US, num_tokens, [[[num_tokens - 5], [5]]],
        with_cpu_time(intervals), predicted_us, PLAN_US, loss, imbalance, delay_steps,
        documents=[(0, 0, ord(name), *own) for name, own in documents.items()],
    )  # fmt: skip


def with_cpu_time(intervals: Intervals) -> list[list[tuple[str, float, float, float]]]:
    """Of threads that others interrupt: no figure here is to come from it."""
    return [[(kind, a, b, 0.1) for kind, a, b in process] for process in intervals]


ORIGINAL = [[10.0, 30.0]]
HOLD = [[20.0, 22.0]]
RECORDS = [
    # `original` cuts A: so both pieces are less work. E waits in `hold`, which is ahead with F, G.
    record(
        "original", 0, 40.0, {"A": (60, 10.0), "B": (40, 30.0)}, 4.0, 1.5, 0.0, ORIGINAL, UNEVEN
    ),
    record("hold", 0, 30.0, {"A": (100, 30.0)}, 3.0, 1.0, 0.0, HOLD, EVEN),
    record("hold", 1, 20.0, {"B": (40, 30.0), "C": (60, 30.0)}, 3.0, 1.2, 1.0, HOLD, EVEN),
    record(
        "original", 1, 50.0, {"A": (40, 10.0), "C": (60, 30.0)}, 3.0, 1.25, 0.0, ORIGINAL, UNEVEN
    ),
    record("original", 2, 60.0, {"D": (100, 40.0)}, 2.0, 1.0, 0.0, ORIGINAL, UNEVEN),
    record("hold", 2, 40.0, {"D": (100, 40.0), "F": (20, 20.0)}, 3.0, 1.0, 2.0, HOLD, EVEN),
    record("hold", 3, 30.0, {"G": (80, 10.0)}, 2.0, 1.0, 0.5, HOLD, EVEN),
    record("original", 3, 50.0, {"E": (100, 40.0)}, 1.0, 1.25, 0.0, ORIGINAL, UNEVEN),
]


def read(
    folder: Path,
    records: Sequence[RecordedStep],
    pp_size: int,
    world_size: int,
    packings: Sequence[str] = ("original", "hold"),
) -> Recording:
    """As `make` writes it and `recording` reads it."""
    content = {
        "config": {"pipeline_model_parallel_size": pp_size, "seq_length": 64},
        "vocab_size": 256,
        "world_size": world_size,
        "num_cores": world_size,
        "packings": packings,
        "steps": [dataclasses.asdict(record) for record in records],
    }
    (folder / "recording.json").write_text(json.dumps(content))
    return Recording.read(folder / "recording.json")


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return read(tmp_path, RECORDS, pp_size=2, world_size=2)


def test_figures_are_those_computed_by_hand(recording: Recording) -> None:
    summary = summarize(recording)
    assert summary["rounds"] == 4
    original, hold = summary["packings"]["original"], summary["packings"]["hold"]

    # A to D: 300 tokens, 120 µs of work, in 150 µs.
    assert original["tokens_per_s"] == pytest.approx(300 / 150e-6)
    assert original["work_per_s"] == pytest.approx(120 / 150)
    assert original["bubble_share"] == pytest.approx(1 - 30 / 50)
    assert original["step_time_s"] == pytest.approx(
        {"min": 4e-5, "mean": 5e-5, "median": 5e-5, "max": 6e-5}
    )
    assert original["imbalance"] == pytest.approx(1.25)
    assert original["delay_steps"] == 0
    assert original["loss"] == pytest.approx((4 + 3 + 2 + 1) / 4)
    assert original["final_loss"] == 1
    assert original["tokens"] == 400

    # D has two thirds of the third step's work, and so of its time.
    assert hold["tokens_per_s"] == pytest.approx(300 / (50e-6 + 40e-6 * 2 / 3))
    assert hold["work_per_s"] == pytest.approx(130 / (50 + 40 * 2 / 3))
    assert hold["bubble_share"] == pytest.approx(1 - 28 / 42)
    assert hold["delay_steps"] == pytest.approx((0 + 100 + 240 + 40) / 400)
    # By tokens: not the mean of 3, 3, 3 and 2.
    assert hold["loss"] == pytest.approx((300 + 300 + 360 + 160) / 400)
    assert hold["step_tokens"] == {"min": 80, "mean": 100, "median": 100, "max": 120}


def test_speedup_is_of_the_same_documents(recording: Recording) -> None:
    summary = summarize(recording)
    assert summary["documents"] == {
        "same": 4,
        "tokens": 300,
        "cut_by_original": 1,
    }
    original, hold = summary["speedup_over_original"].values()
    assert original["tokens"] == original["work"] == original["work_a_token"] == 1
    assert original["work_spread"] == {"min": 1, "max": 1, "blocks": 4}
    assert hold["tokens"] == pytest.approx(150 / (50 + 40 * 2 / 3))
    assert hold["work_a_token"] == pytest.approx(130 / 120)
    assert hold["work"] == pytest.approx(hold["tokens"] * hold["work_a_token"])
    # Of each round, over all its documents: 30/30, 60/20, 60/40 and 10/30 over 4/4, 4/5, 4/6, 4/5.
    assert hold["work_spread"] == pytest.approx({"min": 1 / 2.4, "max": 3.75, "blocks": 4})


def test_packings_without_a_document_in_common_are_refused(tmp_path: Path) -> None:
    apart = [
        dataclasses.replace(step, documents=[(0, 0, number, 1, 1.0)])
        for number, step in enumerate(RECORDS)
    ]
    with pytest.raises(ConfigError, match="no document was trained by all packings"):
        summarize(read(tmp_path, apart, 2, 2))


def test_prediction_error_takes_the_speed_of_the_machine_out(recording: Recording) -> None:
    # Measured 8 and 22 where 10 and 30 were predicted: 3/4 of it is 7.5 and 22.5. And 14 and 14
    # where 2/3 of 20 and 22 were.
    errors = [0.5 / 8, 0.5 / 22, 1 - 40 / 3 / 14, 44 / 3 / 14 - 1]
    summary = summarize(recording)
    assert summary["micro_batch_prediction_error"] == pytest.approx(sum(errors) / 4)


def test_a_slower_hold_is_shown_as_slower(tmp_path: Path) -> None:
    """The report does not flatter: the same steps under the other names."""
    names = {"original": "hold", "hold": "original"}
    swapped = [dataclasses.replace(step, packing=names[step.packing]) for step in RECORDS]
    speed = summarize(read(tmp_path, swapped, 2, 2))["speedup_over_original"]["hold"]
    assert speed["tokens"] == pytest.approx((50 + 40 * 2 / 3) / 150)
    assert speed["work_a_token"] == pytest.approx(120 / 130)


def test_processes_are_taken_by_pipeline_stage_then_replica(tmp_path: Path) -> None:
    """Megatron's order of ranks: replicas of a stage are neighbours."""
    intervals: Intervals = [
        [("F", 0.0, 2.0), ("B", 5.0, 8.0)],  # stage 0 of replica 0
        [("F", 0.0, 4.0), ("B", 17.0, 22.0)],  # stage 0 of replica 1
        [("F", 2.0, 3.0), ("B", 3.0, 5.0)],  # stage 1 of replica 0
        [("F", 4.0, 10.0), ("B", 10.0, 17.0)],  # stage 1 of replica 1
    ]
    steps = [
        RecordedStep(
            packing, number, 0.0, 23.0, 30, [[[10]], [[20]]], with_cpu_time(intervals),
            [[8.0], [22.0]], documents=[(0, 0, number, 30, 30.0)],
        )
        for number in range(4)
        for packing in ("original", "hold")
    ]  # fmt: skip
    recording = read(tmp_path, steps, pp_size=2, world_size=4)
    assert recording.times_us(steps[0], 0).tolist() == [[[2.0], [1.0]], [[3.0], [2.0]]]
    assert recording.times_us(steps[0], 1).tolist() == [[[4.0], [6.0]], [[5.0], [7.0]]]
    timeline = recording.timeline(steps[0])
    assert timeline.busy_us == (5.0, 9.0, 3.0, 13.0)
    # A replica that waits for the other one is a bubble too.
    assert timeline.bubble_share == pytest.approx(1 - 30 / (4 * 22))
    summary = summarize(recording)
    assert summary["packings"]["hold"]["bubble_share"] == pytest.approx(1 - 30 / (4 * 22))
    assert summary["micro_batch_prediction_error"] == 0


def test_a_recording_without_an_operation_is_an_error(recording: Recording) -> None:
    """Never silently another figure."""
    recording.steps[4].intervals[1].pop()
    with pytest.raises(ValueError, match="zip"):
        summarize(recording)


def test_table_shows_speed_first_and_what_it_is_made_of(recording: Recording) -> None:
    shown = table("pp2", summarize(recording))
    column = list(shown.columns[0].cells)
    assert column[0].startswith("work a second") and column[2].startswith("  = tokens a second")
    assert column[3].startswith("  × work a token") and column[5].startswith("idle time")
    console = Console(width=100)
    with console.capture() as captured:
        console.print(shown)
    for figure in ("2.120×", "1.957×", "1.083×", "40.0%", "33.3%", "0.80 … 1.20"):
        assert figure in captured.get()
