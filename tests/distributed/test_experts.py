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
from helpers.layouts import FULL, OVERLAP, SHARDED, WORKLOAD, Layout, further
from helpers.oracle import OracleRun, run_oracle
from helpers.ranks import build_runner, recomputed_for, scatter_for, sliced_for, train
from helpers.shards import differences
from test_merge import merged_for

from megatron_wlb.errors import CompatibilityError, PlanError
from megatron_wlb.plan import StepPlan

Compare = Callable[..., list[str]]

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


@pytest.fixture(scope="module")
def compare(gloo: GlooPool) -> Compare:
    """How a layout's run differs from the oracle's."""
    return _compare(gloo, scatter_for)


@pytest.fixture(scope="module")
def sliced(gloo: GlooPool) -> Compare:
    """The same of slices."""
    return _compare(gloo, sliced_for)


def _compare(gloo: GlooPool, plan_for: Callable[..., StepPlan]) -> Compare:
    known: dict[Any, OracleRun] = {}

    def run(case: Layout, fault: Any = contextlib.nullcontext) -> list[str]:
        plans = [
            plan_for(case.config, WORKLOAD, case.world_size, step)
            for step in range(len(WORKLOAD.steps))
        ]
        # Losses of documents do not depend on the packing.
        key = case if case.model == "moe-aux" else case.model
        if key not in known:
            (known[key],) = gloo.run(1, run_oracle, case.config, WORKLOAD, plans)
        initial = known[key].initial
        runs = gloo.run(case.world_size, train, case.config, WORKLOAD, initial, fault, plan_for)
        return differences(known[key], runs)

    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_compute_what_one_process_does(compare: Compare, case: Layout) -> None:
    assert compare(case) == []


@contextlib.contextmanager
def experts_again(runner: Any) -> Iterator[None]:
    """Layers of experts are computed again in the backward pass, and nothing else is."""
    for moe in experts_of(runner):
        moe.recomputes = True
    yield


def test_experts_that_are_computed_again_count_their_own_documents(compare: Compare) -> None:
    assert compare(PP2, experts_again) == []


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


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (EP2, megatron_s_own_routers),
        (EP4, count_padding),
        (EP2, divide_by_targets),
        (EP2, take_documents_for_one),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_fault_of_experts_differs_from_the_oracle(
    compare: Compare, case: Layout, fault: Any
) -> None:
    found = compare(case, fault)
    assert any(line.startswith("step 0: gradient of") and "router" in line for line in found)
    assert not any(line.startswith("step 0: loss") for line in found)  # in gradients only


def test_documents_of_another_micro_batch_are_refused(compare: Compare) -> None:
    with pytest.raises(PlanError, match=r"a router got .* tokens where the plan has"):
        compare(PP2, megatron_s_own_recomputation)


def run_unequal_numbers(config: Any) -> None:
    runner = build_runner(config, WORKLOAD)
    plan = scatter_for(config, WORKLOAD, 2, 0)
    fewer = (plan.micro_batches[0], plan.micro_batches[1][1:])
    runner.run(dataclasses.replace(plan, micro_batches=fewer))


def test_ranks_of_unequal_numbers_of_micro_batches_are_refused(gloo: GlooPool) -> None:
    with pytest.raises(PlanError, match=r"have numbers of micro-batches \[\(3,\), \(2,\)\]"):
        gloo.run(2, run_unequal_numbers, EP2.config)


def run_slices(config: Any) -> None:
    runner = build_runner(config, WORKLOAD)
    plan = scatter_for(config, WORKLOAD, 2, 0)
    runner.run(dataclasses.replace(plan, chains=((1, 1, 1), (1, 2))))


def test_slices_in_another_order_are_refused_where_replicas_meet(gloo: GlooPool) -> None:
    with pytest.raises(PlanError, match=r"meet in each pass, but have chains of micro-batches"):
        gloo.run(2, run_slices, EP2.config)


def run_unlike(config: Any) -> None:
    runner = build_runner(config, WORKLOAD)
    plan = sliced_for(config, WORKLOAD, 2, 0)
    first, second = plan.micro_batches
    first = (dataclasses.replace(first[0], recomputed=True), *first[1:])
    runner.run(dataclasses.replace(plan, micro_batches=(first, second)))


