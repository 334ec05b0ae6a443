"""Multi-token prediction in every kind of layout computes what one process does.

Losses of all depths, every gradient and the weights after several steps, against
:mod:`helpers.oracle`, with documents of 1 to 60 tokens; and faults that must not pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import pytest
from helpers.layouts import FULL, SHARDED, Differences, Layout, Oracle, further
from helpers.ranks import sliced_for
from test_oracle import broken_batches

ONE = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5"
TWO = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.7"

NO_FAULT = contextlib.nullcontext

ALONE = Layout("llama", 5, extra=TWO)  # untied
CASES = [
    ALONE,
    Layout("mixed", 4, dp=2, extra=f"{ONE} {SHARDED}"),  # tied
    Layout("llama", 4, pp=2, vpp=2, extra=ONE),
    Layout("llama", 3, tp="2sp", extra=TWO),
    Layout("mixed", 3, tp="2", extra=f"{TWO} {FULL}"),
    Layout("mixed", 4, pp=2, cp=2, extra=TWO),
    Layout("sliding", 3, extra=TWO),
    further(Layout("mixed", 5, pp=2, extra=TWO)),
    further(Layout("llama", 4, pp=2, extra=f"{ONE} {FULL}")),
    further(Layout("llama", 5, cp=2, sharding="per-document", extra=ONE)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prediction_computes_what_one_process_does(
    oracle: Oracle, wrong: Differences, case: Layout
) -> None:
    assert len(oracle(case).steps[0].ahead) == case.config.model.mtp_num_layers
    assert wrong(case) == []


@pytest.mark.parametrize(
    "case",
    [Layout("mixed", 3, pp=2, extra=TWO), further(Layout("llama", 3, cp=2, extra=ONE))],
    ids=str,
)
def test_prediction_in_slices_computes_what_one_process_does(
    wrong: Differences, case: Layout
) -> None:
    assert wrong(case, NO_FAULT, sliced_for) == []


def shift_across_documents(runner):
    """Tokens and labels of depth 1 are those of the next row, whatever document that is of."""

    def rolled(batch):
        ahead = batch.ahead
        tokens, labels = ahead.tokens, ahead.labels
        ahead = dataclasses.replace(
            ahead,
            tokens=(tokens[0], tokens[0].roll(-1), *tokens[2:]),
            labels=(labels[0], labels[0].roll(-1), *labels[2:]),
            weights=(ahead.weights[0], *(ahead.weights[0].roll(-1) for _ in tokens[1:])),
        )
        return dataclasses.replace(batch, ahead=ahead)

    return broken_batches(runner, rolled)


@contextlib.contextmanager
def count_labels_of_the_model(runner) -> Iterator[None]:
    """Losses further ahead are divided by the labels of the model itself."""
    begin = runner.batches.begin

    def unweighed(plan):
        begin(plan)
        runner.batches.depth_weights = [1.0] * len(runner.batches.depth_weights)

    with mock.patch.object(runner.batches, "begin", unweighed):
        yield


@pytest.mark.parametrize("fault", [shift_across_documents, count_labels_of_the_model])
def test_prediction_fault_differs_from_the_oracle(wrong: Differences, fault) -> None:
    case = ALONE
    found = wrong(case, fault)
    assert any(line.startswith("step 0: gradient of") for line in found)
    assert any(line.startswith("step 0: loss ahead") for line in found)
