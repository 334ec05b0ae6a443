"""How well simulated steps meet recorded ones: calibrated on the first third, judged on the rest.

From the recording's first third comes a :class:`Calibration`, with each stage's cost fitted to its
forwards and backwards. With it, and the plan's lengths alone, the other steps are simulated.

Where every pipeline rank has a core of its own, times are those of the wall clock. Where they share
cores, an operation's duration depends on what its neighbour does just then. There operations are
fitted by their CPU time, and the replay shares the cores
(:mod:`_validation.sharing`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from _quickstart.recording import RecordedStep, Recording

from _validation.fit import StageSample, fit_stage
from _validation.sharing import replay_shared
from megatron_wlb.cost import MemoryModel
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.schedule.order import dataflow
from megatron_wlb.cost.slices import Unit, UnitTable
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import padded_vocab_size, parallelism, run_of

CALIBRATION_SHARE = 3
"""One in so many rounds, from the first on, is calibrated with."""
FEWEST_ROUNDS = 6
"""A recording has at least so many: a third of them is to calibrate with."""


class Handover(NamedTuple):
    """What actions of a schedule take besides computing."""

    between_us: float
    """What a rank takes from one action to the next for which everything is there."""
    p2p_us: float
    """More than that from the stop of an action to the start of one that waits for it elsewhere."""

    @classmethod
    def of(cls, between_us: Sequence[float], waited_us: Sequence[float]) -> Handover:
        # The lower quarter: the others also wait for a neighbour to receive.
        between = float(np.percentile(between_us, 25)) if between_us else 0.0
        waited = float(np.median(waited_us)) if waited_us else 0.0
        return cls(between, max(waited - between, 0.0))


@dataclass(frozen=True)
class Calibration:
    """What the first third of the steps says."""

    stages: StageCosts
    slice_us: Floats
    """``[2, S]``: what a slice takes more than its part of a whole document."""
    fit_error: float
    handovers: Mapping[str, Handover]
    """By :attr:`RecordedStep.schedule`: the loop for slices has other code between actions."""
    besides_us: float
    """What a step takes before its first and after its last action."""
    slowdown: float
    """By how much pipelines took longer than simulated: what the machine does besides, and what the
    fit of single operations, whose errors are relative, takes off their sum."""


def divided(recording: Recording) -> tuple[list[RecordedStep], list[RecordedStep]]:
    """The timed steps to calibrate with, the first third, and those to judge."""
    last = recording.rounds[len(recording.rounds) // CALIBRATION_SHARE]
    first = [step for step in recording.timed if step.round < last]
    return first, [step for step in recording.timed if step.round >= last]


def repeat_error(recording: Recording) -> float:
    """Mean of ``|time ÷ middle time - 1|`` over a step's other repeats: what the machine does to
    equal steps, and no simulation can foresee. 0 if there are none.
    """
    errors = [
        abs(other.step_us / middle.step_us - 1)
        for middle, own in zip(recording.timed, recording.repeats, strict=True)
        for other in own
        if other is not middle
    ]
    return float(np.mean(errors)) if errors else 0.0


def calibrate(recording: Recording) -> Calibration:
    """Raises :class:`ConfigError` for too few rounds, or micro-batches, to fit."""
    if (num := len(recording.rounds)) < FEWEST_ROUNDS:
        raise ConfigError(f"{num} rounds are too few; record at least {FEWEST_ROUNDS}")
    steps, _ = divided(recording)
    p = parallelism(recording.config)
    samples: list[list[StageSample]] = [[] for _ in range(p.pp_size * p.vpp_size)]
    between: dict[str, list[float]] = {step.schedule: [] for step in steps}
    waited: dict[str, list[float]] = {step.schedule: [] for step in steps}
    besides: list[float] = []
    for step in steps:
        for dp_rank, lengths in enumerate(step.lengths):
            graph, times = recording.graph(step, dp_rank), recording.times_us(step, dp_rank)
            tasks = dataflow(graph.order)
            for stage, own in enumerate(samples):
                passes_us = times[:, stage].tolist()
                own += map(
                    StageSample, lengths, *passes_us, step.before(dp_rank), step.slices(dp_rank)
                )
            stops: list[float] = []
            at = [0] * graph.pp_size
            for task in tasks:
                intervals = step.intervals[recording.process(task.rank, dp_rank)]
                _, start, stop, _ = intervals[at[task.rank]]
                before = intervals[at[task.rank] - 1][2] if at[task.rank] else -math.inf
                at[task.rank] += 1
                stops.append(stop)
                arrives = -math.inf
                if task.source >= 0 and tasks[task.source].rank != task.rank:
                    arrives = stops[task.source]
                if arrives > before:
                    waited[step.schedule].append(max(start - arrives, 0.0))
                elif before > -math.inf:
                    between[step.schedule].append(max(start - before, 0.0))
        besides.append(step.step_us - step.span_us)
    fits = [fit_stage(own) for own in samples]
    calibration = Calibration(
        StageCosts(tuple(fits)),
        np.array([fit.slice_us for fit in fits]).T,
        float(np.mean([fit.mean_error for fit in fits])),
        {name: Handover.of(between[name], waited[name]) for name in between},
        float(np.median(besides)),
        slowdown=1.0,
    )
    spans = np.array([step.span_us for step in steps])
    simulated = np.array([_pipeline_us(recording, calibration, step) for step in steps])
    return replace(calibration, slowdown=float(np.median(spans / simulated)))


def simulate(recording: Recording, calibration: Calibration, step: RecordedStep) -> float:
    """µs of a whole step, from its lengths, prefixes and chains alone."""
    return calibration.besides_us + _pipeline_us(recording, calibration, step)


def _pipeline_us(recording: Recording, calibration: Calibration, step: RecordedStep) -> float:
    times_us = _fitted_us(calibration, step)
    return calibration.slowdown * _replayed_us(recording, calibration, step, times_us)


def _fitted_us(calibration: Calibration, step: RecordedStep) -> list[Floats]:
    """``[dp_size]`` times ``[2, S, N]``: of all forwards and backwards, by the fitted cost."""
    return [
        calibration.stages.times_us(
            lengths, None, UnitTable.starting([before[0] for before in step.before(dp_rank)])
        )
        + calibration.slice_us[:, :, None] * np.array(step.slices(dp_rank))
        for dp_rank, lengths in enumerate(step.lengths)
    ]


def _replayed_us(
    recording: Recording, calibration: Calibration, step: RecordedStep, times_us: Sequence[Floats]
) -> float:
    """Replays the pipelines of all data-parallel ranks; the slowest one counts."""
    cores, handover = recording.cores, calibration.handovers[step.schedule]
    spans_us = []
    for dp_rank, own_us in enumerate(times_us):
        graph = recording.graph(step, dp_rank)
        gaps = np.full(graph.num_micro_batches, handover.p2p_us)
        between_us = own_us + handover.between_us
        if cores is None:
            spans_us.append(float(graph.step_us(between_us, gaps)))
        else:
            spans_us.append(float(replay_shared(graph, between_us, gaps, cores).stop_us.max()))
    return max(spans_us)


@dataclass(frozen=True)
class Row:
    """One packing in one layout. Errors are means of ``|simulated ÷ measured - 1|``."""

    layout: str
    packing: str
    num_steps: int
    """Judged ones."""
    step_time_mape: float
    step_time_bias: float
    """Mean of ``simulated ÷ measured - 1``: above 0, simulated steps are too long."""
    replay_error: float
    """As ``step_time_mape``, but of the pipeline alone with the step's own measured times: what is
    the schedule's and not the cost's."""
    operation_mape: float
    """The error of single forwards and backwards, by the fitted costs."""
    memory_mape: float | None
    """The error of the peak of activations, over processes and steps; None if bytes were not
    counted."""
    simulated_tokens_per_s: float
    measured_tokens_per_s: float
    simulated_work_per_s: float
    """Predicted seconds of computation, over all ranks, that are done in a second: how many ranks
    compute in the mean. Tokens do not compare packings, because a token is less work where
    documents are cut."""
    measured_work_per_s: float
    """The same work by the measured time."""
    measured_work_error: float
    """Standard error of that over the steps, relative."""


def judge(layout: str, recording: Recording, calibration: Calibration) -> list[Row]:
    """A row for each packing, from the steps that were not calibrated with."""
    rows = []
    config = recording.config
    padded = padded_vocab_size(config, recording.vocab_size)
    run = run_of(config, padded, recording.dp_size)
    model, num_micro_batches = run.memory, run.num_micro_batches
    for packing in recording.packings:
        steps = [step for step in divided(recording)[1] if step.packing == packing]
        simulated = np.array([simulate(recording, calibration, step) for step in steps])
        measured = np.array([step.step_us for step in steps])
        operations, replays, works_us = [], [], []
        for step in steps:
            fitted = _fitted_us(calibration, step)
            found = [recording.times_us(step, dp_rank) for dp_rank in range(recording.dp_size)]
            for predicted_us, found_us in zip(fitted, found, strict=True):
                operations.append(float(np.mean(np.abs(predicted_us / found_us - 1))))
            replayed = _replayed_us(recording, calibration, step, found)
            replays.append(abs(replayed / step.span_us - 1))
            whole_us = sum(float(times_us.sum()) for times_us in fitted)
            works_us.append(whole_us - _more_us(calibration, step, num_micro_batches))
        tokens = sum(step.num_tokens for step in steps)
        work_us = np.array(works_us)
        off = work_us / work_us.sum() - measured / measured.sum()
        memory = [
            abs(predicted / counted - 1)
            for step in recording.counted
            if step.packing == packing
            for predicted, counted in _memory(recording, model, step)
        ]
        rows.append(
            Row(
                layout,
                packing,
                len(steps),
                float(np.mean(np.abs(simulated / measured - 1))),
                float(np.mean(simulated / measured - 1)),
                float(np.mean(replays)),
                float(np.mean(operations)),
                float(np.mean(memory)) if memory else None,
                tokens / float(simulated.sum()) * 1e6,
                tokens / float(measured.sum()) * 1e6,
                float(work_us.sum() / simulated.sum()),
                float(work_us.sum() / measured.sum()),
                float(np.sqrt(np.square(off).sum() * len(off) / (len(off) - 1))),
            )
        )
    return rows


def _more_us(calibration: Calibration, step: RecordedStep, num_micro_batches: int) -> float:
    """What more micro-batches than N take besides documents, and slices more than those: no work.

    So the work of a document is the same in slices as whole.
    """
    if not step.chains:
        return 0.0
    units = sum(map(len, step.lengths)) - num_micro_batches
    more = sum(keys > 0 for rank in step.prefixes for unit in rank for keys in unit)
    slices = sum(sum(step.slices(dp_rank)) for dp_rank in range(len(step.lengths)))
    once_us = each_us = 0.0
    for stage in calibration.stages.stages:
        empty_us = stage.work([]).total_us
        once_us += empty_us
        each_us += stage.work([0]).total_us - empty_us
    return units * once_us + more * each_us + slices * float(calibration.slice_us.sum())


def _memory(
    recording: Recording, model: MemoryModel, step: RecordedStep
) -> Iterable[tuple[float, int]]:
    """Predicted and measured peaks of activations of each process."""
    assert step.activation_bytes is not None
    for dp_rank, lengths in enumerate(step.lengths):
        units = step.units(dp_rank)
        table = UnitTable.of(units or [Unit(sum(own)) for own in lengths])
        uses = model.program_bytes if units else model.activation_bytes
        for pp_rank, actions in enumerate(recording.graph(step, dp_rank).order):
            peak = max(uses(pp_rank, actions, table).peak)
            first = recording.process(pp_rank, dp_rank)
            for process in range(first, first + recording.config.parallel.context_parallel_size):
                yield peak, step.activation_bytes[process]


@dataclass(frozen=True)
class Pair:
    """Two packings, the one that does more work a second by simulation first."""

    packings: tuple[str, str]
    simulated_ratio: float
    """The first's work a second over the second's; 1 or more."""
    measured_ratio: float
    error: float
    """Standard error of the measured ratio."""

    @property
    def is_apart(self) -> bool:
        """Whether the measurement tells which of the two is faster: by two standard errors."""
        return abs(self.measured_ratio - 1) > 2 * self.error

    @property
    def is_contradicted(self) -> bool:
        return self.is_apart and self.measured_ratio < 1


def pairs(rows: Sequence[Row]) -> list[Pair]:
    ranked = sorted(rows, key=lambda row: -row.simulated_work_per_s)
    return [
        Pair(
            (a.packing, b.packing),
            a.simulated_work_per_s / b.simulated_work_per_s,
            a.measured_work_per_s / b.measured_work_per_s,
            math.hypot(a.measured_work_error, b.measured_work_error),
        )
        for a, b in combinations(ranked, 2)
    ]


def summarize(recordings: Mapping[str, Recording]) -> dict[str, Any]:
    """All figures, JSON-able: totals, a row for each packing and layout, and rankings."""
    rows: list[dict[str, Any]] = []
    layouts: dict[str, Any] = {}
    for layout, recording in recordings.items():
        calibration = calibrate(recording)
        own = judge(layout, recording, calibration)
        rows += map(asdict, own)
        compared = pairs(own)
        p = parallelism(recording.config)
        layouts[layout] = {
            "pp": p.pp_size,
            "vpp": p.vpp_size,
            "cp": p.cp_size,
            "clock": "wall" if recording.cores is None else "cpu, cores shared",
            "calibration_steps": len(divided(recording)[0]),
            "fit_error": calibration.fit_error,
            "slice_us": float(calibration.slice_us.sum()),
            "besides_us": calibration.besides_us,
            "slowdown": calibration.slowdown,
            "handovers": {name: own._asdict() for name, own in calibration.handovers.items()},
            "repeat_error": repeat_error(recording),
            "pairs": [{**asdict(pair), "packings": list(pair.packings)} for pair in compared],
            "pairs_apart": sum(pair.is_apart for pair in compared),
            "ranking_agrees": not any(pair.is_contradicted for pair in compared),
        }
    num_steps = sum(row["num_steps"] for row in rows)
    memory = [row["memory_mape"] for row in rows if row["memory_mape"] is not None]
    return {
        "step_time_mape": sum(row["step_time_mape"] * row["num_steps"] for row in rows) / num_steps,
        "memory_mape": sum(memory) / len(memory) if memory else None,
        "ranking_agrees": all(layout["ranking_agrees"] for layout in layouts.values()),
        "rows": rows,
        "layouts": layouts,
    }
