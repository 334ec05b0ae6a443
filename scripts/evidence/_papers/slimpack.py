"""The experiments of SlimPack (2025) as simulations, and what it prints of them.

Its models (Table 3) and 80 GB Hopper GPUs are modelled. Its documents are not public;
distributions that follow what its text says of them (:data:`DATA`) stand for them. Layouts,
vocabulary and what is recomputed are not printed: each packing gets the fastest of :func:`layouts`
that its steps fit in. Offloading is not modelled.
Everything here is *simulated*.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from _papers.paper import HARDWARE, Effort, K, max_tokens
from megatron_wlb.cost import Execution, ModelShape, Parallelism, Recompute, load_hardware
from megatron_wlb.cost.document import imbalance
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import Draw, slimpack
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document, StepPlan
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.planning.slicing.cut import Slicer
from megatron_wlb.simulator.step import Lengths, Simulator
from megatron_wlb.simulator.step_timeline import StepTimeline

llama = partial(
    ModelShape, kv_channels=128, vocab_size=32000, gated=True, rms_norm=True, linear_bias=False,
    tied_embeddings=False,
)  # fmt: skip
MODELS = {
    "7b": llama(4096, 11008, 32, 32, 32),
    "13b": llama(5120, 13824, 40, 40, 40),
    "70b": llama(8192, 28672, 80, 64, 8),
    "150b": llama(12288, 32768, 96, 96, 8),
}
"""Table 3. The vocabulary is LLaMA2's; the paper's is lost in the text that we have."""
DEVICES = {"7b": 128, "13b": 128, "70b": 256, "150b": 256}
"""§6.2."""
TP_SIZE = 8
"""The most that a node has. Sections that search no layout have it."""
TP_SIZES = {"7b": (2, 4, 8), "13b": (2, 4, 8), "70b": (4, 8), "150b": (4, 8)}
CP_SIZES = (1, 2, 4)
PP_SIZES = {"7b": 4, "13b": 4, "70b": 8, "150b": 8}
"""Assumed."""
CONTEXTS = (64 * K, 128 * K, 256 * K)
DOCUMENTS = 512
"""What a global batch has, in the mean; §6.1 has 512 to 2048."""
PRINTED_MOST = 2.8
"""The most that SlimPack gains over best-fit packing: the only figure that the text prints."""
BEST_FIT = "best-fit"
FULL = Recompute("full", "uniform", 1)
PARTS = (1 / 4, 1 / 2, 3 / 4)
"""Shares of a stage's layers that windows may recompute, besides none and all."""


def _github(random: np.random.Generator, size: int) -> Floats:
    return random.lognormal(math.log(4096), 1.5, size)


def _wikipedia(random: np.random.Generator, size: int) -> Floats:
    short = random.lognormal(math.log(1024), 0.8, size)
    return np.where(random.random(size) < 0.8, short, random.lognormal(math.log(16384), 1, size))


DATA: dict[str, Draw] = {"Common Crawl": slimpack, "GitHub": _github, "Wikipedia": _wikipedia}
"""Common Crawl has the shares that §2.1.1 prints. GitHub is longer and less spread, with 1 % above
128K; Wikipedia has a cluster of short documents and one of long ones (§6.2, §6.3): ours."""


@lru_cache
def lengths_of(data: str) -> LengthSource:
    """Documents of a data set: one draw, of which seeds choose."""
    drawn = DATA[data](np.random.default_rng(0), 1 << 17)
    return LengthSource.of_lengths(data, np.maximum(drawn, 1).astype(np.int64))


@dataclass(frozen=True)
class Case:
    """One bar of Figure 13."""

    model: str
    context: int
    data: str = "Common Crawl"
    documents: int = DOCUMENTS
    whole: bool = False
    """Whether documents longer than the context run whole: `slim` alone can do that."""
    merges: bool = True
    """Whether `slim` may run a document on several data-parallel ranks."""
    free: bool = False
    """Whether what these exchange takes no time."""

    @property
    def name(self) -> str:
        return f"{self.model.upper()}-{self.context // K}K"


def recomputed(case: Case, packing: str) -> list[Recompute]:
    """How much a packing may recompute, from little to much.

    Windows do in parts, as the paper's baseline. With none of its layers `slim` recomputes those
    micro-batches that it must.
    """
    if packing == "slim":
        return [Recompute(), FULL]
    layers = MODELS[case.model].num_layers // PP_SIZES[case.model]
    parts = [Recompute("full", "block", round(share * layers)) for share in PARTS]
    return [Recompute(), *parts, FULL]


