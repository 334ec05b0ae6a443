"""What the launcher's log predicts of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.strategies import documents

from megatron_wlb.cost.document import DocumentCost
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.plan import MicroBatchPlan, Span, StepPlan
from megatron_wlb.planning.packing.original import in_windows
from megatron_wlb.runtime.megatron_lm.flops import DocumentFlops
from megatron_wlb.runtime.megatron_lm.log import Log, SoFar
from megatron_wlb.settings.command_line import parse

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 40 --global-batch-size 4"
)


def test_log_says_what_the_same_documents_would_take_in_windows() -> None:
    """The first, of 30 tokens, runs last and in slices; windows of 20 cut it elsewhere."""
    long, *short = documents([30, 10, 20, 20])
    whole = [Span(d, 0, d.length) for d in short]
    packed = ((whole[2],), (Span(long, 0, 15), whole[0]), (Span(long, 15, 30), whole[1]))
    own = [MicroBatchPlan(n, spans, 35, 0.0) for n, spans in enumerate(packed)]
    plan = StepPlan(0, "hold", (tuple(own),), 0, 0)
    windows = in_windows(plan, 4)
    assert [m.lengths for m in windows.micro_batches[0]] == [(20,), (10, 10), (20,), (20,)]
    assert [m.num_targets for m in windows] == [20, 18, 19, 19]  # where documents end no label is
    rows = [(27,), (3, 10, 14), (6, 20, 1)]
    assert [m.lengths for m in in_windows(plan, 3).micro_batches[0]] == rows
    two_ranks = in_windows(replace(plan, micro_batches=((own[0],), tuple(own[1:]))), 4)
    assert [[m.index for m in own] for own in two_ranks.micro_batches] == [[0, 2], [1, 3]]


def test_original_has_as_many_micro_batches_as_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With virtual stages Megatron refuses some numbers: then nothing is predicted."""
    flags = (
        "--num-layers 4 --hidden-size 8 --num-attention-heads 1 --seq-length 40 "
        "--global-batch-size 4 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2"
    )
    own = [
        MicroBatchPlan(n, (Span(d, 0, d.length),), d.length, 0.0)
        for n, d in enumerate(documents([50, 30, 50, 30, 50]))
    ]
    plan = StepPlan(0, "hold", (tuple(own[:2]), tuple(own[2:])), 0, 0)
    session: Any = SimpleNamespace(
        config=parse(flags.split()), cost=DocumentCost(1.0, 0.0, 2.0, 0.0), experts=None,
        flops=DocumentFlops(1.0, 0.5),
    )  # fmt: skip
    log: Any = SimpleNamespace(session=session)
    log.predicted_us = partial(Log.predicted_us, log)
    monkeypatch.setattr("megatron_wlb.runtime.megatron_lm.log.get_num_microbatches", lambda: 4)
    windows = in_windows(plan, 8)
    assert [len(own) for own in windows.micro_batches] == [4, 4]
    found = Log.original_us(log, plan)
    # 27 tokens in each row but the last. The whole documents are 4,860 FLOPs, these pieces 2,704.
    assert found == pytest.approx(4860 / 2704 * Log.predicted_us(log, windows))
    assert Log.original_us(log, replace(plan, packing="original")) is None
    monkeypatch.setattr("megatron_wlb.runtime.megatron_lm.log.get_num_microbatches", lambda: 5)
    assert Log.original_us(log, plan) is None


def test_line_says_how_predictions_hold_so_far() -> None:
    so_far = SoFar()
    for measured_ms in (900.0, 110.0, 120.0, 115.0, 115.0, 115.0, 116.0, 114.0):
        so_far.add({"step_ms": measured_ms, "predicted_ms": 100.0, "predicted_original_ms": 130.0})
    assert str(so_far) == " (measured 1.15 × so far, ± 0.024; original 1.3 ×)"
    alone = SoFar()
    alone.add({"step_ms": 3.0, "predicted_ms": 2.0})  # of `original`, the first step
    assert str(alone) == ""


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
