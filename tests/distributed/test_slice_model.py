"""A model that runs long documents in slices computes what one process does with whole ones.

Loss, every gradient and the weights after some steps, as in ``test_oracle.py``. Here each rank runs
its passes one after another, in the order of :func:`megatron_wlb.schedule.order.sliced`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import MicroBatchPlan, Span, StepPlan
from megatron_wlb.schedule.order import sliced, validate
from megatron_wlb.sharding import length_multiple
from megatron_wlb.testing.gloo import GlooPool
from megatron_wlb.testing.layouts import FULL, KEEP, SELECTIVE, WORKLOAD, Layout
from megatron_wlb.testing.oracle import OracleRun, run_oracle
from megatron_wlb.testing.ranks import scatter_for, train
from megatron_wlb.testing.shards import differences

CASES = [
    Layout("llama", 3, extra=SELECTIVE),
    Layout("gpt2", 3, cp=2, sharding="per-sequence", extra=f"{KEEP} {FULL}"),
    Layout("yarn", 3, cp=4, sharding="hybrid"),
    Layout("mixed", 3, cp=2, tp="2sp", sharding="adaptive", extra=SELECTIVE),
]
STEPS = dataclasses.replace(WORKLOAD, steps=WORKLOAD.steps[:1])
SHORT_TOKENS = 6
"""Documents up to this run whole."""


def in_slices(plan: StepPlan, multiple: int) -> StepPlan:
    """The same documents on each rank: the long ones in slices, a short one behind two of them.

    Every other long document has a slice of one token, first and last, and slices are padded.
    """
    ranks, chains, index = [], [], 0
    for given in plan.micro_batches:
        spans = [span for m in given for span in m.spans]
        short = [span for span in spans if span.length <= SHORT_TOKENS]
        units: list[tuple[Span, ...]] = []
        own = []
        for number, span in enumerate(s for s in spans if s.length > SHORT_TOKENS):
            stop = span.length
            places = {stop // 2} if number % 2 else {1, stop // 3, stop - 1}
            cuts = pairwise(sorted({0, stop} | places))
            parts: list[tuple[Span, ...]] = [(Span(span.document, *cut),) for cut in cuts]
            if number < 2:
                parts[-1] += tuple(short[:1])
                short = short[1:]
            units, own = units + parts, [*own, len(parts)]
        units, own = [*units, tuple(short)], [*own, 1]
        rank = []
        for unit in units:
            length = sum(span.length for span in unit)
            padded = -(-max(length, 1) // multiple) * multiple + multiple * (index % 2)
            sharding = given[index % len(given)].sharding
            rank.append(MicroBatchPlan(index, unit, padded, 1.0, sharding))
            index += 1
        ranks.append(tuple(rank))
        chains.append(tuple(own))
    return dataclasses.replace(plan, micro_batches=tuple(ranks), chains=tuple(chains))


# On a rank.


def run_passes(
    runner: Any, plan: StepPlan, forward_step: Any, *, forward_only: bool, backward_first: bool
) -> list[Any]:
    """In place of ``StepRunner.run_schedule``: one rank's passes, and its losses' reports."""
    import torch

    model, batches = runner.model, runner.batches
    config = model.config
    multiple = length_multiple(
        config.tensor_model_parallel_size, config.context_parallel_size, config.sequence_parallel
    )
    plan = in_slices(plan, multiple)
    replica = model.groups.dp.rank()
    order = sliced(1, plan.chains[replica])
    validate(order, plan.chains[replica])
    actions = list(order[0])
    if backward_first:  # The first backward pass of a chain comes one forward too early.
        at = next(at for at, action in enumerate(actions) if action.kind == "B")
        actions[at - 1], actions[at] = actions[at], actions[at - 1]
        chain = plan.chains[replica][0]
        actions[at - 1] = dataclasses.replace(actions[at - 1], micro_batch=chain - 2)
    losses: dict[int, Any] = {}
    reports, num_targets = [], torch.zeros((), dtype=torch.int)
    batches.forget()
    batches.slices.begin(forward_only=forward_only)
    for action in actions:
        if action.kind == "F":
            micro_batch = plan.micro_batches[replica][action.micro_batch]
            batch = batches.build(micro_batch, first=True, last=True)
            output, loss_of = forward_step(iter([batch]), model.chunks[0])
            losses[action.micro_batch], targets, report = loss_of(output)
            num_targets += targets
            reports.append(report)
        elif not forward_only:
            losses.pop(action.micro_batch).backward()
    batches.slices.end()
    if not forward_only:
        config.finalize_model_grads_func(model.chunks, num_targets, pg_collection=model.groups)
    return reports


@contextlib.contextmanager
def passes(runner: Any, backward_first: bool = False) -> Iterator[None]:
    run = partial(run_passes, runner, backward_first=backward_first)
    with mock.patch.object(runner, "run_schedule", run):
        yield


# In pytest.

Oracle = Callable[[Layout], OracleRun]


@pytest.fixture(scope="module")
def oracle(gloo: GlooPool) -> Oracle:
    runs: dict[str, OracleRun] = {}

    def run(case: Layout) -> OracleRun:
        if case.model not in runs:
            (runs[case.model],) = gloo.run(1, run_oracle, case.config, STEPS)
        return runs[case.model]

    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_slices_train_what_one_process_does(gloo: GlooPool, oracle: Oracle, case: Layout) -> None:
    expected = oracle(case)
    runs = gloo.run(case.world_size, train, case.config, STEPS, expected.initial, passes)
    assert differences(expected, runs) == []


def test_a_backward_that_comes_too_early_is_refused(gloo: GlooPool, oracle: Oracle) -> None:
    case = CASES[0]
    fault = partial(passes, backward_first=True)
    with pytest.raises(PlanError, match=r"run (forward|backward) in layer"):
        gloo.run(1, train, case.config, STEPS, oracle(case).initial, fault)


def test_plans_in_slices_are_awkward() -> None:
    seen = set()
    for case in CASES:
        for step in range(len(STEPS.steps)):
            for m in in_slices(scatter_for(case.config, STEPS, case.world_size, step), 8):
                if m.slice:
                    seen.add("with others" if len(m.spans) > 1 else "alone")
                    seen |= {"one token"} if m.slice.length == 1 else set()
                    seen |= {"padded"} if m.length < m.padded_length else set()
                elif m.length:
                    seen.add("whole documents only")
    assert seen == {"with others", "alone", "one token", "padded", "whole documents only"}
