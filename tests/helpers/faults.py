"""Faults of ranks, which must not pass: each breaks the run of a layout that equals one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from helpers.within import experts_of
from megatron_wlb.cost.schedule.order import Action, one_f_one_b


@contextlib.contextmanager
def broken_batches(runner, change) -> Iterator[None]:
    finish = runner.batches.finish

    def finish_broken(made):
        return change(finish(made))

    with mock.patch.object(runner.batches, "finish", finish_broken):
        yield


def leak_one_boundary(runner):
    """The first two documents of one micro-batch see each other; positions stay right."""
    from megatron_wlb.runtime.gpt.attention.document_attention import PlanSeqParams
    from megatron_wlb.runtime.gpt.attention.kernels import Segments

    def leak(batch):
        if batch.plan.index != 0:
            return batch
        assert len(batch.plan.spans) > 1
        lengths, positions = batch.plan.lengths, batch.packed_seq_params.positions
        merged = Segments.of((sum(lengths[:2]), *lengths[2:]))
        params = PlanSeqParams.of(merged, positions.numpy())
        return dataclasses.replace(batch, packed_seq_params=params)

    return broken_batches(runner, leak)


def take_one_key_of_another_document(runner):
    """One key of one chunk is a neighbour's, on each context-parallel rank."""

    def leak(batch):
        gather = batch.packed_seq_params.gather
        rows = gather.rows.clone()
        rows[-1] = rows[0]
        params = dataclasses.replace(
            batch.packed_seq_params, gather=dataclasses.replace(gather, rows=rows)
        )
        return dataclasses.replace(batch, packed_seq_params=params)

    return broken_batches(runner, leak)


def add_gradients_to_other_rows(runner):
    """Gradients of keys go to the token after the right one."""

    def shift(batch):
        gather = batch.packed_seq_params.gather
        params = dataclasses.replace(
            batch.packed_seq_params, gather=dataclasses.replace(gather, first=gather.first.roll(1))
        )
        return dataclasses.replace(batch, packed_seq_params=params)

    return broken_batches(runner, shift)


def dividing_by(divisor):
    """Gradients are divided by what ``divisor`` makes of the step's number of targets."""
    from megatron_wlb.runtime.stepping import step

    right = step._divided_by
    return mock.patch.object(step, "_divided_by", lambda n, config: right(divisor(n), config))


def with_positions(runner, change):
    """Gives RoPE and learned positions what ``change`` makes of ``(positions, lengths)``."""

    def shift(batch):
        params = batch.packed_seq_params
        positions = change(params.positions, batch.plan.lengths)
        params = dataclasses.replace(
            params,
            positions=positions,
            max_seqlen_q=int(positions.max()) + 1,  # so many angles are computed
        )
        return dataclasses.replace(batch, position_ids=positions[None], packed_seq_params=params)

    return broken_batches(runner, shift)


