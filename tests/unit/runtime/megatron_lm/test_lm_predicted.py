"""What the launcher's log predicts of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.strategies import documents

from megatron_wlb.cost.document import DocumentCost
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.plan import MicroBatchPlan, Span, StepPlan
from megatron_wlb.runtime.megatron_lm.log import Log
from megatron_wlb.settings.command_line import parse

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 40 --global-batch-size 4"
)


def test_predicted_step_has_waits_between_replicas_of_experts() -> None:
    # Each replica has one heavy micro-batch of two, at unlike places: who meets in experts waits.
    order = ((40, 10), (10, 40))
    found = documents([length for own in order for length in own])
    own = [MicroBatchPlan(n, (Span(d, 0, d.length),), d.length, 0.0) for n, d in enumerate(found)]
    plan = StepPlan(0, "original", (tuple(own[:2]), tuple(own[2:])), 0, 0)
    cost = DocumentCost(1.0, 0.0, 2.0, 0.0)
    session: Any = SimpleNamespace(config=parse(FLAGS.split()), cost=cost, experts=None)
    log: Any = SimpleNamespace(session=session)
    assert Log.predicted_us(log, plan) == pytest.approx(3 * 50)
    session.experts = ExpertGroups(2, ((0.0, 0.0),))  # nothing is shared in dense layers
    assert Log.predicted_us(log, plan) == pytest.approx(3 * 50)
    session.experts = ExpertGroups(2, ((1e-9, 1e-9),))
    assert Log.predicted_us(log, plan) == pytest.approx(3 * 80)
