"""Plans whose slices' keys and values context-parallel ranks divide: when, and for what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.sliced import peak_gib, planner_of, run_in, total_us

from megatron_wlb.cost import Parallelism
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.step import Simulator, slowest_us

CP8 = Parallelism(cp_size=8, pp_size=4)


def steps(run: Run, cache: str) -> list[StepPlan]:
    return list(planner_of(run, "slim:16", 3, slice_cache=cache).plans(3))


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
    free = run_in(1000.0, CP8)
    assert not any(m.divided for plan in steps(free, "auto") for m in plan)
    limit_gib = 0.5 * peak_gib(free, steps(free, "whole"))
    tight = run_in(limit_gib, CP8)
    found = {cache: steps(tight, cache) for cache in ("auto", "whole", "divided")}
    assert any(m.divided for plan in found["auto"] for m in plan)
    assert peak_gib(tight, found["auto"]) <= limit_gib
    assert peak_gib(tight, found["whole"]) > limit_gib  # whatever is recomputed
    little = run_in(
        0.7 / 0.5 * limit_gib, CP8
    )  # where either will do, by the first step's documents
    taken_us = {c: total_us(little, steps(little, c)) for c in ("auto", "whole", "divided")}
    assert taken_us["auto"] <= 1.03 * min(taken_us.values())
    alone = replace(
        CP8, cp_size=1, tp_size=8, sequence_parallel=True
    )  # there is none to share with
    assert not any(m.divided for plan in steps(run_in(40.0, alone), "divided") for m in plan)
