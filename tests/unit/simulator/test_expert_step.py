"""Steps of replicas that exchange tokens with experts: who waits for whom, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from helpers.machines import H100

from megatron_wlb.cost import DocumentCost, Execution, Parallelism, Recompute
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.cost.schedule.graph import graph_of
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import PlanError
from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.step import Simulator, slowest_us
from megatron_wlb.simulator.step_timeline import StepTimeline

WINDOW = 131072
MIXTRAL = Run(
    padded_vocabulary(load_model("mixtral-8x7b"), 1),
    Execution(
        Parallelism(cp_size=2, pp_size=4, dp_size=8, ep_size=8, etp_size=1),
        Recompute("full", "uniform", 1),
    ),
    H100,
    WINDOW,
    32,
)


def step(
    lengths: Sequence[Sequence[Sequence[int]]], groups: ExpertGroups | None, pp_size: int = 1
) -> StepTimeline:
    costs = StageCosts.even(DocumentCost(4.0, 0.0, 8.0, 0.0), pp_size)
    layout = Parallelism(pp_size=pp_size, dp_size=len(lengths))
    return Simulator(StepCosts(costs, experts=groups), layout).step(lengths)


def test_replicas_meet_in_each_micro_batch() -> None:
    lengths = [[[10], [30]], [[20], [20]]]
    apart, together = step(lengths, None), step(lengths, ExpertGroups(2, ((1e-9, 1e-9),)))
    assert apart.step_us == pytest.approx(12 * 40)
    assert together.step_us == pytest.approx(12 * (20 + 30))
    waits = [float(own.sum()) for own in together.waits_us]
    assert waits == pytest.approx([12 * 10, 12 * 10])
    assert together.expert_wait_share == pytest.approx(1 / 5)
    assert together.bubble_share == pytest.approx(1 / 5)
    alike = step([[[10], [30]], [[10], [30]]], ExpertGroups(2, ((1e-9, 1e-9),)))
    assert alike.step_us == pytest.approx(12 * 40) and alike.expert_wait_share == 0


def test_what_experts_do_is_shared_by_those_who_meet() -> None:
    # Of 4 and 8 µs a token experts do all but 1 and 2.
    line = step([[[10]], [[20]]], ExpertGroups(2, ((3.0, 6.0),)))
    assert line.step_us == pytest.approx(3 * 20 + 9 * 15)


def test_groups_do_not_wait_for_each_other() -> None:
    lengths = [[[10]], [[20]], [[30]], [[40]]]
    line = step(lengths, ExpertGroups(2, ((1e-9, 1e-9),)))
    stops = [float(replayed.stop_us.max()) for replayed in line.replays]
    assert stops == pytest.approx([240, 240, 480, 480])


def test_stage_of_dense_layers_waits_only_for_what_comes_to_it() -> None:
    exchanges = ExpertGroups(2, ((0.0, 0.0), (1e-9, 1e-9)))
    line = step([[[10]], [[20]]], exchanges, pp_size=2)
    first, second = (replica.intervals for replica in line.replicas)
    # Each runs its first stage as fast as it can; the second starts where both can.
    assert first[0][0].stop_us == pytest.approx(20) and second[0][0].stop_us == pytest.approx(40)
    assert first[1][0].start_us == second[1][0].start_us == pytest.approx(40)
    assert first[1][0].stop_us == second[1][0].stop_us == pytest.approx(80)
    assert not line.waits_us[0][:, 0].any() and line.waits_us[0][:, 1].any()


def test_alternatives_that_do_not_meet_are_replayed_as_before() -> None:
    graph = graph_of(4, 2, 8)
    times = np.random.default_rng(5).uniform(1, 9, (2, 8, 8, 4))
    gaps = np.zeros((8, 4))
    plain = graph.replay(times, gaps)
    none = graph.replay(times, gaps, together=2, stages=[False] * 8)
    assert (none.stop_us == plain.stop_us).all()
    met = graph.replay(times, gaps, together=2, stages=[True] * 8)
    assert (met.start_us[:, ::2] == met.start_us[:, 1::2]).all()
    assert (met.stop_us.max(axis=0) >= plain.stop_us.max(axis=0)).all()


def test_slices_of_another_order_cannot_meet() -> None:
    whole = [Span(Document(0, n, 0, 10, True, 0, n, 3), 0, 10) for n in range(4)]
    rows = tuple(
        tuple(MicroBatchPlan(n, (span,), 10, 1.0) for n, span in enumerate(own))
        for own in (whole[:2], whole[2:])
    )
    costs = StageCosts.even(DocumentCost(4.0, 0.0, 8.0, 0.0), 1)
    simulator = Simulator(
        StepCosts(costs, experts=ExpertGroups(2, ((1.0, 1.0),))), Parallelism(dp_size=2)
    )
    alike = StepPlan(3, "slim", rows, 0, 0, chains=((1, 1), (1, 1)))
    assert simulator.step(alike).step_us == pytest.approx(2 * 120)
    with pytest.raises(
        PlanError, match=r"ranks 0 to 1 exchange tokens .*; plan for ranks that run"
    ):
        simulator.step(replace(alike, chains=((1, 1), (2,))))


def test_slices_that_run_alike_are_faster_than_whole_documents() -> None:
    """Simulated on the reference lengths: 2.2 times as fast where experts bind 4 replicas."""
    workload = MIXTRAL.workload(LengthSource.of_distribution("reference"), seed=1)
    simulator = Simulator(MIXTRAL.costs, MIXTRAL.parallelism)

    def mean_us(name: str) -> float:
        planner = workload.planner(PackingSettings(name, 2 * WINDOW), 16, costs=MIXTRAL.costs)
        for _ in range(8):
            planner.skip()
        plans = [*planner.plans(8)]
        for plan in plans:
            assert not plan.chains or plan.chains[0] == plan.chains[3] != plan.chains[4]
        return float(np.mean([simulator.step(plan).step_us / plan.num_tokens for plan in plans]))

    assert mean_us("hold") > 1.4 * mean_us("slim")


@pytest.mark.parametrize("name", ["wlb", "hold"])
def test_replicas_wait_less_where_equal_places_get_equal_work(name: str) -> None:
    """Simulated on the reference lengths: the balance of places takes most of the wait away."""
    workload = MIXTRAL.workload(LengthSource.of_distribution("reference"), seed=1)
    packing = PackingSettings(name, 2 * WINDOW)
    simulator = Simulator(MIXTRAL.costs, MIXTRAL.parallelism)
    assert workload.experts is not None and workload.experts.num_replicas == 4

    def waits(experts: ExpertGroups | None) -> tuple[float, float]:
        planner = replace(workload, experts=experts).planner(packing, 16)
        for _ in range(8):
            planner.skip()
        lines = [simulator.step(plan) for plan in planner.plans(8)]
        pipeline_us = sum(line.pipeline_us for line in lines)
        waited_us = sum(line.expert_wait_share * line.pipeline_us for line in lines)
        return waited_us / pipeline_us, pipeline_us

    (share, us), (plain_share, plain_us) = waits(workload.experts), waits(None)
    assert share < 0.4 * plain_share and plain_share > 0.015
    assert us < 0.985 * plain_us


def test_predicted_time_of_a_plan_is_that_of_replicas_that_wait() -> None:
    workload = MIXTRAL.workload(LengthSource.of_distribution("reference"), seed=1)
    plan = workload.planner(PackingSettings("original", WINDOW), 1).next_plan()
    assert plan is not None
    stages, layout = MIXTRAL.costs.stages, MIXTRAL.parallelism
    alone_us = slowest_us(plan, stages, layout)
    us = slowest_us(plan, stages, layout, workload.experts)
    without_sends = replace(MIXTRAL.costs, p2p_latency_us=0.0, p2p_us_per_token=0.0)
    line = Simulator(without_sends, MIXTRAL.parallelism).step(plan)
    assert us == pytest.approx(line.pipeline_us) and us != pytest.approx(alone_us, rel=1e-3)
