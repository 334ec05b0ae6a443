"""Searches the layout, batch and packing that train a model fastest under a memory limit.

Three passes, each over fewer candidates and each more exact::

    all layouts ──▶ what cannot run is rejected, with its reason   (divisibility, schedule, memory)
                ──▶ one step of even micro-batches each            (coarse)
                ──▶ many steps of real documents of the best       (refined)

Slices need less memory than whole windows, so other layouts are best for them. They have a coarse
pass of their own, of few steps of real documents, also in layouts where no window fits. It tries
fewer numbers of units than training does, and may be wrong by a half: so the best are compared by
more steps, planned as in training, before some are refined.

Stages have as many layers each. Where that cannot be, they are balanced by time; and the best
layouts are also tried so, where the coarse pass gains by it.

Everything is *simulated* and deterministic: the same arguments give the same ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heapreplace
from itertools import chain, product
from math import inf
from operator import itemgetter
from typing import TypeAlias

from megatron_wlb.cost import ModelShape, Parallelism, Recompute
from megatron_wlb.cost.hardware import MOST
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.data.length_source import LengthSource, sample_steps
from megatron_wlb.errors import ConfigError, WLBError
from megatron_wlb.plan.sharding.select import Mode
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.settings import AUTO, SHAPED, kind_in, run_with
from megatron_wlb.planning.run import Devices, Run, title
from megatron_wlb.planning.slicing.cut import Slicer
from megatron_wlb.reading import real_number
from megatron_wlb.settings.config import DEFAULT_MACHINE
from megatron_wlb.simulator.baseline import FULL, baseline
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.simulator.trial import Outcome, Steps, trial
from megatron_wlb.study.advice import MAX_DELAY_STEPS, check_max_delay
from megatron_wlb.study.found import (
    DEFAULT_WINDOWS,
    Candidate,
    Choice,
    Rejected,
    Search,
    by_reason,
    coarse_order,
    first_of_each,
    ranked,
)
from megatron_wlb.study.stages import balanced_layers
from megatron_wlb.study.workers import Workers

Progress: TypeAlias = Callable[[str, int, int], object]

PASSES = ("layouts", "slices", "stages", "compared", "refined", "tuned")
"""What :func:`search` tells of its progress, in order."""
MAX_WINDOWS = (1.25, 1.5, 2.0, 3.0)
"""S_max in windows that are tried on the best layouts, besides the most that fits."""
MOST_CHUNKS = 8
"""The most VPP that is tried."""
APART = 1.15
"""How much more the most of them is at least than another."""
SAMPLE_WINDOWS = 64
"""Windows of documents of which the coarse pass takes the average micro-batch."""
FEW_CHUNKS = 2
"""VPP up to which layouts for slices are all tried: more change their MFU by a few percent."""
MOST_UNLIKE_CHUNKS = 4
"""The most VPP that is tried where layers do not divide over the pipeline ranks."""
SLICED_STEPS = 2
"""Steps of documents that the coarse pass of slices simulates."""
FEW_WARM_UP, FEW_STEPS, NEAR_BEST = 4, 8, 0.95
"""Steps by which slices are compared before some are refined, and the share of the best's MFU from
which these are. MFUs of so few steps differed from those of all by 5 % at most."""
NEARLY = 1.05
"""Share of the memory limit up to which slices that do not fit with single units recomputed may fit
with full recomputation: their cuts differ a little."""
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
    machine: str = DEFAULT_MACHINE
    """The hardware's name or file."""
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


