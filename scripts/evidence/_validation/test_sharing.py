from __future__ import annotations

import numpy as np
import pytest

from _validation.sharing import replay_shared
from megatron_wlb.cost.schedule.graph import graph_of
from megatron_wlb.errors import ConfigError
from megatron_wlb.simulator.engine import timeline


@pytest.mark.parametrize("sizes", [(2, 1, 3), (3, 1, 4), (2, 2, 4), (1, 1, 3)])
def test_ranks_with_cores_of_their_own_are_replayed_as_ever(sizes):
    graph = graph_of(*sizes)
    random = np.random.default_rng(1)
    times = random.lognormal(3, 1, (2, graph.num_stages, graph.num_micro_batches))
    p2p = random.random(graph.num_micro_batches) * 4
    expected = graph.replay(times, p2p)
    found = replay_shared(graph, times, p2p, range(graph.pp_size))
    assert found.start_us == pytest.approx(expected.start_us, rel=1e-9)
    assert found.stop_us == pytest.approx(expected.stop_us, rel=1e-9)


def test_ranks_that_share_a_core_go_on_at_half_the_speed():
    """By hand: rank 0 runs F0 alone, then its F1 beside rank 1's F0 and B0."""
    graph = graph_of(2, 1, 2)
    times = np.array([[[4.0, 6.0], [2.0, 1.0]], [[3.0, 1.0], [8.0, 2.0]]])
    line = timeline(graph, replay_shared(graph, times, np.zeros(2), [0, 0]))

    def intervals(rank):
        return [(str(i.action), i.start_us, i.stop_us) for i in line.intervals[rank]]

    assert intervals(0) == [
        ("F0.0", 0, 4),
        ("F0.1", 4, 16),  # 6 of work beside 2 and 4 of rank 1's
        ("B0.0", pytest.approx(20), pytest.approx(26)),  # 3 beside 1 and 2 of rank 1's
        ("B0.1", pytest.approx(26), pytest.approx(27)),
    ]
    assert intervals(1) == [
        ("F0.0", 4, 8),
        ("B0.0", 8, pytest.approx(20)),  # 4 of its 8 at half the speed, then 4 alone
        ("F0.1", pytest.approx(20), pytest.approx(22)),
        ("B0.1", pytest.approx(22), pytest.approx(26)),
    ]


def test_a_core_that_is_always_busy_takes_the_sum():
    graph = graph_of(3, 1, 4)
    times = np.random.default_rng(2).random((2, 3, 4)) + 1
    assert replay_shared(graph, times, np.zeros(4), [0, 0, 0]).stop_us.max() == pytest.approx(
        times.sum()
    )


def test_cores_have_to_be_given_for_all_ranks():
    with pytest.raises(ConfigError, match="cores for 1 ranks, but the pipeline has 2"):
        replay_shared(graph_of(2, 1, 2), np.ones((2, 2, 2)), np.zeros(2), [0])
