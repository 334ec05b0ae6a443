"""What of hosted micro-batches is on the device, and when their copies end."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.schedule.hosting import Window, held_amounts, hosted_passes
from megatron_wlb.cost.schedule.messages import slice_graph
from megatron_wlb.cost.schedule.order import sliced


@pytest.mark.parametrize("seed", range(20))
def test_windows_hold_no_more_than_they_may(seed: int) -> None:
    rng = random.Random(seed)
    pp_size, vpp_size = rng.choice([1, 2, 4]), rng.choice([1, 2, 3])
    chains = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
    num, most = sum(chains), rng.choice([0.0, 5.0, 20.0])
    hosted = [rng.random() < 0.7 for _ in range(num)]
    amounts = np.array([[rng.uniform(1, 4) for _ in range(num)] for _ in range(vpp_size)])
    for actions in sliced(pp_size, chains, vpp_size):
        held = held_amounts(actions, hosted, amounts, most)
        assert held.max() <= 2 * most + 4 and held.min() >= -1e-9
        out: set[tuple[int, int]] = set()
        window = Window(hosted_passes(actions, hosted), most)
        ran: set[tuple[int, int]] = set()
        for action in actions:
            moves, one = window.before(action), (action.chunk, action.micro_batch)
            out |= set(moves.gone)
            assert set(moves.comes) <= out
            out -= set(moves.comes)
            if not hosted[action.micro_batch]:
                continue
            if action.kind == "B":
                assert one in ran and one not in out  # all of it is there again
            ran.add(one)
            window.behind(action, float(amounts[one]))
        assert not out and window.held == pytest.approx(0.0)


GRAPH = slice_graph(1, (3,))
TIMES = np.array([[[10.0] * 3], [[20.0] * 3]])
NO_GAPS = np.zeros(3)


def step_us(copy_us: float, window_us: float, hosted: list[bool], gaps: Floats = NO_GAPS) -> float:
    copies = GRAPH.copies(np.full((1, 3), copy_us), hosted, window_us)
    return float(GRAPH.step_us(TIMES, gaps, [copies]))


def test_copies_beside_passes_take_no_time() -> None:
    assert step_us(1e6, 0.0, [False] * 3) == 90.0
    assert step_us(5.0, 10.0, [True, True, False]) == 90.0
    # The last slice is in the window when its backward comes, and its copy has to end.
    assert step_us(25.0, 100.0, [False, False, True]) == 30.0 + 25.0 + 60.0


def test_passes_wait_for_copies() -> None:
    # 0 is copied from 10 to 50. Nothing may lag behind, so 1 starts at 50, and 2 at 50 + 10. Then 0
    # comes while 2 runs backward (70 to 90) and 1 (90 to 110), from 70 on: as no room is left, it
    # waits for 2 to be through.
    assert step_us(40.0, 0.0, [True, False, False]) == 50 + 2 * 10 + 20 + 20 + 20
    # Both go and come one after the other.
    assert step_us(40.0, 0.0, [True, True, False]) > step_us(40.0, 0.0, [True, False, False])
    assert step_us(40.0, 80.0, [True, False, False]) == 90.0


def test_alternatives_are_replayed_as_each_alone() -> None:
    graph = slice_graph(2, (4, 1, 2), 2)
    rng = np.random.default_rng(3)
    times, gaps = rng.uniform(1, 3, (2, 4, 7, 3)), rng.uniform(0, 0.2, (7, 3))
    copies = [
        graph.copies(rng.uniform(1, 5, (4, 7)), list(rng.random(7) < 0.6), window)
        for window in (0.0, 3.0, 9.0)
    ]
    copies[1] = None
    alone = [graph.step_us(times[..., k], gaps[:, k], [own]) for k, own in enumerate(copies)]
    assert graph.step_us(times, gaps, copies).tolist() == alone
    assert graph.step_us(times, gaps).tolist() < alone
    own = graph.replay(times[..., 0], gaps[:, 0], copies=copies[:1])
    np.testing.assert_allclose(graph.by_action(own.stop_us - own.start_us), times[..., 0])
    # Met in each pass, none is faster than alone.
    met = graph.replay(times, gaps, together=3, stages=[True] * 4, copies=copies)
    assert (met.stop_us.max(axis=0) >= alone).all()


def test_hosting_never_makes_a_step_shorter() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        graph = slice_graph(4, (5, 2, 1, 3))
        times, gaps = rng.uniform(1, 3, (2, 4, 11)), rng.uniform(0, 0.2, 11)
        hosted = list(rng.random(11) < 0.5)
        us = [
            float(graph.step_us(times, gaps, [graph.copies(np.full((4, 11), each), hosted, 2.0)]))
            for each in (0.0, 0.5, 2.0, 8.0)
        ]
        assert us[0] == float(graph.step_us(times, gaps)) and us == sorted(us)
