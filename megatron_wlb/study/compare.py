"""Packings and context-parallel shardings side by side: many steps of each, simulated.

Every packing sees the same documents in the same order, and every sharding of a packing the same
micro-batches. All times, bytes and rates are *simulated*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from megatron_wlb.cost.memory import GIB
from megatron_wlb.data.documents import LongDocuments
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError, PlanError
from megatron_wlb.plan import StepPlan
from megatron_wlb.plan.sharding.select import Mode, Prediction
from megatron_wlb.plan.sharding.shard import Kind
from megatron_wlb.planning.packing import Meter, PackingMetrics, PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.planning.slicing.cut import Slicer
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.simulator.step_timeline import StepTimeline
from megatron_wlb.study.advice import Option, by_part

Rows: TypeAlias = Sequence[Sequence[int]]
Chooser: TypeAlias = Callable[[Rows], list[Prediction]]
latency_us = attrgetter("latency_us")

WARM_UP_STEPS = 20
"""Steps that do not count: queues and pools fill."""
EXAMPLE_STEPS = 6
"""Steps of which each micro-batch is kept, to be drawn."""
ROW = (
    "title", "sharding", "tokens_per_s", "mfu", "bubble_share", "packing_imbalance", "pp_imbalance",
    "cp_imbalance", "dp_imbalance", "expert_wait_share", "delay_steps", "step_tokens",
    "sharding_shares",
)  # fmt: skip
"""What a row of JSON has under the name that :class:`Outcome` gives it."""


@dataclass(frozen=True)
class Example:
    """One simulated step, to look at."""

    plan: StepPlan
    timeline: StepTimeline
    """Its timeline, with memory."""
    micro_batch_us: tuple[tuple[float, ...], ...]
    """Times in the first counted steps: all data-parallel ranks' micro-batches in running order."""


