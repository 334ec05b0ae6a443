"""Documents in slices compute what one process computes with each document alone.

Loss, every element of every gradient, and the weights after several optimizer steps, against
:mod:`helpers.oracle`; evaluation too. And faults that must not pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from helpers.gloo import GlooPool
from helpers.layouts import (
    FULL,
    GATHER,
    HEAD_GROUPS,
    KEEP,
    LONGER,
    OVERLAP,
    SELECTIVE,
    VERIFY_SHAPES,
    WORKLOAD,
    Differences,
    Layout,
    Oracle,
    further,
)
from helpers.oracle import OracleRun, State
from helpers.ranks import (
    build_runner,
    half_recomputed,
    recomputed_for,
    scatter_for,
    sliced_for,
    train,
)
from helpers.shards import RankRun

from megatron_wlb.cost.schedule.order import Action, one_f_one_b
from megatron_wlb.cost.slices import MLPS
from megatron_wlb.errors import PlanError
from megatron_wlb.plan import StepPlan

BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
DROPOUT = "--hidden-dropout 0.2"
ONE = Layout("llama", 1)
PP2_DP2 = Layout("gpt2", 1, pp=2, dp=2, extra=GATHER)
CASES = [
    ONE,
    # Megatron's recipes name a TP of experts where there are none.
    Layout("gpt2", 1, dp=2, extra=f"{OVERLAP} --expert-tensor-parallel-size 2"),
    Layout("llama", 1, pp=2, extra=SELECTIVE),
    Layout("gpt2", 1, pp=2, extra=f"{BLOCK} {VERIFY_SHAPES}"),
    PP2_DP2,
    Layout("llama", 1, pp=4),
    # Several chunks; two ranks are each other's next and last.
    Layout("llama", 2, pp=2, vpp=2, extra=f"{FULL} {VERIFY_SHAPES}"),
    # Context parallelism.
    Layout("llama", 1, cp=2, sharding="per-document", extra=HEAD_GROUPS),
]
FURTHER = [
    Layout("mixed", 1, cp=2, tp="2sp", sharding="adaptive", extra=SELECTIVE),
    Layout("gpt2", 1, cp=2, sharding="per-sequence", extra=f"{KEEP} {FULL}"),
    Layout("yarn", 1, cp=4, sharding="hybrid"),
    Layout("mixed", 1, tp="2sp", extra=FULL),
    Layout("gpt2", 1, pp=2, cp=2, sharding="hybrid", extra=FULL),
    Layout("gpt2", 2, pp=2, vpp=2, dp=2, extra=GATHER),
    Layout("mixed", 4, pp=4, vpp=2, extra=FULL),
    Layout("llama", 2, pp=2, vpp=3, tp="2sp", extra=OVERLAP),
]


def runs_of(gloo, case: Layout, initial: State, plan_for=sliced_for):
    return gloo.run(case.world_size, train, case.config, WORKLOAD, initial, nullcontext, plan_for)


@pytest.mark.parametrize("case", [*CASES, *map(further, FURTHER)], ids=str)
def test_slices_compute_what_one_process_does(wrong: Differences, case: Layout) -> None:
    assert wrong(case, plan_for=sliced_for) == []


@contextlib.contextmanager
def counting(runner, kind, method: str, number: Callable[[int, int], int]) -> Iterator[None]:
    """Asserts how often a method runs in each step: ``number`` of micro-batches, and of those that
    are computed again.
    """
    run_schedule, right = runner.run_schedule, getattr(kind, method)

    def counted(plan, *args, forward_only, **options):
        own = plan.micro_batches[runner.model.groups.dp.rank()]
        again = sum(m.recomputed > 0 for m in own)
        with mock.patch.object(kind, method, autospec=True, side_effect=right) as run:
            reports = run_schedule(plan, *args, forward_only=forward_only, **options)
        assert run.call_count == number(len(own), 0 if forward_only else again)
        assert again
        return reports

    with mock.patch.object(runner, "run_schedule", counted):
        yield


@contextlib.contextmanager
def with_some_recomputed(runner) -> Iterator[None]:
    """Asserts that blocks recompute the micro-batches that are to be, and no others."""
    from megatron.core.transformer import transformer_block

    num_chunks = len(runner.model.chunks)
    with counting(runner, transformer_block, "checkpointed_forward", lambda _, n: n * num_chunks):
        yield
    assert all(gpt.config.recompute_granularity is None for gpt in runner.model.gpts)


@pytest.mark.parametrize(
    "case",
    [
        Layout("llama", 2, pp=2, vpp=2, extra=GATHER),
        *map(further, [
            Layout("mixed", 1, cp=2, sharding="per-document"),
            Layout("gpt2", 1, pp=2, dp=2, extra=OVERLAP),
            Layout("mixed", 4, pp=4, vpp=2, extra=VERIFY_SHAPES),
            Layout("llama", 1, pp=2, tp="2sp"),
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_some_micro_batches_are_recomputed(wrong: Differences, case: Layout) -> None:
    assert wrong(case, with_some_recomputed, recomputed_for) == []


def mlps_recomputed_for(config, workload, world_size: int, step: int) -> StepPlan:
    return half_recomputed(sliced_for(config, workload, world_size, step), MLPS)


def with_some_mlps_recomputed(runner):
    """Asserts that the MLPs of the micro-batches that are to be are run again, and no others."""
    from megatron.core.transformer.mlp import MLP

    num_layers = sum(len(gpt.decoder.layers) for gpt in runner.model.gpts)
    return counting(runner, MLP, "forward", lambda num, again: num_layers * (num + again))


@pytest.mark.parametrize(
    "case",
    [
        Layout("llama", 2, pp=2, vpp=2, extra=GATHER),
        *map(further, [
            Layout("llama", 1, cp=2, tp="2sp", sharding="per-document"),
            Layout("llama", 1, pp=2, dp=2, extra=OVERLAP),
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_some_mlps_are_recomputed(wrong: Differences, case: Layout) -> None:
    assert wrong(case, with_some_mlps_recomputed, mlps_recomputed_for) == []


def test_mlps_with_biases_are_not_recomputed(wrong: Differences) -> None:
    with pytest.raises(PlanError, match=r"MLPs, which have biases.*recompute its layers"):
        wrong(Layout("gpt2", 1), plan_for=mlps_recomputed_for)


@contextlib.contextmanager
def with_head_start(runner) -> Iterator[None]:
    """Attention begins with near keys in each micro-batch, as on GPUs where that pays."""
    from megatron_wlb.runtime.gpt.attention import head_start

    for gpt in runner.model.gpts:
        for layer in gpt.decoder.layers:
            core = layer.self_attention.core_attention
            core.options = dataclasses.replace(core.options, head_start_bytes=0)
    joined = mock.Mock(wraps=head_start.join)
    with mock.patch.multiple(head_start, LINK_SHARE=0, join=joined):
        yield
    assert joined.called


def test_slices_compute_the_same_with_a_head_start(wrong: Differences) -> None:
    case = Layout("llama", 1, pp=2, cp=2, sharding="hybrid", extra=HEAD_GROUPS)
    assert wrong(case, with_head_start, sliced_for) == []


@contextlib.contextmanager
def meeting(runner) -> Iterator[None]:
    """All data-parallel ranks meet in each layer, forward and backward, as they do to agree on
    FP8's delayed scales.
    """
    import torch

    counts = [torch.zeros(1), torch.zeros(1)]

    def meet(at: int) -> None:
        counts[at] += 1
        torch.distributed.all_reduce(counts[at], group=runner.model.groups.dp)

    def pass_on(module, inputs, output) -> None:
        meet(0)
        if output[0].requires_grad:
            output[0].register_hook(lambda _: meet(1))

    layers = [layer for gpt in runner.model.gpts for layer in gpt.decoder.layers]
    hooks = [layer.register_forward_hook(pass_on) for layer in layers]
    yield
    for hook in hooks:
        hook.remove()
    assert min(map(float, counts)) > 0


def test_replicas_that_meet_in_each_pass_run_slices_alike(wrong: Differences) -> None:
    """Any flag that says so stands for delayed scales, which need a GPU."""
    case = Layout("llama", 4, pp=2, dp=2, extra=f"--use-torch-fsdp2 {FULL}")
    assert wrong(case, meeting, sliced_for) == []


def test_sliced_plans_are_awkward() -> None:
    """That the cases are what they seem."""
    for case in CASES:
        for step, documents in enumerate(WORKLOAD.steps):
            plan = sliced_for(case.config, WORKLOAD, case.world_size, step)
            spans = [span for m in plan for span in m.spans]
            assert sorted(d.key for d in documents) == sorted(
                s.document.key for s in spans if not s.start
            )
            assert sum(s.num_targets for s in spans) == sum(d.num_targets for d in documents)
            chains = [length for own in plan.chains for length in own]
            assert len({length for length in chains if length > 1}) > 1
            assert 1 in chains
            slices = [m.slice for m in plan if m.slice is not None]
            assert any(s.length == 1 and s.start == 0 for s in slices)
            assert any(s.length == 1 and s.stop == s.document.length for s in slices)
            assert any(m.slice is not None and len(m.spans) > 1 for m in plan)
            assert any(m.padded_length > m.length for m in plan)
    plans = [sliced_for(PP2_DP2.config, WORKLOAD, 4, step) for step in range(len(WORKLOAD.steps))]
    assert any(len({len(own) for own in plan.micro_batches}) > 1 for plan in plans)


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


# What must not pass. Each breaks the run of a layout that is equal to the oracle above.


@contextlib.contextmanager
def with_order(order) -> Iterator[None]:
    from megatron_wlb.runtime.stepping import step

    with mock.patch.object(step, "sliced", order):
        yield


def in_megatrons_order(runner):
    return with_order(lambda pp_size, chains, _: one_f_one_b(pp_size, sum(chains)))


def forwards_then_backwards_in_order(pp_size: int, chains, _) -> list[list[Action]]:
    passes = [Action(kind, 0, m) for kind in ("F", "B") for m in range(sum(chains))]  # type: ignore[arg-type]
    return [passes] * pp_size


@contextlib.contextmanager
def first_to_last_unguarded(runner) -> Iterator[None]:
    """Backward passes in the order of the forward ones, and nobody minds."""
    from megatron_wlb.runtime.gpt.attention.slice_attention import LayerSlice, SliceStore

    with (
        with_order(forwards_then_backwards_in_order),
        mock.patch.object(LayerSlice, "_is_next", lambda self, *_: True),
        mock.patch.object(LayerSlice, "turned", lambda self, *_: None),
        mock.patch.object(SliceStore, "end", lambda self: self.buffers.clear()),
    ):
        yield


@contextlib.contextmanager
def reduce_one_backward_early(runner) -> Iterator[None]:
    """Gradients are reduced in the last backward but one, from the second step on.

    In the first step Megatron counts a parameter's gradients from there on, and so would wait for
    the last one in each later step.
    """
    from megatron_wlb.runtime.stepping import executor

    config, backward = runner.model.config, executor.schedules.backward_step
    no_sync, left, num_steps = config.no_sync_func, 0, 0
    entered = contextlib.ExitStack()

    @contextlib.contextmanager
    def shorter():
        nonlocal num_steps
        num_steps += 1
        with entered:
            entered.enter_context(no_sync())
            yield

    def run(plan: StepPlan, **options):
        nonlocal left
        left = len(plan.micro_batches[runner.model.groups.dp.rank()])
        return right(plan, **options)

    def early(*args):
        nonlocal left
        left -= 1
        is_early = left == 1 and num_steps > 1
        if is_early:
            entered.close()
        gradients = backward(*args)
        if is_early:  # on a busy machine the reduction could begin after the last backward
            for chunk in runner.model.chunks:
                for bucket_group in chunk.bucket_groups:
                    bucket_group.grad_reduce_handle.wait()
        return gradients

    right = runner.run
    with (
        mock.patch.object(config, "no_sync_func", shorter),
        mock.patch.object(runner, "run", run),
        mock.patch.object(executor.schedules, "backward_step", early),
    ):
        yield


@contextlib.contextmanager
def take_another_documents_keys(runner) -> Iterator[None]:
    """The last slice of each document looks for keys under another document's name."""
    store = runner.batches.slices
    right = store.slice

    def wrong(span, divided):
        found = right(span, divided)
        if span.stop < span.document.length:
            return found
        return dataclasses.replace(found, document=(found.document[0] + 1, 0))

    with mock.patch.object(store, "slice", wrong):
        yield


