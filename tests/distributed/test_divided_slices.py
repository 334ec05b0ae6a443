"""Slices whose keys and values are divided over context-parallel ranks: as one process computes it.

Loss, every element of every gradient, and the weights after several optimizer steps, as in
``test_executor.py``. And faults that must not pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from helpers.layouts import FULL, HEAD_GROUPS, KEEP, SELECTIVE, Differences, Layout, further
from helpers.ranks import divided, half_recomputed, sliced_for
from helpers.workload import Workload
from test_merge import merged_for

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import StepPlan
from megatron_wlb.settings.config import Config

CP2 = Layout("llama", 1, cp=2, sharding="per-document", extra=HEAD_GROUPS)
EP2 = Layout("deepseek", 2, cp=2, ep=2, sharding="adaptive")
CASES = [
    CP2,
    Layout("llama", 2, pp=2, vpp=2, cp=2, extra=FULL),
]
FURTHER = [
    Layout("mixed", 1, cp=2, tp="2sp", sharding="adaptive", extra=SELECTIVE),
    Layout("gpt2", 1, pp=2, cp=2, sharding="hybrid"),
    Layout("yarn", 1, cp=4, sharding="hybrid"),
    Layout("gpt2", 1, cp=2, sharding="per-sequence", extra=f"{KEEP} {FULL}"),
    Layout("latent-yarn", 1, cp=2, sharding="per-document"),
    Layout("sliding-skip", 1, cp=2, sharding="per-document", extra=HEAD_GROUPS),
    Layout("sliding", 1, cp=4, sharding="adaptive"),
    EP2,
]


def divided_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    plan = divided(sliced_for(config, workload, world_size, step))
    assert any(m.divided for m in plan)
    return plan


def recomputed_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    return half_recomputed(divided_for(config, workload, world_size, step))


def divided_and_merged_for(
    config: Config, workload: Workload, world_size: int, step: int
) -> StepPlan:
    return divided(merged_for(config, workload, world_size, step))


@pytest.mark.parametrize("case", [*CASES, *map(further, FURTHER)], ids=str)
def test_divided_slices_compute_what_one_process_does(wrong: Differences, case: Layout) -> None:
    assert wrong(case, plan_for=divided_for) == []


@pytest.mark.parametrize("case", [CP2, further(EP2)], ids=str)
def test_divided_slices_are_recomputed(wrong: Differences, case: Layout) -> None:
    assert wrong(case, plan_for=recomputed_for) == []


def test_ranks_together_divide_keys_and_values(wrong: Differences) -> None:
    case = Layout("llama", 1, dp=2, cp=2, extra=HEAD_GROUPS)
    assert wrong(case, plan_for=divided_and_merged_for) == []


@contextlib.contextmanager
def that_waits_for_each_gather(runner) -> Iterator[None]:
    """Asserts that a step has waited for all rows that it gathers when it ends, also for those that
    no layer takes.
    """
    from megatron_wlb.runtime.gpt.attention.divided import Gathered, Rows

    start, take, run = Rows.start_gather, Gathered.take, runner.run
    started, taken = [], []

    def recorded(*given):
        *tensors, work = start(*given)
        if work is not None:
            work = mock.Mock(wraps=work)
            started.append(work)
        return *tensors, work

    def recorded_take(gathered, *into):
        taken.append(gathered._started[-1][-1])
        return take(gathered, *into)

    def counted(plan, **options):
        loss = run(plan, **options)
        assert [work.wait.call_count for work in started] == [1] * len(started)
        untaken = len(started) - sum(work is not None for work in taken)
        assert started and untaken > 0
        started.clear()
        taken.clear()
        return loss

    with (
        mock.patch.object(Rows, "start_gather", recorded),
        mock.patch.object(Gathered, "take", recorded_take),
        mock.patch.object(runner, "run", counted),
    ):
        yield


def test_step_waits_for_rows_that_no_layer_takes(wrong: Differences) -> None:
    """Layers of a sliding window take fewer rows than the full one before them begins to gather."""
    case = Layout("sliding-skip", 1, cp=2, sharding="per-document", extra=HEAD_GROUPS)
    assert wrong(case, that_waits_for_each_gather, divided_for) == []


# What must not pass.


@contextlib.contextmanager
def without_what_others_give(runner) -> Iterator[None]:
    """Gradients of rows before a slice stay on the rank that computed them."""
    from megatron_wlb.runtime.gpt.attention.divided import Rows

    with mock.patch.object(Rows, "start_reduce", return_value=None):
        yield


@contextlib.contextmanager
def keep_rows_of_another_rank(runner) -> Iterator[None]:
    from megatron_wlb.runtime.gpt.attention.divided import Rows

    right = Rows.keep

    def wrong(self, whole, share):
        right(self, whole.roll(1, 0), share)

    with mock.patch.object(Rows, "keep", wrong):
        yield


@pytest.mark.parametrize("fault", [without_what_others_give, keep_rows_of_another_rank])
def test_wrong_shares_are_seen(wrong: Differences, fault: Callable[..., object]) -> None:
    assert wrong(CP2, fault, divided_for) != []


def half_divided_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    """The first slice of each document is not divided."""
    plan = divided_for(config, workload, world_size, step)
    ranks = [
        tuple(dataclasses.replace(m, divided=bool(m.slice and m.slice.start)) for m in own)
        for own in plan.micro_batches
    ]
    return dataclasses.replace(plan, micro_batches=tuple(ranks))


def test_document_that_is_half_divided_is_refused(wrong: Differences) -> None:
    with pytest.raises(PlanError, match="are to be divided over 2 ranks, those before over 1"):
        wrong(CP2, plan_for=half_divided_for)
