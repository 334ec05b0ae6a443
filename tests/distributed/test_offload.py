"""Micro-batches that wait in the host's memory compute what one process computes with each document
alone: loss, every gradient, and the weights after several steps.

Slabs and windows are small here, so that copies straddle slabs and passes have to wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.layouts import GATHER, OVERLAP, VERIFY_SHAPES, Differences, Layout, further
from helpers.ranks import divided, half_recomputed, sliced_for

from megatron_wlb.cost.slices import HOST
from megatron_wlb.plan import StepPlan

ETP1 = "--expert-tensor-parallel-size 1"


def hosted_for(config: Any, workload: Any, world_size: int, step: int) -> StepPlan:
    plan = half_recomputed(sliced_for(config, workload, world_size, step), HOST)
    return dataclasses.replace(plan, window_bytes=[1e5, 0.0, 1e9][step % 3])


def divided_for(config: Any, workload: Any, world_size: int, step: int) -> StepPlan:
    return divided(hosted_for(config, workload, world_size, step))


def every_for(config: Any, workload: Any, world_size: int, step: int) -> StepPlan:
    """All micro-batches wait there."""
    plan = hosted_for(config, workload, world_size, step)
    ranks = [[dataclasses.replace(m, recomputed=HOST) for m in own] for own in plan.micro_batches]
    return dataclasses.replace(plan, micro_batches=tuple(map(tuple, ranks)))


@contextlib.contextmanager
def with_small_slabs(runner: Any) -> Iterator[None]:
    """Asserts that passes do go to the host, to memory that was pinned before the step's first
    message, and that nothing does in evaluation.
    """
    from megatron_wlb.runtime.stepping import offload

    run_schedule, made = runner.run_schedule, offload.Passage
    passages: list[offload.Passage] = []
    order: list[str] = []  # of pins and messages, in a step
    pins: list[str] = []
    empty, group = torch.empty, torch.distributed.ProcessGroup

    def noted(what: str, call: Any) -> Any:
        def note(*given: Any, **options: Any) -> Any:
            if what == "message" or options.get("pin_memory") is not None:
                order.append(what)
            return call(*given, **options)

        return note

    def passage(*given: Any) -> offload.Passage:
        passages.append(made(*given))
        return passages[-1]

    def counted(plan: StepPlan, *args: Any, forward_only: bool, **options: Any) -> Any:
        passages.clear()
        order.clear()
        reports = run_schedule(plan, *args, forward_only=forward_only, **options)
        pins.extend(what for what in order if what == "pin")
        assert order == sorted(order, reverse=True)  # pins before the first message
        own = plan.micro_batches[runner.model.groups.dp.rank()]
        waits = not forward_only and any(m.recomputed == HOST for m in own)
        assert [one.num_bytes > 10_000 for one in passages] == [True] * waits
        assert not waits or (pins and runner._host.beyond < 1.1)  # what is pinned is enough
        return reports

    with (
        mock.patch.object(torch, "empty", noted("pin", empty)),
        mock.patch.object(group, "send", noted("message", group.send)),
        mock.patch.object(group, "recv", noted("message", group.recv)),
        mock.patch.object(offload, "SMALL", 0.0),
        mock.patch.object(offload, "SLAB_BYTES", 4096),
        mock.patch("megatron_wlb.runtime.stepping.step.Passage", passage),
        mock.patch.object(runner, "run_schedule", counted),
    ):
        yield


@pytest.mark.parametrize(
    ("case", "plan_for"),
    [
        (Layout("llama", 2, pp=2, vpp=2, extra=GATHER), hosted_for),
        (Layout("llama", 1, cp=2, tp="2sp", sharding="per-document"), divided_for),
        (Layout("moe-seq", 4, pp=2, dp=2, ep=2), hosted_for),
        further(Layout("gpt2", 1), every_for),
        further(Layout("gpt2", 1, pp=2, dp=2, extra=OVERLAP), every_for),
        further(Layout("mixed", 1, cp=2, sharding="per-document"), every_for),
        further(Layout("mixed", 4, pp=4, vpp=2, extra=VERIFY_SHAPES), every_for),
        further(Layout("moe-seq", 3, tp="2sp", ep=2, extra=ETP1), every_for),
        further(Layout("deepseek", 4, pp=2, vpp=2, dp=2, ep=2), every_for),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_micro_batches_wait_in_the_hosts_memory(
    wrong: Differences, case: Layout, plan_for: Any
) -> None:
    assert wrong(case, with_small_slabs, plan_for) == []


@contextlib.contextmanager
def with_few_slabs(runner: Any) -> Iterator[None]:
    """As many as a step needs are pinned from the second step on."""
    from megatron_wlb.runtime.stepping import offload

    with mock.patch.object(offload, "BEYOND", 0.4), with_small_slabs(runner):
        yield
    assert runner._host.beyond > 0.8


def test_what_finds_no_room_stays_on_the_device(wrong: Differences) -> None:
    assert wrong(Layout("llama", 1), with_few_slabs, every_for) == []


@contextlib.contextmanager
def with_wrong_bytes(runner: Any) -> Iterator[None]:
    """What comes back has lost its last part, which is zeros."""
    from megatron_wlb.runtime.stepping import offload

    pairs = offload._Kept.pairs

    def lost(kept: Any) -> Iterator[Any]:
        *others, (slab, whole) = pairs(kept)
        return iter([*others, (torch.zeros_like(slab), whole)])

    with with_small_slabs(runner), mock.patch.object(offload._Kept, "pairs", lost):
        yield


def test_bytes_that_are_lost_on_the_way_are_seen(wrong: Differences) -> None:
    assert wrong(Layout("llama", 1), with_wrong_bytes, every_for)
