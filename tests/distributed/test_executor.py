"""Documents in slices with dropout and in bf16, and messages that are not as planned.

That they compute what one process does is in ``test_oracle.py``.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from helpers.gloo import GlooPool
from helpers.layouts import (
    FULL,
    WORKLOAD,
    Layout,
    Oracle,
)
from helpers.oracle import OracleRun, State
from helpers.plans import scatter_for, sliced_for
from helpers.ranks import build_runner, train
from helpers.shards import RankRun

from megatron_wlb.cost.schedule.order import Action
from megatron_wlb.errors import PlanError

DROPOUT = "--hidden-dropout 0.2"


def runs_of(gloo, case: Layout, initial: State, plan_for=sliced_for):
    return gloo.run(case.world_size, train, case.config, WORKLOAD, initial, nullcontext, plan_for)


def test_slices_with_dropout_are_reproducible(gloo: GlooPool, oracle: Oracle) -> None:
    """Two runs are equal in every bit, and so is one that computes activations again."""
    plain = Layout("gpt2", 1, pp=2, extra=DROPOUT)
    again = Layout("gpt2", 1, pp=2, extra=f"{DROPOUT} {FULL}")
    initial = oracle(plain).initial
    losses = [runs_of(gloo, case, initial)[1].losses for case in (plain, plain, again)]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0] != runs_of(gloo, Layout("gpt2", 1, pp=2), initial)[1].losses


def gradient_error(oracle: OracleRun, runs: list[RankRun]) -> float:
    """The distance from the oracle's first gradient, as a share of its norm."""
    wrong = whole = 0.0
    for run in runs:
        for held, gradient in zip(run.held, run.gradients[0], strict=True):
            expected = oracle.steps[0].gradients[held.name].reshape(-1)[held.indices.reshape(-1)]
            wrong += float(np.square(gradient - expected, dtype=np.float64).sum())
            whole += float(np.square(expected, dtype=np.float64).sum())
    return float((wrong / whole) ** 0.5)


def test_slices_in_bf16_are_as_good_as_whole_documents(gloo: GlooPool, oracle: Oracle) -> None:
    case = Layout("llama", 2, pp=2, extra="--bf16")
    expected = oracle(case)
    sliced, whole = (
        gradient_error(expected, runs_of(gloo, case, expected.initial, plan_for=plan_for))
        for plan_for in (sliced_for, scatter_for)
    )
    assert 1e-4 < sliced < 1.2 * whole  # roundings of other sums, as many of them


def error_of_unlike_lengths(case: Layout) -> tuple[str, str] | None:
    """What the second stage says of a tensor of 4 tokens, where its plan has 6, and whom it waits
    for there.
    """
    import torch
    from torch import distributed as dist

    from megatron_wlb.runtime.ranks import watchdog
    from megatron_wlb.runtime.stepping.executor import Transfers

    runner = build_runner(case.config, WORKLOAD)
    config, links = runner.model.config, runner.links
    stage, action = links.rank, Action("F", 0, 0)
    transfers = Transfers(links, [(4, 6)[stage]], config, True, "step 3")
    tensor = torch.ones(4, 1, config.hidden_size)
    if stage == 0:
        transfers.send(action, tensor)
        transfers.end()
        return None
    arrival = transfers.post(action)
    with pytest.raises(PlanError) as caught:
        arrival.wait()
    place = watchdog.whereabouts(caught.value)
    dist.recv(tensor, 0, group=links.groups["F", False])  # or the first stage would wait for ever
    return str(caught.value), place


def test_lengths_that_differ_from_the_plan_are_found(gloo: GlooPool) -> None:
    _, (error, place) = gloo.run(2, error_of_unlike_lengths, Layout("llama", 1, pp=2))
    assert error.startswith(
        "step 3: stage 1 (rank 1) expects 6 tokens for the activation of micro-batch 0, chunk 0 by "
        "its plan, but rank 0 sends 4"
    )
    assert place.endswith("), which waits for rank 0"), place
