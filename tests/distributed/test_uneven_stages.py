"""Stages of unlike numbers of layers, some without any, compute what one process does."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
from helpers.layouts import FULL, GATHER, OVERLAP, SHARDED, Differences, Layout
from helpers.ranks import sliced_for

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
ACCOUNTS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
LAYOUT = "--pipeline-model-parallel-layout"

CASES = {
    "first-and-last": Layout("llama", 5, pp=4, extra=f"--num-layers 6 {FIRST} 1 {LAST} 1"),
    "last": Layout("mixed", 3, pp=2, dp=2, extra=f"{LAST} 1 {SHARDED} {OVERLAP}"),
    "accounts-vpp": Layout("mixed", 4, pp=2, vpp=2, extra=f"--num-layers 6 {ACCOUNTS}"),
    "layout-vpp": Layout("llama", 4, pp=2, extra=f"{LAYOUT} Et|t|tt|L {FULL}"),
    "chunk-without-anything": Layout("gpt2", 4, pp=2, dp=2, extra=f"{LAYOUT} E|tt||ttL {GATHER}"),
    "ends-without-layers": Layout("gpt2", 4, pp=4, extra=f"{LAYOUT} E|tt|tt|L"),
}


@pytest.mark.parametrize("name", CASES)
def test_uneven_stages_compute_what_one_process_does(wrong: Differences, name: str) -> None:
    case = CASES[name]
    assert wrong(case) == []


def test_slices_pass_through_uneven_stages(wrong: Differences) -> None:
    case = CASES["ends-without-layers"]
    assert wrong(case, nullcontext, sliced_for) == []


@contextmanager
def exchanged_layers(runner):
    """The middle stages run their two layers in the other order."""
    (gpt,) = runner.model.gpts
    layers = list(gpt.decoder.layers)
    gpt.decoder.layers = type(gpt.decoder.layers)(layers[::-1])
    yield


def test_layers_in_another_order_are_seen(wrong: Differences) -> None:
    """Negative control of the equalities above."""
    case = CASES["first-and-last"]
    assert wrong(case, exchanged_layers)
