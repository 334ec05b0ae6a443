from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _quickstart import work
from _quickstart.recording import RecordedStep, Recording
from _quickstart.report import draw, headline, summarize, table
from rich.console import Console

from megatron_wlb.cost.schedule.messages import slice_graph
from megatron_wlb.errors import ConfigError
from megatron_wlb.simulator.engine import Timeline, timeline
from megatron_wlb.study import plot

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


def record(
    packing: str,
    number: int,
    step_us: float,
    num_tokens: int,
    loss: float,
    imbalance: float,
    delay_steps: float,
    predicted_us: list[list[float]],
    intervals: Intervals,
) -> RecordedStep:
    return RecordedStep(
        packing, number, 95.0, 95.0 + step_us - PLAN_US, num_tokens, [[[num_tokens - 20], [20]]],
        with_cpu_time(intervals), predicted_us, PLAN_US, loss, imbalance, delay_steps,
    )  # fmt: skip


def with_cpu_time(intervals: Intervals) -> list[list[tuple[str, float, float, float]]]:
    """Of threads that others interrupt: no figure here is to come from it."""
    return [[(kind, a, b, 0.1) for kind, a, b in process] for process in intervals]


ORIGINAL = [[10.0, 30.0]]
HOLD = [[20.0, 22.0]]
RECORDS = [
    # Round 0 is skipped: whatever it says counts nowhere.
    record("original", 0, 9999.0, 777, 99.0, 99.0, 99.0, ORIGINAL, EVEN),
    record("hold", 0, 1.0, 777, 99.0, 99.0, 99.0, HOLD, UNEVEN),
    record("original", 1, 40.0, 100, 4.0, 1.5, 0.0, ORIGINAL, UNEVEN),
    record("hold", 1, 30.0, 120, 3.0, 1.0, 0.0, HOLD, EVEN),
    record("hold", 2, 20.0, 120, 3.0, 1.2, 1.0, HOLD, EVEN),
    record("original", 2, 50.0, 200, 3.0, 1.25, 0.0, ORIGINAL, UNEVEN),
    record("original", 3, 60.0, 50, 2.0, 1.0, 0.0, ORIGINAL, UNEVEN),
    record("hold", 3, 40.0, 120, 3.0, 1.0, 2.0, HOLD, EVEN),
    record("hold", 4, 30.0, 120, 2.0, 1.0, 0.5, HOLD, EVEN),
    record("original", 4, 50.0, 50, 1.0, 1.25, 0.0, ORIGINAL, UNEVEN),
]


def read(
    folder: Path,
    records: Sequence[RecordedStep],
    pp_size: int,
    world_size: int,
    packings: Sequence[str] = ("original", "hold"),
) -> Recording:
    """As `record` writes it and `recording` reads it."""
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
    summary = summarize(recording, skip_rounds=1)
    assert (summary["rounds"], summary["skipped_rounds"]) == (4, 1)
    original, hold = summary["packings"]["original"], summary["packings"]["hold"]

    # 400 tokens in 200 µs; 4 · 40 µs of work in them.
    assert original["tokens_per_s"] == pytest.approx(400 / 200e-6)
    assert original["work_per_s"] == pytest.approx(160 / 200)
    assert original["bubble_share"] == pytest.approx(1 - 30 / 50)
    assert original["step_time_s"] == pytest.approx({"min": 4e-5, "median": 5e-5, "max": 6e-5})
    assert original["imbalance"] == pytest.approx(1.25)
    assert original["delay_steps"] == 0
    # By tokens: not the mean of 4, 3, 2 and 1.
    assert original["loss"] == pytest.approx((400 + 600 + 100 + 50) / 400)
    assert original["final_loss"] == 1
    assert original["tokens"] == 400

    assert hold["tokens_per_s"] == pytest.approx(480 / 120e-6)
    assert hold["work_per_s"] == pytest.approx(168 / 120)
    assert hold["bubble_share"] == pytest.approx(1 - 28 / 42)
    assert hold["step_time_s"] == pytest.approx({"min": 2e-5, "median": 3e-5, "max": 4e-5})
    assert hold["imbalance"] == pytest.approx(1.05)
    assert hold["delay_steps"] == pytest.approx(3.5 / 4)
    assert hold["loss"] == pytest.approx(2.75)


def test_speedup_compares_totals_and_shows_the_spread(recording: Recording) -> None:
    speed = summarize(recording, skip_rounds=1)["speedup_over_original"]
    assert speed["original"]["tokens"] == speed["original"]["work"] == 1
    assert speed["original"]["work_spread"] == {"min": 1, "max": 1, "blocks": 4}
    assert speed["hold"]["tokens"] == pytest.approx(2)
    assert speed["hold"]["work"] == pytest.approx(1.4 / 0.8)
    # Four blocks of one round: 42/30, 42/20, 42/40 and 42/30 over 40/40, 40/50, 40/60 and 40/50.
    assert speed["hold"]["work_spread"] == pytest.approx({"min": 1.4, "max": 2.625, "blocks": 4})


