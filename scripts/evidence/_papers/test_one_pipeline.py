from __future__ import annotations

from itertools import pairwise

import pytest

from _papers.one_pipeline import (
    BACKWARD,
    BOTH,
    FORWARD,
    PP_SIZE,
    SLICE_MULTIPLE,
    Cut,
    Pass,
    Piece,
    cut,
    pipeline,
    step_us,
    unlike,
)
from _papers.paper import Effort

LENGTHS = (90_000, 40_000, 17_000, *range(6000, 300, -150), 200, 100)
QUICK = Effort(5, (1,), warm_up=5)


def check(units: Cut, last_first: bool) -> None:
    """Every token once, documents in turn, each in the direction of its pass."""
    pieces = [piece for unit in units for piece in unit]
    assert [p.document for p in pieces] == sorted(p.document for p in pieces)
    for document, length in enumerate(LENGTHS):
        own = [p for p in pieces if p.document == document][:: -1 if last_first else 1]
        assert [own[0].start, own[-1].stop] == [0, length]
        for before, after in pairwise(own):
            assert before.stop == after.start and not after.start % SLICE_MULTIPLE


@pytest.mark.parametrize("cost", [FORWARD, BACKWARD, BOTH])
@pytest.mark.parametrize("last_first", [False, True])
def test_cut_makes_units_of_equal_cost(cost: Pass, last_first: bool) -> None:
    units = cut(LENGTHS, 24, cost, last_first=last_first)
    check(units, last_first)
    times_us = [sum(map(cost.us, unit)) for unit in units]
    assert len(units) == 24
    assert max(times_us) < 1.05 * sum(times_us) / 24
    whole_us = sum(cost.us(Piece(0, 0, length)) for length in LENGTHS)
    assert sum(times_us) == pytest.approx(whole_us)


def test_cuts_of_unlike_costs_differ() -> None:
    forward, backward = (cut(LENGTHS, 24, cost) for cost in (FORWARD, BACKWARD))
    # Attention weighs more backward. The first slice has least of it, so it is longer there.
    assert forward[0][0].stop < backward[0][0].stop


def test_step_of_one_unit_runs_through_all_ranks_and_back() -> None:
    whole: Cut = [[Piece(0, 0, 1000)]]
    assert step_us(whole, whole) == pytest.approx(BOTH.us(whole[0][0]))


def test_step_waits_for_all_forwards_of_a_document() -> None:
    halves: Cut = [[Piece(0, 0, 512)], [Piece(0, 512, 1024)]]
    times = [FORWARD.us(unit[0]) / PP_SIZE for unit in halves]
    backward: Cut = [halves[1], halves[0]]
    back = [BACKWARD.us(unit[0]) / PP_SIZE for unit in backward]
    # The second half is the heavier one in both passes.
    least = times[0] + PP_SIZE * times[1] + PP_SIZE * back[0] + back[1]
    assert step_us(halves, backward) == pytest.approx(least)


def test_backward_units_of_their_own_gain_less_than_a_hundredth() -> None:
    for number in (4, 16):
        found = unlike(number, QUICK)
        (own,), (bound,) = found.speedup["own cuts"], found.speedup["no bubbles"]
        assert 0.99 < own < 1.01 < bound < 1.09
        assert found.speedup["unions of 4"][0] < found.speedup["unions of 2"][0] < 1
        assert found.num_units >= 8 * 4


def test_slices_beat_interleaved_hold_with_the_same_sharding_and_need_less_memory() -> None:
    (stock, original), (hold,), (slim,) = (
        pipeline("original", 4, 1, QUICK, ["per-sequence", "adaptive"]),
        pipeline("hold", 4, 4, QUICK),
        pipeline("slim", 4, 1, QUICK),
    )
    assert original.speedup(stock) > 1.05  # of the sharding alone
    assert {one.sharding for one in (original, hold, slim)} == {"adaptive"}
    assert slim.speedup(original) > 1.03 * hold.speedup(original)
    assert slim.peak_bytes < original.peak_bytes < hold.peak_bytes
    assert slim.speedup(original) < 1 / (1 - original.bubble_share)
