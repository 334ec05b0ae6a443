"""Documents some of whose tokens are no targets, or count differently, in every kind of layout.

Loss, every gradient and the weights after several steps equal one process that runs each document
alone and weighs its labels one by one; and faults that must not pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import pytest
from helpers.layouts import NUM_STEPS, SHARDED, WORKLOAD, Differences, Layout, further
from helpers.ranks import sliced_for
from helpers.workload import Workload
from test_oracle import dividing_by

MASKED = WORKLOAD.masked(seed=3)
BY_SAMPLE = WORKLOAD.masked(seed=4, by_sample=True)
TWO = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.7"


WHOLE = [
    Layout("mixed", 4, dp=2, extra=f"{TWO} {SHARDED}"),
    Layout("llama", 4, pp=2, vpp=2, cp=2, sharding="per-document"),
    Layout("moe-seq", 3, pp=2, tp="2sp"),
    further(Layout("llama", 3, tp="2sp", cp=2, extra=TWO)),
    further(Layout("deepseek", 4, pp=2, ep=2, dp=2)),
]
SLICED = [
    Layout("mixed", 3, pp=2, extra=TWO),
    Layout("llama", 3, dp=2, cp=2),
    further(Layout("moe-aux", 4, pp=2, vpp=2)),
    further(Layout("llama", 3, pp=2, tp="2", extra=TWO)),
]


@pytest.mark.parametrize("workload", [MASKED, further(BY_SAMPLE)], ids=["by token", "by sample"])
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_masked_documents_compute_what_one_process_does(
    wrong: Differences, case: Layout, workload: Workload
) -> None:
    assert wrong(case, workload=workload) == []


@pytest.mark.parametrize("workload", [MASKED, BY_SAMPLE], ids=["by token", "by sample"])
@pytest.mark.parametrize("case", SLICED, ids=str)
def test_slices_of_masked_documents_compute_what_one_process_does(
    wrong: Differences, case: Layout, workload: Workload
) -> None:
    plans = [sliced_for(case.config, workload, case.world_size, step) for step in range(NUM_STEPS)]
    assert any(not span.num_targets for plan in plans for m in plan for span in m.spans)
    assert wrong(case, plan_for=sliced_for, workload=workload) == []


def test_plans_count_what_the_masks_do() -> None:
    case = SLICED[0]
    for workload in (MASKED, BY_SAMPLE):
        for step in range(NUM_STEPS):
            plan = sliced_for(case.config, workload, case.world_size, step)
            counted = workload.counted(step)
            assert plan.num_targets == pytest.approx(sum(own.sum() for own in counted))
            assert plan.targets_ahead(2) == pytest.approx(sum(own[2:].sum() for own in counted))
        # Of each stored document that has a target 1, whatever pieces it runs in.
        with_targets = {d.number for d in workload.steps[0] if d.num_targets}
        if workload is BY_SAMPLE:
            total = sum(d.num_targets for d in workload.steps[0])
            assert total == pytest.approx(len(with_targets))


def by_one(runner, shift=lambda runs: tuple((a + 1, b + 1, w) for a, b, w in runs)):
    """Reads the targets as if they stood one token further on."""
    from megatron_wlb.runtime.stepping import batch

    right = batch._weigh

    def off(mask, document, before):
        right(mask, document._replace(targets=shift(document.targets)), before)

    return mock.patch.object(batch, "_weigh", off)


@contextlib.contextmanager
def every_token(runner) -> Iterator[None]:
    """Reads no targets, though the loss is divided by them."""
    with by_one(runner, lambda runs: None):
        yield


@contextlib.contextmanager
def by_all_labels(runner) -> Iterator[None]:
    """Divides by all tokens with a label."""
    run = runner.run_schedule

    def counted(plan, *args, **options):
        with dividing_by(lambda _: sum(d.num_labels for d in plan.documents)):
            return run(plan, *args, **options)

    with mock.patch.object(runner, "run_schedule", counted):
        yield


@pytest.mark.parametrize("fault", [by_one, every_token, by_all_labels])
def test_fault_in_targets_differs_from_the_oracle(wrong: Differences, fault) -> None:
    found = wrong(dataclasses.replace(WHOLE[0], dp=1), fault, workload=MASKED)
    assert any(line.startswith("step 0: gradient of") for line in found)