def test_replay_puts_the_measured_times_through_four_stages(recording: Recording) -> None:
    replayed = summarize(recording, skip_rounds=1)["replay"]
    assert replayed["pp"] == 4
    assert "replayed, not measured" in replayed["note"]
    # 24 where 25 were measured, and 21 where 21 were.
    assert replayed["error_against_measured_step"] == pytest.approx((1 / 25 + 0) / 2)
    # Each time halved, in four stages: 23 and 17.5.
    assert replayed["bubble_share"] == pytest.approx(
        {"original": 1 - 30 / (4 * 23), "hold": 1 - 28 / (4 * 17.5)}
    )
    assert replayed["work_speedup_over_original"] == pytest.approx(
        {"original": 1.0, "hold": (42 / 17.5) / (40 / 23)}
    )


def test_prediction_error_takes_the_speed_of_the_machine_out(recording: Recording) -> None:
    # Measured 8 and 22 where 10 and 30 were predicted: 3/4 of it is 7.5 and 22.5. And 14 and 14
    # where 2/3 of 20 and 22 were.
    errors = [0.5 / 8, 0.5 / 22, 1 - 40 / 3 / 14, 44 / 3 / 14 - 1]
    summary = summarize(recording, skip_rounds=1)
    assert summary["micro_batch_prediction_error"] == pytest.approx(sum(errors) / 4)


def test_a_slower_hold_is_shown_as_slower(tmp_path: Path) -> None:
    """The report does not flatter: the same steps under the other names."""
    swapped = [
        dataclasses.replace(r, packing="hold" if r.packing == "original" else "original")
        for r in RECORDS
    ]
    summary = summarize(read(tmp_path, swapped, 2, 2), skip_rounds=1)
    assert summary["speedup_over_original"]["hold"]["work"] == pytest.approx(0.8 / 1.4)
    assert summary["speedup_over_original"]["hold"]["tokens"] == pytest.approx(0.5)
    bubbles = {name: f["bubble_share"] for name, f in summary["packings"].items()}
    assert bubbles["hold"] > bubbles["original"]
    assert summary["replay"]["work_speedup_over_original"]["hold"] < 1


def test_skipped_rounds_change_the_figures(recording: Recording) -> None:
    counted = summarize(recording, skip_rounds=0)["packings"]["original"]
    assert counted["tokens"] == 400 + 777
    assert counted["step_time_s"]["max"] == pytest.approx(9999e-6)


@pytest.mark.parametrize("skip_rounds", [2, 5])
def test_too_few_rounds_are_refused(recording: Recording, skip_rounds: int) -> None:
    with pytest.raises(ConfigError, match=f"at least {skip_rounds + 4}"):
        summarize(recording, skip_rounds)


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
            [[8.0], [22.0]],
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
    summary = summarize(recording, skip_rounds=0)
    assert summary["packings"]["hold"]["bubble_share"] == pytest.approx(1 - 30 / (4 * 22))
    assert summary["micro_batch_prediction_error"] == 0
    # Each replica alone takes 8 and 22: its own pipeline has no gap.
    assert summary["replay"]["error_against_measured_step"] == 0


def test_data_parallel_layout_has_no_replay(tmp_path: Path) -> None:
    intervals: Intervals = [
        [("F", 100.0, 103.0), ("B", 103.0, 108.0)],
        [("F", 100.0, 101.0), ("B", 101.0, 103.0)],
    ]
    records = [
        RecordedStep(
            name, number, 95.0, 115.0, 30, [[[20]], [[10]]], with_cpu_time(intervals),
            [[9.0], [3.0]],
        )
        for number in range(4)
        for name in ("original", "hold")
    ]  # fmt: skip
    summary = summarize(read(tmp_path, records, 1, 2), skip_rounds=0)
    assert "replay" not in summary
    assert summary["packings"]["hold"]["bubble_share"] == pytest.approx(1 - 11 / 16)


def test_a_recording_without_an_operation_is_an_error(recording: Recording) -> None:
    """Never silently another figure."""
    step = recording.steps[4]
    step.intervals[1].pop()
    with pytest.raises(ValueError, match="zip"):
        summarize(recording, skip_rounds=1)


def test_table_shows_the_figures(recording: Recording) -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table("pp2", summarize(recording, skip_rounds=1)))
    for shown in ("2.000×", "1.750×", "1.40 … 2.62", "40.0%", "33.3%", "0.88", "replayed at PP=4"):
        assert shown in captured.get()


def test_headline_leads_with_speed_and_idle_time(recording: Recording) -> None:
    assert headline(summarize(recording, skip_rounds=1)).splitlines() == [
        "hold: does 1.75× the work of original in a second (1.40 … 2.62 in 4 parts of 4 rounds); "
        "processes wait 33.3% of the time",
        "original: processes wait 40.0% of the time",
    ]


