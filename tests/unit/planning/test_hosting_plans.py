"""Plans in which micro-batches wait in the host's memory: when, how many, and for what."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import numpy.typing as npt
import pytest
from helpers.machines import H100

from megatron_wlb.cost import Execution, Hardware, Parallelism, Recompute
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.model_file import load_model, padded_vocabulary
from megatron_wlb.cost.slices import HOST, LAYERS, MLPS, Unit, UnitTable
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning import guards
from megatron_wlb.planning.balance.samples import plan_step
from megatron_wlb.planning.from_config import execution
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.planner import Planner
from megatron_wlb.planning.run import Run
from megatron_wlb.planning.slicing import room
from megatron_wlb.planning.slicing.cut import Slicer
from megatron_wlb.planning.slicing.room import MemoryLimit
from megatron_wlb.settings.command_line import parse
from megatron_wlb.simulator.step import Simulator

WINDOW, NUM_STEPS = 131072, 4
MACHINE = dataclasses.replace(H100, host_link_gb_s=50.0)
LAYOUT = Parallelism(tp_size=4, cp_size=2, pp_size=4, vpp_size=8, dp_size=2, sequence_parallel=True)
EXPERTS = Parallelism(
    tp_size=2,
    cp_size=2,
    pp_size=4,
    vpp_size=8,
    dp_size=2,
    ep_size=8,
    etp_size=1,
    sequence_parallel=True,
)


def run_with(
    host_gib: float,
    limit_gib: float = 65.0,
    machine: Hardware = MACHINE,
    *,
    model: str = "7b",
    layout: Parallelism = LAYOUT,
) -> Run:
    shape = padded_vocabulary(load_model(model), 8)
    execution = Execution(layout, host_gib=host_gib)
    return Run(shape, execution, machine, WINDOW, 8 * layout.dp_size, memory_gib=limit_gib)


def planner_of(run: Run, packing: str = "slim", num_steps: int = NUM_STEPS) -> Planner:
    setting = PackingSettings.parse(packing, WINDOW, 2 * WINDOW)
    source = LengthSource.of_distribution("reference")
    return run.workload(source, seed=1).planner(setting, num_steps, costs=run.costs)


def steps(run: Run, packing: str = "slim", num_steps: int = NUM_STEPS) -> list[StepPlan]:
    return list(planner_of(run, packing, num_steps).plans(num_steps))


def peak_gib(run: Run, plans: list[StepPlan]) -> float:
    simulator = Simulator(run.costs, run.parallelism, memory=run.memory)
    return max(held.peak_bytes for plan in plans for held in simulator.plan_memory(plan)) / GIB


def total_us(run: Run, plans: list[StepPlan]) -> float:
    return sum(Simulator(run.costs, run.parallelism).step(plan).step_us for plan in plans)


def num_hosted(plans: list[StepPlan]) -> int:
    return sum(m.recomputed == HOST for plan in plans for m in plan)


def test_waiting_in_the_hosts_memory_is_faster_than_recomputing() -> None:
    free, within, without = run_with(0.0, 1000.0), run_with(200.0), run_with(0.0)
    plain, hosted, recomputed = (steps(run, "slim:24") for run in (free, within, without))
    assert peak_gib(free, plain) > 80.0
    for run, plans in ((within, hosted), (without, recomputed)):
        assert peak_gib(run, plans) <= 65.0
    assert num_hosted(hosted) and not num_hosted(recomputed)
    least_us, us, more_us = (
        total_us(run, plans)
        for run, plans in ((free, plain), (within, hosted), (without, recomputed))
    )
    assert least_us <= us < least_us + 0.6 * (more_us - least_us)


def test_no_step_is_above_the_limit() -> None:
    """One of these fits only if what would wait in the host's memory is recomputed."""
    layout = dataclasses.replace(LAYOUT, tp_size=2, dp_size=4)
    run = dataclasses.replace(run_with(120.0, layout=layout), num_micro_batches=16)
    source = LengthSource.of_distribution("reference")
    setting = PackingSettings.parse("slim:16", WINDOW, WINDOW)
    plans = [*run.workload(source, seed=2).planner(setting, 16, costs=run.costs).plans(16)]
    assert peak_gib(run, plans) <= 65.0
    kinds = [{m.recomputed for m in own} for plan in plans for own in plan.micro_batches]
    assert any(HOST in own for own in kinds)
    assert any(LAYERS in own and HOST not in own for own in kinds)


