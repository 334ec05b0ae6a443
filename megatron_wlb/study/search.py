"""Searches the layout, batch and packing that train a model fastest under a memory limit.

Three passes, each over fewer candidates and each more exact::

    all layouts ──▶ what cannot run is rejected, with its reason   (divisibility, schedule, memory)
                ──▶ one step of even micro-batches each            (coarse)
                ──▶ many steps of real documents of the best       (refined)

Slices need less memory than whole windows, so other layouts are best for them. They have a coarse
pass of their own, of few steps of real documents, also in layouts where no window fits.

Stages have as many layers each. Where that cannot be, they are balanced by time; and the best
layouts are also tried so, where the coarse pass gains by it.

Everything is *simulated* and deterministic: the same arguments give the same ranking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import product
from typing import Literal, TypeAlias, TypeVar

from megatron_wlb.cost import ModelShape, Parallelism, Recompute
from megatron_wlb.cost.hardware import MOST
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.model_file import padded_vocabulary
from megatron_wlb.data.length_source import LengthSource, sample_steps
from megatron_wlb.errors import ConfigError, WLBError
from megatron_wlb.plan.sharding.select import Mode
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.settings import AUTO, SHAPED, kind_in, run_with
from megatron_wlb.planning.run import Devices, Run, title
from megatron_wlb.planning.slicing.cut import Slicer
from megatron_wlb.reading import real_number
from megatron_wlb.simulator.baseline import FULL, Baseline, baseline
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.simulator.trial import Outcome, Steps, planning_costs, trial
from megatron_wlb.study.advice import MAX_DELAY_STEPS, check_max_delay, preference
from megatron_wlb.study.stages import balanced_layers

T = TypeVar("T")
Why: TypeAlias = Literal["topology", "divisibility", "batch and schedule", "memory"]

PASSES = ("memory", "slices", "coarse", "refined", "tuned")
"""What :func:`search` tells of its progress, in order."""
MAX_WINDOWS = (1.25, 1.5, 2.0, 3.0)
"""S_max in windows that are tried on the best layouts, besides the most that fits."""
DEFAULT_WINDOWS = 2.0
"""S_max in windows with which layouts are refined, where it fits."""
MOST_CHUNKS = 8
"""The most VPP that is tried."""
SAMPLE_WINDOWS = 64
"""Windows of documents of which the coarse pass takes the average micro-batch."""
MOST_UNLIKE_CHUNKS = 4
"""The most VPP that is tried where layers do not divide over the pipeline ranks."""
SLICED_STEPS = 2
"""Steps of documents that the coarse pass of slices simulates."""
LEAST_GAIN = 1.002
"""By how much the coarse pass must gain by unlike stages for these to be refined too."""


@dataclass(frozen=True, kw_only=True)
class Space(Devices):
    """What is searched: a model whose vocabulary is not padded, executed with any layout."""

    window: int
    num_micro_batches: tuple[int, ...]
    """N: of a step, over all data-parallel ranks."""
    packings: tuple[str, ...] = ("original", "slim", "wlb", "hold", "hold+shape")
    """As :meth:`PackingSettings.parse` takes them; the last one that is not shaped refines the
    layouts. Where there is one stage ``+shape`` is left off: there is nothing to shape. `slim` is
    tried where there are stages."""
    sharding: Mode = "adaptive"
    """The sharding where CP is above 1."""
    recomputes: tuple[Recompute, ...] = (Recompute(), Recompute("selective"), FULL)
    """Recomputation to try, least first: more only where S_max is below :data:`DEFAULT_WINDOWS`."""
    extrapolate: bool = False
    """Whether to go beyond the end of the hardware's measured attention."""
    fixed: dict[str, int] = field(default_factory=dict)
    """Sizes that are given, such as ``{"tp_size": 8}``."""

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.window < 1 or not self.num_micro_batches:
            raise ConfigError(
                f"{self.num_devices} devices, a window of {self.window} tokens and "
                f"{len(self.num_micro_batches)} numbers of micro-batches; give at least 1 of each"
            )
        real_number("--expert-imbalance", self.execution.expert_imbalance, 1, MOST)
        for packing in self.packings:  # Now, not once layouts have been searched for minutes.
            PackingSettings.parse(packing, self.window, self.window)


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot run."""

    parallelism: Parallelism
    num_micro_batches: int
    recompute: Recompute
    why: Why
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A layout that can run, by the coarse pass."""

    scenario: Run
    max_tokens: int
    """The largest S_max that fits."""
    mfu: float
    """The MFU of even micro-batches of an average mix of documents, or of the first steps in
    slices; only ranks layouts."""
    slices: bool = False
    """Whether it is a layout for slices."""

    @property
    def windows(self) -> float:
        """S_max that layouts are refined with, in windows."""
        return min(DEFAULT_WINDOWS, self.max_tokens / self.scenario.window)


