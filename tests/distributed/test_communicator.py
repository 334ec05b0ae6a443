"""What travels between pipeline stages in a real step, in which order, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from functools import partial
from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import GROUP, NO_P2P_OVERLAP, Layout
from helpers.ranks import build_runner
from helpers.workload import Workload, make_workload

from megatron_wlb.cost.schedule.order import Action, interleaved, one_f_one_b, receive_order
from megatron_wlb.errors import PlanError
from megatron_wlb.plan import MicroBatchPlan, Span, StepPlan

HIDDEN = 32


def workload_of(layout: Layout) -> Workload:
    """A document for each micro-batch, each of another length, multiples of 2, not sorted."""
    n = layout.num_micro_batches
    return make_workload([[2 + 2 * ((7 * m + 3) % n if n % 7 else m) for m in range(n)]], 59)


def plan_of(layout: Layout) -> StepPlan:
    micro_batches = [
        MicroBatchPlan(m, (Span(d, 0, d.length),), d.length, 1.0)
        for m, d in enumerate(workload_of(layout).steps[0])
    ]
    assert len({m.length for m in micro_batches}) == layout.num_micro_batches
    return StepPlan(0, "one document each", (tuple(micro_batches),), 0, 0)


def swapped(plan: StepPlan) -> StepPlan:
    """The first two micro-batches in the other order."""
    (first, second, *rest) = plan.micro_batches[0]
    return dataclasses.replace(plan, micro_batches=((second, first, *rest),))


# Cases, run on every rank.


def run_step(layout: Layout, options, plans_of_ranks=None):
    """``(loss, error)`` of one step; ``plans_of_ranks`` overrides the plan of some ranks."""
    import torch

    runner = build_runner(layout.config, workload_of(layout), **options)
    plan = (plans_of_ranks or {}).get(torch.distributed.get_rank(), plan_of(layout))
    for chunk in runner.model.chunks:
        chunk.zero_grad_buffer()
    return runner.run(plan).mean


def error_of_step(layout: Layout, options, plans_of_ranks) -> str:
    with pytest.raises(PlanError) as caught:
        run_step(layout, options, plans_of_ranks)
    return str(caught.value)


def runs_that_compare(layout: Layout, interval: int, plans_of_ranks) -> list[bool]:
    """For each of four runs of plans that differ, whether the difference was found."""
    import torch

    runner = build_runner(layout.config, workload_of(layout), verify_plan_interval=interval)
    plan = plans_of_ranks.get(torch.distributed.get_rank(), plan_of(layout))
    found = []
    for _ in range(4):
        for chunk in runner.model.chunks:
            chunk.zero_grad_buffer()
        try:
            runner.run(plan)
        except PlanError:
            found.append(True)
        else:
            found.append(False)
    return found


def messages_of_step(layout: Layout, options):
    """The loss, and ``(from, to, dtype, shape)`` of all p2p messages sent and received."""
    from torch.distributed import ProcessGroup, get_global_rank, get_rank

    sent, received = [], []

    def recording(stock, record, is_send):
        def send_or_receive(group, tensors, peer, tag):
            (tensor,) = tensors
            me, other = get_rank(), get_global_rank(group, peer)
            ends = (me, other) if is_send else (other, me)
            record.append((*ends, str(tensor.dtype), tuple(tensor.shape)))
            return stock(group, tensors, peer, tag)

        return send_or_receive

    send, receive = ProcessGroup.send, ProcessGroup.recv
    with (
        mock.patch.object(ProcessGroup, "send", recording(send, sent, True)),
        mock.patch.object(ProcessGroup, "recv", recording(receive, received, False)),
    ):
        loss = run_step(layout, options)
    return loss, sent, received


def actions_of_step(layout: Layout, forward_only: bool):
    """What ran, in order; and the lengths of what was sent to the next and the previous stage.

    A micro-batch is known by the batch that the chunk was given, a backward by the gradient that
    reaches the chunk's output.
    """
    runner = build_runner(layout.config, workload_of(layout))
    model, communicator = runner.model, runner.communicator
    actions, to_next, to_previous = [], [], []
    forward = runner._forward_step([0] * layout.num_micro_batches, "step")
    communicate = communicator._communicate

    def recording_forward(batches, chunk):
        output, loss_function = forward(batches, chunk)
        assert isinstance(loss_function, partial)
        (batch,) = loss_function.args
        number = model.chunks.index(chunk)
        actions.append(Action("F", number, batch.plan.index))
        if output.requires_grad:
            output.register_hook(lambda _: actions.append(Action("B", number, batch.plan.index)))
        return output, loss_function

    def recording_communicate(*, tensor_send_next, tensor_send_prev, **kwargs):
        for tensor, record in ((tensor_send_next, to_next), (tensor_send_prev, to_previous)):
            if tensor is not None:
                record.append(tensor.shape[0])
        return communicate(
            tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, **kwargs
        )

    with (
        mock.patch.object(runner, "_forward_step", lambda *_: recording_forward),
        mock.patch.object(communicator, "_communicate", recording_communicate),
    ):
        runner.run(plan_of(layout), forward_only=forward_only)
    return actions, to_next, to_previous


def storages_of_step(layout: Layout, forward_only: bool) -> tuple[int, int, int]:
    """Of a step's messages their number, how many lost their memory before they were sent, and how
    many have it still when the step is over.
    """
    from megatron.core.pipeline_parallel import schedules
    from torch.distributed import ProcessGroup
    from torch.multiprocessing.reductions import StorageWeakRef

    runner = build_runner(layout.config, workload_of(layout))
    under_way, memory, lost = [], [], set()
    send, deallocate = ProcessGroup.send, schedules.deallocate_output_tensor

    def recording_send(group, tensors, peer, tag):
        work = send(group, tensors, peer, tag)
        memory.append(StorageWeakRef(tensors[0].untyped_storage()))
        under_way.append(work)
        return work

    def recording_deallocate(output, is_asked):
        deallocate(output, is_asked)
        for number, (work, own) in enumerate(zip(under_way, memory, strict=True)):
            if own.expired() and not work.is_completed():
                lost.add(number)

    with (
        mock.patch.object(ProcessGroup, "send", recording_send),
        mock.patch.object(schedules, "deallocate_output_tensor", recording_deallocate),
    ):
        runner.run(plan_of(layout), forward_only=forward_only)
    under_way.clear()
    for gpt in runner.model.gpts:  # which have their last input, and so its gradient
        gpt.set_input_tensor(None)
    return len(memory), len(lost), sum(not own.expired() for own in memory)


def misuse_communicator(layout: Layout) -> list[str]:
    """The errors of a communicator whose plan is longer, then shorter than the schedule."""
    communicator = build_runner(layout.config, workload_of(layout)).communicator
    stage = communicator.pp_group.rank()
    errors = []
    communicator.begin([4, 6, 8], forward_only=True, label="step 7")
    if stage == 1:
        assert communicator._communicate_shapes(None, None, True, False)[0] == [4, 1, HIDDEN]
    for call in (
        communicator.end,
        lambda: communicator.begin([2], forward_only=True, label="step 8"),
    ):
        try:
            call()
        except PlanError as error:
            errors.append(str(error))
    if stage == 1:
        communicator._communicate_shapes(None, None, True, False)
        communicator._communicate_shapes(None, None, True, False)
        communicator.end()
        for directions in ((True, False), (False, True)):
            with pytest.raises(PlanError) as caught:
                communicator._communicate_shapes(None, None, *directions)
            errors.append(str(caught.value))
    return errors


# Messages.

FEW = Layout("gpt2", 4, pp=2, vpp=2, extra=NO_P2P_OVERLAP)
MESSAGE_CASES = [
    Layout("gpt2", 5, pp=2),
    Layout("gpt2", 5, pp=2, vpp=2, extra=f"{GROUP} 3"),
    FEW,
    Layout("gpt2", 3, pp=2, tp="2sp"),
    Layout("gpt2", 9, pp=4, vpp=2, extra=f"{GROUP} 5"),
]


def payloads(layout: Layout) -> Counter[tuple[int, int, str, tuple[int, ...]]]:
    """What must travel, and nothing else: each micro-batch over each boundary, there and back."""
    p = layout.config.parallel
    tp = p.tensor_model_parallel_size
    needed: Counter[tuple[int, int, str, tuple[int, ...]]] = Counter()
    for boundary in range(layout.pp * layout.vpp - 1):
        before, after = boundary % layout.pp, (boundary + 1) % layout.pp
        for m in plan_of(layout).micro_batches[0]:
            shape = (m.padded_length // (tp if p.sequence_parallel else 1), 1, HIDDEN)
            for tp_rank in range(tp):  # ranks count over TP first
                ends = before * tp + tp_rank, after * tp + tp_rank
                needed[*ends, "torch.float32", shape] += 1
                needed[*ends[::-1], "torch.float32", shape] += 1
    assert needed.total() == 2 * (layout.pp * layout.vpp - 1) * layout.num_micro_batches * tp
    return needed


@pytest.mark.parametrize("layout", MESSAGE_CASES, ids=str)
def test_step_sends_payloads_only(gloo: GlooPool, layout: Layout) -> None:
    results = gloo.run(layout.world_size, messages_of_step, layout, {})
    for direction in (1, 2):
        messages = itertools.chain.from_iterable(result[direction] for result in results)
        assert Counter(messages) == payloads(layout)


@pytest.mark.parametrize("layout", [case for case in MESSAGE_CASES if case != FEW], ids=str)
def test_verified_step_asks_for_each_shape_and_contents_once(
    gloo: GlooPool, layout: Layout
) -> None:
    plain = gloo.run(layout.world_size, run_step, layout, {})
    results = gloo.run(layout.world_size, messages_of_step, layout, {"verify_shapes": True})
    sent = Counter(itertools.chain.from_iterable(result[1] for result in results))
    needed = payloads(layout)
    asked = Counter(m for m in sent.elements() if m[2] == "torch.int64")
    assert sent - asked == needed
    assert {shape for *_, shape in asked} == {(3,)}
    # Of each its shape, and what it holds.
    assert Counter((start, stop) for start, stop, *_ in asked.elements()) == Counter(
        (start, stop) for start, stop, *_ in [*needed.elements()] * 2
    )
    # Looking changes nothing.
    assert [result[0] for result in results] == plain


# Plans that differ.


@pytest.mark.parametrize(
    "layout", [Layout("gpt2", 5, pp=2), Layout("gpt2", 8, pp=4, vpp=2)], ids=str
)
@pytest.mark.parametrize("odd_rank", [0, 1])
def test_plan_of_one_rank_differs_and_all_raise(
    gloo: GlooPool, layout: Layout, odd_rank: int
) -> None:
    plans = {odd_rank: swapped(plan_of(layout))}
    errors = gloo.run(layout.world_size, error_of_step, layout, {}, plans, timeout_s=30)
    for error in errors:
        assert error.startswith("step 0: ranks hold different plans: rank")
        said = re.findall(r"ranks? ([\d, ]+) \(host \S+\)", error)[0]
        if layout.world_size == 2:
            assert said == "0" and ", rank 1 (host" in error
        else:
            assert said == str(odd_rank) and ", the others" in error
        assert "at place 0 of data-parallel rank 0 micro-batch" in error


def test_plans_with_equal_lengths_but_other_documents_differ(gloo: GlooPool) -> None:
    layout = Layout("gpt2", 3, pp=2)
    first, *rest = plan_of(layout).micro_batches[0]
    (span,) = first.spans
    other = span._replace(document=span.document._replace(number=99))
    moved = (dataclasses.replace(first, spans=(other,)), *rest)
    plans = {1: dataclasses.replace(plan_of(layout), micro_batches=(moved,))}
    errors = gloo.run(2, error_of_step, layout, {}, plans, timeout_s=30)
    for error in errors:
        assert "rank 0 (host" in error and "at place 0 of micro-batch 0 document 0 of" in error
        assert "document 99 of corpus 0" in error


def test_plan_is_compared_at_its_interval(gloo: GlooPool) -> None:
    # The packing's name is in the digest, but changes nothing that runs.
    other = {1: dataclasses.replace(plan_of(Layout("gpt2", 3, pp=2)), packing="other")}
    compared = gloo.run(2, runs_that_compare, Layout("gpt2", 3, pp=2), 2, other, timeout_s=30)
    assert compared == [[True, False, True, False]] * 2


@pytest.mark.parametrize(
    "layout", [Layout("gpt2", 5, pp=2), Layout("gpt2", 8, pp=4, vpp=2)], ids=str
)
@pytest.mark.parametrize("odd_rank", [0, 1])
def test_verified_shapes_that_differ_are_named(
    gloo: GlooPool, layout: Layout, odd_rank: int
) -> None:
    options = {"verify_shapes": True, "verify_plan_interval": 0}
    plans = {odd_rank: swapped(plan_of(layout))}
    first, second = (m.padded_length for m in plan_of(layout).micro_batches[0][:2])
    with pytest.raises(PlanError, match=r"step 0: stage \d .* expects shape \[") as caught:
        gloo.run(layout.world_size, run_step, layout, options, plans, timeout_s=30)
    for length in (first, second):
        assert f"[{length}, 1, {HIDDEN}]" in str(caught.value)


def test_plan_for_another_number_of_replicas_is_refused(gloo: GlooPool) -> None:
    layout = Layout("gpt2", 3, pp=2)
    twice = dataclasses.replace(plan_of(layout), micro_batches=plan_of(layout).micro_batches * 2)
    for error in gloo.run(2, error_of_step, layout, {}, {0: twice, 1: twice}):
        assert error.startswith("step 0: the plan is for 2 data-parallel ranks, this run has 1")
    # On one rank only, it must not leave the other waiting.
    for error in gloo.run(2, error_of_step, layout, {}, {0: twice}, timeout_s=30):
        assert error.startswith("step 0: ranks hold different plans")


@pytest.mark.parametrize(
    ("layout", "length"), [(Layout("gpt2", 3, pp=2), 0), (Layout("gpt2", 3, pp=2, tp="2sp"), 7)]
)
def test_micro_batch_that_cannot_be_sharded_is_refused(
    gloo: GlooPool, layout: Layout, length: int
) -> None:
    first, second, third = plan_of(layout).micro_batches[0]
    second = dataclasses.replace(second, spans=(), padded_length=length)
    plan = dataclasses.replace(plan_of(layout), micro_batches=((first, second, third),))
    plans = dict.fromkeys(range(layout.world_size), plan)
    for error in gloo.run(layout.world_size, error_of_step, layout, {}, plans, timeout_s=30):
        assert error.startswith(f"step 0: micro-batch 1 is {length} tokens long; pad it to")


def test_communicator_notices_a_schedule_that_does_not_fit(gloo: GlooPool) -> None:
    first, second = gloo.run(2, misuse_communicator, Layout("gpt2", 3, pp=2))
    assert first == []  # the first stage receives no activations
    ended = "step 7: the schedule ended with 2 activations and 0 gradients of the plan not received"
    assert [error.startswith(ended) for error in second[:2]] == [True, True]
    beyond = "step 7: stage 1 is asked to receive an {} beyond the last one of its plan"
    assert second[2:] == [beyond.format("activation"), beyond.format("gradient")]


# Order.

# The rest, in one process, is in tests/unit/cost/schedule/test_order_megatron.py.
ORDER_CASES = [
    Layout("gpt2", 5, pp=2),
    Layout("gpt2", 2, pp=3, extra="--num-layers 3"),
    Layout("gpt2", 5, pp=2, vpp=2, extra=f"{GROUP} 3 {NO_P2P_OVERLAP}"),
    Layout("gpt2", 9, pp=4, vpp=2, extra=f"{GROUP} 5"),
]


@pytest.mark.parametrize("layout", ORDER_CASES, ids=str)
@pytest.mark.parametrize("forward_only", [False, True])
def test_stock_schedule_runs_the_simulated_order(
    gloo: GlooPool, layout: Layout, forward_only: bool
) -> None:
    pp, vpp, num_micro_batches = layout.pp, layout.vpp, layout.num_micro_batches
    group = layout.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    results = gloo.run(layout.world_size, actions_of_step, layout, forward_only)
    if vpp == 1:
        order = one_f_one_b(pp, num_micro_batches)
    else:
        order = interleaved(pp, vpp, num_micro_batches, group)
    if forward_only:
        order = [[action for action in actions if action.kind == "F"] for actions in order]
    assert [actions for actions, _, _ in results] == order

    length_of = [m.padded_length for m in plan_of(layout).micro_batches[0]]
    for rank in range(pp):
        expected = receive_order(pp, vpp, num_micro_batches, group, rank)
        if forward_only:
            expected = expected._replace(backward=[])
        _, sent_by_previous, _ = results[(rank - 1) % pp]
        _, _, sent_by_next = results[(rank + 1) % pp]
        assert sent_by_previous == [length_of[m] for _, m in expected.forward]
        assert sent_by_next == [length_of[m] for _, m in expected.backward]


@pytest.mark.gloo_only
@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(
    "layout", [Layout("gpt2", 2, pp=2, vpp=2), Layout("gpt2", 8, pp=4, vpp=2)], ids=str
)
def test_message_has_its_memory_until_it_is_sent(
    gloo: GlooPool, layout: Layout, forward_only: bool
) -> None:
    for sent, lost, left in gloo.run(layout.world_size, storages_of_step, layout, forward_only):
        assert sent and (lost, left) == (0, 0)
