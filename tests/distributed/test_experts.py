"""Experts over ranks compute what one process computes with each document alone.

Loss, auxiliary losses, every gradient (of experts, routers and all else), biases, and the weights
after several steps, against :mod:`helpers.oracle`, whose losses are made by their definitions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import FULL, OVERLAP, SHARDED, WORKLOAD, Differences, Layout, further
from helpers.ranks import build_runner, recomputed_for, scatter_for, sliced_for
from test_merge import merged_for

from megatron_wlb.errors import CompatibilityError, PlanError
from megatron_wlb.plan import StepPlan

ETP1 = "--expert-tensor-parallel-size 1"
ETP2 = "--expert-tensor-parallel-size 2"
EP2 = Layout("moe-seq", 3, dp=2, ep=2)
PP2 = Layout("moe-seq", 4, pp=2, dp=2, ep=2)
DIVIDED = Layout("moe-seq", 3, dp=2, extra=ETP2)  # over data-parallel ranks
EP4 = Layout("moe-aux", 3, dp=4, ep=4, extra=f"{SHARDED} {OVERLAP}")
CASES = [
    EP4,
    further(Layout("moe-seq", 3, tp="2sp", dp=2, ep=2)),  # experts divided by TP, too
    Layout("moe-aux", 2, tp="2sp", cp=2, ep=4, extra=ETP1),
    Layout("moe-seq", 3, tp="2sp", dp=2, extra=f"{ETP1} {SHARDED}"),  # whole ones, on all ranks
    # With multi-latent attention and multi-token prediction, as DeepSeek's.
    Layout("deepseek", 4, pp=2, vpp=2, dp=2, ep=2, extra=FULL),
    Layout("deepseek", 3, tp="2sp", cp=2, ep=2, sharding="per-document"),
    further(EP2),
    further(DIVIDED),
    further(Layout("moe-seq", 3, tp="2sp", extra=ETP1)),
    further(Layout("moe-seq", 3, tp="2sp", ep=2, extra=ETP1)),
    further(Layout("moe-aux", 3, dp=4, ep=2, extra=ETP2)),
    further(Layout("moe-seq", 4, pp=2, dp=2, extra=f"{ETP2} {SHARDED}")),
    further(Layout("moe-seq", 4, pp=2, dp=2, ep=2, extra=FULL)),
    further(Layout("moe-seq", 4, pp=2, vpp=2, dp=2, ep=2)),
    further(Layout("moe-seq", 3, cp=2, ep=2, sharding="per-document", extra=SHARDED)),
    further(Layout("deepseek", 4, pp=2, dp=2, ep=2, extra=FULL)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_compute_what_one_process_does(wrong: Differences, case: Layout) -> None:
    assert wrong(case) == []


@contextlib.contextmanager
def experts_again(runner: Any) -> Iterator[None]:
    """Layers of experts are computed again in the backward pass, and nothing else is."""
    for moe in experts_of(runner):
        moe.recomputes = True
    yield


def test_experts_that_are_computed_again_count_their_own_documents(wrong: Differences) -> None:
    assert wrong(PP2, experts_again) == []


# What must not pass.


def experts_of(runner: Any) -> list[Any]:
    layers = [layer for gpt in runner.model.gpts for layer in gpt.decoder.layers]
    return [layer.mlp for layer in layers if hasattr(layer.mlp, "router")]


@contextlib.contextmanager
def megatron_s_own_routers(runner: Any) -> Iterator[None]:
    from megatron.core.transformer.moe.router import TopKRouter

    for moe in experts_of(runner):
        moe.router.__class__ = TopKRouter
    yield


@contextlib.contextmanager
def megatron_s_own_recomputation(runner: Any) -> Iterator[None]:
    """Routers count the documents of the micro-batch that came last."""
    for moe in experts_of(runner):
        moe.moe_layer_recompute = True
    yield


def with_tokens(runner: Any, change: Callable[[Any], Any]) -> Any:
    """Tells routers what ``change`` makes of their tokens."""
    finish = runner.batches.finish

    def finish_broken(made: Any) -> Any:
        params = dataclasses.replace(
            made.packed_seq_params, routed=change(made.packed_seq_params.routed)
        )
        return finish(dataclasses.replace(made, packed_seq_params=params))

    return mock.patch.object(runner.batches, "finish", finish_broken)


def count_padding(runner: Any) -> Any:
    return with_tokens(
        runner, lambda tokens: dataclasses.replace(tokens, num_documents=tokens.num_documents + 1)
    )


def divide_by_targets(runner: Any) -> Any:
    """Losses of all tokens are divided by those with a label, as that of tokens is."""
    return with_tokens(runner, lambda tokens: dataclasses.replace(tokens, targets_per_token=1.0))


def take_documents_for_one(runner: Any) -> Any:
    def join(tokens: Any) -> Any:
        is_padding = tokens.documents == tokens.num_documents
        return dataclasses.replace(tokens, documents=is_padding.long(), num_documents=1)

    return with_tokens(runner, join)


def test_documents_of_another_micro_batch_are_refused(wrong: Differences) -> None:
    with pytest.raises(PlanError, match=r"a router got .* tokens where the plan has"):
        wrong(PP2, megatron_s_own_recomputation)


def of_unequal_numbers(plan: StepPlan) -> StepPlan:
    fewer = (plan.micro_batches[0], plan.micro_batches[1][1:])
    return dataclasses.replace(plan, micro_batches=fewer)


def of_other_chains(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, chains=((1, 1, 1), (1, 2)))


def of_others_recomputed(plan: StepPlan) -> StepPlan:
    first, second = plan.micro_batches
    first = (dataclasses.replace(first[0], recomputed=True), *first[1:])
    return dataclasses.replace(plan, micro_batches=(first, second))


def run_changed(config: Any, plan_for: Any, change: Callable[[StepPlan], StepPlan]) -> None:
    build_runner(config, WORKLOAD).run(change(plan_for(config, WORKLOAD, 2, 0)))


@pytest.mark.parametrize(
    ("plan_for", "change", "message"),
    [
        (scatter_for, of_unequal_numbers, r"have numbers of micro-batches \[\(3,\), \(2,\)\]"),
        (scatter_for, of_other_chains, r"meet in each pass, but have chains of micro-batches"),
        (sliced_for, of_others_recomputed, r"but have recomputed ones of micro-batches \[\(True, "),
    ],
)
def test_plans_that_are_unlike_are_refused_where_replicas_meet(
    gloo: GlooPool, plan_for: Any, change: Callable[[StepPlan], StepPlan], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        gloo.run(2, run_changed, EP2.config, plan_for, change)


OVER_REPLICAS = Layout("moe-seq", 4, pp=2, dp=2, ep=2, extra=FULL)
SLICED = [
    further(Layout("moe-seq", 3, pp=2, tp="2sp", ep=2, extra=f"{ETP1} {FULL}")),
    further(Layout("moe-seq", 3, tp="2sp", ep=2, extra=ETP1)),
    further(Layout("moe-seq", 3, pp=2, cp=2, ep=2, sharding="per-document", extra=FULL)),
    further(Layout("moe-aux", 3, tp="2sp", cp=2, ep=4, extra=ETP1)),
    further(Layout("moe-seq", 3, tp="2sp", dp=2, ep=2, extra=f"{ETP1} {SHARDED} {OVERLAP}")),
    further(Layout("deepseek", 3, pp=2, tp="2sp", ep=2, extra=ETP1)),
    # Over replicas, which run alike.
    OVER_REPLICAS,
    further(Layout("moe-aux", 4, dp=4, ep=2, extra=f"{SHARDED} {OVERLAP}")),
    further(EP4),
    further(Layout("moe-seq", 4, pp=2, dp=2, extra=f"{ETP2} {SHARDED}")),
    further(Layout("moe-seq", 3, cp=2, dp=2, ep=4, sharding="per-document")),
    further(Layout("deepseek", 4, pp=2, dp=2, ep=2)),
    further(Layout("deepseek", 4, pp=2, vpp=2, dp=2, ep=2)),
]


@pytest.mark.parametrize("case", SLICED, ids=str)
def test_experts_of_slices_compute_what_one_process_does(wrong: Differences, case: Layout) -> None:
    assert wrong(case, plan_for=sliced_for) == []


ALONE = Layout("moe-seq", 1, dp=2)  # all experts in each replica
MERGED = [
    ALONE,
    Layout("moe-seq", 1, pp=2, dp=2, ep=2, extra=FULL),
    further(Layout("moe-seq", 1, dp=4, ep=2, extra=f"{SHARDED} {OVERLAP}")),
    further(Layout("moe-seq", 1, dp=4, ep=4)),
    further(Layout("moe-seq", 1, tp="2sp", dp=2, ep=2, extra=f"{ETP1} {SHARDED} {OVERLAP}")),
    further(Layout("moe-seq", 1, tp="2sp", dp=2, ep=2)),
    further(Layout("moe-aux", 1, cp=2, dp=2, ep=4, sharding="per-document")),
    further(Layout("moe-aux", 1, dp=4, extra=OVERLAP)),
    further(Layout("deepseek", 2, pp=2, vpp=2, dp=2, ep=2)),
]


@pytest.mark.parametrize("case", MERGED, ids=str)
def test_experts_of_replicas_together_compute_what_one_process_does(
    wrong: Differences, case: Layout
) -> None:
    assert wrong(case, plan_for=merged_for) == []


@pytest.mark.long
def test_experts_of_slices_are_computed_again(wrong: Differences) -> None:
    case = Layout("moe-seq", 3, tp="2sp", ep=2, extra=ETP1)
    assert wrong(case, experts_again, sliced_for) == []


@pytest.mark.parametrize(
    "case",
    [
        Layout("moe-aux", 4, pp=2, dp=2, ep=2),
        further(Layout("moe-aux", 3, tp="2sp", cp=2, ep=4, extra=f"{ETP1} {FULL}")),
        further(Layout("moe-seq", 4, pp=2, dp=2, ep=2)),
        further(Layout("deepseek", 4, pp=2, vpp=2, dp=2, ep=2)),
    ],
    ids=str,
)
def test_some_micro_batches_with_experts_are_recomputed(wrong: Differences, case: Layout) -> None:
    assert wrong(case, plan_for=recomputed_for) == []


def count_on_each_replica(runner: Any) -> Any:
    """Routers count what their own replica's tokens of a document choose."""
    return with_tokens(runner, lambda tokens: dataclasses.replace(tokens, group=None))


