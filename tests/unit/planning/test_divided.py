"""Plans whose slices' keys and values context-parallel ranks divide: when, and for what."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.machines import H100

from megatron_wlb.cost import Execution, Parallelism
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.model_file import load_model, padded_vocabulary
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.planner import Planner
from megatron_wlb.planning.run import Run
from megatron_wlb.planning.slicing.cut import Slicer
from megatron_wlb.simulator.step import Simulator, slowest_us

WINDOW = 131072
REFERENCE = LengthSource.of_distribution("reference")
CP8 = Parallelism(cp_size=8, pp_size=4)


def run_in(limit_gib: float, layout: Parallelism = CP8) -> Run:
    shape = padded_vocabulary(load_model("7b"), 8)
    return Run(shape, Execution(layout), H100, WINDOW, 4 * layout.dp_size, memory_gib=limit_gib)


def planner_of(run: Run, cache: str, packing: str = "slim:16") -> Planner:
    setting = PackingSettings.parse(packing, WINDOW, 2 * WINDOW, slice_cache=cache)
    return run.workload(REFERENCE, seed=1).planner(setting, 3, costs=run.costs)


def steps(run: Run, cache: str, packing: str = "slim:16") -> list[StepPlan]:
    return list(planner_of(run, cache, packing).plans(3))


def peak_gib(run: Run, plans: list[StepPlan]) -> float:
    simulator = Simulator(run.costs, run.parallelism, memory=run.memory)
    return max(held.peak_bytes for plan in plans for held in simulator.plan_memory(plan)) / GIB


def total_us(run: Run, plans: list[StepPlan]) -> float:
    return sum(Simulator(run.costs, run.parallelism).step(plan).step_us for plan in plans)


@pytest.mark.parametrize("layout", [CP8, replace(CP8, cp_size=2, dp_size=2, vpp_size=2)])
def test_divided_slices_need_less_memory_and_more_time(layout: Parallelism) -> None:
    run = run_in(1000.0, layout)
    whole, divided = steps(run, "whole"), steps(run, "divided")
    for plan in divided:
        assert all(m.divided == (m.slice is not None) for m in plan)
    pairs = list(zip(whole, divided, strict=True))
    assert all([m.spans for m in a] == [m.spans for m in b] for a, b in pairs)
    assert all(a.digest != b.digest for a, b in pairs)
    assert peak_gib(run, divided) < (0.6 if layout is CP8 else 0.95) * peak_gib(run, whole)
    assert total_us(run, whole) < total_us(run, divided) < 1.25 * total_us(run, whole)
    for one, other in pairs:  # the log's prediction knows it, too
        without, us = (slowest_us(plan, run.costs.stages, layout) for plan in (one, other))
        assert without < us <= Simulator(run.costs, layout).step(other).step_us


def test_auto_divides_where_that_is_faster_or_the_only_way() -> None:
    free = run_in(1000.0)
    assert not any(m.divided for plan in steps(free, "auto") for m in plan)
    limit_gib = 0.5 * peak_gib(free, steps(free, "whole"))
    tight = run_in(limit_gib)
    found = {cache: steps(tight, cache) for cache in ("auto", "whole", "divided")}
    assert any(m.divided for plan in found["auto"] for m in plan)
    assert peak_gib(tight, found["auto"]) <= limit_gib
    assert peak_gib(tight, found["whole"]) > limit_gib  # whatever is recomputed
    little = run_in(0.7 / 0.5 * limit_gib)  # where either will do, by the first step's documents
    taken_us = {c: total_us(little, steps(little, c)) for c in ("auto", "whole", "divided")}
    assert taken_us["auto"] <= 1.03 * min(taken_us.values())
    alone = replace(
        CP8, cp_size=1, tp_size=8, sequence_parallel=True
    )  # there is none to share with
    assert not any(m.divided for plan in steps(run_in(40.0, alone), "divided") for m in plan)


def test_memory_that_whole_keys_do_not_fit_is_enough_for_divided_ones() -> None:
    free = run_in(1000.0)
    limit_gib = 1.1 * peak_gib(free, steps(free, "divided"))
    slicers = [planner_of(run_in(limit_gib), cache).slicing for cache in ("whole", "auto")]
    whole, auto = (slicer for slicer in slicers if isinstance(slicer, Slicer))
    assert whole.peak_bytes > auto.peak_bytes
    assert auto.peak_bytes <= limit_gib * GIB


def test_resumed_planner_divides_as_before() -> None:
    tight = run_in(0.5 * peak_gib(run_in(1000.0), steps(run_in(1000.0), "whole")))
    planner = planner_of(tight, "auto")
    first = planner.next_plan()
    resumed = planner_of(tight, "auto")
    resumed.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    plans = [each.next_plan() for each in (planner, resumed)]
    assert first is not None and plans[0] is not None and plans[1] is not None
    assert plans[0].digest == plans[1].digest
    assert any(m.divided for m in plans[1])
