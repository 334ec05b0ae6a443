"""The experiments of WLB-LLM (OSDI 2025) as simulations, and the numbers it prints for them.

Its models, its layouts (Table 1) and H100s are modelled, or another machine where asked; its
documents are not public, and the synthetic ``reference`` distribution, which has the properties of
Figure 3, stands for them. What the paper does not say is assumed here, in one place: interleaving
(:data:`VPP_SIZE`) and S_max (:data:`MAX_WINDOWS`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias
from unittest import mock

from _papers import algorithm_1
from megatron_wlb.cost import DocumentCost, Execution, Parallelism, load_hardware
from megatron_wlb.cost.analytic import BACKWARD_ATTENTION, BACKWARD_LINEAR
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.plan.sharding.select import Mode
from megatron_wlb.plan.sharding.shard import Kind
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.metrics import PackingMetrics
from megatron_wlb.planning.run import Run, Workload
from megatron_wlb.settings.packings import PACKINGS, Place
from megatron_wlb.simulator.trial import Outcome, Steps, packed, trials

K = 1024
VPP_SIZE = 2
"""Chunks a pipeline rank. The paper runs interleaved 1F1B (§6) without saying how many."""
MAX_WINDOWS = 1.5
"""S_max in windows, less where memory holds less. The paper does not print it."""
TP_HIDDEN = 0.9
"""Share of tensor-parallel collectives that matrix products hide where they overlap. The paper
overlaps them (§6) and does not say how much that hides."""
DISTRIBUTION = "reference"
HARDWARE = "h100-sxm"

TABLE_1 = {
    ("550m", 64 * K): (2, 2, 4, 2),
    ("550m", 128 * K): (2, 4, 4, 1),
    ("7b", 64 * K): (4, 2, 4, 1),
    ("7b", 128 * K): (8, 2, 4, 1),
    ("30b", 64 * K): (8, 2, 4, 1),
    ("30b", 128 * K): (8, 4, 4, 1),
    ("70b", 64 * K): (16, 4, 4, 1),
    ("70b", 128 * K): (16, 4, 4, 1),
}
"""Model and window -> TP, CP, PP, DP. (7B at 64K: 32 GPUs; 70B: 256, which is its DP 1.)"""

TABLE_2: dict[str, tuple[float, float]] = {
    "original": (1.44, 0),
    "fixed-greedy:1": (1.41, 4),
    "fixed-greedy:2": (1.22, 5),
    "fixed-greedy:4": (1.11, 5),
    "fixed-greedy:8": (1.08, 5),
    "fixed-solver:1": (1.40, 467),
    "fixed-solver:2": (1.18, 1488),
    "fixed-solver:4": (1.09, 25313),
    "wlb:1": (1.24, 8),
    "wlb:2": (1.05, 20),
    "wlb:3": (1.05, 23),
}
"""Packing -> imbalance degree, and overhead in ms a batch."""
FIGURE_12 = {"fixed": 1.03, "wlb": 1.23, "wlb 64K": 1.15, "wlb 128K": 1.30}
"""Speed-ups over Plain-4D: means over the configurations. Its bars are in the figure only."""
FIGURE_13 = {
    "CP per-document": 1.02,
    "CP adaptive": 1.05,
    "PP var-len and delay": 1.28,
    "all": 1.33,
}
FIGURE_14 = {128 * K: 1.33, 160 * K: 1.40}
"""Window -> speed-up; 128K is Figure 13's. The others are in the figure only."""
FIGURE_15 = {
    ("per-document", 64 * K): 1.01,
    ("per-document", 128 * K): 1.07,
    ("adaptive", 0): 1.075,
}
"""Speed-ups over per-sequence; the text gives the adaptive one over both windows."""
WINDOWS = tuple(number * K for number in (32, 64, 96, 128, 160))


@dataclass(frozen=True)
class Effort:
    """How much is simulated."""

    steps: int
    seeds: tuple[int, ...]
    warm_up: int = 30
    solver: bool = True
    """Whether the solver runs, which takes seconds a step."""
    solver_steps: int = 20
    solver_limit: float = 1.0
    """Seconds a search of the fixed-length solver may take."""
    hardware: str = HARDWARE
    """Name or file; attention is measured where it has such tables."""

    def of(self, distribution: str) -> Steps:
        source = LengthSource.of_distribution(distribution)
        return Steps(source, self.steps, self.warm_up, self.seeds)