def take_slices_for_documents(runner: Any) -> Any:
    return with_tokens(runner, lambda tokens: dataclasses.replace(tokens, cut=None))


@pytest.mark.parametrize(
    ("case", "fault", "plan_for"),
    [
        (EP2, megatron_s_own_routers, scatter_for),
        (EP4, count_padding, scatter_for),
        (EP2, divide_by_targets, scatter_for),
        (EP2, take_documents_for_one, scatter_for),
        (ALONE, count_on_each_replica, merged_for),
        (OVER_REPLICAS, take_slices_for_documents, sliced_for),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_fault_of_experts_differs_from_the_oracle(
    wrong: Differences, case: Layout, fault: Any, plan_for: Any
) -> None:
    found = wrong(case, fault, plan_for)
    assert any(line.startswith("step 0: gradient of") and "router" in line for line in found)
    assert not any(line.startswith("step 0: loss") for line in found)  # in gradients only


def build_with_another_router(config: Any) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_wlb.runtime.gpt.moe import DocumentMoELayer, route_by_document

    runner = build_runner(config, WORKLOAD)
    (gpt,) = runner.model.gpts
    for layer in gpt.decoder.layers:
        if isinstance(layer.mlp, DocumentMoELayer):
            layer.mlp.__class__ = DocumentMoELayer.__base__
            layer.mlp.router.__class__ = type("OwnRouter", (TopKRouter,), {})
    route_by_document(gpt)


def test_a_router_of_another_kind_is_refused(gloo: GlooPool) -> None:
    with pytest.raises(CompatibilityError, match="has a OwnRouter in place of Megatron's TopKRou"):
        gloo.run(1, build_with_another_router, Layout("moe-aux", 1).config)


def counted_while_measuring(config: Any) -> float:
    """What routers count while passes are timed: in biases, losses and their log."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from megatron_wlb.runtime.measuring.measure import run_passes

    runner = build_runner(config, WORKLOAD)
    tracker = get_moe_metrics_tracker().metrics
    tracker.clear()
    assert min(run_passes(runner.model, [5, 11], WORKLOAD.vocab_size)) > 0
    logged = sum(float(one.values.abs().sum()) for one in tracker.values())
    tracker.clear()
    routers = [moe.router for moe in experts_of(runner)]
    assert routers
    return logged + sum(float(router.local_tokens_per_expert.sum()) for router in routers)


def test_timed_passes_count_no_token(gloo: GlooPool) -> None:
    assert gloo.run(2, counted_while_measuring, EP2.config) == [0.0, 0.0]
