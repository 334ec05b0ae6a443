from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cost import Execution, ModelShape, load_hardware
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.strategies.plan.propose import StrategySpace
from megatron_wlb.strategies.strategy_search import SAMPLE_STEPS, StrategyStudy, sample_steps, study

SHAPE = ModelShape(
    1024, 2816, 4, 8, 8, 128, 8192, True, rms_norm=True, linear_bias=False, tied_embeddings=False
)
SPACE = StrategySpace(
    SHAPE,
    Execution(),
    replace(load_hardware("a100"), launch_us=0.0),
    8,
    memory_gib=2.2,
    schemes=tuple(map(Scheme.parse, ("tp1", "tp2", "tp4", "tp8"))),
)
WINDOW = 40000


def source(share: float) -> LengthSource:
    """Short documents, and so many of the length that only TP 8 takes."""
    random = np.random.default_rng(5)
    lengths = np.clip(random.lognormal(np.log(700), 0.8, 4000), 16, 4000).astype(np.int64)
    lengths[random.random(4000) < share] = 36000
    return LengthSource.of_lengths("some", lengths)


def studied(share: float, steps: int = 8) -> StrategyStudy:
    return study(SPACE, source(share), window=WINDOW, windows_a_step=3, num_steps=steps)


def test_documents_that_are_judged_are_not_those_proposed_from() -> None:
    first, second = source(0.01).halves(1)
    sizes = {"window": WINDOW, "windows_a_step": 3, "seed": 1}
    one, two = (sample_steps(half, SAMPLE_STEPS, **sizes) for half in (first, second))
    assert len(one) == len(two) == SAMPLE_STEPS
    assert [d.length for d in one[0]] != [d.length for d in two[0]]


def test_gain_adds_up_over_steps_and_strategies() -> None:
    found = studied(0.004)
    assert sum(one.num_chosen for one in found.outcomes) == found.num_steps == 8
    assert sum(one.chosen_us for one in found.outcomes) == pytest.approx(found.dynamic_us)
    assert sum(one.equal_us for one in found.outcomes) == pytest.approx(found.equal_us)
    alone_us = found.best_alone.alone_us
    assert alone_us is not None
    # What every step may choose is chosen by the same simulated time, so it cannot be slower.
    assert found.dynamic_us <= alone_us * 1.001
    assert found.gain > 1.1
    for one in found.outcomes:
        assert sum(use.num_documents for use in one.uses) >= one.num_chosen
        assert all(use.shortest <= use.longest for use in one.uses)


def test_rare_long_documents_make_strategies_change() -> None:
    """Steps without a long document need no layout that takes it."""
    found = studied(0.004)
    assert len([one for one in found.outcomes if one.num_chosen]) > 1
    alone = [one.alone_us for one in found.outcomes]
    assert alone[0] is not None and None in alone


def test_the_more_long_documents_the_less_is_gained() -> None:
    rare, often = studied(0.004).gain, studied(0.05).gain
    assert rare > 1.1 > 1.05 > often >= 0.999