def scenario(
    model: str,
    window: int,
    layout: tuple[int, int, int, int],
    vpp_size: int = VPP_SIZE,
    hardware: str = HARDWARE,
    *,
    overlapped: bool = False,
) -> Run:
    """A row of Table 1: N is PP × DP, as in §7.1. Tensor-parallel collectives are ``overlapped`` in
    both passes and :data:`TP_HIDDEN`, or as this project's runtime has them.
    """
    tp_size, cp_size, pp_size, dp_size = layout
    machine = load_hardware(hardware)
    return Run(
        padded_vocabulary(load_model(model), tp_size),
        Execution(
            Parallelism(
                tp_size, cp_size, pp_size, vpp_size, dp_size, sequence_parallel=tp_size > 1
            ),
            tp_overlapped=overlapped,
        ),
        replace(machine, tp_overlap=TP_HIDDEN) if overlapped else machine,
        window,
        pp_size * dp_size,
    )


def max_tokens(base: Run) -> int:
    """S_max: :data:`MAX_WINDOWS`, or what fits."""
    return min(int(MAX_WINDOWS * base.window), max(base.window, base.max_tokens()))


def forward_cost(base: Run) -> DocumentCost:
    """What the paper balances and judges by: forward alone (§7.4); backward as so many of it."""
    cost = base.model.cost()
    return DocumentCost(
        cost.forward_linear_us,
        cost.forward_quadratic_us,
        BACKWARD_LINEAR * cost.forward_linear_us,
        BACKWARD_LINEAR * cost.forward_quadratic_us,
    )


def table_2(
    effort: Effort, packings: Sequence[str], *, overlapped: bool = False
) -> dict[str, list[PackingMetrics]]:
    """Imbalance of packings at 7B-128K, one a seed; ``overlapped`` as of
    :func:`scenario`.
    """
    base = _row_of_table_2(effort, overlapped=overlapped)
    cost, limit = forward_cost(base), max_tokens(base)
    return {name: _evaluate(base, cost, name, limit, effort) for name in packings}


def _row_of_table_2(effort: Effort, *, overlapped: bool = False) -> Run:
    layout = TABLE_1["7b", 128 * K]
    return scenario("7b", 128 * K, layout, hardware=effort.hardware, overlapped=overlapped)


def printed_algorithm(effort: Effort, departures: Sequence[str]) -> list[PackingMetrics]:
    """Table 2's case by Algorithm 1 as printed but for ``departures``, with one queue."""
    place = Place("", f"{algorithm_1.__name__}:PrintedPacker")
    kind = algorithm_1.with_departures(*departures)
    with (
        mock.patch.dict(PACKINGS, {kind.name: place}),
        mock.patch.object(algorithm_1, "PrintedPacker", kind),
    ):
        return table_2(effort, [f"{kind.name}:1"])[f"{kind.name}:1"]


def sensitivity(
    effort: Effort, windows: Sequence[float], thresholds: Sequence[Sequence[float]]
) -> dict[tuple[float, tuple[float, ...]], list[PackingMetrics]]:
    """Table 2's case by ``wlb`` for each S_max and each set of thresholds, in windows."""
    base = _row_of_table_2(effort)
    cost, found = forward_cost(base), {}
    for size, shares in itertools.product(windows, map(tuple, thresholds)):
        queues = tuple(int(share * base.window) for share in shares)
        setting = PackingSettings.parse("wlb", base.window, int(size * base.window))
        found[size, shares] = _evaluated(
            base, cost, replace(setting, queue_thresholds=queues), effort.steps, effort
        )
    return found


def figure_6(effort: Effort, batches: Sequence[int]) -> dict[int, list[PackingMetrics]]:
    """Imbalance of attention alone (§3.3), by how many global batches are packed together.

    The paper does it on its 550M model and says neither window nor N: those of 550M-128K.
    """
    base = scenario("550m", 128 * K, TABLE_1["550m", 128 * K], hardware=effort.hardware)
    attention = DocumentCost(0.0, 1e-6, 0.0, 2e-6)
    return {
        number: _evaluate(base, attention, f"fixed-greedy:{number}", base.window, effort)
        for number in batches
    }


