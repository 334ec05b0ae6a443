"""One trial: steps of documents with a packing on a run, planned as training plans them, simulated.

Every command that advises, the dry run and ``--wlb-packing auto`` take their figures from here, so
all say the same of one run. Each packing sees the same documents in the same order. All times,
bytes and rates are *simulated*; only what planning itself takes is measured.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice, pairwise
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from megatron_wlb.cost.memory import GIB
from megatron_wlb.data.documents import LongDocuments
from megatron_wlb.errors import ConfigError, PlanError
from megatron_wlb.plan import Document, StepPlan
from megatron_wlb.plan.sharding.select import Mode, Prediction
from megatron_wlb.plan.sharding.shard import Kind
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.metrics import Meter, PackingMetrics
from megatron_wlb.planning.planner import Stream
from megatron_wlb.planning.run import Documents, Run, Workload
from megatron_wlb.planning.slicing.cut import Slicer
from megatron_wlb.reading import whole_number
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.simulator.step_timeline import StepTimeline

WARM_UP_STEPS = 20
"""Steps that do not count: queues and pools fill."""
STEPS = 40
"""Steps that count, if nothing else is asked for."""
SEED = 1234
"""Seed of the documents' order, as Megatron's ``--seed`` has it."""
EXAMPLE_STEPS = 6
"""Steps whose micro-batches are kept, to be drawn."""
PARTS = 4
"""Number of parts in a row that steps are divided into, to see how a gain varies."""
Sharding: TypeAlias = Mode | Kind


class _Reader:
    """Reads a stream that others read too, from its start; ``drawn`` has all steps so far."""

    def __init__(self, stream: Stream, drawn: list[list[Document]]) -> None:
        self.step, self._stream, self._drawn = 0, stream, drawn

    @property
    def exhausted(self) -> bool:
        return self.step == len(self._drawn) and self._stream.exhausted

    def next_step(self) -> list[Document]:
        if self.step == len(self._drawn):
            self._drawn.append(self._stream.next_step())
        self.step += 1
        return [*self._drawn[self.step - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]


class _Drawn:
    """Documents of a source, drawn once for all that is tried on them."""

    def __init__(self, source: Documents) -> None:
        self.source, self.longest = source, cache(source.longest)
        self._streams: dict[object, tuple[Stream, list[list[Document]]]] = {}

    def stream(self, num_steps: int, **options: Any) -> Stream:
        key = num_steps, *sorted(options.items())
        if key not in self._streams:
            self._streams[key] = self.source.stream(num_steps, **options), []
        return _Reader(*self._streams[key])


@dataclass(frozen=True)
class Steps:
    """Which steps are tried: the same for all that is compared."""

    source: Documents
    num: int = STEPS
    """Steps that count, of each seed."""
    warm_up: int = WARM_UP_STEPS
    seeds: tuple[int, ...] = (SEED,)
    long_documents: LongDocuments = "split"
    tell: Callable[[], object] = lambda: None
    """Called after each step."""
    length_multiple: int | None = None
    """What micro-batches are padded to a multiple of, if not what the layout asks for."""
    drawn: _Drawn | None = field(default=None, compare=False, repr=False)
    """The documents, which all trials of these steps share."""

    def __post_init__(self) -> None:
        if self.drawn is None or self.drawn.source is not self.source:
            object.__setattr__(self, "drawn", _Drawn(self.source))
        if self.num < 1 or self.warm_up < 0 or not self.seeds:
            raise ConfigError(
                f"{self.num} steps after {self.warm_up}, {len(self.seeds)} seeds; give at least "
                "one of each"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """What is tried: another process draws the documents itself, and tells nobody."""
        given = self.source, self.num, self.warm_up, self.seeds, self.long_documents
        return partial(type(self), length_multiple=self.length_multiple), given

    def __len__(self) -> int:
        """Steps that a trial plans."""
        return len(self.seeds) * (self.warm_up + self.num)

    def workloads(self, run: Run) -> list[Workload]:
        """What is planned from, by seed."""
        multiple = self.length_multiple or run.length_multiple
        assert self.drawn is not None
        made = (
            run.workload(self.drawn, seed=seed, long_documents=self.long_documents)
            for seed in self.seeds
        )
        return [replace(one, length_multiple=multiple) for one in made]

    def check(self, run: Run, settings: Sequence[PackingSettings]) -> None:
        """Raises :class:`ConfigError` for settings that cannot work, before any step is planned."""
        workload = self.workloads(run)[0]
        run.check_reach(max(map(workload.longest_segment, settings), default=None))
        workload.check(settings)


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
    """How a packing and a sharding do on a run."""

    run: Run
    setting: PackingSettings
    sharding: Sharding
    metrics: PackingMetrics
    """Measures of the packing, by the modelled times of micro-batches before sharding."""
    step_us: float
    """Mean."""
    tokens_per_s: float
    """Tokens a second of all devices; padding is not counted."""
    mfu: float
    """Model FLOPs ÷ (time × peak of all devices)."""
    mfu_by_seed: tuple[float, ...]
    mfu_by_part: tuple[float, ...]
    """The MFU of each of :data:`PARTS` parts of the steps."""
    bubble_share: float
    """Share of the ranks' time in the pipeline that they wait."""
    peak_bytes: float
    """The most that any rank held in any step."""
    out_of_memory: str
    """Where it first did not fit, or nothing."""
    expected_bytes: float
    """The most that a step of slices is expected to need, if that is more."""
    longest_tokens: int
    """Longest micro-batch that ran, padded."""
    pp_imbalance: float
    """The slowest micro-batch of a pipeline over its mean; mean over steps and replicas."""
    cp_imbalance: float
    """Attention of the slowest context-parallel rank over the mean, weighted by its time."""
    dp_imbalance: float
    """Work of the slowest replica over the mean; mean over steps."""
    expert_wait_share: float
    """The part of ``bubble_share`` in which ranks wait, at exchanges with experts, for a replica
    that has more work in the same place."""
    sharding_shares: dict[str, float]
    """For each kind of sharding, the share of micro-batches that got it. Micro-batches that several
    replicas run together do not count."""
    planning_ms: float
    """Measured CPU time of planning a step."""
    units: int | None
    """Micro-batches that slices cut a data-parallel rank's step into."""
    example: Example
    flags: tuple[str, ...]
    """What the training command needs to pack like this."""

    @property
    def title(self) -> str:
        return self.setting.title

    @property
    def delay_steps(self) -> float:
        return self.metrics.delay_mean_steps

    @property
    def imbalance(self) -> float:
        """Time-weighted."""
        return self.metrics.imbalance_weighted

    def speedup(self, base: Outcome) -> float:
        """The ratio of work a second, which is that of MFUs.

        Tokens a second would also vary with which long documents wait at the end, and where
        `original` cuts documents, its tokens are less work.
        """
        return self.mfu / base.mfu

    def speedup_by_seed(self, base: Outcome) -> tuple[float, float]:
        """Lowest and highest."""
        pairs = zip(self.mfu_by_seed, base.mfu_by_seed, strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        return min(ratios), max(ratios)


def trial(
    run: Run, setting: PackingSettings, steps: Steps, sharding: Sharding = "adaptive"
) -> Outcome:
    """Plans and simulates steps of one packing.

    Raises :class:`ConfigError` for settings that cannot work, and :class:`PackingError` for
    documents that a packing cannot place.
    """
    (found,) = trials(run, setting, steps, [sharding])
    return found


def trials(
    run: Run, setting: PackingSettings, steps: Steps, shardings: Sequence[Sharding]
) -> list[Outcome]:
    """Does what :func:`trial` does with several shardings of the same micro-batches."""
    steps.check(run, [setting])
    costs = run.planning_costs(run.measured is None) if setting.simulated else None
    memory, meter = _Memory(run), Meter()
    shardings = shardings if run.parallelism.cp_size > 1 else ["per-sequence"]
    tallies = [_Tally(run, sharding, memory.simulator) for sharding in shardings]
    planning_s, slicing = 0.0, None
    workloads = steps.workloads(run)
    for workload in workloads:
        planner = workload.planner(setting, steps.warm_up + steps.num, costs=costs)
        for tally in tallies:
            tally.steps.append([])
        for _ in range(steps.warm_up):
            planner.skip()
            steps.tell()
        for _ in range(steps.num):
            start_s = time.process_time()
            plan = planner.next_plan()
            planning_s += time.process_time() - start_s
            assert plan is not None
            meter.add(plan)
            memory.add(plan)
            flops = run.flops([d.length for d in plan.documents])
            for tally in tallies:
                tally.add(plan, flops)
            steps.tell()
        slicing = planner.slicing
        if isinstance(slicing, Slicer):
            memory.expect(slicing)
        elif run.memory_gib is not None and not memory.out_of_memory:
            reads = "max_tokens" in setting.kind.reads
            wanted = setting.max_tokens if reads else run.micro_batch_tokens
            if not run.fits_windows or run.max_tokens() < wanted:
                memory.out_of_memory = (
                    f"micro-batches of {wanted} tokens do not fit {run.memory_gib:g} GiB"
                )
    about = {
        "setting": setting,
        "metrics": meter.metrics(planner.packer.waiting),
        "peak_bytes": memory.peak_bytes,
        "out_of_memory": memory.out_of_memory,
        "expected_bytes": max(memory.peak_bytes, memory.expected_bytes),
        "longest_tokens": memory.longest_tokens,
        "planning_ms": planning_s / (len(steps.seeds) * steps.num) * 1e3,
        "units": (slicing.num_units or 1) if isinstance(slicing, Slicer) else None,
        "flags": workloads[0].flags(setting),
    }
    return [tally.outcome(about) for tally in tallies]


def packed(
    workload: Workload, setting: PackingSettings, num: int, warm_up: int = WARM_UP_STEPS
) -> PackingMetrics:
    """What a packing makes of documents over ``num`` steps after ``warm_up``: planned as training
    plans them, but not simulated.

    Raises what :meth:`Workload.check` does, and what packing does.
    """
    num = whole_number("num_steps", num, 1)
    workload.check([setting])
    planner, meter = workload.planner(setting, warm_up + num), Meter()
    for _ in range(warm_up):
        planner.skip()
    for plan in planner.plans(num):
        meter.add(plan)
    return meter.metrics(planner.packer.waiting)


def by_part(work: Sequence[float], times_us: Sequence[float]) -> tuple[float, ...]:
    """Work ÷ time of each of :data:`PARTS` parts of consecutive steps, or of each step."""
    num = min(PARTS, len(work))
    ends = [part * len(work) // num for part in range(num + 1)]
    return tuple(sum(work[a:b]) / sum(times_us[a:b]) for a, b in pairwise(ends))


class _Memory:
    """The peaks of a setting's steps, which no sharding changes."""

    def __init__(self, run: Run) -> None:
        self.peak_bytes, self.out_of_memory, self.longest_tokens = 0.0, "", 0
        self.expected_bytes = 0.0
        self.simulator = Simulator(run.costs, run.parallelism, memory=run.memory)
        self._limit_bytes = run.limit_gib * GIB

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
            self.out_of_memory = str(error)
        self.expected_bytes = max(self.expected_bytes, slicer.peak_bytes)


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

    run: Run
    sharding: Sharding
    simulator: Simulator
    steps: list[list[_Step]] = field(default_factory=list)
    """By seed."""

    def __post_init__(self) -> None:
        self._choose = self.run.choose_each(self.sharding)
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

    def outcome(self, about: dict[str, Any]) -> Outcome:
        """All steps together; ``about`` is what no sharding changes."""
        steps = [step for own in self.steps for step in own]
        total, n = _Step(*map(sum, zip(*steps, strict=True))), len(steps)
        peak = self.run.num_devices * self.run.hardware.peak_tflops * 1e6  # FLOPs a µs
        parts = by_part([s.flops for s in steps], [s.us for s in steps])
        return Outcome(
            run=self.run,
            sharding=self.sharding,
            step_us=total.us / n,
            tokens_per_s=total.tokens / total.us * 1e6,
            mfu=total.flops / (peak * total.us),
            mfu_by_seed=tuple(
                sum(s.flops for s in own) / (peak * sum(s.us for s in own)) for own in self.steps
            ),
            mfu_by_part=tuple(rate / peak for rate in parts),
            bubble_share=total.bubble_us / total.pipeline_us,
            pp_imbalance=total.pp_imbalance / n,
            cp_imbalance=self._slowest_us / self._mean_us if self._mean_us else 1.0,
            dp_imbalance=total.dp_imbalance / n,
            expert_wait_share=total.expert_wait_us / total.pipeline_us,
            sharding_shares={
                kind: count / self._chosen.total() for kind, count in sorted(self._chosen.items())
            },
            example=self._example(),
            **about,
        )

    def _step(self, plan: StepPlan, *, with_memory: bool) -> tuple[StepTimeline, list[Prediction]]:
        every = [m for rank in plan.micro_batches for m in rank]
        rows = [m.lengths for m in every]
        chosen = self._choose(rows)
        scales: Iterator[float] = map(self.run.attention_scale, rows, chosen)
        by_rank = [list(islice(scales, len(rank))) for rank in plan.micro_batches]
        # What several replicas run together is divided evenly: nothing was chosen for it.
        own = [one for m, one in zip(every, chosen, strict=True) if not m.replicas]
        return self.simulator.step(plan, by_rank, with_memory=with_memory), own

    def _example(self) -> Example:
        times_us = [step.us for step in self.steps[0]]
        nearest = min(range(len(times_us)), key=lambda n: abs(times_us[n] - fmean(times_us)))
        plan = self._plans[nearest]
        return Example(plan, self._step(plan, with_memory=True)[0], tuple(self._micro_batch_us))
