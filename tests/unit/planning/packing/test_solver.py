import logging
import sys
from itertools import chain, combinations

import pytest
from helpers.strategies import documents, reference_lengths

from megatron_wlb.cost import DocumentCost
from megatron_wlb.errors import ConfigError, PackingError
from megatron_wlb.planning.packing.base import Limits
from megatron_wlb.planning.packing.fixed import FixedGreedyPacker
from megatron_wlb.planning.packing.reference import REFERENCE_COST
from megatron_wlb.planning.packing.solver import FixedSolverPacker

pytest.importorskip("ortools", reason="the extra `solver` is not installed")

COST = DocumentCost(1, 0.1, 2, 0.25)
LIMITS = Limits(2, 10, 10, 20)


def loads(micro_batches, cost=COST):
    return [cost.total_us(d.length for d in m) for m in micro_batches]


def test_solver_finds_the_best_windows():
    some = [9, 6, 5, 8, 7]  # two windows of 20 tokens, none cut; LPT would keep 8, 7, 5 together
    limits = Limits(2, 20, 20, 40)
    packed = FixedSolverPacker(limits, COST).pack(documents(some), 0)
    best = min(
        max(loads([chosen, [d for d in documents(some) if d not in chosen]]))
        for size in range(len(some))
        for chosen in map(list, combinations(documents(some), size))
        if sum(some) - 20 <= sum(d.length for d in chosen) <= 20
    )
    assert max(loads(packed)) == pytest.approx(best, rel=1e-4)  # as far as work is rounded
    assert best < 0.99 * max(loads(FixedGreedyPacker(limits, COST).pack(documents(some), 0)))
    assert sorted(d.length for d in chain(*packed)) == sorted(some)


def test_solver_keeps_windows_where_longer_ones_would_be_better():
    """12 and 6 against 8, 7 and 7 would be even, but those are 22 tokens."""
    packed = FixedSolverPacker(Limits(2, 20, 20, 40), COST).pack(documents([12, 8, 7, 7, 6]), 0)
    assert [sum(d.length for d in m) for m in packed] == [20, 20]


def test_solver_balances_better_than_greedy():
    lengths = reference_lengths(4, seed=4)
    limits = Limits(4, 131072, 131072, 4 * 131072)
    solver = FixedSolverPacker(limits, REFERENCE_COST, limit=0.5)
    greedy = FixedGreedyPacker(limits, REFERENCE_COST)
    ours = max(loads(solver.pack(documents(lengths), 0), REFERENCE_COST))
    theirs = max(loads(greedy.pack(documents(lengths), 0), REFERENCE_COST))
    assert ours < theirs


def test_solver_balances_the_steps_of_several_batches():
    arriving = [*documents([10, 5, 5], 0), *documents([10, 4, 6], 1, first=3)]
    packing = FixedSolverPacker(LIMITS, COST, 2)
    steps = [packing.pack(arriving, 0), packing.pack([], 1)]
    assert sorted(sorted(d.length for d in m) for step in steps for m in step) == [
        [4, 6], [5, 5], [10], [10],
    ]  # fmt: skip
    assert all(max(loads(step)) * 2 / sum(loads(step)) < 1.01 for step in steps)


def test_solver_gives_the_same_plan_again_within_its_limit():
    """A wall-clock limit would not."""
    lengths = reference_lengths(4, seed=9)
    limits = Limits(4, 131072, 131072, 4 * 131072)

    def plan():
        return FixedSolverPacker(limits, REFERENCE_COST, limit=0.2).pack(documents(lengths), 0)

    assert plan() == plan()


def test_solver_says_that_it_found_no_plan():
    packing = FixedSolverPacker(LIMITS, COST, limit=1e-9)
    with pytest.raises(PackingError, match=r"found no plan for step 7 within solver_limit 1e-09"):
        packing.pack(documents([5, 4, 3, 3, 3, 2]), 7)


def test_solver_reports_progress(caplog):
    with caplog.at_level(logging.INFO, logger="megatron_wlb"):
        FixedSolverPacker(LIMITS, COST).pack(documents([5, 4, 3, 3, 3, 2]), 3)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("step 3: solver at imbalance")
    assert "step 3: solver ends at imbalance" in messages[-1]
    assert "(optimal)" in messages[-1]


def test_solver_names_the_extra_that_is_missing(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(ConfigError, match=r"pip install 'megatron-wlb\[solver\]'"):
        FixedSolverPacker(LIMITS, COST)


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_solver_refuses_a_limit_that_is_not_positive(limit):
    with pytest.raises(ConfigError, match="solver_limit is"):
        FixedSolverPacker(LIMITS, COST, limit=limit)