def _evaluate(
    base: Run, cost: DocumentCost, packing: str, limit: int, effort: Effort
) -> list[PackingMetrics]:
    setting = PackingSettings.parse(packing, base.window, limit, solver_limit=effort.solver_limit)
    holds = setting.name != "fixed-solver"  # which holds nothing back, so nothing has to fill
    return _evaluated(base, cost, setting, effort.steps if holds else effort.solver_steps, effort)


def _evaluated(
    base: Run, cost: DocumentCost, setting: PackingSettings, steps: int, effort: Effort
) -> list[PackingMetrics]:
    warm_up = 0 if setting.name == "fixed-solver" else effort.warm_up
    documents = LengthSource.of_distribution(DISTRIBUTION)
    workloads = [
        Workload(documents, base.window, base.num_micro_batches, cost, seed)
        for seed in effort.seeds
    ]
    return [packed(one, setting, steps, warm_up) for one in workloads]


Pair: TypeAlias = tuple[str, Mode | Kind]
"""Packing and sharding."""
PLAIN: Pair = ("original", "per-sequence")
"""Plain-4D."""


def speedups(base: Run, pairs: Sequence[Pair], effort: Effort) -> dict[Pair, Outcome]:
    """What each pair does, :data:`PLAIN` included."""
    limit = max_tokens(base)
    shardings: dict[str, list[Mode | Kind]] = {}
    for packing, sharding in dict.fromkeys([PLAIN, *pairs]):
        shardings.setdefault(packing, []).append(sharding)
    found: dict[Pair, Outcome] = {}
    for packing, modes in shardings.items():
        setting = PackingSettings.parse(packing, base.window, limit)
        outcomes = trials(base, setting, effort.of(DISTRIBUTION), modes)
        found |= {(packing, mode): one for mode, one in zip(modes, outcomes, strict=True)}
    return found


LAYER_SHARDINGS: tuple[Mode | Kind, ...] = (
    "per-sequence", "per-document-remainder", "per-document", "adaptive", "hybrid",
)  # fmt: skip


def figure_15(
    window: int, tp_size: int, effort: Effort, slow: Callable[[Run], Run] = lambda run: run
) -> dict[str, list[float]]:
    """Times one 7B layer with CP 4, both passes, per sharding and seed: µs over all steps.

    The attention kernel is that of the run which ``slow`` makes.

    ``paper-adaptive`` chooses between per-sequence and §5.1's per-document, ``adaptive`` between
    per-sequence and this project's, which deals out no single rows.
    """
    base = slow(scenario("7b", window, (tp_size, 4, 1, 1), 1, effort.hardware))
    layer = base.model.layer()
    passes = 1 + BACKWARD_ATTENTION
    choosers = {str(sharding): base.chooser(sharding) for sharding in LAYER_SHARDINGS}
    totals: dict[str, list[float]] = {name: [] for name in (*choosers, "paper-adaptive")}
    for seed in effort.seeds:
        for times in totals.values():
            times.append(0.0)
        for lengths in _micro_batches(base, seed, effort):
            linear_us = (layer.linear_us + layer.backward_linear_us) * sum(lengths)
            even_us = layer.attention_us * passes * sum(n * n for n in lengths)
            layers = {
                name: linear_us + even_us * base.attention_scale(lengths, choose(lengths))
                for name, choose in choosers.items()
            }
            layers["paper-adaptive"] = min(layers["per-sequence"], layers["per-document-remainder"])
            for name, us in layers.items():
                totals[name][-1] += us
    return totals


def _micro_batches(base: Run, seed: int, effort: Effort) -> Iterator[tuple[int, ...]]:
    """Windows as they come."""
    one = replace(base, num_micro_batches=1)
    planner = one.workload(LengthSource.of_distribution(DISTRIBUTION), seed=seed).planner(
        PackingSettings("original", base.window), effort.steps
    )
    for plan in planner.plans(effort.steps):
        for micro_batch in plan:
            yield micro_batch.lengths
