from __future__ import annotations

import pytest

from megatron_wlb.cost import DocumentCost, Execution, MemoryModel, ModelShape, Parallelism
from megatron_wlb.cost.schedule.order import Action
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.simulator.engine import Interval, Timeline
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.simulator.trace import trace

SHAPE = ModelShape(64, 128, 4, 4, 4, 16, 512, False)
LENGTHS = [[[30], [20, 5], [25]], [[10], [40], [9, 9]]]


@pytest.fixture(scope="module")
def line():
    layout = Parallelism(pp_size=2, dp_size=2)
    costs = StepCosts(
        StageCosts.even(DocumentCost(3.0, 0.5, 6.0, 1.25), 2),
        reduce_us=(50.0, 70.0),
        update_us=(11.0, 7.0),
    )
    return Simulator(
        costs,
        layout,
        memory=MemoryModel(SHAPE, Execution(layout)),
    ).step(LENGTHS)


def test_trace_has_every_action_where_it_ran(line):
    events = trace({"hold": line})["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "hold, data-parallel rank 0", 1: "hold, data-parallel rank 1"}
    found = {
        (e["pid"], e["tid"], e["name"]): (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X" and e["tid"] < 2
    }
    assert len(found) == 2 * 2 * 6
    for dp_rank, replica in enumerate(line.replicas):
        for rank, intervals in enumerate(replica.intervals):
            for i in intervals:
                times = found[dp_rank, rank, str(i.action)]
                assert times == pytest.approx((i.start_us, i.stop_us))
    whole = [e["ts"] + e["dur"] for e in events if e["ph"] == "X"]
    assert max(whole) == pytest.approx(line.step_us)
    assert {e["name"] for e in events if e.get("tid", 0) >= 2 and e["ph"] == "X"} == {
        "reduce 0",
        "update",
    }


def test_trace_marks_what_is_critical_and_counts_memory(line):
    events = trace({"hold": line})["traceEvents"]
    critical = {
        (e["pid"], e["tid"] % 2, e["name"]) for e in events if e.get("args", {}).get("critical")
    }
    path = {(p.dp_rank, p.pp_rank, p.what) for p in line.critical_path}
    assert {(d, r, what) for d, r, what in path if d >= 0} <= critical
    assert len(critical) < len([e for e in events if e["ph"] == "X"])
    for dp_rank, memory in enumerate(line.memory):
        for rank, held in enumerate(memory.ranks):
            counted = [
                e["args"]["bytes"]
                for e in events
                if e["ph"] == "C" and e["pid"] == dp_rank and e["name"].endswith(f"rank {rank}")
            ]
            assert max(counted) == held.state.total + held.activation_peak_bytes
            assert counted[-1] == pytest.approx(held.state.total)


def test_trace_of_several_and_recorded_timelines_begin_at_zero(line):
    recorded = Timeline(((Interval(1000.0, 1003.0, Action("F", 0, 0)),), ()))
    events = trace({"hold": line, "measured": recorded})["traceEvents"]
    mine = [e for e in events if e["pid"] == 2]
    assert [(e["ts"], e["dur"]) for e in mine if e["ph"] == "X"] == [(0.0, 3.0)]