@dataclass(frozen=True)
class Choice:
    """A layout with a packing and an S_max, simulated over many steps."""

    candidate: Candidate
    outcome: Outcome

    @property
    def fits(self) -> bool:
        return not self.outcome.out_of_memory


@dataclass(frozen=True)
class Search:
    """What was found."""

    ranked: tuple[Choice, ...]
    """By :func:`~megatron_wlb.study.advice.preference`, so the fastest first; those above the
    limit of delay come after all others, and those that ran out of memory last."""
    candidates: tuple[Candidate, ...]
    """Every layout that can run, by the coarse pass, fastest first; the first were refined."""
    rejected: tuple[Rejected, ...]
    max_delay: float
    base: Baseline
    """What gains of the best are over: `original` in the same layout."""

    @property
    def best(self) -> Choice:
        return self.ranked[0]

    @cached_property
    def num_simulated(self) -> int:
        """Layouts with their N and recomputation that were simulated with documents."""
        return len({choice.candidate.scenario for choice in self.ranked})

    @cached_property
    def original(self) -> Choice | None:
        """The fastest with `original` packing that fits."""
        return _original(self.ranked)

    def is_beside(self, choice: Choice) -> bool:
        """Whether it has the layout and the batch of the best, so that gains are over ``base``."""
        one, best = choice.candidate.scenario, self.best.candidate.scenario
        return (one.parallelism, one.num_micro_batches) == (
            best.parallelism,
            best.num_micro_batches,
        )

    @cached_property
    def layouts(self) -> list[Choice]:
        """The best of each layout with its N and recomputation."""
        first: dict[Run, Choice] = {}
        for choice in self.ranked:
            first.setdefault(choice.candidate.scenario, choice)
        return [*first.values()]

    @cached_property
    def of_each(self) -> list[Choice]:
        """The best that was simulated with each packing, in whichever layout."""
        first: dict[str, Choice] = {}
        for choice in self.ranked:
            first.setdefault(choice.outcome.title, choice)
        return [*first.values()]

    @cached_property
    def packings(self) -> list[Choice]:
        """The other packings on the best layout, each with its best S_max."""
        first = {self.best.outcome.title: self.best}
        for choice in self.ranked:
            if choice.candidate.scenario == self.best.candidate.scenario:
                first.setdefault(choice.outcome.title, choice)
        return [*first.values()][1:]


