from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from megatron_wlb.cost import AnalyticModel, Execution, MemoryModel, ModelShape, load_hardware
from megatron_wlb.cost.memory import GIB
from megatron_wlb.errors import PlanError
from megatron_wlb.plan import Document, StepPlan
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts, Scheme
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.strategies.plan.assigner import Assigner, Candidate, step_plan
from megatron_wlb.strategies.plan.replica_steps import StrategySimulator, StrategyTimeline
from megatron_wlb.strategies.plan.store_costs import ExchangeTimes, ParameterStore
from megatron_wlb.strategies.plan.strategy import Cluster, Strategy
from megatron_wlb.strategies.plan.whole_replica import replica_costs

SHAPE = ModelShape(
    1024, 2816, 8, 8, 8, 128, 8192, True, rms_norm=True, linear_bias=False, tied_embeddings=False
)
CLUSTER, HARDWARE = Cluster(16, 8), replace(load_hardware("a100"), launch_us=0.0)
STORE = ParameterStore.of(SHAPE, CLUSTER)


def costs_of(text: str) -> ReplicaCosts:
    p = Scheme.parse(text).parallelism
    memory = MemoryModel(SHAPE, Execution(p, store_ranks=16))
    return replica_costs(AnalyticModel(SHAPE, Execution(p), HARDWARE), memory, 4 * GIB)


COSTS = {costs.kind: costs for costs in map(costs_of, ("tp8", "tp2pp2", "tp2", "tp4pp2vpp2"))}
BY_NAME = {str(scheme): (scheme, tokens) for scheme, tokens in COSTS}
LENGTHS = [*range(300, 6000, 171), 14000]


def plan(*names: str, lengths: list[int] | None = None) -> StepPlan:
    candidate = Candidate(Strategy.of(CLUSTER, [BY_NAME[name] for name in names]), COSTS)
    lengths = LENGTHS if lengths is None else lengths
    documents = [Document(0, n, 0, length, True, 0, n, 0) for n, length in enumerate(lengths)]
    found = Assigner([candidate]).choose(lengths)
    return step_plan(0, documents, found)


MIXED = plan("tp8", "tp2pp2", "tp2")


def simulate(plan: StepPlan, pull_us: float, push_us: float, *, overlap: bool) -> StrategyTimeline:
    times = ExchangeTimes(np.full(16, pull_us), np.full(16, push_us), 70.0)
    return StrategySimulator(COSTS, lambda strategy: times, overlap=overlap).step(plan)


def test_step_takes_what_its_slowest_replica_takes() -> None:
    assert MIXED.strategy is not None
    line = StrategySimulator(COSTS).step(MIXED)
    replicas = MIXED.strategy.replicas
    for own, replica, ran in zip(line.replicas, replicas, MIXED.micro_batches, strict=True):
        alone = Simulator(COSTS[replica.kind].costs, replica.scheme.parallelism)
        lengths = [[m.lengths for m in ran]]
        assert own is not None and own.pipeline_us == alone.step(lengths).pipeline_us
    assert line.step_us == line.propagation_us == max(o.pipeline_us for o in line.replicas if o)


def test_assignment_told_what_the_simulator_tells() -> None:
    assert MIXED.strategy is not None
    candidate = Candidate(MIXED.strategy, COSTS)
    told = Assigner([candidate]).choose(LENGTHS)
    line = StrategySimulator(COSTS).step(MIXED)
    assert line.propagation_us == pytest.approx(max(told.replica_us), rel=1e-9)


def busy_share(line: StrategyTimeline) -> float:
    """The share of all ranks' time in which they run forwards or backwards."""
    busy_us = sum(
        sum(map(sum, own.busy_us)) * replica.scheme.num_ranks / replica.scheme.pp_size
        for own, replica in zip(line.replicas, line.strategy.replicas, strict=True)
        if own
    )
    return busy_us / (line.step_us * line.strategy.cluster.num_devices)


def test_idle_ranks_and_resting_replicas_count_as_waiting() -> None:
    full = StrategySimulator(COSTS).step(plan("tp8", "tp8"))
    half = StrategySimulator(COSTS).step(plan("tp8"))
    assert 0.9 < busy_share(full) <= 1 and busy_share(half) == pytest.approx(0.5, rel=0.01)
    one = plan("tp8", "tp2", "tp2", lengths=[14000])
    assert one.strategy is not None
    line = StrategySimulator(COSTS).step(one)
    assert [own is None for own in line.replicas] == [False, True, True]
    assert busy_share(line) == pytest.approx(0.5, rel=0.01)


