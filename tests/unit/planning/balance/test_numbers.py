"""Numbers of micro-batches that are chosen step by step: what stays, what gains, what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_wlb.cost import DocumentCost, Execution, MemoryModel, Parallelism
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.balance.numbers import WORTH_ANOTHER, max_tokens_by_number
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PACKINGS, PackingSettings, reads
from megatron_wlb.planning.packing.reference import REFERENCE_COST, REFERENCE_WINDOW
from megatron_wlb.planning.planner import Planner
from megatron_wlb.planning.run import Workload
from megatron_wlb.planning.slicing.room import MemoryLimit
from megatron_wlb.simulator.step import Simulator, slowest_us

REFERENCE = LengthSource.of_distribution("reference")
NUM_STEPS = 24
S_MAX = 2 * REFERENCE_WINDOW


def workload(number: int = 4, *, cost: DocumentCost = REFERENCE_COST, **layout: int) -> Workload:
    p = Parallelism(**{"pp_size": 4} | layout)
    multiple = 2 if p.tp_size > 1 else 1
    return Workload(
        REFERENCE, REFERENCE_WINDOW, number * p.dp_size, cost, 5, layout=p, length_multiple=multiple
    )


def setting(name: str, max_tokens: int = S_MAX) -> PackingSettings:
    return PackingSettings.parse(name, REFERENCE_WINDOW, max_tokens)


def planner(name: str, of: Workload) -> Planner:
    return of.planner(setting(name), NUM_STEPS)


def plans(name: str, of: Workload) -> list[StepPlan]:
    return list(planner(name, of).plans(NUM_STEPS))


def numbers(of: list[StepPlan]) -> set[int]:
    for plan in of:
        assert len({len(rank) for rank in plan.micro_batches}) == 1
    return {len(plan.micro_batches[0]) for plan in of}


def simulated_us(plan: StepPlan, of: Workload) -> float:
    p = of.layout
    assert p is not None
    return slowest_us(plan, StageCosts.by_layers(of.cost, p), p)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("original", {}),
        ("original", {"dp_size": 2}),
        ("hold", {"dp_size": 2}),
        ("wlb", {"tp_size": 2, "pp_size": 2}),
        ("hold+shape", {}),
    ],
    ids=str,
)
def test_numbers_differ_by_step_and_documents_stay(name: str, layout: dict[str, int]) -> None:
    of = workload(**layout)
    fixed, chosen = plans(name, of), plans(f"{name}+auto", of)
    assert numbers(fixed) == {4} and len(numbers(chosen)) > 1
    faster = 0
    for plain, other in zip(fixed, chosen, strict=True):
        assert sorted(plain.documents) == sorted(other.documents)
        assert plain.waiting_tokens == other.waiting_tokens
        assert all(m.padded_length <= S_MAX for m in other)
        assert sorted(m.index for m in other) == list(range(sum(map(len, other.micro_batches))))
        times_us = [simulated_us(plan, of) for plan in (plain, other)]
        if len(plain.micro_batches[0]) == len(other.micro_batches[0]):
            ours, theirs = ([[m.spans for m in r] for r in p.micro_batches] for p in (other, plain))
            assert ours == theirs
        elif "shape" not in name:  # which may gain more where the number stays
            assert times_us[1] < (1 - WORTH_ANOTHER + 1e-3) * times_us[0]
            faster += 1
    assert faster > NUM_STEPS // 3 or "shape" in name


def test_numbers_rise_and_fall() -> None:
    """More fill the pipeline sooner; where each costs much besides its documents, fewer do."""
    assert max(numbers(plans("hold+auto", workload(2)))) > 2
    cost = DocumentCost(1e-3, 0.0, 2e-3, 0.0, micro_batch_us=400.0)
    assert min(numbers(plans("hold+auto", workload(16, cost=cost, pp_size=2)))) < 16


@pytest.mark.parametrize(
    ("name", "share", "most"), [("hold", 0.6, 0.55), ("wlb", 0.6, 0.55), ("hold", 0.96, 0.42)]
)
def test_numbers_with_experts_are_dealt_by_place(name: str, share: float, most: float) -> None:
    """``share`` of linear work is the experts', which is even and must not count."""
    token_us = REFERENCE_COST.document_us(2) - REFERENCE_COST.document_us(1)
    groups = ExpertGroups(2, ((share / 12 * token_us, share / 6 * token_us),) * 4)

    def gaps_us(chosen: list[StepPlan]) -> float:
        """What replicas of a group differ by in their own work, place by place."""
        own_us = [
            [[groups.own_us(m.predicted_us, m.padded_length) for m in rank] for rank in ranks]
            for ranks in (plan.micro_batches for plan in chosen)
        ]
        pairs = [ranks[first : first + 2] for ranks in own_us for first in (0, 2)]
        return sum(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))

    alone = workload(4, dp_size=4)
    together = replace(alone, experts=groups)
    apart, by_place = (plans(f"{name}+auto", of) for of in (alone, together))
    assert len(numbers(by_place)) > 1
    assert gaps_us(by_place) < most * gaps_us(apart)
    again = plans(f"{name}+auto", together)
    assert [plan.digest for plan in again] == [plan.digest for plan in by_place]


def test_memory_limit_holds_with_more_micro_batches_in_flight() -> None:
    shape = padded_vocabulary(load_model("7b"), 8)
    p = Parallelism(tp_size=8, cp_size=2, pp_size=4, sequence_parallel=True)
    memory = MemoryModel(shape, Execution(p))
    limit_gib = max(memory.peak_bytes(r, [S_MAX] * 2) for r in range(4)) / GIB
    of = Workload(
        REFERENCE, REFERENCE_WINDOW, 2, REFERENCE_COST, 5, length_multiple=32, layout=p,
        memory=MemoryLimit(memory, limit_gib * GIB, 32),
    )  # fmt: skip
    chosen = plans("hold+auto", of)
    assert max(numbers(chosen)) > 4
    simulator = Simulator(of.planner(setting("slim"), 1).slicing.pipeline.costs, p, memory=memory)  # type: ignore[union-attr]
    peaks = [held.peak_bytes for plan in chosen for held in simulator.plan_memory(plan)]
    assert max(peaks) <= limit_gib * GIB
    # As long as two may be, more would not fit.
    assert max(memory.peak_bytes(r, [S_MAX] * 4) for r in range(4)) > limit_gib * GIB


def test_without_a_memory_limit_no_more_tokens_are_held_at_once() -> None:
    most = max_tokens_by_number(Parallelism(pp_size=4), None, 2, 1000, 8)
    assert [most(number) for number in (1, 2, 3, 4, 9)] == [1000, 1000, 664, 496, 496]
    full = max_tokens_by_number(Parallelism(pp_size=4), None, 8, 1000, 8)
    assert [full(number) for number in (1, 4, 8, 64)] == [1000] * 4


def test_without_a_pipeline_the_number_stays() -> None:
    assert planner("hold+auto", workload(pp_size=1)).shaping is None


def test_packings_with_numbers_of_their_own_are_refused() -> None:
    for name in PACKINGS:
        if reads(name, "micro_batches"):
            assert setting(f"{name}+auto").flags()[-2:] == ["--wlb-micro-batches", "auto"]
            continue
        with pytest.raises(ConfigError, match=f"^{name} packing"):
            setting(f"{name}+auto")
    assert setting("hold+auto+shape") == setting("hold+shape+auto")
