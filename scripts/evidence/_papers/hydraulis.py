"""The experiments of Hydraulis (2024) as simulations, and what it prints of them.

Its models, its 64 A800 GPUs and its tokens an iteration are modelled. Its documents are public, but
their lengths are not printed: distributions that behave as §3.1 and Appendix A.1 say stand for
them (:data:`DATA`). Its figures' numbers are in the pictures alone, so few are compared.
Everything here is *simulated*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import numpy as np

from _papers.paper import Effort, K
from _papers.slimpack import best_fit, llama
from megatron_wlb.cost import AnalyticModel, MemoryModel, ModelShape, Parallelism, load_hardware
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.cost.step_costs import UPDATE_BYTES, analytic_costs
from megatron_wlb.data.lengths import Draw
from megatron_wlb.plan import Document
from megatron_wlb.planning.balance.dispatch import StepDocuments
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts, Scheme
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.strategies.plan.assigner import Assignment, Candidate, assign, step_plan
from megatron_wlb.strategies.plan.propose import Proposal, StrategySpace, propose
from megatron_wlb.strategies.plan.replica_steps import StrategySimulator, StrategyTimeline
from megatron_wlb.strategies.plan.store_costs import ParameterStore
from megatron_wlb.strategies.plan.strategy import Cluster
from megatron_wlb.strategies.strategy_search import SAMPLE_STEPS, StrategyStudy, judge

HARDWARE = "a800"
MODELS: dict[str, ModelShape] = {
    "7b": llama(4096, 11008, 32, 32, 32),
    "13b": llama(5120, 13824, 40, 40, 40),
    "32b": llama(6656, 17920, 60, 64, 64, kv_channels=104),
}
"""LLaMA2's. Of 32B only the size is printed: LLaMA's 60 layers of width 6656, but 64 heads, as the
paper divides them by 16."""
TABLE_3 = {
    ("7b", 8): ("tp2pp2", "tp4pp2"),
    ("7b", 16): ("tp2pp2", "tp4pp2"),
    ("13b", 16): ("tp4", "tp8"),
    ("13b", 32): ("tp4", "tp8"),
    ("32b", 32): ("tp8pp2", "tp16"),
    ("32b", 64): ("tp8pp2", "tp16"),
}
"""Model, GPUs -> Megatron-LM's scheme for documents up to 16K and up to 32K."""
CONFIGURATIONS = {"F1": (16 * K, 100 * K), "F2": (32 * K, 100 * K), "F3": (32 * K, 200 * K)}
"""Longest document, tokens an iteration. Table 3 has the lengths; the tokens of F3 are ours."""
SCALES = {
    "GPUs": [(num, 32 * K, 200 * K) for num in (8, 16, 32, 64)],
    "longest document": [(16, longest * K, 200 * K) for longest in (16, 32, 64, 128)],
    "tokens": [(16, 32 * K, tokens * K) for tokens in (100, 200, 400)],
}
"""Figure 11: GPUs, longest document and tokens an iteration; 7B, Common Crawl (§8.3). The factors'
values are ours, as the paper has them in the picture alone."""
PRINTED_RANGE = (1.32, 2.66)
"""Over the best of Megatron-LM, DeepSpeed and HotSPa (§8.2)."""
TABLE_1 = {
    "propagation": 1.58,
    "end to end, not overlapped": 1.31,
    "end to end, overlapped": 1.44,
}
TABLE_1_S = {
    "equal": (6.78, 0.02, 1.11),
    "unlike": (4.29, 0.02, 1.71),
    "overlapped": (4.29, 0.02, 1.18),
}
"""Seconds of propagation, optimisation and the exchange."""


def _common_crawl(random: np.random.Generator, size: int) -> Floats:
    return random.lognormal(math.log(500), 1.2, size)


def _github(random: np.random.Generator, size: int) -> Floats:
    return random.lognormal(math.log(800), 1.4, size)


DATA: dict[str, Draw] = {"CommonCrawl": _common_crawl, "GitHub": _github}
"""Lognormals. Common Crawl's gives 1.6M tokens a longest document between 15K and 32K (Appendix
A.1), and 100K tokens one that is often far below the context (Figure 3). GitHub's is longer."""


