from __future__ import annotations

import math
from itertools import chain, product

import pytest

pytest.importorskip("ortools", reason="OR-tools is not installed: pip install ortools")

from _papers.hydraulis import Case, space_of
from _papers.hydraulis_optimum import (
    GAP,
    Setting,
    equation_1_us,
    estimates_us,
    ideal_dispatch,
    ideal_packing,
    one_step,
    trials,
)
from megatron_wlb.planning.balance.assign import bins_of
from megatron_wlb.planning.balance.dispatch import StepDocuments, dispatch
from megatron_wlb.planning.balance.replica_costs import Scheme

LENGTHS = (9000, 7500, 6100, 4000, 3300, 2100, 1500, 900, 350)
SPACE = space_of(Case("7b", 16), "a800")
CANDIDATE = SPACE.equal(SPACE.price(Scheme.parse("tp4pp2")))
"""Two pipelines."""


def test_ideal_dispatch_is_the_best_of_all() -> None:
    step, number = StepDocuments(LENGTHS), len(CANDIDATE.strategy.replicas)
    least_us = min(
        max(
            estimates_us(
                step,
                CANDIDATE,
                [[at for at, to in enumerate(chosen) if to == n] for n in range(number)],
            )
        )
        for chosen in product(range(number), repeat=len(LENGTHS))
    )
    worst = [list(range(len(LENGTHS))), *([] for _ in range(number - 1))]
    found = ideal_dispatch(step, CANDIDATE, worst)
    assert sorted(chain(*found.documents)) == list(range(len(LENGTHS)))
    assert least_us <= found.us * (1 + 1e-9) and found.us <= least_us * (1 + GAP)
    assert found.bound_us <= least_us * (1 + 1e-9)


def test_ways_dispatch_each_document_once_and_none_beats_the_bound() -> None:
    step = StepDocuments(LENGTHS)
    own = dispatch(step, CANDIDATE.groups, math.inf)
    assert own is not None
    random = trials(step, CANDIDATE, 1)
    assert trials(step, CANDIDATE, 1) == random
    bound_us = ideal_dispatch(step, CANDIDATE, own).bound_us
    for documents in (own, random, trials(step, CANDIDATE, 2, 1)):
        assert sorted(chain(*documents)) == list(range(len(LENGTHS)))
        assert max(estimates_us(step, CANDIDATE, documents)) >= bound_us
    # One order is seldom as good as the best of a hundred.
    first = max(estimates_us(step, CANDIDATE, trials(step, CANDIDATE, 1, 1)))
    assert max(estimates_us(step, CANDIDATE, random)) < first


def test_ideal_packing_is_not_worse_than_lpt_nor_below_its_bound() -> None:
    step = StepDocuments(LENGTHS)
    ((costs, _),) = CANDIDATE.groups
    lpt, best = ideal_packing(step, costs, list(range(len(LENGTHS))))
    assert best.bound_us <= best.us <= lpt.us
    assert best.us <= best.bound_us * (1 + 2 * GAP)
    assert sorted(chain(*best.documents)) == list(range(len(LENGTHS)))
    assert equation_1_us(step, costs, best.documents) == best.us
    for number in range(1, len(LENGTHS) + 1):
        bins = bins_of(step, costs, list(range(len(LENGTHS))), number)
        assert equation_1_us(step, costs, bins) >= best.bound_us * (1 - 1e-9) or (
            sum(LENGTHS) / number < costs.least_tokens
        )


def test_a_step_has_all_ways() -> None:
    setting = Setting(Case("7b", 16), "tp4pp2")
    step = one_step(StepDocuments(LENGTHS), setting, "a800", 1)
    assert step.bound_us <= step.ideal.estimate_us <= step.ours.estimate_us
    assert step.ideal.estimate_us <= step.trials.estimate_us
    assert step.packed_bound_us <= step.packed_us <= step.lpt_us
    assert step.own_packing_us > 0 < step.ideal_packing_us