def layout(
    case: Case,
    cp_size: int,
    hardware: str = HARDWARE,
    *,
    tp_size: int = TP_SIZE,
    recompute: Recompute | None = None,
    least_tp: int = TP_SIZE,
) -> Run:
    """One way to divide the devices. N is that of :func:`num_windows`."""
    return Run(
        padded_vocabulary(MODELS[case.model], tp_size),
        Execution(
            Parallelism(
                tp_size,
                cp_size,
                PP_SIZES[case.model],
                dp_size=_shards(case, tp_size) // cp_size,
                sequence_parallel=True,
            ),
            recompute or Recompute(),
        ),
        load_hardware(hardware),
        case.context,
        num_windows(case, least_tp),
    )


def _shards(case: Case, tp_size: int) -> int:
    """Data-parallel ranks times context-parallel ones."""
    return DEVICES[case.model] // PP_SIZES[case.model] // tp_size


def num_windows(case: Case, least_tp: int) -> int:
    """N: what the documents fill in the mean, a multiple of all data-parallel sizes from this TP
    on.
    """
    stored = lengths_of(case.data).stored
    assert stored is not None
    most = _shards(case, least_tp)
    windows = case.documents * float(stored.mean()) / case.context
    return most * max(1, round(windows / most))


def layouts(
    case: Case, packing: str, hardware: str = HARDWARE, *, more: bool = False
) -> list[list[Run]]:
    """What the devices can be divided in; of each layout what it may recompute, little first.

    CP 1, 2 or 4, all layers recomputed or none. With ``more`` also TP is searched, and windows
    recompute in parts.
    """
    tp_sizes = TP_SIZES[case.model] if more else (TP_SIZE,)
    ways = recomputed(case, packing) if more else [Recompute(), FULL]
    return [
        [
            layout(
                case, cp_size, hardware, tp_size=tp_size, recompute=recompute,
                least_tp=min(tp_sizes),
            )
            for recompute in ways
        ]
        for tp_size in tp_sizes
        for cp_size in CP_SIZES
    ]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """How a packing did in a case."""

    run: Run
    mfu_by_seed: tuple[float, ...]
    bubble_share: float
    peak_gib: float
    units: float
    """Micro-batches of a data-parallel rank, in the mean."""
    merged: float
    """Documents of a step that several data-parallel ranks run, in the mean."""
    spread: Floats
    """``[2, 2]``: of forwards and backwards, the slowest over the mean and the coefficient of
    variation, within a data-parallel rank's step."""

    def speedup(self, other: Result) -> tuple[float, float, float]:
        """The ratio of work a second, its lowest and its highest over the seeds."""
        pairs = zip(self.mfu_by_seed, other.mfu_by_seed, strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        mean = sum(self.mfu_by_seed) / sum(other.mfu_by_seed)
        return mean, min(ratios), max(ratios)


def measure(run: Run, packing: str, case: Case, effort: Effort) -> Result:
    """Simulates a packing, with context-parallel ranks that share attention evenly."""
    costs = run.costs
    if case.free and costs.stages.prefixes:
        prefixes = costs.stages.prefixes
        nothing = tuple((0.0,) * len(own) for own in prefixes.merged_us)
        stages = replace(costs.stages, prefixes=replace(prefixes, merged_us=nothing))
        costs = replace(costs, stages=stages)
    simulator = Simulator(costs, run.parallelism, memory=run.memory)
    peak_flops_per_us = run.num_devices * run.hardware.peak_tflops * 1e6
    mfu, bubbles, spreads, units, merged, peak_bytes = [], [], [], [], [], 0.0
    for seed in effort.seeds:
        flops = time_us = 0.0
        for step, own_flops in _steps(run, packing, case, seed, effort):
            line = simulator.step(step)
            flops, time_us = flops + own_flops, time_us + line.step_us
            bubbles.append(line.bubble_share)
            spreads.append(spread(line))
            units.append(sum(len(rank) for rank in line.p2p_us) / line.dp_size)
            merged.append(step.num_merged if isinstance(step, StepPlan) else 0)
            peak_bytes = max(peak_bytes, line.peak_bytes)
        mfu.append(flops / (peak_flops_per_us * time_us))
    return Result(
        run,
        tuple(mfu),
        float(np.mean(bubbles)),
        peak_bytes / GIB,
        float(np.mean(units)),
        float(np.mean(merged)),
        np.mean(spreads, axis=0),
    )


def fastest(case: Case, packing: str, effort: Effort, *, more: bool = False) -> Result:
    """A packing in the layout in which it is fastest, of those of :func:`layouts` that it fits in.

    Each layout recomputes as little as fits. Raises :class:`ConfigError` where none fits.
    """
    trial = Effort(2, effort.seeds[:1], warm_up=0, hardware=effort.hardware)
    left = [iter(runs) for runs in layouts(case, packing, effort.hardware, more=more)]
    tried: list[tuple[Result, Iterator[Run]]] = []

    def try_next(runs: Iterator[Run]) -> None:
        for run in runs:
            result = measure(run, packing, case, trial)
            if result.peak_gib <= run.limit_gib:
                tried.append((result, runs))
                return

    for runs in left:
        try_next(runs)
    while tried:
        best = max(tried, key=lambda one: one[0].mfu_by_seed[0])
        tried.remove(best)
        whole = measure(best[0].run, packing, case, effort)
        if whole.peak_gib <= whole.run.limit_gib:
            return whole
        try_next(best[1])
    raise ConfigError(f"{case.name} with {packing} fits in no layout; give other devices")


@dataclass(frozen=True)
class OwnUnits:
    """Steps of slices by their number of units, by seed: what a number of each replica's own gains
    over one for all, each the best of the step; and over the number that the package settled on.
    """

    over_common: tuple[float, ...]
    over_settled: tuple[float, ...]
    unlike: float
    """Share of the steps in which replicas would choose unlike numbers."""
    settled: float
    """Units that the package has, in the mean."""


def own_units(run: Run, case: Case, effort: Effort) -> OwnUnits:
    """Tries all numbers of units on each replica of each step; no document is merged."""
    setting = PackingSettings("slim", run.window)
    over: list[tuple[float, float]] = []
    unlike, settled = 0, []
    for seed in effort.seeds:
        workload = replace(run.workload(lengths_of(case.data), seed=seed), merges=False)
        slicer = workload.planner(setting, effort.steps, costs=run.costs).slicing
        assert isinstance(slicer, Slicer)
        stream = workload.stream(setting, effort.steps)
        settled_us = common_us = own_us = 0.0
        for step in range(effort.steps):
            documents = stream.next_step()
            settled.append(slicer.settle(documents, step))
            times_us = _by_number(slicer, documents)
            settled_us += max(times_us[settled[-1].num_units])
            common_us += min(map(max, times_us.values()))
            by_replica = [*zip(*times_us.values(), strict=True)]
            own_us += max(map(min, by_replica))
            unlike += len({own.index(min(own)) for own in by_replica}) > 1
        over.append((common_us / own_us, settled_us / own_us))
    over_common, over_settled = zip(*over, strict=True)
    return OwnUnits(
        over_common,
        over_settled,
        unlike / len(settled),
        float(np.mean([way.num_units for way in settled])),
    )


def _by_number(slicer: Slicer, documents: Sequence[Document]) -> dict[int, list[float]]:
    """Simulated times of each replica by the number of units, those that the package tries."""
    dealt = slicer.cuts.deal(slicer.cuts.heaviest_first(documents))
    return {
        way.num_units: [slicer.step_us(dealt, [way], group)[0] for group in range(len(dealt.alone))]
        for way in slicer.ways
    }


def spread(line: StepTimeline) -> Floats:
    """See :attr:`Result.spread`."""
    stages = [times.sum(axis=1) for times in line.times_us]
    found: Floats = np.mean(
        [[(imbalance(own.tolist()), own.std() / own.mean()) for own in times] for times in stages],
        axis=0,
    )
    return found


def _steps(
    run: Run, packing: str, case: Case, seed: int, effort: Effort
) -> Iterator[tuple[StepPlan | Lengths, float]]:
    """Steps that count, with their FLOPs."""
    workload = replace(
        run.workload(lengths_of(case.data), seed=seed),
        long_documents="slice" if case.whole else "split",
        merges=case.merges,
    )
    num = effort.warm_up + effort.steps
    limit = run.window
    if packing == BEST_FIT:
        stream = workload.stream(PackingSettings("slim", limit), num)
        random = np.random.default_rng(seed)
        for step in range(num):
            lengths = [document.length for document in stream.next_step()]
            windows = best_fit(lengths, run.window, run.parallelism.dp_size)
            order = random.permutation(len(windows))
            dp_size = run.parallelism.dp_size
            if step >= effort.warm_up:
                ranks = [[windows[at] for at in order[rank::dp_size]] for rank in range(dp_size)]
                yield ranks, run.flops(lengths)
        return
    if packing == "hold":
        limit = max_tokens(run)
    setting = PackingSettings.parse(packing, run.window, limit)
    for plan in workload.planner(setting, num, costs=run.costs).plans(num):
        if plan.step >= effort.warm_up:
            yield plan, run.flops(document.length for document in plan.documents)


def best_fit(lengths: Sequence[int], window: int, multiple: int = 1) -> list[list[int]]:
    """Packs whole documents in windows: the longest first, each where it leaves the least room.

    Where the windows are no multiple of ``multiple``, those with most documents give some away.
    """
    windows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # tokens, window; ascending
    for length in sorted(lengths, reverse=True):
        at = bisect_left(rooms, (length, 0))
        if at < len(rooms):
            room, index = rooms.pop(at)
        else:
            room, index = window, len(windows)
            windows.append([])
        windows[index].append(length)
        insort(rooms, (room - length, index))
    while len(windows) % multiple:
        fullest = max(windows, key=len)
        half = len(fullest) // 2
        windows.append(fullest[half:])
        del fullest[half:]
    return windows