def test_other_recomputed_ones_are_refused_where_replicas_meet(gloo: GlooPool) -> None:
    with pytest.raises(PlanError, match=r"but have recomputed ones of micro-batches \[\(True, "):
        gloo.run(2, run_unlike, EP2.config)


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
def test_experts_of_slices_compute_what_one_process_does(sliced: Compare, case: Layout) -> None:
    assert sliced(case) == []


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


@pytest.fixture(scope="module")
def merged(gloo: GlooPool) -> Compare:
    """The same of documents that several replicas run together."""
    return _compare(gloo, merged_for)


@pytest.mark.parametrize("case", MERGED, ids=str)
def test_experts_of_replicas_together_compute_what_one_process_does(
    merged: Compare, case: Layout
) -> None:
    assert merged(case) == []


def count_on_each_replica(runner: Any) -> Any:
    """Routers count what their own replica's tokens of a document choose."""
    return with_tokens(runner, lambda tokens: dataclasses.replace(tokens, group=None))


def test_documents_that_each_replica_counts_for_itself_differ_from_the_oracle(
    merged: Compare,
) -> None:
    found = merged(ALONE, count_on_each_replica)
    assert any(line.startswith("step 0: gradient of") and "router" in line for line in found)
    assert not any(line.startswith("step 0: loss") for line in found)


@pytest.mark.long
def test_experts_of_slices_are_computed_again(sliced: Compare) -> None:
    assert sliced(Layout("moe-seq", 3, tp="2sp", ep=2, extra=ETP1), experts_again) == []


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
def test_some_micro_batches_with_experts_are_recomputed(gloo: GlooPool, case: Layout) -> None:
    assert _compare(gloo, recomputed_for)(case) == []


def take_slices_for_documents(runner: Any) -> Any:
    return with_tokens(runner, lambda tokens: dataclasses.replace(tokens, cut=None))


def test_a_slice_that_counts_alone_differs(sliced: Compare) -> None:
    found = sliced(OVER_REPLICAS, take_slices_for_documents)
    assert any(line.startswith("step 0: gradient of") and "router" in line for line in found)
    assert not any(line.startswith("step 0: loss") for line in found)


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


def norms(config: Any) -> tuple[float, float]:
    """The norm of all gradients by our update, and by Megatron."""
    from megatron_wlb.runtime.stepping.optimizer import build_optimizer, update

    runner = build_runner(config, WORKLOAD)
    optimizer, _ = build_optimizer(config, runner.model)
    for chunk in runner.model.chunks:
        chunk.zero_grad_buffer()
    runner.run(scatter_for(config, WORKLOAD, 2, 0))
    optimizer.prepare_grads()
    expected = float(optimizer.get_grad_norm())
    return update(optimizer, 1.0).item(), expected


@pytest.mark.parametrize("case", [EP2, dataclasses.replace(EP2, extra=SHARDED), DIVIDED], ids=str)
def test_gradients_of_experts_count_once_in_the_norm(gloo: GlooPool, case: Layout) -> None:
    results = gloo.run(2, norms, case.config)
    assert results[0][0] == results[1][0] > 0.1
    for found, expected in results:
        assert found == pytest.approx(expected, rel=1e-5)


def counted_while_measuring(config: Any) -> float:
    """What routers count while passes are timed: in biases, losses and their log."""
    from megatron.core.transformer.moe import moe_utils

    from megatron_wlb.runtime.measuring.measure import run_passes

    runner = build_runner(config, WORKLOAD)
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    tracker.clear()
    assert min(run_passes(runner.model, [5, 11], WORKLOAD.vocab_size)) > 0
    logged = sum(float(one["values"].abs().sum()) for one in tracker.values())
    tracker.clear()
    routers = [moe.router for moe in experts_of(runner)]
    assert routers
    return logged + sum(float(router.local_tokens_per_expert.sum()) for router in routers)


def test_timed_passes_count_no_token(gloo: GlooPool) -> None:
    assert gloo.run(2, counted_while_measuring, EP2.config) == [0.0, 0.0]