@dataclass(frozen=True)
class Outcome:
    """How a packing and a sharding do in a scenario."""

    setting: PackingSettings
    sharding: Mode | Kind
    num_steps: int
    step_us: float
    """Mean."""
    tokens_per_s: float
    """Tokens a second of all devices; padding is not counted."""
    mfu: float
    """Model FLOPs ÷ (time × peak of all devices)."""
    mfu_by_seed: tuple[float, ...]
    mfu_by_part: tuple[float, ...]
    """The MFU of each part of the steps."""
    bubble_share: float
    """Share of the ranks' time in the pipeline that they wait."""
    peak_bytes: float
    """The most that any rank held in any step."""
    out_of_memory: str
    """Where it first did not fit, or nothing."""
    longest_tokens: int
    """Longest micro-batch that ran, padded."""
    packing_imbalance: float
    """``max · N / Σ`` of the modelled micro-batch times before sharding, mean over steps."""
    pp_imbalance: float
    """The slowest micro-batch of a pipeline over its mean; mean over steps and replicas."""
    cp_imbalance: float
    """Attention of the slowest context-parallel rank over the mean, weighted by its time."""
    dp_imbalance: float
    """Work of the slowest replica over the mean; mean over steps."""
    expert_wait_share: float
    """The part of ``bubble_share`` in which ranks wait, at exchanges with experts, for a replica
    that has more work in the same place."""
    delay_steps: float
    step_tokens: float
    sharding_shares: dict[str, float]
    """For each kind of sharding, the share of micro-batches that got it. Micro-batches that several
    replicas run together do not count."""
    example: Example
    flags: tuple[str, ...]
    """What the training command needs to pack like this."""

    @property
    def title(self) -> str:
        return self.setting.title

    @property
    def option(self) -> Option[Outcome]:
        return Option(
            self,
            self.mfu,
            self.mfu_by_part,
            self.delay_steps,
            self.packing_imbalance,
            self.longest_tokens,
            self.setting.kind.slices,
        )

    def speedup(self, original: Outcome) -> float:
        """The ratio of work a second, which is that of MFUs.

        Tokens a second would also vary with which long documents wait at the end, and where
        `original` cuts documents, its tokens are less work.
        """
        return self.mfu / original.mfu

    def speedup_by_seed(self, original: Outcome) -> tuple[float, float]:
        pairs = zip(self.mfu_by_seed, original.mfu_by_seed, strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        return min(ratios), max(ratios)

    def row(self, original: Outcome) -> dict[str, Any]:
        """JSON-able; speed-ups are over ``original``."""
        lowest, highest = self.speedup_by_seed(original)
        return {name: getattr(self, name) for name in ROW} | {
            "packing": self.setting.name,
            "shaped": self.setting.shaped,
            "micro_batches": self.setting.micro_batches,
            "max_tokens": self.setting.max_tokens,
            "steps": self.num_steps,
            "step_ms": self.step_us / 1e3,
            "speedup": self.speedup(original),
            "speedup_lowest": lowest,
            "speedup_highest": highest,
            "tokens_speedup": self.tokens_per_s / original.tokens_per_s,
            "peak_gib": self.peak_bytes / GIB,
            "out_of_memory": self.out_of_memory or None,
            "longest_micro_batch_tokens": self.longest_tokens,
            "flags": list(self.flags),
        }


def compare(
    scenario: Run,
    source: LengthSource,
    settings: Sequence[PackingSettings],
    shardings: Sequence[Mode | Kind],
    *,
    steps: int,
    seeds: Sequence[int],
    warm_up: int = WARM_UP_STEPS,
    long_documents: LongDocuments = "split",
    on_step: Callable[[], object] = lambda: None,
) -> list[Outcome]:
    """Simulates each packing with each sharding; ``on_step`` is called after each planned step.

    Raises:
        ConfigError: settings that cannot work; found before any step is simulated.
        PackingError: documents that a packing cannot place.
    """
    if steps < 1 or warm_up < 0 or not seeds:
        raise ConfigError(
            f"{steps} steps after {warm_up}, {len(seeds)} seeds; give at least one of each"
        )
    workloads = [
        scenario.workload(source, seed=seed, long_documents=long_documents) for seed in seeds
    ]
    scenario.check_reach(max(map(workloads[0].longest_segment, settings), default=None))
    workloads[0].check(settings)
    outcomes = []
    choosers = _choosers(scenario, shardings)
    for setting in settings:
        memory = _Memory(scenario)
        flags = workloads[0].flags(setting)
        tallies = [
            _Tally(scenario, setting, mode, choosers[mode], memory, flags) for mode in shardings
        ]
        for workload in workloads:
            for tally in tallies:
                tally.steps.append([])
            meter = Meter()
            planner = workload.planner(setting, warm_up + steps, costs=scenario.costs)
            for _ in range(warm_up):
                planner.skip()
                on_step()
            for plan in planner.plans(steps):
                meter.add(plan)
                memory.add(plan)
                flops = scenario.flops([d.length for d in plan.documents])
                for tally in tallies:
                    tally.add(plan, flops)
                on_step()
            if isinstance(planner.slicing, Slicer):
                memory.expect(planner.slicing)
            for tally in tallies:
                tally.metrics.append(meter.metrics(planner.packer.waiting))
        outcomes += [tally.outcome() for tally in tallies]
    return outcomes


def _choosers(scenario: Run, shardings: Sequence[Mode | Kind]) -> dict[Mode | Kind, Chooser]:
    """What chooses for each sharding; what adaptive predicts, serves per-sequence as well."""
    choosers: dict[Mode | Kind, Chooser] = {mode: scenario.choose_each(mode) for mode in shardings}
    if {"per-sequence", "adaptive"} <= set(shardings):
        selector = scenario.selector("adaptive")
        last: list[tuple[Rows, list[list[Prediction]]]] = [([], [])]

        def predictions(rows: Rows) -> list[list[Prediction]]:
            """Predicts once a step, which both choosers come with."""
            if rows != last[0][0]:
                last[0] = rows, selector.predictions_each(rows)
            return last[0][1]

        choosers["per-sequence"] = lambda rows: [own[0] for own in predictions(rows)]
        choosers["adaptive"] = lambda rows: [min(own, key=latency_us) for own in predictions(rows)]
    return choosers


class _Memory:
    """The peaks of a setting's steps, which no sharding changes."""

    def __init__(self, scenario: Run) -> None:
        self.peak_bytes, self.out_of_memory, self.longest_tokens = 0.0, "", 0
        self.simulator = Simulator(scenario.costs, scenario.parallelism, memory=scenario.memory)
        self._limit_bytes = scenario.limit_gib * GIB

    def add(self, plan: StepPlan) -> None:
        many = len(plan.micro_batches) > 1
        self.longest_tokens = max(self.longest_tokens, *(m.padded_length for m in plan))
        for dp_rank, used in enumerate(self.simulator.plan_memory(plan)):
            self.peak_bytes = max(self.peak_bytes, used.peak_bytes)
            if not self.out_of_memory:
                try:
                    used.check(self._limit_bytes, f"data-parallel rank {dp_rank}" if many else "")
                except PlanError as error:
                    self.out_of_memory = f"step {plan.step}: {error}"

    def expect(self, slicer: Slicer) -> None:
        """Notes where a step could need more than these did, as training does at its start."""
        try:
            slicer.check_room()
        except ConfigError as error:
            self.out_of_memory = self.out_of_memory or str(error)


class _Step(NamedTuple):
    """The figures of a simulated step that are added up."""

    tokens: float
    us: float
    flops: float
    bubble_us: float
    """``pipeline_us`` × the share in which ranks wait."""
    pipeline_us: float
    pp_imbalance: float
    dp_imbalance: float
    expert_wait_us: float
    """``pipeline_us`` × the share that is waited at exchanges with experts."""


@dataclass
class _Tally:
    """Simulates steps of one setting and sharding, and adds them up."""

    scenario: Run
    setting: PackingSettings
    sharding: Mode | Kind
    choose: Chooser
    memory: _Memory
    flags: tuple[str, ...]
    metrics: list[PackingMetrics] = field(default_factory=list)
    """By seed, as are the steps."""
    steps: list[list[_Step]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._slowest_us = self._mean_us = 0.0
        self._chosen: Counter[str] = Counter()
        self._plans: list[StepPlan] = []  # of the first seed, as the next
        self._micro_batch_us: list[tuple[float, ...]] = []

    def add(self, plan: StepPlan, flops: float) -> None:
        """Simulates a step of so many model FLOPs."""
        line, chosen = self._step(plan, with_memory=False)
        self.steps[-1].append(
            _Step(
                *(plan.num_tokens, line.step_us, flops),
                *(line.bubble_share * line.pipeline_us, line.pipeline_us),
                *(line.pp_imbalance, line.dp_imbalance),
                line.expert_wait_share * line.pipeline_us,
            )
        )
        for prediction in chosen:
            self._slowest_us += max(prediction.forward_us)
            self._mean_us += sum(prediction.forward_us) / len(prediction.forward_us)
            self._chosen[prediction.sharding.kind] += 1
        if len(self.steps) == 1:
            self._plans.append(plan)
            if len(self._micro_batch_us) < EXAMPLE_STEPS:
                self._micro_batch_us.append(
                    tuple(us for rank in line.micro_batch_us for us in rank)
                )

    def outcome(self) -> Outcome:
        steps = [step for own in self.steps for step in own]
        total, n = _Step(*map(sum, zip(*steps, strict=True))), len(steps)
        peak = self.scenario.num_devices * self.scenario.hardware.peak_tflops * 1e6  # FLOPs a µs
        return Outcome(
            self.setting,
            self.sharding,
            n,
            total.us / n,
            total.tokens / total.us * 1e6,
            total.flops / (peak * total.us),
            tuple(
                sum(s.flops for s in own) / (peak * sum(s.us for s in own)) for own in self.steps
            ),
            tuple(rate / peak for rate in by_part([s.flops for s in steps], [s.us for s in steps])),
            total.bubble_us / total.pipeline_us,
            self.memory.peak_bytes,
            self.memory.out_of_memory,
            self.memory.longest_tokens,
            fmean(metrics.imbalance_mean for metrics in self.metrics),
            total.pp_imbalance / n,
            self._slowest_us / self._mean_us if self._mean_us else 1.0,
            total.dp_imbalance / n,
            total.expert_wait_us / total.pipeline_us,
            fmean(metrics.delay_mean_steps for metrics in self.metrics),
            total.tokens / n,
            {kind: count / self._chosen.total() for kind, count in sorted(self._chosen.items())},
            self._example(),
            self.flags,
        )

    def _step(self, plan: StepPlan, *, with_memory: bool) -> tuple[StepTimeline, list[Prediction]]:
        every = [m for rank in plan.micro_batches for m in rank]
        rows = [m.lengths for m in every]
        chosen = self.choose(rows)
        scales = map(self.scenario.attention_scale, rows, chosen)
        by_rank = [list(islice(scales, len(rank))) for rank in plan.micro_batches]
        simulator = self.memory.simulator
        # What several replicas run together is divided evenly: nothing was chosen for it.
        own = [one for m, one in zip(every, chosen, strict=True) if not m.replicas]
        return simulator.step(plan, by_rank, with_memory=with_memory), own

    def _example(self) -> Example:
        times_us = [step.us for step in self.steps[0]]
        nearest = min(range(len(times_us)), key=lambda n: abs(times_us[n] - fmean(times_us)))
        plan = self._plans[nearest]
        return Example(plan, self._step(plan, with_memory=True)[0], tuple(self._micro_batch_us))
