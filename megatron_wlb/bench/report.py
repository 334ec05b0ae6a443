"""What a recorded comparison says: one summary, a table, pictures.

Reads what :mod:`megatron_wlb.bench.train_packings` wrote (without tensor parallelism). *Measured*
figures come from the recording alone; *replayed* ones put its measured operation times through the
schedule of a longer pipeline (:mod:`megatron_wlb.simulator.engine`) and are called so wherever they
stand.

Speed is judged by totals over many steps, of tokens and of predicted work: a packing that delays
documents alternates lighter and heavier steps, which makes medians of single steps mislead.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_wlb.bench.train_packings import StepRecord
from megatron_wlb.errors import ConfigError
from megatron_wlb.schedule.order import schedule
from megatron_wlb.simulator.engine import Interval, Timeline, replay, split_stages

NUM_BLOCKS = 4
"""Consecutive parts of the recording whose speed-ups show the spread."""

REPLAYED_PP = 4


@dataclass(frozen=True)
class Step:
    """A recorded step with its operations named."""

    record: StepRecord
    pp_size: int

    @property
    def seconds(self) -> float:
        """Of the whole step: plan, forward, backward, update."""
        return (self.record.stop_us - self.record.start_us) / 1e6

    @property
    def work(self) -> float:
        """Predicted µs of all its micro-batches: how much there was to do."""
        return sum(map(sum, self.record.predicted_us))

    @cached_property
    def timelines(self) -> list[Timeline]:
        """Per data-parallel rank, what each of its stages ran when."""
        dp_size = len(self.record.lengths)
        order = schedule(self.pp_size, 1, len(self.record.lengths[0]))
        return [
            Timeline(
                tuple(
                    tuple(
                        Interval(start, stop, action)
                        for action, (_, start, stop) in zip(
                            order[pp_rank],
                            # Megatron's order of ranks: data-parallel ones are neighbours.
                            self.record.intervals[pp_rank * dp_size + dp_rank],
                            strict=True,
                        )
                    )
                    for pp_rank in range(self.pp_size)
                )
            )
            for dp_rank in range(dp_size)
        ]

    @cached_property
    def timeline(self) -> Timeline:
        """Of all processes together."""
        return Timeline(tuple(rank for t in self.timelines for rank in t.intervals))

    def stage_times(self, dp_rank: int) -> tuple[list[list[list[float]]], ...]:
        """Measured µs ``[pp_size][1][num_micro_batches]``, of forward and of backward."""
        return tuple(
            [
                [[i.stop_us - i.start_us for i in _by_micro_batch(rank, kind)]]
                for rank in self.timelines[dp_rank].intervals
            ]
            for kind in "FB"
        )

    def micro_batch_us(self) -> list[list[float]]:
        """Measured forward plus backward over all stages, as ``record.predicted_us``."""
        return [
            [
                sum(times)
                for times in zip(*(c for t in self.stage_times(d) for (c,) in t), strict=True)
            ]
            for d in range(len(self.record.lengths))
        ]


def _by_micro_batch(rank: Sequence[Interval], kind: str) -> list[Interval]:
    return sorted((i for i in rank if i.action.kind == kind), key=lambda i: i.action.micro_batch)


@dataclass(frozen=True)
class Recording:
    """All steps of a comparison."""

    packings: list[str]
    pp_size: int
    dp_size: int
    window: int
    steps: list[Step]

    @classmethod
    def read(cls, path: Path) -> Recording:
        content = json.loads(path.read_text())
        pp_size = content["config"]["pipeline_model_parallel_size"]
        return cls(
            content["packings"],
            pp_size,
            content["world_size"] // pp_size,
            content["config"]["seq_length"],
            [Step(StepRecord(**step), pp_size) for step in content["steps"]],
        )

    def of(self, packing: str, first_round: int = 0) -> list[Step]:
        return [
            s for s in self.steps if s.record.packing == packing and s.record.round >= first_round
        ]


def summarize(recording: Recording, skip_rounds: int) -> dict[str, Any]:
    """The figures of one layout, JSON-able.

    Args:
        recording: what was recorded.
        skip_rounds: rounds at the start that do not count: pools and caches fill.

    Raises:
        ConfigError: too few rounds are left.
    """
    counted = {name: recording.of(name, skip_rounds) for name in recording.packings}
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
        "micro_batch_prediction_error": _prediction_error(counted),
    }
    base = counted[recording.packings[0]]
    for name, steps in counted.items():
        blocks = [_block(num_rounds, b) for b in range(NUM_BLOCKS)]
        work = [_rate(steps[b], "work") / _rate(base[b], "work") for b in blocks]
        summary["speedup_over_original"][name] = {
            "tokens": _rate(steps, "tokens") / _rate(base, "tokens"),
            "work": _rate(steps, "work") / _rate(base, "work"),
            "work_spread": {"min": min(work), "max": max(work), "blocks": NUM_BLOCKS},
        }
    if recording.pp_size > 1:
        summary["replay"] = _replays(recording, counted)
    return summary


def _block(num_rounds: int, block: int) -> slice:
    return slice(num_rounds * block // NUM_BLOCKS, num_rounds * (block + 1) // NUM_BLOCKS)


def _rate(steps: Sequence[Step], what: str) -> float:
    """Tokens, or µs of predicted work, a second."""
    amount = sum(s.record.num_tokens if what == "tokens" else s.work for s in steps)
    return amount / sum(s.seconds for s in steps)


def _figures(steps: Sequence[Step]) -> dict[str, Any]:
    seconds = [s.seconds for s in steps]
    available = sum(len(s.timeline.intervals) * s.timeline.step_us for s in steps)
    busy = sum(sum(s.timeline.busy_us) for s in steps)
    tokens = sum(s.record.num_tokens for s in steps)
    return {
        "tokens_per_s": _rate(steps, "tokens"),
        # µs of predicted work a µs: 1 a process would be a perfect prediction without bubbles.
        "work_per_s": _rate(steps, "work") / 1e6,
        "bubble_share": 1 - busy / available,
        "step_time_s": {
            "min": min(seconds),
            "median": statistics.median(seconds),
            "max": max(seconds),
        },
        "imbalance": statistics.mean(s.record.imbalance for s in steps),
        "delay_steps": sum(s.record.delay_steps * s.record.num_tokens for s in steps) / tokens,
        "loss": sum(s.record.loss * s.record.num_tokens for s in steps) / tokens,
        "final_loss": steps[-1].record.loss,
        "tokens": tokens,
    }


def _prediction_error(counted: Mapping[str, Sequence[Step]]) -> float:
    """Mean of |predicted ÷ measured - 1| over all micro-batches, the machine's speed taken out.

    A shared machine is slower at times; each step's total is scaled to what was measured.
    """
    errors = []
    for steps in counted.values():
        for step in steps:
            measured = [us for rank in step.micro_batch_us() for us in rank]
            predicted = [us for rank in step.record.predicted_us for us in rank]
            scale = sum(measured) / sum(predicted)
            errors += [abs(p * scale / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return statistics.mean(errors)


def _replays(recording: Recording, counted: Mapping[str, Sequence[Step]]) -> dict[str, Any]:
    """Measured operation times through the same and through a longer pipeline."""
    errors: list[float] = []
    speed: dict[str, float] = {}
    bubble: dict[str, float] = {}
    parts = REPLAYED_PP // recording.pp_size
    for name, steps in counted.items():
        work = span = busy = 0.0
        for step in steps:
            for dp_rank, timeline in enumerate(step.timelines):
                forward, backward = step.stage_times(dp_rank)
                num = len(forward[0][0])
                same = replay(schedule(recording.pp_size, 1, num), forward, backward)
                errors.append(abs(same.step_us / timeline.step_us - 1))
                longer = replay(
                    schedule(REPLAYED_PP, 1, num),
                    split_stages(forward, parts),
                    split_stages(backward, parts),
                )
                work += sum(step.record.predicted_us[dp_rank])
                span += longer.step_us
                busy += sum(longer.busy_us)
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


def table(title: str, summary: Mapping[str, Any]) -> Table:
    """One layout's figures, side by side."""
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for name in summary["packings"]:
        result.add_column(name, justify="right")
    figures = summary["packings"].values()
    speed = summary["speedup_over_original"].values()

    def row(label: str, cells: Sequence[str]) -> None:
        result.add_row(label, *cells)

    row("tokens a second", [f"{f['tokens_per_s']:,.0f}" for f in figures])
    row("  over original", [f"{s['tokens']:.3f}×" for s in speed])
    row("work a second, over original", [f"{s['work']:.3f}×" for s in speed])
    row(
        f"  lowest … highest of {NUM_BLOCKS} parts",
        [f"{s['work_spread']['min']:.2f} … {s['work_spread']['max']:.2f}" for s in speed],
    )
    if "replay" in summary:
        replayed = summary["replay"]
        row(
            f"  replayed at PP={replayed['pp']}",
            [f"{v:.3f}×" for v in replayed["work_speedup_over_original"].values()],
        )
    row("bubble share", [f"{f['bubble_share']:.1%}" for f in figures])
    row("imbalance (predicted)", [f"{f['imbalance']:.3f}" for f in figures])
    row("delay, steps", [f"{f['delay_steps']:.2f}" for f in figures])
    row("step time, median s", [f"{f['step_time_s']['median']:.2f}" for f in figures])
    row("last loss", [f"{f['final_loss']:.3f}" for f in figures])
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


def draw(recording: Recording, skip_rounds: int, folder: Path, layout: str) -> list[Path]:
    """Pictures of one layout: work of the micro-batches, and one step of each as it ran."""
    from megatron_wlb.study.plot import plot_micro_batches, plot_timelines

    folder.mkdir(parents=True, exist_ok=True)
    work_path, timeline_path = (folder / f"{layout}-{n}.png" for n in ("work", "timeline"))
    steps = {name: recording.of(name, skip_rounds) for name in recording.packings}
    plot_micro_batches(
        {
            name: [[us for rank in s.record.predicted_us for us in rank] for s in of]
            for name, of in steps.items()
        },
        work_path,
    )
    nominal = statistics.mean(s.record.num_tokens for of in steps.values() for s in of)
    typical = {
        # Steps of a like amount of tokens, so that one time axis compares them.
        name: min(of, key=lambda s: abs(s.record.num_tokens - nominal)).timeline
        for name, of in steps.items()
    }
    plot_timelines(
        typical,
        timeline_path,
        f"One step of each packing, {layout.upper()}",
        measured=True,
    )
    return [work_path, timeline_path]
