from __future__ import annotations

import numpy as np
import pytest

from megatron_wlb.cost.schedule.graph import Graph
from megatron_wlb.cost.schedule.order import Action, one_f_one_b
from megatron_wlb.errors import PlanError
from megatron_wlb.simulator.engine import Interval, Timeline, check_times, timeline

F, B = "F", "B"


def gpipe(pp_size, num_micro_batches):
    """An order that is none of Megatron's: all forwards first."""
    return [[Action(kind, 0, m) for kind in (F, B) for m in range(num_micro_batches)]] * pp_size


def replay(order, forward_us, backward_us, p2p_us=0.0, sends="buffered"):
    """Times are ``[pp_size][vpp_size][num_micro_batches]``."""
    graph = Graph(order, sends)
    times_us = np.zeros((2, graph.num_stages, graph.num_micro_batches))
    for kind, times in enumerate((forward_us, backward_us)):
        for rank, chunks in enumerate(times):
            times_us[kind, rank :: graph.pp_size] = chunks
    p2p = np.full(graph.num_micro_batches, p2p_us)
    return timeline(graph, graph.replay(times_us, p2p))


def uniform(sizes, time_us):
    pp_size, vpp_size, num_micro_batches, *_ = sizes
    return [[[time_us] * num_micro_batches] * vpp_size] * pp_size


@pytest.mark.parametrize("sends", ["buffered", "blocking"])
@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 9])
def test_replay_of_equal_micro_batches_is_the_closed_form_of_1f1b_and_gpipe(
    pp_size, num_micro_batches, make, sends
):
    """Step (N + P - 1)·(f + b), so the bubble is (P - 1)/N of the ideal time."""
    sizes = (pp_size, 1, num_micro_batches)
    order = make(pp_size, num_micro_batches)
    timeline = replay(order, uniform(sizes, 3.0), uniform(sizes, 7.0), sends=sends)
    ideal_us = num_micro_batches * 10.0
    assert timeline.step_us == ideal_us + (pp_size - 1) * 10.0
    assert timeline.busy_us == (ideal_us,) * pp_size
    bubble_us = timeline.bubble_share * timeline.step_us
    assert bubble_us / ideal_us == pytest.approx((pp_size - 1) / num_micro_batches, rel=1e-12)


def test_replay_shows_the_heavy_micro_batch_on_every_stage():
    """By hand: 2 ranks, 3 micro-batches, backward twice the forward, the middle one heavy."""
    times = [[[1.0, 4.0, 1.0]]] * 2
    doubled = [[[2.0, 8.0, 2.0]]] * 2
    timeline = replay(one_f_one_b(2, 3), times, doubled, p2p_us=0.5)

    def intervals(rank):
        return [(str(i.action), i.start_us, i.stop_us) for i in timeline.intervals[rank]]

    assert intervals(0) == [
        ("F0.0", 0.0, 1.0),
        ("F0.1", 1.0, 5.0),
        ("B0.0", 5.0, 7.0),
        ("F0.2", 7.0, 8.0),
        ("B0.1", 18.0, 26.0),
        ("B0.2", 26.0, 28.0),
    ]
    assert intervals(1) == [
        ("F0.0", 1.5, 2.5),
        ("B0.0", 2.5, 4.5),
        ("F0.1", 5.5, 9.5),
        ("B0.1", 9.5, 17.5),
        ("F0.2", 17.5, 18.5),
        ("B0.2", 18.5, 20.5),
    ]
    assert timeline.step_us == 28.0
    assert timeline.busy_us == (18.0, 18.0)
    assert timeline.bubble_share == 1 - 36 / 56


def test_timeline_may_be_recorded_and_start_at_any_time():
    timeline = Timeline(
        (
            (Interval(100.0, 103.0, Action(F, 0, 0)), Interval(110.0, 117.0, Action(B, 0, 0))),
            (Interval(104.0, 109.0, Action(F, 0, 0)), Interval(109.0, 110.0, Action(B, 0, 0))),
        )
    )
    assert (timeline.start_us, timeline.step_us, timeline.busy_us) == (100.0, 17.0, (10.0, 6.0))
    assert timeline.bubble_share == 1 - 16 / 34


def test_timeline_without_actions_has_no_bubble():
    assert Timeline(((), ())).bubble_share == 0.0
    assert replay([], [], []).step_us == 0.0


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(wrong):
    with pytest.raises(PlanError, match=f"p2p_us: {wrong} µs is not a duration"):
        check_times("p2p_us", np.array([1.0, wrong, 1.0]))
