"""Which micro-batches of slices are recomputed: few, alike where replicas meet."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.machines import H100
from helpers.sliced import REFERENCE, WINDOW, peak_gib, planner_of, run_in, total_us

from megatron_wlb.cost import Execution, MemoryModel, Parallelism, Recompute
from megatron_wlb.cost.schedule.order import sliced
from megatron_wlb.cost.slices import LAYERS, MLPS, Slice, Unit, UnitTable
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.from_config import tell_memory
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.runtime.stepping.merge import check_merged
from megatron_wlb.settings.config import Config, WlbConfig

TP8 = Parallelism(tp_size=8, pp_size=4, sequence_parallel=True)
FULL = Recompute("full", "uniform", 1)


def steps(run: Run, packing: str = "slim:16", num: int = 6, **more: object) -> list[StepPlan]:
    return list(planner_of(run, packing, num, **more).plans(num))


def again(table: UnitTable, *what: int) -> UnitTable:
    return table._replace(recomputed=np.array(what, dtype=float))


@pytest.mark.parametrize("vpp_size", [1, 2])
def test_steps_fit_by_recomputing_some(vpp_size: int) -> None:
    layout = replace(TP8, vpp_size=vpp_size)
    free = run_in(1000.0, layout)
    plain = steps(free)
    assert not any(m.recomputed for plan in plain for m in plan)
    limit = 0.7 * peak_gib(free, plain)
    tight = run_in(limit, layout)
    fitting = steps(tight)
    assert peak_gib(tight, fitting) <= limit
    for before, plan in zip(plain, fitting, strict=True):
        assert [m.spans for m in before] == [m.spans for m in plan]
        if peak_gib(free, [before]) <= limit:
            assert not any(m.recomputed for m in plan)
    shares = [np.mean([m.recomputed > 0 for m in plan]) for plan in fitting]
    assert 0 < np.mean(shares) < 0.5
    times = [total_us(free, some) for some in (plain, fitting)]
    all_us = total_us(run_in(1000.0, layout, recompute=FULL), plain)
    assert times[0] < times[1] < times[0] + 0.5 * (all_us - times[0])


def test_mlps_are_recomputed_where_that_is_enough() -> None:
    """They take less time than layers, for about half of the bytes; without biases alone."""
    free = run_in(1000.0, TP8)
    limit = 0.75 * peak_gib(free, steps(free))
    tight = run_in(limit, TP8)
    found = [m for plan in steps(tight) for m in plan]
    assert any(m.recomputed == MLPS for m in found)
    units = [m for m in found if m.recomputed]
    layers_us, mlps_us = 0.0, 0.0
    for m in units:
        known = UnitTable.starting([m.prefixes[0]])
        plain, mlps, layers = (
            tight.costs.stages.times_us([m.lengths], None, again(known, what)).sum()
            for what in (0, MLPS, LAYERS)
        )
        assert plain < mlps < layers
        layers_us, mlps_us = layers_us + layers - plain, mlps_us + mlps - plain
    assert mlps_us < 0.6 * layers_us
    assert tight.memory.shape.linear_bias is False
    biased = replace(tight, shape=replace(tight.shape, linear_bias=True))
    kinds = {m.recomputed for plan in steps(biased) for m in plan}
    assert kinds == {0, LAYERS}


def test_choosing_how_ranks_share_a_slice_leaves_what_is_recomputed() -> None:
    """A selector writes micro-batches anew (CP=2)."""
    layout = replace(TP8, tp_size=4, cp_size=2)
    free = run_in(None, layout)
    run = run_in(0.7 * peak_gib(free, steps(free)), layout)
    setting = PackingSettings.parse("slim:16", WINDOW, 2 * WINDOW)
    workload = run.workload(REFERENCE, seed=1)
    without, chosen = (
        list(workload.planner(setting, 6, costs=run.costs, selector=selector).plans(6))
        for selector in (None, run.selector("adaptive"))
    )
    assert any(m.recomputed for plan in chosen for m in plan)
    assert len({m.sharding for plan in chosen for m in plan}) > 1
    for before, plan in zip(without, chosen, strict=True):
        assert [m.recomputed for m in before] == [m.recomputed for m in plan]


def test_none_is_recomputed_where_that_is_off_or_layers_are_anyhow() -> None:
    for run, more in (
        (run_in(20.0, TP8), {"recompute": "off"}),
        (run_in(20.0, TP8, recompute=FULL), {}),
    ):
        assert not any(m.recomputed for plan in steps(run, num=2, **more) for m in plan)


def test_a_machine_s_memory_is_the_limit_unless_another_is_given() -> None:
    small = replace(run_in(None, TP8), hardware=replace(H100, memory_gib=36.0))
    assert any(m.recomputed for plan in steps(small) for m in plan)
    assert not any(m.recomputed for plan in steps(run_in(None, TP8)) for m in plan)


def test_replicas_that_meet_recompute_alike() -> None:
    layout = replace(TP8, dp_size=2)
    meeting = run_in(25.0, layout).executed(replicas_meet=True)
    plans = steps(meeting)
    for plan in plans:
        first, second = ([m.recomputed for m in own] for own in plan.micro_batches)
        assert first == second
    assert any(m.recomputed for plan in plans for m in plan)


def test_documents_of_several_replicas_are_recomputed_on_all_of_them() -> None:
    run = replace(run_in(13.0, replace(TP8, dp_size=4)), num_micro_batches=4)
    source = LengthSource.of_lengths("one", np.array([131072, *[1024] * 100]))
    planner = planner_of(run, "slim:16", 3, source)
    again = set()
    for plan in planner.plans(3):
        check_merged(plan)
        assert peak_gib(run, [plan]) <= 13.0
        again |= {m.recomputed for m in plan if m.replicas}
    assert again == {0, MLPS, LAYERS}


@pytest.mark.parametrize("kernels", ["fused", "torch"])
def test_recomputed_units_hold_what_all_do_under_full_recomputation(kernels: str) -> None:
    shape = load_model("550m")
    layout = Parallelism(pp_size=2, vpp_size=2)
    plain, full = (
        MemoryModel(shape, Execution(layout, recompute, kernels=kernels))
        for recompute in (Recompute(), FULL)
    )
    units = [Unit(900, Slice(0, 0, 900, 2000)), Unit(1100, Slice(0, 900, 2000, 2000)), Unit(512)]
    again = [unit._replace(recomputed=LAYERS) for unit in units]
    for rank, actions in enumerate(sliced(2, [2, 1], 2)):
        expected = full.program_bytes(rank, actions, UnitTable.of(units))
        assert plain.program_bytes(rank, actions, UnitTable.of(again)) == expected
        assert plain.program_bytes(rank, actions, UnitTable.of(units)) != expected


def test_time_of_recomputed_units_is_that_of_full_recomputation() -> None:
    layout = Parallelism(tp_size=2, cp_size=2, pp_size=4, sequence_parallel=True)
    plain, full = (run_in(None, layout, recompute=r).costs.stages for r in (Recompute(), FULL))
    lengths, before = [[4096], [1024, 77], [513]], UnitTable.starting([8192, 0, 0])
    base = plain.times_us(lengths, None, before)
    found = plain.times_us(lengths, None, again(before, LAYERS, 0, LAYERS))
    expected = full.times_us(lengths, None, before)
    # In full recomputation a third of what a kernel takes besides its work counts again, too.
    assert found[:, :, [0, 2]] == pytest.approx(expected[:, :, [0, 2]], rel=0.01)
    assert (found[:, :, 1] == base[:, :, 1]).all()
    always = again(before, LAYERS, LAYERS, LAYERS)
    assert (plain.times_us(lengths, None, always) >= found).all()


def test_slices_for_a_device_of_another_size_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def told(packing: str, has_gib: float, **more: object) -> str:
        caplog.clear()
        wlb = WlbConfig(wlb_packing=packing, wlb_hardware="h100-sxm", **more)
        tell_memory(Config(wlb=wlb), has_gib)
        return caplog.text

    assert "planned for 74 GiB, which h100-sxm has, but this device has 140 GiB" in told(
        "slim", 139.8
    )
    assert "this device has 40 GiB" in told("slim", 39.6)
    assert not (told("slim", 79.2) or told("hold", 139.8))
    assert not told("slim", 139.8, wlb_memory_gib=120.0)