def search(
    space: Space,
    steps: Steps,
    *,
    num_refined: int = 8,
    num_tuned: int = 3,
    max_delay: float = MAX_DELAY_STEPS,
    workers: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> Search:
    """Searches all layouts and ranks those that can run.

    Args:
        space: what is searched.
        steps: what is simulated of each, and the documents, which are a :class:`.LengthSource`.
        num_refined: of the coarse pass's best layouts, how many are simulated with documents; at
            most as many for slices, of which half as many more are compared by fewer steps.
        num_tuned: of these, how many are with every packing and S_max.
        max_delay: steps that a token is delayed at most, in the mean, by what is ranked first.
        workers: processes that simulate, as :class:`.Workers` starts them.
        progress: called with the pass's name, and how much of how much is done.

    Raises:
        ConfigError: nothing can run, or nothing that was simulated fits memory; the message says
            why, and what comes nearest.
    """
    check_max_delay(max_delay)
    sample = _sample(steps, space.window)
    pool = Workers(workers, space, steps, sample)
    tell = {what: partial(progress, what) for what in PASSES}
    with pool:
        looked_at = [*pool.map(_looked_at, [*_layouts(space)], tell["layouts"])]
        whole, no_whole = _apart(one for _, (_, found) in looked_at for one in found)
        reach = [(most_mfu, layout) for layout, (most_mfu, _) in looked_at]
        reach.sort(key=itemgetter(0), reverse=True)
        sliced, no_sliced = _apart(_in_slices(reach, num_refined, pool, tell["slices"]))
        rejected = [*no_whole, *no_sliced]
        if not whole and not sliced:
            raise ConfigError(_nothing(space, rejected))
        best = [*whole[:num_refined], *sliced[:num_refined]]
        evened = [*pool.map(_evened, best, tell["stages"])]
        beside = chain.from_iterable(found for _, found in evened)
        candidates, _ = _apart(dict.fromkeys([*whole, *sliced, *beside]))
        balanced, _ = _apart(found[0] for one, found in evened if found and not one.slices)
        half = -(-num_refined // 2)
        comparing = [one for one in candidates if one.slices][: num_refined + half]
        settings = [(one, _plain(space, one)) for one in comparing]
        compared = _choices(pool.map(_compared, settings, tell["compared"]))
        near = _nearest(ranked(compared, max_delay)) if compared else []  # which take longest
        refining = [*near[:num_refined], *whole[:num_refined], *balanced[:half]]
        settings = [(one, _plain(space, one)) for one in refining]
        refined = ranked(_choices(pool.map(_outcome, settings, tell["refined"])), max_delay)
        known = [(choice.candidate, choice.outcome.setting) for choice in refined]
        settings = [
            (one, setting)
            for one, wide in _to_tune(refined, candidates, num_tuned)
            for setting in _variants(space, one, wide)
            if (one, setting) not in known
        ]
        tuned = _choices(pool.map(_outcome, settings, tell["tuned"]))
    found = ranked([*refined, *tuned], max_delay)
    if not found[0].fits:
        raise ConfigError(_none_fits(space, found))
    run = found[0].candidate.scenario
    whole_run = replace(run, memory_gib=space.limit_gib(run.parallelism))
    base = baseline(whole_run, steps, space.sharding, space.machine)
    return Search(tuple(found), tuple(candidates), tuple(rejected), max_delay, base)


def _apart(found: Iterable[Candidate | Rejected]) -> tuple[list[Candidate], list[Rejected]]:
    """What can run, the fastest first, and what cannot."""
    candidates, rejected = list[Candidate](), list[Rejected]()
    for one in found:
        if isinstance(one, Rejected):
            rejected.append(one)
        else:
            candidates.append(one)
    return sorted(candidates, key=coarse_order), rejected


def _outcome(
    one: tuple[Candidate, PackingSettings], space: Space, steps: Steps, _: Sequence[int]
) -> Outcome:
    candidate, setting = one
    return trial(candidate.scenario, setting, steps, space.sharding)


def _compared(
    one: tuple[Candidate, PackingSettings], space: Space, steps: Steps, sample: Sequence[int]
) -> Outcome:
    """As :func:`_outcome`, of few steps."""
    warm_up, num = min(FEW_WARM_UP, steps.warm_up), min(FEW_STEPS, steps.num)
    return _outcome(one, space, replace(steps, warm_up=warm_up, num=num), sample)


def _choices(
    tried: Iterable[tuple[tuple[Candidate, PackingSettings], Outcome]],
) -> list[Choice]:
    return [Choice(candidate, outcome) for (candidate, _), outcome in tried]


def _plain(space: Space, candidate: Candidate) -> PackingSettings:
    """The last packing that is not shaped, where there is one, for a candidate."""
    packings = _of_layout(space, candidate.scenario.parallelism, slices=candidate.slices)
    plain = [name for name in packings if SHAPED not in name]
    packing = (plain or packings)[-1]
    return _variant(packing, candidate, candidate.windows)


def _nearest(compared: Sequence[Choice]) -> list[Candidate]:
    """Layouts that may be the best, each with the stages that are better; the best first."""
    least_mfu = NEAR_BEST * compared[0].outcome.mfu
    found = first_of_each(compared, _any_stages)
    return [choice.candidate for choice in found if choice.outcome.mfu >= least_mfu]


def _to_tune(
    refined: Sequence[Choice], candidates: Sequence[Candidate], num: int
) -> Iterator[tuple[Candidate, bool]]:
    """The best layouts that keep documents whole, each with every S_max. Where the best runs slices
    also its own, with one S_max: for comparison.
    """
    whole = [choice for choice in refined if not choice.candidate.slices]
    found = [choice.candidate for choice in first_of_each(whole, _any_stages)[:num]]
    yield from ((one, True) for one in found)
    best = refined[0].candidate
    beside = [one for one in candidates if one.place == best.place and not one.slices][:1]
    if best.slices and beside and beside[0] not in found:
        yield beside[0], False


def _any_stages(choice: Choice) -> Hashable:
    """Its layout, whichever layers the stages have, N and recomputation."""
    run = choice.candidate.scenario
    layout = replace(run.parallelism, stage_layers=None)
    return layout, run.num_micro_batches, run.recompute


def _variants(space: Space, candidate: Candidate, wide: bool) -> list[PackingSettings]:
    """Every packing; if ``wide``, those that S_max matters to with each that fits. The plain form
    of one that is shaped has one: with the same S_max it is hardly ever faster.
    """
    most = min(candidate.max_tokens / candidate.scenario.window, MAX_WINDOWS[-1])
    windows = [*(w for w in MAX_WINDOWS if w <= most / APART), most]
    packings = _of_layout(space, candidate.scenario.parallelism, slices=candidate.slices)
    variants = []
    for packing in packings:
        once = not wide or kind_in(packing).windows or packing + SHAPED in packings
        for number in [candidate.windows] if once else windows:
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


def _whole(
    space: Space, tried: Sequence[Run | Rejected], sample: Sequence[int]
) -> Iterator[Candidate | Rejected]:
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
        yield Candidate(run, max_tokens, _coarse_mfu(space, run, sample))
        if max_tokens >= DEFAULT_WINDOWS * space.window:
            roomy.add(number)


def _looked_at(
    layout: Parallelism, space: Space, steps: Steps, sample: Sequence[int]
) -> tuple[float, list[Candidate | Rejected]]:
    """The most MFU of a layout in slices, and what :func:`_whole` finds."""
    tried = [*_tried(space, layout, sample)]
    return _most_mfu(space, tried, steps), [*_whole(space, tried, sample)]


def _in_slices(
    reach: Sequence[tuple[float, Parallelism]],
    num: int,
    pool: Workers,
    told: Callable[[int, int], object],
) -> Iterator[Candidate | Rejected]:
    """What runs in slices. Once there are ``num``, layouts that cannot reach them are left out, and
    more virtual stages where few are far from them. ``reach`` has those with the highest MFU first.
    """
    fastest: list[float] = []
    reached: dict[Parallelism, float] = {}  # by layout, whatever its VPP

    def wanted(one: tuple[float, Parallelism]) -> bool:
        most_mfu, layout = one
        if layout.vpp_size > FEW_CHUNKS:
            most_mfu = min(most_mfu, reached.get(replace(layout, vpp_size=1), inf) / NEAR_BEST)
        return len(fastest) < num or most_mfu >= fastest[-1]

    in_order = sorted(reach, key=lambda one: one[1].vpp_size > FEW_CHUNKS)
    for (_, layout), found in pool.map(_sliced, in_order, told, wanted):
        for one in found:
            if isinstance(one, Candidate):
                fastest[:] = sorted([*fastest, one.mfu], reverse=True)[:num]
                any_vpp = replace(layout, vpp_size=1)
                reached[any_vpp] = max(one.mfu, reached.get(any_vpp, 0.0))
            yield one


def _sliced(
    layout: tuple[float, Parallelism], space: Space, steps: Steps, sample: Sequence[int]
) -> list[Candidate | Rejected]:
    """Each N in slices, with the least recomputation that fits memory, by its first steps. Where
    nothing else can run, also why it does not fit.
    """
    found: list[Candidate | Rejected] = []
    done, alone = set[int](), set[int]()
    for run in _tried(space, layout[1], sample):
        if isinstance(run, Rejected) or run.num_micro_batches in done:
            continue
        p, most = run.parallelism, int(DEFAULT_WINDOWS * space.window)
        run = replace(run, memory_gib=space.limit_gib(p, slices=True))
        if run.num_micro_batches in alone and run.recompute.granularity == "selective":
            continue  # It keeps more than single units that run all layers again.
        for packing in _of_layout(space, p, slices=True):
            setting = PackingSettings.parse(packing, space.window, most)
            workload, least_bytes = steps.workloads(run)[0], inf
            memory = run.memory_limit._replace(exact=False)
            try:
                run.memory.check_state(run.limit_gib * GIB)  # before all that takes time
                memory.check_document(workload.longest(setting))
                workload, least_bytes = replace(workload, memory=memory), 0.0
                planner = workload.planner(setting, SLICED_STEPS, costs=run.planning_costs(True))
                assert isinstance(planner.slicing, Slicer)
                least_bytes = planner.slicing.peak_bytes
                planner.slicing.check_room()  # as training does
                simulator = Simulator(run.costs, p, memory=run.memory)
                plans = [*planner.plans(SLICED_STEPS)]
                for plan in plans:
                    for used in simulator.plan_memory(plan):
                        used.check(run.limit_gib * GIB, "")
            except WLBError as error:
                number = run.num_micro_batches
                if not _of_layout(space, p, slices=False):
                    found.append(Rejected(p, number, run.recompute, "memory", str(error)))
                if memory.recomputes:  # all layers of all units, which is about the same
                    far = least_bytes > NEARLY * memory.limit_bytes
                    (done if far else alone).add(number)
                continue
            total_us = sum(simulator.step(plan, with_memory=False).step_us for plan in plans)
            flops = sum(run.flops([d.length for d in plan.documents]) for plan in plans)
            peak = run.num_devices * run.hardware.peak_tflops * 1e6
            found.append(Candidate(run, most, flops / (total_us * peak), slices=True))
            done.add(run.num_micro_batches)
    return found


def _most_mfu(space: Space, tried: Sequence[Run | Rejected], steps: Steps) -> float:
    """The MFU of a layout's first steps in slices if its busiest pipeline rank never waited, nor
    sent anything, and slices cost no more than documents: what is simulated is below it.
    """
    most = 0.0
    for run in tried:
        if isinstance(run, Rejected) or run.recompute != space.recomputes[0]:
            continue  # More recomputation only takes time.
        p = run.parallelism
        for packing in _of_layout(space, p, slices=True):
            setting = PackingSettings.parse(packing, space.window, space.window)
            stream = steps.workloads(run)[0].stream(setting, SLICED_STEPS + 1)  # as a planner has
            drawn = [[d.length for d in stream.next_step()] for _ in range(SLICED_STEPS)]
            stages_us = run.costs.stages.times_us(drawn).sum(axis=(0, 2))
            ranks_us = stages_us.reshape(p.vpp_size, p.pp_size).sum(axis=0) / p.dp_size
            once_us = run.costs.fixed_us + max(run.costs.update_us, default=0.0)
            flops = sum(map(run.flops, drawn))
            peak = run.num_devices * run.hardware.peak_tflops * 1e6
            most = max(most, flops / ((ranks_us.max() + SLICED_STEPS * once_us) * peak))
    return most


def _needs_unlike_stages(shape: ModelShape, layout: Parallelism) -> bool:
    """Whether layers do not divide over the pipeline ranks, but could with one or two for the ends.

    Without virtual stages any number of layers can.
    """
    short, few = -shape.num_layers % layout.num_stages, layout.vpp_size <= MOST_UNLIKE_CHUNKS
    divides = shape.num_layers % layout.pp_size == 0 or shape.num_layers < layout.pp_size
    return not divides and (layout.vpp_size == 1 or (short <= 2 and few))


def _unlike(candidate: Candidate, sample: Sequence[int]) -> Parallelism | None:
    """The candidate's layout with stages balanced by time, if these are unlike then."""
    run = candidate.scenario
    p = run.parallelism
    if p.pp_size == 1 or p.stage_layers is not None:
        return None
    stages = balanced_layers(run.shape, run.hardware, p, run.recompute, sample)
    return replace(p, stage_layers=stages) if len(set(stages)) > 1 else None


def _evened(
    candidate: Candidate, space: Space, steps: Steps, sample: Sequence[int]
) -> list[Candidate]:
    """The candidate with stages balanced by time, where the coarse pass gains by that; behind
    slices, also what keeps documents whole there.
    """
    if (layout := _unlike(candidate, sample)) is None:
        return []
    number, slices = candidate.scenario.num_micro_batches, candidate.slices
    recomputes = space.recomputes if slices else (candidate.scenario.recompute,)
    one = replace(space, num_micro_batches=(number,), recomputes=recomputes)
    whole = _whole(one, [*_tried(one, layout, sample)], sample)
    found, _ = _apart(_sliced((inf, layout), one, steps, sample) if slices else whole)
    if not found or found[0].mfu < LEAST_GAIN * candidate.mfu:
        return []
    return [found[0], *_apart(whole)[0]]  # of whole documents nothing is left


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
    besides_us, in_order = cost.total_us(()), sorted(sample, reverse=True)
    times_us = [*map(cost.document_us, in_order)]
    loads = [(besides_us, number) for number in range(SAMPLE_WINDOWS)]
    heapify(loads)
    bins: list[list[int]] = [[] for _ in loads]
    for length, us in zip(in_order, times_us, strict=True):
        load_us, number = loads[0]
        bins[number].append(length)
        heapreplace(loads, (load_us + us, number))
    mean_us = (besides_us + sum(times_us)) / SAMPLE_WINDOWS
    average = bins[min((abs(load_us - mean_us), number) for load_us, number in loads)[1]]
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
