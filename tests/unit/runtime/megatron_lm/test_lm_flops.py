"""Floating-point operations of documents, from a formula of whole windows."""

from __future__ import annotations

import argparse

import pytest
from helpers.workload import make_workload, scatter, slice_up

from megatron_wlb.plan import StepPlan
from megatron_wlb.runtime.megatron_lm.flops import DocumentFlops


def formula(args: argparse.Namespace, batch_size: int) -> float:
    """As Megatron's: 7 a token, 3 a token and token before it."""
    return batch_size * (7.0 * args.seq_length + 3.0 * args.seq_length**2)


ARGS = argparse.Namespace(seq_length=1000, hidden_size=8)


def test_operations_are_linear_and_quadratic_in_each_document() -> None:
    flops = DocumentFlops.of(formula, ARGS)
    assert flops.per_token == pytest.approx(7)
    assert flops.per_token_squared == pytest.approx(3)
    assert flops.of_documents([10, 1, 500]) == pytest.approx(7 * 511 + 3 * (100 + 1 + 250_000))
    assert ARGS.seq_length == 1000


STEP = make_workload([[3, 90, 17, (20, 5)]], vocab_size=16).steps[0]


@pytest.mark.parametrize("plan", [scatter(0, STEP, 2, 2, 1), scatter(0, STEP, 2, 2, 8)])
def test_padding_and_the_packing_of_documents_cost_nothing(plan: StepPlan) -> None:
    assert plan.padding_tokens
    flops = DocumentFlops.of(formula, ARGS)
    assert flops.of_plan(plan) == pytest.approx(flops.of_documents([3, 90, 17, 20, 5]))


def test_slices_have_the_operations_of_their_documents() -> None:
    plan = slice_up(0, STEP, 2)
    assert any(m.slice for m in plan)
    flops = DocumentFlops.of(formula, ARGS)
    assert flops.of_plan(plan) == pytest.approx(flops.of_documents([3, 90, 17, 20, 5]))
