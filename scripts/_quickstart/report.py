"""What a recorded comparison says: one summary, a headline, a table, pictures.

*Measured* figures come from the recording alone; *replayed* ones put its measured operation times
through the schedule of a longer pipeline, and are called so wherever they stand.

Speed is judged by totals over many steps, of tokens and of predicted work: a packing that delays
documents alternates lighter and heavier steps, which makes medians of single steps mislead.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from _quickstart.recording import RecordedStep, Recording
from megatron_wlb.cost.slices import Unit
from megatron_wlb.errors import ConfigError

NUM_BLOCKS = 4
"""Consecutive parts of the recording whose speed-ups show the spread."""

REPLAYED_PP = 4
WORK = (
    "work: the seconds of computing that documents should take, by a cost measured at the start; "
    "what more and smaller micro-batches take besides them is none. "
    "Tokens compare worse: original cuts documents, and a piece is less work for each token."
)


def summarize(recording: Recording, skip_rounds: int) -> dict[str, Any]:
    """The figures of one layout, JSON-able; ``skip_rounds`` at the start do not count.

    Raises :class:`ConfigError` where too few rounds are left.
    """
    counted = _counted(recording, skip_rounds)
    num_rounds = min(map(len, counted.values()))
    if num_rounds < NUM_BLOCKS:
        raise ConfigError(
            f"{num_rounds} rounds after skipping {skip_rounds} are too few to compare; record at "
            f"least {skip_rounds + NUM_BLOCKS}"
        )
    summary: dict[str, Any] = {
        "rounds": num_rounds,
        "skipped_rounds": skip_rounds,
        "packings": {name: _figures(steps) for name, steps in counted.items()},
        "speedup_over_original": {},
        "micro_batch_prediction_error": _prediction_error(recording, counted),
    }
    base = counted[recording.packings[0]]
    ends = [num_rounds * block // NUM_BLOCKS for block in range(NUM_BLOCKS + 1)]
    blocks = [slice(start, stop) for start, stop in pairwise(ends)]
    for name, steps in counted.items():
        work = [_rate(steps[b], "work_us") / _rate(base[b], "work_us") for b in blocks]
        summary["speedup_over_original"][name] = {
            "tokens": _rate(steps, "num_tokens") / _rate(base, "num_tokens"),
            "work": _rate(steps, "work_us") / _rate(base, "work_us"),
            "work_spread": {"min": min(work), "max": max(work), "blocks": NUM_BLOCKS},
        }
    if recording.pp_size > 1 and REPLAYED_PP % recording.pp_size == 0:
        summary["replay"] = _replays(recording, counted)
    return summary


def _counted(recording: Recording, skip_rounds: int) -> dict[str, list[RecordedStep]]:
    return {
        name: [s for s in recording.timed if s.packing == name and s.round >= skip_rounds]
        for name in recording.packings
    }


def _rate(steps: Sequence[RecordedStep], what: str) -> float:
    """Tokens, or µs of predicted work, a second."""
    return float(sum(getattr(s, what) for s in steps) / sum(s.seconds for s in steps))


def _figures(steps: Sequence[RecordedStep]) -> dict[str, Any]:
    seconds = [s.seconds for s in steps]
    available = sum(len(s.intervals) * s.span_us for s in steps)
    tokens = sum(s.num_tokens for s in steps)
    return {
        "tokens_per_s": _rate(steps, "num_tokens"),
        # µs of predicted work a µs: 1 a process would be a perfect prediction without bubbles.
        "work_per_s": _rate(steps, "work_us") / 1e6,
        "bubble_share": 1 - sum(s.busy_us for s in steps) / available,
        "step_time_s": {
            "min": min(seconds),
            "median": statistics.median(seconds),
            "max": max(seconds),
        },
        "imbalance": statistics.mean(s.imbalance for s in steps),
        "delay_steps": sum(s.delay_steps * s.num_tokens for s in steps) / tokens,
        "loss": sum(s.loss * s.num_tokens for s in steps) / tokens,
        "final_loss": steps[-1].loss,
        "tokens": tokens,
    }


def _prediction_error(recording: Recording, counted: Mapping[str, Sequence[RecordedStep]]) -> float:
    """Mean of |predicted ÷ measured - 1| over all micro-batches, the machine's speed taken out.

    A shared machine is slower at times; each step's total is scaled to what was measured.
    """
    errors: list[float] = []
    for step in (step for steps in counted.values() for step in steps):
        rows = [recording.times_us(step, d).sum(axis=(0, 1)) for d in range(recording.dp_size)]
        measured = np.concatenate(rows)
        predicted = np.concatenate(step.predicted_us)
        errors += abs(predicted * (measured.sum() / predicted.sum()) / measured - 1).tolist()
    return statistics.mean(errors)


def _replays(recording: Recording, counted: Mapping[str, Sequence[RecordedStep]]) -> dict[str, Any]:
    """Measured operation times through the same and through a longer pipeline.

    Every stage becomes successive ones that take an equal share of its time: right for equal
    layers; what a stage does besides (embedding, output layer, loss) is spread with them.
    """
    errors: list[float] = []
    speed, bubble = {}, {}
    parts = REPLAYED_PP // recording.pp_size
    for name, steps in counted.items():
        work = span = busy = 0.0
        for step in steps:
            work += step.work_us
            for dp_rank in range(recording.dp_size):
                same, longer = (
                    recording.graph(step, dp_rank, pp_size=pp_size, sends="buffered")
                    for pp_size in (recording.pp_size, REPLAYED_PP)
                )
                times_us = recording.times_us(step, dp_rank)
                at_once = np.zeros(same.num_micro_batches)
                first = recording.process(0, dp_rank)
                mine = step.intervals[first :: recording.world_size // recording.pp_size]
                measured_us = max(p[-1][2] for p in mine) - min(p[0][1] for p in mine)
                errors.append(abs(float(same.step_us(times_us, at_once)) / measured_us - 1))
                span += float(longer.step_us(times_us.repeat(parts, axis=1) / parts, at_once))
                busy += float(times_us.sum())
        speed[name] = work / span
        bubble[name] = 1 - busy / (REPLAYED_PP * span)
    base = speed[recording.packings[0]]
    return {
        "note": f"replayed, not measured: operation times of PP={recording.pp_size} through the "
        f"schedule of PP={REPLAYED_PP}",
        "pp": REPLAYED_PP,
        "error_against_measured_step": statistics.mean(errors),
        "work_speedup_over_original": {name: value / base for name, value in speed.items()},
        "bubble_share": bubble,
    }


def headline(summary: Mapping[str, Any]) -> str:
    """How much faster the packings are than the first one, and how long processes wait.

    The last packing comes first.
    """
    idle = {name: figures["bubble_share"] for name, figures in summary["packings"].items()}
    (base, first_idle), *others = idle.items()
    lines = []
    for name, share in reversed(others):
        speed = summary["speedup_over_original"][name]
        low, high = speed["work_spread"]["min"], speed["work_spread"]["max"]
        lines.append(
            f"{name}: does {speed['work']:.2f}× the work of {base} in a second "
            f"({low:.2f} … {high:.2f} in {NUM_BLOCKS} parts of {summary['rounds']} rounds); "
            f"processes wait {share:.1%} of the time"
        )
    return "\n".join([*lines, f"{base}: processes wait {first_idle:.1%} of the time"])


def table(title: str, summary: Mapping[str, Any]) -> Table:
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for name in summary["packings"]:
        result.add_column(name, justify="right")
    figures = summary["packings"].values()
    speed = summary["speedup_over_original"].values()
    rows = {
        "work a second, over original": [f"{s['work']:.3f}×" for s in speed],
        f"  lowest … highest of {NUM_BLOCKS} parts": [
            f"{s['work_spread']['min']:.2f} … {s['work_spread']['max']:.2f}" for s in speed
        ],
    }
    if "replay" in summary:
        replayed = summary["replay"]["work_speedup_over_original"].values()
        rows[f"  replayed at PP={summary['replay']['pp']}"] = [f"{v:.3f}×" for v in replayed]
    rows |= {
        "idle time (bubble share)": [f"{f['bubble_share']:.1%}" for f in figures],
        "tokens a second": [f"{f['tokens_per_s']:,.0f}" for f in figures],
        "  over original": [f"{s['tokens']:.3f}×" for s in speed],
        "imbalance (predicted)": [f"{f['imbalance']:.3f}" for f in figures],
        "delay, steps": [f"{f['delay_steps']:.2f}" for f in figures],
        "step time, median s": [f"{f['step_time_s']['median']:.2f}" for f in figures],
        "last loss": [f"{f['final_loss']:.3f}" for f in figures],
    }
    for label, cells in rows.items():
        result.add_row(label, *cells)
    result.caption = (
        f"measured over {summary['rounds']} rounds; micro-batch times predicted within "
        f"{summary['micro_batch_prediction_error']:.1%}"
    )
    if "replay" in summary:
        result.caption += (
            f"; a replay meets the measured step within "
            f"{summary['replay']['error_against_measured_step']:.1%}"
        )
    return result


def _sliced(step: RecordedStep) -> list[int | None]:
    """The document that each micro-batch runs a slice of, as :meth:`RecordedStep.units` number
    them.
    """
    units = [
        step.units(dp_rank) or [Unit(0)] * len(own) for dp_rank, own in enumerate(step.lengths)
    ]
    return [unit.slice and unit.slice.document for own in units for unit in own]


def draw(recording: Recording, skip_rounds: int, folder: Path, layout: str) -> list[Path]:
    """Pictures of one layout: work of the micro-batches, and one step of each as it ran."""
    from _quickstart.work import plot_micro_batches
    from megatron_wlb.study.plot import plot_timelines

    folder.mkdir(parents=True, exist_ok=True)
    work_path, timeline_path = (folder / f"{layout}-{n}.png" for n in ("work", "timeline"))
    steps = _counted(recording, skip_rounds)
    plot_micro_batches(
        {
            name: [[us for rank in s.predicted_us for us in rank] for s in of]
            for name, of in steps.items()
        },
        work_path,
        {name: [_sliced(s) for s in of] for name, of in steps.items() if any(s.chains for s in of)},
    )
    nominal = statistics.mean(s.work_us for of in steps.values() for s in of)
    nearest = {name: min(of, key=lambda s: abs(s.work_us - nominal)) for name, of in steps.items()}
    typical = {
        f"{name}, {step.work_us / nominal:.1f} × the mean work": recording.timeline(step)
        for name, step in nearest.items()
    }
    plot_timelines(
        typical,
        timeline_path,
        f"The step of each packing that is nearest to the mean in work, {layout}",
        measured=True,
        row="pipeline rank" if recording.pp_size > 1 else "rank",
    )
    return [work_path, timeline_path]