def search(
    space: Space,
    steps: Steps,
    *,
    num_refined: int = 8,
    num_tuned: int = 3,
    max_delay: float = MAX_DELAY_STEPS,
    hardware: str = "h100-sxm",
    progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> Search:
    """Searches all layouts and ranks those that can run.

    Args:
        space: what is searched.
        steps: what is simulated of each, and the documents, which are a :class:`.LengthSource`.
        num_refined: of the coarse pass's best layouts, how many are simulated with documents.
        num_tuned: of these, how many are with every packing and S_max.
        max_delay: steps that a token is delayed at most, in the mean, by what is ranked first.
        hardware: the machine's name or file.
        progress: called with the pass's name, and how much of how much is done.

    Raises:
        ConfigError: nothing can run, or nothing that was simulated fits memory; the message says
            why, and what comes nearest.
    """
    check_max_delay(max_delay)

    def told(what: str, items: Sequence[T]) -> Iterator[T]:
        for number, item in enumerate(items, start=1):
            yield item
            progress(what, number, len(items))

    layouts = [*_layouts(space)]
    sample = _sample(steps, space.window)
    tried = [[*_tried(space, layout, sample)] for layout in layouts]
    runs = [one for some in told("memory", tried) for one in _fitting(space, some)]
    cut = [one for some in told("slices", tried) for one in _sliced(space, some, steps)]
    rejected = [one for one in (*runs, *cut) if isinstance(one, Rejected)]
    possible = [one for one in runs if not isinstance(one, Rejected)]
    sliced = [one for one in cut if not isinstance(one, Rejected)]
    if not possible and not sliced:
        raise ConfigError(_nothing(space, rejected))
    candidates = [
        Candidate(scenario, max_tokens, _coarse_mfu(space, scenario, sample))
        for scenario, max_tokens in told("coarse", possible)
    ]
    candidates.sort(key=_coarse_order)
    refining = candidates[:num_refined]
    balanced = [better for one in refining if (better := _balanced(space, one, sample))]
    refining += sorted(balanced, key=_coarse_order)[: -(-num_refined // 2)]
    sliced.sort(key=_coarse_order)
    refining += sliced[:num_refined]
    candidates = sorted([*candidates, *balanced, *sliced], key=_coarse_order)

    def simulate(candidate: Candidate, variants: Sequence[PackingSettings]) -> list[Choice]:
        return [
            Choice(candidate, trial(candidate.scenario, variant, steps, space.sharding))
            for variant in variants
        ]

    refined: list[Choice] = []
    for candidate in told("refined", refining):
        packings = _of_layout(space, candidate.scenario.parallelism, slices=candidate.slices)
        plain = [name for name in packings if SHAPED not in name]
        for packing in (plain or packings)[-1:]:
            refined += simulate(candidate, [_variant(packing, candidate, candidate.windows)])
    refined = _ranked(refined, max_delay)
    best = refined[0].candidate
    whole = [choice for choice in refined if not choice.candidate.slices]
    tuned = [choice.candidate for choice in _of_unlike_layouts(whole)[:num_tuned]]
    # And what keeps documents whole, in the layout that is best for slices.
    tuned += [one for one in candidates if best.slices and one.scenario == best.scenario]
    known = {(choice.candidate, choice.outcome.setting) for choice in refined}
    for candidate in told("tuned", [one for one in dict.fromkeys(tuned) if not one.slices]):
        variants = _variants(space, candidate)
        refined += simulate(candidate, [v for v in variants if not _is_known(known, candidate, v)])
    ranked = _ranked(refined, max_delay)
    if not ranked[0].fits:
        raise ConfigError(_none_fits(space, ranked))
    run = ranked[0].candidate.scenario
    whole_run = replace(run, memory_gib=space.limit_gib(run.parallelism))
    base = baseline(whole_run, steps, space.sharding, hardware)
    return Search(tuple(ranked), tuple(candidates), tuple(rejected), max_delay, base)


def _is_known(
    known: set[tuple[Candidate, PackingSettings]], candidate: Candidate, variant: PackingSettings
) -> bool:
    """Whether it was simulated there, or the same with a few tokens of S_max more or less."""
    return any(
        one == candidate
        and replace(variant, max_tokens=setting.max_tokens) == setting
        and abs(variant.max_tokens / setting.max_tokens - 1) < 0.05
        for one, setting in known
    )


def _ranked(choices: Sequence[Choice], max_delay: float) -> list[Choice]:
    """Ranks choices: what fits first, then what keeps the limit, then the fastest."""
    base = (_original(choices) or max(choices, key=lambda c: c.outcome.mfu)).outcome

    def order(choice: Choice) -> tuple[object, ...]:
        outcome = choice.outcome
        return (
            not choice.fits,
            outcome.delay_steps > max_delay,
            preference(outcome, base),
            not outcome.setting.is_plain,
            outcome.setting.max_tokens,
            _order(choice.candidate.scenario),
            outcome.title,
        )

    return sorted(choices, key=order)


def _coarse_order(candidate: Candidate) -> tuple[object, ...]:
    return -candidate.mfu, _order(candidate.scenario)


def _of_unlike_layouts(choices: Sequence[Choice]) -> list[Choice]:
    """The first of each layout, whichever layers its stages have."""
    first: dict[object, Choice] = {}
    for choice in choices:
        run = choice.candidate.scenario
        layout = replace(run.parallelism, stage_layers=None)
        first.setdefault((layout, run.num_micro_batches, run.recompute), choice)
    return [*first.values()]


def _original(choices: Sequence[Choice]) -> Choice | None:
    plain = [c for c in choices if c.outcome.setting.is_plain and c.fits]
    return max(plain, key=lambda choice: choice.outcome.mfu, default=None)


def _order(scenario: Run) -> tuple[int, ...]:
    """Settles ties: the simplest layout first."""
    p = scenario.parallelism
    sizes = p.pp_size, p.vpp_size, p.cp_size, p.tp_size, p.ep_size, scenario.num_micro_batches
    return *sizes, p.stage_layers is not None


def _variants(space: Space, candidate: Candidate) -> list[PackingSettings]:
    """Every packing; those that S_max matters to, with each that fits."""
    fits = candidate.max_tokens / candidate.scenario.window
    windows = [w for w in MAX_WINDOWS if w <= fits]
    if fits > 1.05 * max(windows, default=0.0) and fits < MAX_WINDOWS[-1]:
        windows.append(fits)
    variants = []
    for packing in _of_layout(space, candidate.scenario.parallelism, slices=candidate.slices):
        for number in [candidate.windows] if kind_in(packing).windows else windows:
            variants.append(_variant(packing, candidate, number))
    return list(dict.fromkeys(variants))


def _of_layout(space: Space, p: Parallelism, *, slices: bool) -> list[str]:
    """The packings that can run there: those of slices, or those that keep documents whole."""
    names = [name for name in space.packings if kind_in(name).slices == slices]
    return run_with(p.pp_size, names)


def _variant(packing: str, candidate: Candidate, windows: float) -> PackingSettings:
    window = candidate.scenario.window
    if candidate.scenario.parallelism.pp_size == 1:
        packing = packing.replace(SHAPED, "").replace(AUTO, "")
    return PackingSettings.parse(packing, window, min(int(windows * window), candidate.max_tokens))


def _layouts(space: Space) -> Iterator[Parallelism]:
    """All ways to take the devices' number apart, with every VPP up to :data:`MOST_CHUNKS`."""
    divisors = [n for n in range(1, space.num_devices + 1) if space.num_devices % n == 0]
    for tp_size, cp_size, pp_size in product(divisors, repeat=3):
        inner = tp_size * cp_size * pp_size
        if space.num_devices % inner:
            continue
        for vpp_size in range(1, MOST_CHUNKS + 1 if pp_size > 1 else 2):
            sizes = tp_size, cp_size, pp_size, vpp_size, space.num_devices // inner
            plain = Parallelism(*sizes, sequence_parallel=tp_size > 1)
            for layout in _with_experts(space.shape, plain):
                if space.fixed.items() <= layout.sizes.items():
                    yield layout


def _with_experts(shape: ModelShape, layout: Parallelism) -> Iterator[Parallelism]:
    """A layout with each way to divide experts, of which every one stays whole."""
    if not shape.experts:
        yield layout
        return
    num_ranks = layout.tp_size * layout.cp_size * layout.dp_size
    for ep_size in range(1, num_ranks + 1):
        if num_ranks % ep_size == 0 and all(e.num_experts % ep_size == 0 for e in shape.experts):
            yield replace(layout, ep_size=ep_size, etp_size=1)


def _tried(space: Space, layout: Parallelism, sample: Sequence[int]) -> Iterator[Run | Rejected]:
    """Each N and recomputation with a layout, or why it cannot run; memory is not looked at."""
    shape = padded_vocabulary(space.shape, layout.tp_size)
    max_tp = space.max_tp or space.hardware.devices_per_node
    if layout.tp_size > max_tp:
        reason = f"TP {layout.tp_size} is above the limit of {max_tp} (a node)"
        yield Rejected(layout, 0, space.recomputes[0], "topology", reason)
        return
    if not any(_of_layout(space, layout, slices=slices) for slices in (False, True)):
        reason = "slices need pipeline stages; give other packings too"
        yield Rejected(layout, 0, space.recomputes[0], "batch and schedule", reason)
        return
    try:
        if _needs_unlike_stages(shape, layout):
            stages = balanced_layers(shape, space.hardware, layout, Recompute(), sample)
            layout = replace(layout, stage_layers=stages)
        layout.layers_of_stages(shape)
    except ConfigError as error:
        yield Rejected(layout, 0, space.recomputes[0], "divisibility", str(error))
        return
    for number in space.num_micro_batches:
        for recompute in space.recomputes:
            try:
                run = Run(
                    shape,
                    replace(space.execution, parallelism=layout, recompute=recompute),
                    space.hardware,
                    space.window,
                    number,
                    memory_gib=space.limit_gib(layout),
                    extrapolate=space.extrapolate,
                )
            except ConfigError as error:
                yield Rejected(layout, number, recompute, "batch and schedule", str(error))
                break  # The same with every recompute setting.
            yield run


def _fitting(space: Space, tried: Sequence[Run | Rejected]) -> Iterator[tuple[Run, int] | Rejected]:
    """What keeps documents whole: each that fits memory, with the S_max that does, or why not."""
    roomy: set[int] = set()
    for run in tried:
        if isinstance(run, Rejected):
            yield run
            continue
        number = run.num_micro_batches
        if number in roomy or not _of_layout(space, run.parallelism, slices=False):
            continue  # More recomputation only takes time.
        try:
            max_tokens = run.max_tokens()
            if max_tokens < space.window:
                raise ConfigError(
                    f"micro-batches of {max_tokens} tokens fit {run.limit_gib:.1f} GiB, but a "
                    f"window has {space.window}"
                )
        except ConfigError as error:
            yield Rejected(run.parallelism, number, run.recompute, "memory", str(error))
            continue
        yield run, max_tokens
        if max_tokens >= DEFAULT_WINDOWS * space.window:
            roomy.add(number)


def _sliced(
    space: Space, tried: Sequence[Run | Rejected], steps: Steps
) -> Iterator[Candidate | Rejected]:
    """Each N in slices, with the least recomputation that fits memory, by its first steps. Where
    nothing else can run, also why it does not fit.
    """
    done: set[int] = set()
    for run in tried:
        if isinstance(run, Rejected) or run.num_micro_batches in done:
            continue
        p, most = run.parallelism, int(DEFAULT_WINDOWS * space.window)
        run = replace(run, memory_gib=space.limit_gib(p, slices=True))
        for packing in _of_layout(space, p, slices=True):
            setting = PackingSettings.parse(packing, space.window, most)
            simulator = Simulator(run.costs, p, memory=run.memory)
            workload = steps.workloads(run)[0]
            try:
                planner = workload.planner(setting, SLICED_STEPS, costs=planning_costs(run))
                plans = [*planner.plans(SLICED_STEPS)]
                for plan in plans:
                    for used in simulator.plan_memory(plan):
                        used.check(run.limit_gib * GIB, "")
                assert isinstance(planner.slicing, Slicer)
                planner.slicing.check_room()  # as training does
            except WLBError as error:
                if not _of_layout(space, p, slices=False):
                    yield Rejected(p, run.num_micro_batches, run.recompute, "memory", str(error))
                continue
            total_us = sum(simulator.step(plan, with_memory=False).step_us for plan in plans)
            flops = sum(run.flops([d.length for d in plan.documents]) for plan in plans)
            peak = run.num_devices * run.hardware.peak_tflops * 1e6
            yield Candidate(run, most, flops / (total_us * peak), slices=True)
            done.add(run.num_micro_batches)


def _needs_unlike_stages(shape: ModelShape, layout: Parallelism) -> bool:
    """Whether layers do not divide over the pipeline ranks, but could with one or two for the ends.

    Without virtual stages any number of layers can.
    """
    short, few = -shape.num_layers % layout.num_stages, layout.vpp_size <= MOST_UNLIKE_CHUNKS
    divides = shape.num_layers % layout.pp_size == 0 or shape.num_layers < layout.pp_size
    return not divides and (layout.vpp_size == 1 or (short <= 2 and few))


def _balanced(space: Space, candidate: Candidate, sample: Sequence[int]) -> Candidate | None:
    """The candidate with stages balanced by time, where the coarse pass gains by that."""
    run = candidate.scenario
    p = run.parallelism
    if p.pp_size == 1 or p.stage_layers is not None:
        return None
    stages = balanced_layers(run.shape, run.hardware, p, run.recompute, sample)
    if len(set(stages)) == 1:
        return None
    unlike = run.executed(parallelism=replace(p, stage_layers=stages))
    mfu = _coarse_mfu(space, unlike, sample)
    if mfu < LEAST_GAIN * candidate.mfu:
        return None
    try:
        max_tokens = unlike.max_tokens()
    except ConfigError:
        return None
    return Candidate(unlike, max_tokens, mfu) if max_tokens >= run.window else None


def _nothing(space: Space, rejected: Sequence[Rejected]) -> str:
    """Says in one line that nothing can run, why, and what to do."""
    if not rejected:
        given = ", ".join(f"{name} {size}" for name, size in space.fixed.items())
        return f"no layout of {space.num_devices} devices has {given}; leave a size out"
    said = ", ".join(f"{count} for {why}" for why, count in by_reason(rejected).items())
    last = ([one for one in rejected if one.why == "memory"] or rejected)[-1]
    return (
        f"no layout of {space.num_devices} devices can run ({said}); such as "
        f"{title(last.parallelism)}: {last.reason}"
    )


def _none_fits(space: Space, choices: Sequence[Choice]) -> str:
    """Says in one line how much memory the least of all needs, the limit, and what to do."""
    least = min(choices, key=lambda choice: choice.outcome.peak_bytes)
    run, outcome = least.candidate.scenario, least.outcome
    return (
        f"no layout of {space.num_devices} devices that was simulated fits memory: the least is "
        f"{outcome.peak_bytes / GIB:.2f} GiB ({title(run.parallelism)}, {outcome.title}), above "
        f"the limit of {run.limit_gib:.2f} GiB; raise --refine to simulate more layouts, or give "
        "more devices, packings or memory"
    )


def by_reason(rejected: Sequence[Rejected]) -> dict[str, int]:
    """Number of rejected layouts by reason, most first."""
    return dict(Counter(str(one.why) for one in rejected).most_common())


def _sample(steps: Steps, window: int) -> list[int]:
    """:data:`SAMPLE_WINDOWS` windows of documents as a run would draw them, longer ones cut."""
    assert isinstance(steps.source, LengthSource)
    (documents,) = sample_steps(
        steps.source, 1, window=window, windows_a_step=SAMPLE_WINDOWS, seed=steps.seeds[0],
        long_documents=steps.long_documents,
    )  # fmt: skip
    return [document.length for document in documents]


def _coarse_mfu(space: Space, scenario: Run, sample: Sequence[int]) -> float:
    """The MFU of a step of N times the most average of balanced sample micro-batches."""
    cost, p = scenario.cost, scenario.parallelism
    mean_us = cost.total_us(sample) / SAMPLE_WINDOWS
    loads = [(0.0, number) for number in range(SAMPLE_WINDOWS)]
    heapify(loads)
    bins: list[list[int]] = [[] for _ in loads]
    for length in sorted(sample, reverse=True):
        load_us, number = loads[0]
        bins[number].append(length)
        heapreplace(loads, (load_us + cost.document_us(length), number))
    average = min(bins, key=lambda lengths: abs(cost.total_us(lengths) - mean_us))
    padding = -sum(average) % scenario.length_multiple
    segments = [*average, padding] if padding else average
    mode: Mode = space.sharding if p.cp_size > 1 else "per-sequence"
    scale = scenario.attention_scale(segments, scenario.chooser(mode)(segments))
    num = scenario.num_micro_batches // p.dp_size
    line = Simulator(scenario.costs, p).step(
        [[segments] * num] * p.dp_size, [[scale] * num] * p.dp_size
    )
    flops = scenario.flops(average) * scenario.num_micro_batches
    return flops / (line.step_us * scenario.num_devices * scenario.hardware.peak_tflops * 1e6)
