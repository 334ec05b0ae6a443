"""A run of weeks resumes as if it had never stopped: any packing, any blend, at every step."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from helpers.slowness import slowness
from helpers.soak import PACKINGS, Soak, soaks
from helpers.strategies import documents
from hypothesis import example, given, settings

from megatron_wlb.cost import DocumentCost
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.planning.packing import packer
from megatron_wlb.planning.planner import Planner

COST = DocumentCost(1, 0.1, 2, 0.25, micro_batch_us=5)


def interleaved(packing: str, num_steps: int = 60) -> Soak:
    """Long documents of two corpora whose pieces alternate."""
    random = np.random.default_rng(0)
    lengths = [np.maximum(random.lognormal(6, 1.5, 400).astype(int), 1) for _ in range(2)]
    blend = tuple(tuple(corpus.tolist()) for corpus in lengths)
    return Soak(
        packing, blend, (0.3, 0.7), None, "split", 1024, 8, 2048, None, 12, COST, num_steps, 1
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_planner_reloaded_before_every_step_plans_the_same(packing: str) -> None:
    assert interleaved(packing).run() == 60


@settings(max_examples=150)
@given(soaks())
@example(interleaved("wlb", 5))
def test_planner_state_restores_what_was_saved(soak: Soak) -> None:
    soak.run()


@pytest.mark.parametrize("packing", PACKINGS)
def test_planner_goes_on_at_its_pace_with_more_epochs_after_the_end(packing: str) -> None:
    """The steps that the flush took, and the rest of the last one, bring no documents at once."""

    def planner(num_epochs: int) -> Planner:
        name, more = packing.partition(",")[0], PACKINGS[packing]
        lengths = np.random.default_rng(3).integers(1, 1025, 120)
        stream = DocumentStream(
            [lengths], window=1024, step_tokens=4096, seed=1, num_epochs=num_epochs
        )
        packing_ = packer(name, num_micro_batches=4, window=1024, cost=COST, **more)
        return Planner(stream, packing_, COST, dp_size=1)

    first = planner(1)
    while first.next_plan() is not None:
        pass
    second = planner(2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    end = second.step
    if not packing.startswith(("fixed", "original")):
        arrived = second._read()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert min(d.step for d in arrived) == end
        of_each = [sum(d.length for d in arrived if d.step == end + k) for k in range(8)]
        steps = second.packer.look_ahead + 1
        assert all(4096 - 1024 <= tokens <= 4096 + 1024 for tokens in of_each[:steps])
    plans = list(iter(second.next_plan, None))
    assert plans[0].step == end
    assert all(d.step >= end for plan in plans for d in plan.documents)
    expected = np.random.default_rng(3).integers(1, 1025, 120).sum()
    assert sum(plan.num_tokens for plan in plans) == expected


def test_planner_state_takes_a_microsecond_a_document_at_most() -> None:
    """It is taken in every step, in the process that trains.

    About 0.3 here, most of it for sorting what is read ahead.
    """
    lengths = np.random.default_rng(3).integers(1, 1025, 100_000)
    packing = packer(
        "hold", num_micro_batches=64, window=1024, cost=COST, max_step_tokens=2**17, look_ahead=1
    )
    packing.pack(documents(lengths.tolist(), step=1), 0)
    num_waiting = len(packing.waiting)
    assert num_waiting > 90_000

    def us_a_document() -> float:
        start_s = time.process_time()
        packing.state_dict()
        return (time.process_time() - start_s) / num_waiting * 1e6

    assert min(us_a_document() for _ in range(5)) < slowness()
