"""Plans in which micro-batches wait in the host's memory: when, how many, and for what."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.machines import H100
from helpers.sliced import REFERENCE, WINDOW, peak_gib, planner_of, run_in, total_us

from megatron_wlb.cost import Hardware, Parallelism, Recompute
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.slices import HOST, LAYERS, Unit, UnitTable
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning import guards
from megatron_wlb.planning.balance.samples import plan_step
from megatron_wlb.planning.from_config import execution
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.settings.command_line import parse
from megatron_wlb.simulator.step import Simulator

MACHINE = dataclasses.replace(H100, host_link_gb_s=50.0)
LAYOUT = Parallelism(tp_size=4, cp_size=2, pp_size=4, vpp_size=8, dp_size=2, sequence_parallel=True)
EXPERTS = dataclasses.replace(LAYOUT, tp_size=2, ep_size=8, etp_size=1)


def run_with(
    host_gib: float, limit_gib: float = 65.0, machine: Hardware = MACHINE,
    layout: Parallelism = LAYOUT, model: str = "7b",
) -> Run:  # fmt: skip
    return run_in(limit_gib, layout, 8, model=model, machine=machine, host_gib=host_gib)


def steps(run: Run, packing: str = "slim", num_steps: int = 4) -> list[StepPlan]:
    return list(planner_of(run, packing, num_steps).plans(num_steps))


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
    setting = PackingSettings.parse("slim:16", WINDOW, WINDOW)
    plans = [*run.workload(REFERENCE, seed=2).planner(setting, 16, costs=run.costs).plans(16)]
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
    for plan in steps(run, "slim:24", 8):
        for units in Simulator(run.costs, run.parallelism, memory=run.memory)._sliced(plan)[1]:
            given = [unit for unit in units if unit.recomputed == HOST]
            for tapes in run.memory.tapes:
                kept = sum(
                    run.memory.hosted_bytes(tape, UnitTable.of(given)).sum() for tape in tapes
                )
                most = max(most, float(kept) / GIB)
    assert 0 < most <= host_gib


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


def test_nothing_waits_where_all_layers_are_recomputed() -> None:
    run = run_with(200.0, 40.0).executed(recompute=Recompute("full", "uniform", 1))
    assert not num_hosted(steps(run))


def test_machine_without_the_figure_is_refused() -> None:
    unknown = dataclasses.replace(H100, host_link_gb_s=None)
    with pytest.raises(ConfigError, match=r"--wlb-host-gib is 200, .* lacks host_link_gb_s"):
        planner_of(run_with(200.0, machine=unknown), "slim", 4)


def test_strategies_have_no_such_memory(caplog: pytest.LogCaptureFixture) -> None:
    config = parse(["--wlb-strategies", "tp1", "--wlb-host-gib", "5"])
    assert execution(config).host_gib == 0.0
    guards.check(config, 1)
    assert "--wlb-host-gib 5.0 has no effect: it counts only with one layout" in caplog.text


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