@pytest.mark.parametrize("fault", [in_megatrons_order, take_another_documents_keys])
def test_wrong_order_or_document_is_refused(
    wrong: Differences, fault: Callable[..., object]
) -> None:
    with pytest.raises(PlanError, match="slices run forward first to last"):
        wrong(ONE, fault, sliced_for)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (ONE, first_to_last_unguarded),
        (Layout("gpt2", 1, dp=2, extra=OVERLAP), reduce_one_backward_early),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_wrong_order_or_early_reduction_differs_from_the_oracle(
    wrong: Differences, case: Layout, fault: Callable[..., object]
) -> None:
    found = wrong(case, fault, sliced_for, LONGER)
    assert any(": gradient of" in line for line in found)
    assert not any(line.startswith("step 0: loss") for line in found)


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


@contextlib.contextmanager
def keep_chunks_together(runner) -> Iterator[None]:
    """Layers of another chunk find the keys of the first."""
    from megatron_wlb.runtime.gpt.attention.slice_attention import LayerSlice

    name = property(lambda run: (run.slice.document, 0))
    with mock.patch.object(LayerSlice, "_name", name):
        yield


def test_keys_of_another_chunk_are_refused(wrong: Differences) -> None:
    with pytest.raises(PlanError, match="slices run forward first to last"):
        wrong(Layout("llama", 2, pp=2, vpp=2), keep_chunks_together, sliced_for)


@contextlib.contextmanager
def with_first_micro_batches_told(runner) -> Iterator[None]:
    """Each step and evaluation tells a chunk once that new weights come, before it runs: caches of
    FP8 need that.
    """
    (chunk,) = runner.model.chunks
    tell, run = chunk.set_is_first_microbatch, runner.run_schedule
    events = []

    def told(name, call):
        return mock.Mock(side_effect=lambda *a, **k: (events.append(name), call(*a, **k))[1])

    chunk.set_is_first_microbatch = told("told", tell)
    runner.run_schedule = told("run", run)
    chunk.register_forward_pre_hook(lambda *_: events.append("forward"))
    yield
    num_runs = events.count("run")
    assert num_runs == events.count("told") > 1
    assert events.count("forward") > num_runs
    assert [after for before, after in pairwise(events) if before == "run"] == ["told"] * num_runs


def test_slices_tell_layers_of_the_first_micro_batch(wrong: Differences) -> None:
    assert wrong(Layout("gpt2", 1, pp=2), with_first_micro_batches_told, sliced_for) == []