def shift_half_of_each_document(runner):
    def change(positions, lengths):
        positions, start = positions.clone(), 0
        for length in lengths:
            positions[start + length // 2 : start + length] += 1
            start += length
        return positions

    return with_positions(runner, change)


def shift_each_document(runner):
    return with_positions(runner, lambda positions, lengths: positions + 1)


@contextlib.contextmanager
def mean_of_means(runner) -> Iterator[None]:
    """Each micro-batch is divided by its own tokens, and not all by those of the step."""
    import torch

    from megatron_wlb.runtime.stepping import step

    right = step.loss_function

    def own_mean(batch, losses):
        loss_sum, num_targets, report = right(batch, losses)
        own = torch.clamp(num_targets, min=1)
        return loss_sum / own, num_targets, report

    with dividing_by(lambda _: 1), mock.patch.object(step, "loss_function", own_mean):
        yield


def drop_a_micro_batch(runner):
    """The first micro-batch counts in the number of tokens, but its losses are masked."""

    def drop(batch):
        if batch.plan.index == 0 and batch.loss_mask is not None:
            return dataclasses.replace(batch, loss_mask=batch.loss_mask * 0)
        return batch

    return broken_batches(runner, drop)


@contextlib.contextmanager
def forget_to_reduce_norms(runner) -> Iterator[None]:
    """Norms are not marked as divided over TP by sequence parallelism."""
    for gpt in runner.model.gpts:
        for name, parameter in gpt.named_parameters():
            if "layernorm" in name:
                parameter.sequence_parallel = False
    yield


@contextlib.contextmanager
def forget_to_tie(runner) -> Iterator[None]:
    """First and last stage keep the gradients of the tied weights to themselves."""
    from megatron.core.distributed import finalize_model_grads

    names = finalize_model_grads.__globals__  # the package has the function under its module's name
    with mock.patch.dict(names, _allreduce_word_embedding_grads=lambda *args, **kwargs: None):
        yield


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
def take_another_documents_keys(runner) -> Iterator[None]:
    """The last slice of each document looks for keys under another document's name."""
    store = runner.batches.slices
    right = store.part

    def wrong(plan):
        found = right(plan)
        if found is None or found.stop < found.length:
            return found
        return dataclasses.replace(found, document=(found.document[0] + 1, 0))

    with mock.patch.object(store, "part", wrong):
        yield


class Done:
    """A collective that has nothing to wait for."""

    def wait(self) -> None:
        pass


@contextlib.contextmanager
def reduce_nothing(runner) -> Iterator[None]:
    """Each rank's keys get the gradients of its own queries only."""
    from megatron_wlb.runtime.gpt.attention import key_exchange

    def own_only(out, given, group, async_op):
        out.copy_(given.chunk(group.size())[group.rank()])
        return Done()

    with mock.patch.object(key_exchange, "reduce_scatter", own_only):
        yield


@contextlib.contextmanager
def without_what_others_give(runner) -> Iterator[None]:
    """Gradients of rows before a slice stay on the rank that computed them."""
    from megatron_wlb.runtime.gpt.attention.divided import Rows

    with mock.patch.object(Rows, "start_reduce", return_value=None):
        yield


@contextlib.contextmanager
def reach_one_key_further(runner) -> Iterator[None]:
    runner.batches.reach_tokens += 1
    yield


def take_ranks_in_another_order(runner: Any) -> Any:
    """Each rank has the other's latents for its own."""
    from megatron_wlb.runtime.gpt.attention.latent_attention import DocumentLatentAttention

    right = DocumentLatentAttention.expand

    def wrong(self: Any, latents: Any, num_shards: int) -> Any:
        return right(self, latents.roll(len(latents) // 2, 0), num_shards)

    for gpt in runner.model.gpts:
        for layer in gpt.decoder.layers:
            attention = layer.self_attention
            attention.core_attention.expand = wrong.__get__(attention)
    return contextlib.nullcontext()


def shift_across_documents(runner):
    """Tokens and labels of depth 1 are those of the next row, whatever document that is of."""

    def rolled(batch):
        ahead = batch.ahead
        tokens, labels = ahead.tokens, ahead.labels
        ahead = dataclasses.replace(
            ahead,
            tokens=(tokens[0], tokens[0].roll(-1), *tokens[2:]),
            labels=(labels[0], labels[0].roll(-1), *labels[2:]),
            weights=(ahead.weights[0], *(ahead.weights[0].roll(-1) for _ in tokens[1:])),
        )
        return dataclasses.replace(batch, ahead=ahead)

    return broken_batches(runner, rolled)


def by_one(runner, shift=lambda runs: tuple((a + 1, b + 1, w) for a, b, w in runs)):
    """Reads the targets as if they stood one token further on."""
    from megatron_wlb.runtime.stepping import losses

    right = losses.Targeted.weights

    def off(part, depth=0):
        document = part.document._replace(targets=shift(part.document.targets))
        return right(part._replace(document=document), depth)

    return mock.patch.object(losses.Targeted, "weights", off)


@contextlib.contextmanager
def changed(runner, **shift) -> Iterator[None]:
    from megatron_wlb.runtime.stepping import losses

    class Changed(losses.TargetTokens):
        def __init__(self, documents, owners, samples, positions, *rest):
            positions, samples = positions + shift.get("place", 0), samples + shift.get("sample", 0)
            super().__init__(documents, owners, samples, positions, *rest)

    with mock.patch.object(losses, "TargetTokens", Changed):
        yield


def a_place_further(runner) -> Any:
    return changed(runner, place=1)


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


def count_on_each_replica(runner: Any) -> Any:
    """Routers count what their own replica's tokens of a document choose."""
    return with_tokens(runner, lambda tokens: dataclasses.replace(tokens, group=None))


def take_slices_for_documents(runner: Any) -> Any:
    return with_tokens(runner, lambda tokens: dataclasses.replace(tokens, cut=None))


def hand_on_nothing(_runner: Any) -> Any:
    """Each slice begins with a state of zeros."""
    from megatron_wlb.runtime.gpt import states

    right = states._Take.forward
    return mock.patch.object(states._Take, "forward", staticmethod(lambda *args: right(*args) * 0))


def hand_back_nothing(_runner: Any) -> Any:
    """Each slice leaves no gradient of its state."""
    from megatron_wlb.runtime.gpt import states

    right = states._Take.backward
    wrong = staticmethod(lambda ctx, grad: right(ctx, grad * 0))
    return mock.patch.object(states._Take, "backward", wrong)


def share_no_states(_runner: Any) -> Any:
    """Each branch begins with a state of zeros."""
    from megatron_wlb.runtime.gpt import states

    right = states.Branches.of
    wrong = staticmethod(
        lambda lengths, *given: right(right(lengths, *given).rows.lengths, given[0])
    )
    return mock.patch.object(states.Branches, "of", wrong)


def leave_out_states_gradients(_runner: Any) -> Any:
    """No branch gives back the gradient of the state that it began with."""
    from megatron_wlb.runtime.gpt import states

    right = states.LayerScan.each

    def wrong(scan: Any, kind: str, anchor: Any, run: Any) -> Any:
        return right(
            scan, kind, anchor, lambda level, s: run(level, s if s is None else s.detach())
        )

    return mock.patch.object(states.LayerScan, "each", wrong)


def hand_back_last_alone(_runner: Any) -> Any:
    """Of several branches one gives back the gradient of the state that all began with."""
    from megatron_wlb.runtime.gpt import states

    right = states._Take.backward

    def wrong(ctx: Any, grad: Any) -> Any:
        ctx.store.state_grads.pop(ctx.name, None)
        return right(ctx, grad)

    return mock.patch.object(states._Take, "backward", staticmethod(wrong))


def scan_over_documents(_runner: Any) -> Any:
    """The documents of a micro-batch have one state."""
    from megatron_wlb.runtime.gpt import states

    right = states.ScannedDocuments.of
    wrong = staticmethod(lambda lengths, *rest: right([sum(lengths)], *rest))
    return mock.patch.object(states.ScannedDocuments, "of", wrong)


def with_shared(runner: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Gives attention what ``change`` makes of ``(shared rows, plan)`` of each micro-batch."""

    def changed(batch):
        params = batch.packed_seq_params
        if params.shared is None:
            return batch
        params = dataclasses.replace(params, shared=change(params.shared, batch.plan))
        return dataclasses.replace(batch, packed_seq_params=params)

    return broken_batches(runner, changed)


def see_nothing_that_is_shared(runner: Any) -> Any:
    return with_shared(runner, lambda shared, _: dataclasses.replace(shared, above=()))


def let_siblings_see_each_other(runner: Any) -> Any:
    """The last two segments of each micro-batch run as one."""
    from megatron_wlb.runtime.gpt.attention.kernels import Segments

    def merged(shared, plan):
        *first, one, other = shared.own.lengths_q
        return dataclasses.replace(shared, own=Segments.of([*first, one + other]))

    return with_shared(runner, merged)


def rotate_by_rows(runner: Any) -> Any:
    """Positions are places in the micro-batch."""
    return with_positions(
        runner, lambda positions, lengths: positions.new_tensor(range(sum(lengths)))
    )


def leave_out_a_childs_gradients(_runner: Any) -> Any:
    """One call gives the keys and values above it no gradients."""
    from megatron_wlb.runtime.gpt.attention.joined_rows import JoinedRows

    right = JoinedRows.backward

    def lacking(call, grad, sums):
        call.seen = call.seen[1:]
        return right(call, grad, sums)

    return mock.patch.object(JoinedRows, "backward", lacking)


def count_shared_labels_once(_runner: Any) -> Any:
    from megatron_wlb.runtime.stepping import batch

    right = batch.targeted

    def own(plan, rows):
        return list(right(plan, rows))[: len(plan.spans)]

    return mock.patch.object(batch, "targeted", own)


def take_a_siblings_label(runner: Any) -> Any:
    """A branch's first row, the last that is shared, has its parent's label."""

    def changed(batch):
        if batch.labels is None:
            return batch
        plan, labels = batch.plan, batch.labels.clone()
        rows = [sum(plan.lengths[:at]) for at in range(len(plan.spans))]
        for row, above in zip(rows, plan.sharing.above, strict=True):
            if above and above[-1].stop < row:
                labels[0, row] = labels[0, above[-1].stop]
        return dataclasses.replace(batch, labels=labels)

    return broken_batches(runner, changed)