def test_exchange_that_is_not_hidden_adds_up() -> None:
    plain = StrategySimulator(COSTS).step(MIXED)
    line = simulate(MIXED, 5000.0, 9000.0, overlap=False)
    assert line.exchange_us == 14000.0
    assert line.step_us == plain.step_us + 14000.0 + 70.0


def test_short_exchange_is_hidden_but_for_a_layer_at_the_ends() -> None:
    # tp8 has 8 layers on each rank, so an eighth of either is at the ends.
    equal = plan("tp8", "tp8")
    line = simulate(equal, 80.0, 160.0, overlap=True)
    assert line.exchange_us == pytest.approx(80 / 8 + 160 / 8)


def test_exchange_that_runs_beside_no_pass_adds_to_the_step() -> None:
    times = ExchangeTimes(np.full(16, 80.0), np.full(16, 160.0), 70.0, apart_us=1234.0)
    for overlap in (False, True):
        without = simulate(MIXED, 80.0, 160.0, overlap=overlap)
        line = StrategySimulator(COSTS, lambda _: times, overlap=overlap).step(MIXED)
        assert line.step_us == pytest.approx(without.step_us + 1234.0)


def test_long_exchange_is_waited_for() -> None:
    short, long = (simulate(MIXED, us, us, overlap=True) for us in (1e2, 1e6))
    assert 0 < short.exchange_us < 100 < 1e6 < long.exchange_us
    apart = simulate(MIXED, 1e6, 1e6, overlap=False)
    assert long.step_us < apart.step_us
    # First and last pass hide something even then: no more than they take.
    assert apart.step_us - long.step_us < apart.propagation_us


@pytest.mark.parametrize(("pull_us", "push_us"), [(10.0, 2e4), (3e5, 10.0), (4e5, 6e5)])
def test_assignment_knows_what_the_exchange_leaves_to_wait_for(pull_us, push_us) -> None:
    """Choosing by an exchange that is always hidden would prefer replicas that wait for it."""
    for names in (("tp8", "tp2pp2", "tp2"), ("tp8", "tp8"), ("tp2",) * 8):
        lengths = [length for length in LENGTHS if length < 6000 or "tp8" in names]
        done = plan(*names, lengths=lengths)
        strategy = done.strategy
        assert strategy is not None
        every = (pull_us,) * len(names), (push_us,) * len(names)
        found = Assigner([Candidate(strategy, COSTS, 70.0, *every)]).choose(lengths)
        documents = [Document(0, n, 0, length, True, 0, n, 0) for n, length in enumerate(lengths)]
        line = simulate(step_plan(0, documents, found), pull_us, push_us, overlap=True)
        # Stages behind the first have their weights later than it is told here, if at all.
        assert found.step_us == pytest.approx(line.step_us, rel=0.03)


def test_store_of_a_real_model_is_worth_hiding() -> None:
    exchange = partial(STORE.times, hardware=HARDWARE)
    hidden, apart = (
        StrategySimulator(COSTS, exchange, overlap=overlap).step(MIXED) for overlap in (True, False)
    )
    assert hidden.exchange_us < 0.7 * apart.exchange_us
    assert hidden.update_us == apart.update_us > 0


def test_memory_holds_what_replicas_are_given() -> None:
    """S_max is by memory, so the fullest step of it fits and a longer micro-batch would not."""
    kind = BY_NAME["tp2pp2"]
    lengths = [kind[1]] * 6
    memory = COSTS[kind].memory
    assert memory is not None
    simulator = Simulator(COSTS[kind].costs, kind[0].parallelism, memory=memory)
    replicas = plan("tp2pp2", "tp2pp2", lengths=lengths).micro_batches
    peaks = [simulator.step([[m.lengths for m in own]]).peak_bytes for own in replicas]
    assert 0.97 * 4 * GIB < max(peaks) <= 4 * GIB
    longer = kind[1] + 2 * kind[0].length_multiple
    assert max(memory.peak_bytes(rank, [longer] * 3) for rank in range(2)) > 4 * GIB


def test_virtual_stages_run_in_whole_groups() -> None:
    line = StrategySimulator(COSTS).step(plan("tp4pp2vpp2", "tp8"))
    (own, _) = line.replicas
    assert own is not None and len(own.p2p_us[0]) % 2 == 0


def test_plan_without_a_strategy_is_refused() -> None:
    with pytest.raises(PlanError, match="has no strategy"):
        StrategySimulator(COSTS).step(replace(MIXED, strategy=None))