def test_a_device_without_need_sends_nothing() -> None:
    plans, before = steps(run_with(200.0, 1000.0)), steps(run_with(0.0, 1000.0))
    assert not num_hosted(plans)
    assert [plan.digest for plan in plans] == [plan.digest for plan in before]


def test_plan_says_what_is_hosted_and_through_which_windows() -> None:
    plans = steps(run_with(200.0))
    plan = next(plan for plan in plans if num_hosted([plan]))
    assert 65.0 * GIB / 16 <= plan.window_bytes <= 65.0 * GIB / 8
    others = [
        dataclasses.replace(plan, window_bytes=0.0),
        dataclasses.replace(
            plan,
            micro_batches=tuple(
                tuple(dataclasses.replace(m, recomputed=0) for m in own)
                for own in plan.micro_batches
            ),
        ),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 3


@pytest.mark.parametrize("host_gib", [50.0, 60.0])
def test_hosts_memory_suffices_on_every_rank(host_gib: float) -> None:
    run = run_with(host_gib)
    most = 0.0
    for plan in steps(run, "slim:24", 2 * NUM_STEPS):
        for units in Simulator(run.costs, run.parallelism, memory=run.memory)._sliced(plan)[1]:
            given = [unit for unit in units if unit.recomputed == HOST]
            for tapes in run.memory.tapes:
                kept = sum(
                    run.memory.hosted_bytes(tape, UnitTable.of(given)).sum() for tape in tapes
                )
                most = max(most, float(kept) / GIB)
    assert 0 < most <= host_gib


class OneRank:
    """The passes of one chain, and what they save: what :func:`room._choose` asks of a program."""

    def __init__(self, saved: npt.NDArray[np.float64]) -> None:
        self._saved = saved  # [kinds, units]
        self.kinds = [MLPS, LAYERS, HOST]

    def passes(self, rank: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        forwards = np.arange(self._saved.shape[1])[:, None]
        return forwards, 2 * len(forwards) - 1 - forwards

    def saved(self, rank: int) -> npt.NDArray[np.float64]:
        return self._saved[:, :, None]


@pytest.mark.parametrize("seed", range(30))
def test_choice_counts_what_hosted_units_hold_while_they_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num = int(rng.integers(2, 8))
    layers, share = rng.uniform(1, 9, num), rng.uniform(0.3, 0.7, num)
    saved = np.array([0 * layers, share * layers, layers, 1.2 * layers])
    prices = np.array([0 * layers, *rng.uniform(0.1, 5, (3, num))])
    before = rng.uniform(-5, 25, 2 * num)
    left, again = before.copy(), np.zeros(num, dtype=np.int64)
    host_bytes = float(rng.uniform(0, 2) * saved[HOST].sum())
    program = OneRank(saved)
    room._choose(program, 0, left, prices, again, saved[HOST], host_bytes)  # type: ignore[arg-type]
    true = before.copy()
    for unit, kind in enumerate(again.tolist()):
        is_hosted = kind == HOST
        true[unit + is_hosted : 2 * num - unit - is_hosted] -= saved[kind, unit]
    assert left == pytest.approx(true)
    assert saved[HOST, again == HOST].sum() <= host_bytes
    if (true > 0).any():  # all is recomputed that would help
        over = [at for at in range(2 * num) if true[at] > 0]
        assert all(again[unit] == LAYERS for at in over for unit in [min(at, 2 * num - 1 - at)])


def test_slow_link_is_not_used() -> None:
    slow = dataclasses.replace(MACHINE, host_link_gb_s=2.0)
    assert not num_hosted(steps(run_with(200.0, machine=slow)))


def test_replicas_that_meet_host_the_same() -> None:
    fast = dataclasses.replace(MACHINE, host_link_gb_s=400.0)
    mixtral = {"model": "mixtral-8x7b", "layout": EXPERTS, "machine": fast}
    free = run_with(0.0, 1000.0, **mixtral)
    limit_gib = 0.75 * peak_gib(free, steps(free, "slim:32"))
    run = run_with(200.0, limit_gib, **mixtral)
    assert run.alike == 2
    plans = steps(run, "slim:32")
    assert num_hosted(plans)
    for plan in plans:
        first, *others = [[m.recomputed for m in own] for own in plan.micro_batches]
        assert all(other == first for other in others)
    assert peak_gib(run, plans) <= limit_gib
    assert total_us(run, plans) >= total_us(free, [without_hosts(plan) for plan in plans])


def without_hosts(plan: StepPlan) -> StepPlan:
    ranks = [
        tuple(dataclasses.replace(m, recomputed=m.recomputed % HOST) for m in own)
        for own in plan.micro_batches
    ]
    return dataclasses.replace(plan, micro_batches=tuple(ranks), window_bytes=0.0)


def test_resumed_run_plans_the_same() -> None:
    run = run_with(200.0)
    planner = planner_of(run)
    list(planner.plans(2))
    state = json.loads(json.dumps(planner.state_dict()))
    assert state["slicing"]["windows"] in (8, 10, 12, 16)
    rest = [plan.digest for plan in planner.plans(2)]
    other = planner_of(run)
    other.load_state_dict(state)
    assert [plan.digest for plan in other.plans(2)] == rest
    elsewhere = planner_of(run_with(0.0))  # which chooses anew
    elsewhere.load_state_dict(state)
    assert not num_hosted(list(elsewhere.plans(2)))


def test_nothing_waits_where_all_layers_are_recomputed() -> None:
    run = run_with(200.0, 40.0).executed(recompute=Recompute("full", "uniform", 1))
    assert not num_hosted(steps(run))


def test_machine_without_the_figure_is_refused() -> None:
    unknown = dataclasses.replace(H100, host_link_gb_s=None)
    with pytest.raises(ConfigError, match=r"--wlb-host-gib is 200, .* figure host_link_gb_s"):
        planner_of(run_with(200.0, machine=unknown))


def test_strategies_have_no_such_memory(caplog: pytest.LogCaptureFixture) -> None:
    config = parse(["--wlb-strategies", "tp1", "--wlb-host-gib", "5"])
    assert execution(config).host_gib == 0.0
    guards.check(config, 1)
    assert "--wlb-host-gib 5.0 has no effect: it counts only with one layout" in caplog.text


def test_host_that_has_no_memory_changes_nothing() -> None:
    run = run_with(0.0)
    assert [plan.digest for plan in steps(run)] == [
        plan.digest
        for plan in steps(run_with(0.0, machine=dataclasses.replace(MACHINE, host_link_gb_s=None)))
    ]
    assert isinstance(run.memory_limit, MemoryLimit) and not run.memory_limit.host_bytes
    slicer = planner_of(run).slicing
    assert isinstance(slicer, Slicer) and slicer.windows == 0


def test_hosted_bytes_are_what_a_pass_keeps_but_what_it_received() -> None:
    run = run_with(0.0)
    (tape, *_), *_ = run.memory.tapes
    last = run.memory.tapes[-1][-1]
    (first, end) = (
        run.memory.hosted_bytes(of, UnitTable.of([Unit(1000)]))[0] for of in (tape, last)
    )
    assert 0.9 * 1000 * tape.saved_per_token < first <= 1000 * tape.saved_per_token
    assert end == pytest.approx(1000 * (last.saved_per_token - last.operations[0].saved), rel=1e-3)


def test_samples_that_wait_in_the_host_s_memory_have_windows_too() -> None:
    run = run_with(64.0, 14.0, layout=dataclasses.replace(LAYOUT, cp_size=1))
    given = run.cost, run.costs, run.parallelism
    plan = plan_step([60000, *[1000] * 31], 65536, *given, slices=True, memory=run.memory_limit)
    assert num_hosted([plan]) and plan.window_bytes > 0
    assert peak_gib(run, [plan]) <= 14