def test_table_has_speed_and_idle_time_first(recording: Recording) -> None:
    column = list(table("pp2", summarize(recording, skip_rounds=1)).columns[0].cells)
    assert column[0].startswith("work a second") and column[3].startswith("idle time")


@pytest.mark.parametrize(("pp_size", "row"), [(2, "pipeline rank"), (1, "rank")])
def test_picture_is_of_steps_of_like_work_and_names_its_rows(
    pp_size: int, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}

    def keep(timelines: dict[str, Timeline], path: Path, title: str, **options: Any) -> None:
        drawn.update(options, timelines=timelines, title=title)

    monkeypatch.setattr(plot, "plot_timelines", keep)
    monkeypatch.setattr(work, "plot_micro_batches", lambda *_: None)
    intervals: Intervals = [[("F", 0.0, 2.0), ("B", 9.0, 12.0)], [("F", 2.0, 5.0), ("B", 5.0, 9.0)]]
    steps = [
        RecordedStep(
            # Tokens are of no matter: the third one's are those of the others.
            name, number, 0.0, 20.0, 30 + 60 * (number < 2), [[[30]], [[30]]][:num],
            with_cpu_time([[(kind, a, b + number) for kind, a, b in p] for p in intervals]),
            [[work]] * num,
        )
        for num in [3 - pp_size]
        for name, works in (("original", (8.0, 30.0, 60.0)), ("hold", (31.0, 1.0, 70.0)))
        for number, work in enumerate(works)
    ]  # fmt: skip
    draw(read(tmp_path, steps, pp_size, world_size=2), 0, tmp_path, "layout")
    assert drawn["row"] == row and drawn["measured"]
    assert "layout" in drawn["title"] and "nearest to the mean in work" in drawn["title"]
    assert {name: t.step_us for name, t in drawn["timelines"].items()} == {
        "original, 0.9 × the mean work": 13.0,
        "hold, 0.9 × the mean work": 12.0,
    }


CHAINS = (2, 1)
SLICE_TIMES = np.array([[[2.0, 3.0, 4.0], [1.0, 2.0, 3.0]], [[5.0, 4.0, 6.0], [3.0, 4.0, 5.0]]])


@pytest.fixture
def with_slices(tmp_path: Path) -> Recording:
    """Rounds of a step of `original` and one of slices, as a pipeline without gaps runs it."""
    graph = slice_graph(2, CHAINS)
    ran = timeline(graph, graph.replay(SLICE_TIMES, np.zeros(3)))
    intervals = [[(i.action.kind, i.start_us, i.stop_us) for i in rank] for rank in ran.intervals]
    sliced = record("slim", 0, 60.0, 100, 2.0, 1.1, 0.0, [[10.0, 12.0, 8.0]], intervals)
    changes = {
        "lengths": [[[40], [20, 5], [30, 5]]],
        "prefixes": [[[0], [40, 0], [0, 0]]],
        "chains": [[*CHAINS]],
        "more_us": 3.0,
    }
    steps = [
        step
        for number in range(4)
        for step in (
            dataclasses.replace(RECORDS[2], round=number),
            dataclasses.replace(sliced, round=number, **changes),
        )
    ]
    return read(tmp_path, steps, 2, 2, packings=("original", "slim"))


def test_slices_are_replayed_in_their_own_order(with_slices: Recording) -> None:
    summary = summarize(with_slices, skip_rounds=0)
    # 30 µs were predicted, of which 3 are for more micro-batches than N: they are no work.
    assert summary["packings"]["slim"]["work_per_s"] == pytest.approx(27 / 60)
    assert summary["speedup_over_original"]["slim"]["work"] == pytest.approx(27 / 60)
    replayed = summary["replay"]
    assert replayed["error_against_measured_step"] == pytest.approx(1 / 25 / 2)
    longer_us = float(slice_graph(4, CHAINS).step_us(SLICE_TIMES.repeat(2, 1) / 2, np.zeros(3)))
    assert replayed["bubble_share"]["slim"] == pytest.approx(1 - 42 / (4 * longer_us))
    assert replayed["work_speedup_over_original"]["slim"] == pytest.approx(
        27 / longer_us / (40 / 23)
    )


def test_pictures_know_which_slices_are_of_one_document(
    with_slices: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(work, "plot_micro_batches", lambda *given: drawn.update(bars=given[2]))
    monkeypatch.setattr(plot, "plot_timelines", lambda lines, *_, **__: drawn.update(lines=lines))
    draw(with_slices, 0, tmp_path, "pp2")
    assert drawn["bars"] == {"slim": [[0, 0, None]] * 4}
    original, slim = drawn["lines"].values()
    assert not any(i.slice for rank in original.intervals for i in rank)
    for rank in slim.intervals:
        slices = {i.action.micro_batch: i.slice and i.slice[1:3] for i in rank}
        assert slices == {0: (0, 40), 1: (40, 60), 2: None}