@dataclass(frozen=True)
class Case:
    """One group of bars of Figure 10."""

    model: str
    num_devices: int
    data: str = "CommonCrawl"
    configuration: str = "F2"
    one_adapter: bool = False
    """Whether TP 16, over two nodes, gets the rate of one network adapter; else that of all, as the
    model of links has it. The paper says that it is slow (§8.3), not how slow."""

    @property
    def name(self) -> str:
        return f"{self.data} {self.model.upper()}, {self.num_devices} GPUs, {self.configuration}"

    sizes: tuple[int, int] | None = None
    """Longest document and tokens an iteration, if not the configuration's."""

    @property
    def context(self) -> int:
        return (self.sizes or CONFIGURATIONS[self.configuration])[0]


CASES = tuple(
    Case(model, num, data, name)
    for data in DATA
    for model, num in TABLE_3
    for name in CONFIGURATIONS
)
BREAKDOWN = Case("32b", 64)
"""The case of §8.4: 32B with CommonCrawl on 64 GPUs; F2 is assumed."""


def steps_of(case: Case, num: int, seed: int) -> list[list[Document]]:
    """Iterations of so many tokens; documents above the context are truncated, as the paper's."""
    context, tokens = case.sizes or CONFIGURATIONS[case.configuration]
    random = np.random.default_rng([seed, len(case.data)])
    drawn = np.clip(DATA[case.data](random, num * tokens // 256), 16, context).astype(np.int64)
    step = np.cumsum(drawn) // tokens
    assert step[-1] >= num
    return [
        [
            Document(0, int(n), 0, int(drawn[n]), True, 0, int(n), number)
            for n in np.flatnonzero(step == number)
        ]
        for number in range(num)
    ]


@dataclass(frozen=True)
class PaperSpace(StrategySpace):
    """TP × PP as the paper has them, TP 16 over two nodes among them.

    Runs of ours keep TP in a node, with CP beside it.
    """

    one_adapter: bool = False

    @cached_property
    def cluster(self) -> Cluster:
        return Cluster(self.num_devices, 2 * self.hardware.devices_per_node)

    @cached_property
    def store(self) -> ParameterStore:
        nodes = Cluster(self.num_devices, self.hardware.devices_per_node)
        return ParameterStore.of(self.shape, nodes)

    def price(self, scheme: Scheme, longest: int | None = None) -> ReplicaCosts:
        node = self.hardware.devices_per_node
        if scheme.tp_size <= node or not self.one_adapter:
            return super().price(scheme, longest)
        across = replace(
            self.hardware,
            devices_per_node=2 * node,
            node_link_gb_s=self.hardware.network_gb_s,
        )
        space = StrategySpace(self.shape, self.execution, across, self.num_devices)
        return space.price(scheme, longest)


def space_of(case: Case, hardware: str = HARDWARE) -> PaperSpace:
    """The schemes of a case's model and GPUs."""
    return _space(case.model, case.num_devices, hardware, case.one_adapter)


@lru_cache(maxsize=8)
def _space(model: str, num_devices: int, hardware: str, one_adapter: bool) -> PaperSpace:
    shape = padded_vocabulary(MODELS[model], 16)
    schemes = tuple(
        Scheme(tp_size, 1, pp_size)
        for tp_size in (1, 2, 4, 8, 16)
        for pp_size in (1, 2, 4)
        if tp_size * pp_size <= num_devices and shape.num_layers % pp_size == 0
    )
    machine = load_hardware(hardware)
    return PaperSpace(
        shape, Execution(), machine, num_devices, schemes=schemes, one_adapter=one_adapter
    )


def printed_layout(case: Case, hardware: str = HARDWARE) -> Candidate:
    """Megatron-LM's of Table 3."""
    space = space_of(case, hardware)
    text = TABLE_3[case.model, case.num_devices][case.context > 16 * K]
    return space.equal(space.price(Scheme.parse(text)))


def _packed_full(candidate: Candidate) -> Candidate:
    """The same, whose micro-batches are as long as memory holds."""
    full = {k: replace(one, least_tokens=one.max_tokens) for k, one in candidate.costs.items()}
    return replace(candidate, costs=full)


@lru_cache(maxsize=64)
def studied(case: Case, seed: int, steps: int, hardware: str) -> StrategyStudy:
    """Strategies proposed from one draw of documents, judged on another."""
    space = space_of(case, hardware)
    return judge(space, proposed(case, hardware), steps_of(case, steps, seed))


@lru_cache(maxsize=64)
def proposed(case: Case, hardware: str) -> Proposal:
    """Strategies for a case's documents."""
    space = space_of(case, hardware)
    sample = [[d.length for d in step] for step in steps_of(case, SAMPLE_STEPS, seed=1_000_000)]
    return propose(space, sample, longest=case.context)


@dataclass(frozen=True)
class Result:
    """A case, by seed."""

    case: Case
    studies: tuple[StrategyStudy, ...]
    packed_us: tuple[float, ...]
    """All steps in the layout of Table 3, with documents packed to the context and dealt out."""
    packed: Candidate

    def over_packed(self) -> list[float]:
        return [us / s.dynamic_us for us, s in zip(self.packed_us, self.studies, strict=True)]

    def over_equal(self) -> list[float]:
        return [s.gain for s in self.studies]


def end_to_end(case: Case, effort: Effort) -> Result:
    """Strategies against Megatron-LM in its layout of Table 3."""
    base = printed_layout(case, effort.hardware)
    seeds = effort.seeds
    return Result(
        case,
        tuple(studied(case, seed, effort.steps, effort.hardware) for seed in seeds),
        tuple(packed_us(base, steps_of(case, effort.steps, s), case.context) for s in seeds),
        base,
    )


def scaled(num_devices: int, sizes: tuple[int, int], effort: Effort) -> Result:
    """One point of Figure 11: strategies against Megatron-LM in the equal layout that is fastest
    with its packing, as Appendix F has it for few of them.
    """
    case, seeds = Case("7b", num_devices, sizes=sizes), effort.seeds
    space = space_of(case, effort.hardware)
    steps = {seed: steps_of(case, effort.steps, seed) for seed in seeds}
    equal = [space.equal(own) for own in space.costs.values() if own.max_tokens >= case.context]
    base = min(equal, key=lambda one: packed_us(one, steps[seeds[0]], case.context))
    return Result(
        case,
        tuple(studied(case, seed, effort.steps, effort.hardware) for seed in seeds),
        tuple(packed_us(base, steps[seed], case.context) for seed in seeds),
        base,
    )


def packed_us(candidate: Candidate, steps: Sequence[Sequence[Document]], context: int) -> float:
    """Time of steps whose documents are packed to the context and dealt out in turns."""
    return sum(max(_packed(candidate, step, context)) + candidate.fixed_us for step in steps)


def _packed(candidate: Candidate, step: Sequence[Document], context: int) -> list[float]:
    """What each replica takes."""
    ((costs, members),) = candidate.groups
    p = costs.scheme.parallelism
    windows = best_fit([document.length for document in step], context)
    simulator = Simulator(costs.costs, p)
    times_us = [0.0] * len(members)
    for number in members:
        own = windows[number :: len(members)]
        if own:
            line = simulator.step([own])
            forward_us, backward_us = line.times_us[0][0, 0, 0], line.times_us[0][1, 0, -1]
            times_us[number] = line.pipeline_us + float(
                costs.waits_us(np.array(candidate.pull_us[number]), forward_us)
                + costs.waits_us(np.array(candidate.push_us[number]), backward_us)
            )
    return times_us


@dataclass(frozen=True)
class Stage:
    """One bar of Figure 13, by seed."""

    name: str
    step_us: tuple[float, ...]
    gap: float
    """By how much the fastest replica is done before the slowest, as a share; the mean."""


def ablation(case: Case, effort: Effort) -> list[Stage]:
    """Figure 13: parts of Hydraulis one after another."""
    proposal = proposed(case, effort.hardware)
    base = printed_layout(case, effort.hardware)
    static = proposal.candidates[0]
    ways: dict[str, Callable[[StepDocuments], Assignment | None]] = {
        "equal layout, dispatched, packed to the maximum": partial(
            assign, candidate=_packed_full(base)
        ),
        "micro-batches by time": partial(assign, candidate=base),
        "one strategy for all steps": partial(assign, candidate=static),
        "chosen step by step": lambda step: min(
            (a for c in proposal.candidates if (a := assign(step, c))), key=lambda a: a.step_us
        ),
    }
    stages = []
    packed = [steps_of(case, effort.steps, seed) for seed in effort.seeds]
    fixed_us, gaps = base.fixed_us, []
    times = []
    for steps in packed:
        took = [_packed(base, step, case.context) for step in steps]
        times.append(sum(map(max, took)) + len(steps) * fixed_us)
        gaps += [1 - min(own) / max(own) for own in took]
    stages.append(Stage("equal layout, packed and dealt out", tuple(times), float(np.mean(gaps))))
    for name, way in ways.items():
        times, gaps = [], []
        for steps in packed:
            found = [way(StepDocuments([d.length for d in step])) for step in steps]
            known = [one for one in found if one is not None]
            assert len(known) == len(steps)
            times.append(sum(one.step_us for one in known))
            gaps += [1 - min(one.replica_us) / max(one.replica_us) for one in known]
        stages.append(Stage(name, tuple(times), float(np.mean(gaps))))
    return stages


@dataclass(frozen=True)
class Parts:
    """Table 1: mean times of a step's parts in µs."""

    propagation_us: float
    update_us: float
    exchange_us: float

    @property
    def step_us(self) -> float:
        return self.propagation_us + self.update_us + self.exchange_us


def breakdown(case: Case, effort: Effort, seed: int) -> dict[str, Parts]:
    """Equal layout with its usual collectives; strategies, the exchange hidden or not."""
    space = space_of(case, effort.hardware)
    proposal = proposed(case, effort.hardware)
    steps = steps_of(case, effort.steps, seed)
    base = printed_layout(case, effort.hardware)
    passes = StrategySimulator(space.costs)
    equal_us = []
    for number, step in enumerate(steps):
        one = assign(StepDocuments([d.length for d in step]), base)
        assert one is not None
        equal_us.append(passes.step(step_plan(number, step, one)).propagation_us)
    found = {"equal": Parts(float(np.mean(equal_us)), *usual_exchange_us(space, base))}
    simulators = {
        name: StrategySimulator(space.costs, space.exchange, overlap=overlap)
        for name, overlap in (("unlike", False), ("overlapped", True))
    }
    lines: dict[str, list[StrategyTimeline]] = {name: [] for name in simulators}
    for number, step in enumerate(steps):
        documents = StepDocuments([d.length for d in step])
        best = min(
            (a for c in proposal.candidates if (a := assign(documents, c))),
            key=lambda a: a.step_us,
        )
        plan = step_plan(number, step, best)
        for name, simulator in simulators.items():
            lines[name].append(simulator.step(plan))
    for name, own in lines.items():
        found[name] = Parts(
            float(np.mean([line.propagation_us for line in own])),
            float(np.mean([line.update_us for line in own])),
            float(np.mean([line.exchange_us for line in own])),
        )
    return found


def usual_exchange_us(space: StrategySpace, base: Candidate) -> tuple[float, float]:
    """Update of an equal layout's shards, and its reduce-scatter and all-gather, none hidden."""
    ((costs, members),) = base.groups
    scheme = costs.scheme
    p = Parallelism(
        scheme.tp_size, scheme.cp_size, scheme.pp_size, dp_size=len(members),
        sequence_parallel=scheme.tp_size > 1,
    )  # fmt: skip
    memory = MemoryModel(space.shape, Execution(p))
    model = AnalyticModel(space.shape, Execution(p, space.recompute), space.hardware)
    costs_of_all = analytic_costs(model, memory)
    shards = p.dp_size * p.cp_size
    most = max(range(p.pp_size), key=memory.num_parameters)
    update_us = space.hardware.memory_us(UPDATE_BYTES * memory.num_parameters(most) / shards)
    gather_us = costs_of_all.update_us[most] - update_us
    return update_us, gather_us + sum(costs_of_all.reduce_us[most :: p.pp_size])
