"""What is done or watched around the runs of ranks that must equal one process."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

from megatron_wlb.cost.slices import HOST
from megatron_wlb.plan import StepPlan


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


def with_some_mlps_recomputed(runner):
    """Asserts that the MLPs of the micro-batches that are to be are run again, and no others."""
    from megatron.core.transformer.mlp import MLP

    num_layers = sum(len(gpt.decoder.layers) for gpt in runner.model.gpts)
    return counting(runner, MLP, "forward", lambda num, again: num_layers * (num + again))


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


@contextlib.contextmanager
def with_nan_rows(_: Any) -> Iterator[None]:
    """Rows of buffers are NaN until they are written, and once their backward pass has run."""
    import torch

    from megatron_wlb.runtime.gpt.attention.slice_attention import Buffer, LayerSlice

    made, turned = Buffer.__init__, LayerSlice.turned
    ended: list[int] = []

    def make(buffer: Buffer, *given: Any) -> None:
        made(buffer, *given)
        buffer.pair.fill_(math.nan)

    def turn(run: LayerSlice) -> None:
        pair = run.slice.store.buffers[run.name].pair
        run.write(pair, torch.full_like(run.rows(pair), math.nan))
        ended.append(run.slice.stop - run.slice.start)
        turned(run)

    with mock.patch.object(Buffer, "__init__", make), mock.patch.object(LayerSlice, "turned", turn):
        yield
    assert len(set(ended)) > 1


@contextlib.contextmanager
def with_small_slabs(runner: Any) -> Iterator[None]:
    """Asserts that passes do go to the host, to memory that was pinned before the step's first
    message, and that nothing does in evaluation.
    """
    import torch

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


@contextlib.contextmanager
def with_few_slabs(runner: Any) -> Iterator[None]:
    """As many as a step needs are pinned from the second step on."""
    from megatron_wlb.runtime.stepping import offload

    with mock.patch.object(offload, "BEYOND", 0.4), with_small_slabs(runner):
        yield
    assert runner._host.beyond > 0.8


@contextlib.contextmanager
def with_wrong_bytes(runner: Any) -> Iterator[None]:
    """What comes back has lost its last part, which is zeros."""
    import torch

    from megatron_wlb.runtime.stepping import offload

    pairs = offload._Kept.pairs

    def lost(kept: Any) -> Iterator[Any]:
        *others, (slab, whole) = pairs(kept)
        return iter([*others, (torch.zeros_like(slab), whole)])

    with with_small_slabs(runner), mock.patch.object(offload._Kept, "pairs", lost):
        yield


@contextlib.contextmanager
def that_waits_for_each_gather(runner) -> Iterator[None]:
    """Asserts that a step has waited for all rows that it gathers when it ends, also for those that
    no layer takes.
    """
    from megatron_wlb.runtime.gpt.attention.divided import Rows
    from megatron_wlb.runtime.gpt.attention.slice_attention import SliceStore

    start, leave, run = Rows.start_gather, SliceStore.leave, runner.run
    started, untaken = [], []

    def recorded(*given):
        under_way = start(*given)
        started.append(mock.Mock(wraps=under_way))
        return started[-1]

    def recorded_leave(store):
        untaken.extend([] if store.ahead is None else [store.ahead])
        leave(store)

    def counted(plan, **options):
        loss = run(plan, **options)
        assert [under_way.wait.call_count for under_way in started] == [1] * len(started)
        assert started and untaken
        started.clear()
        untaken.clear()
        return loss

    with (
        mock.patch.object(Rows, "start_gather", recorded),
        mock.patch.object(SliceStore, "leave", recorded_leave),
        mock.patch.object(runner, "run", counted),
    ):
        yield


@contextlib.contextmanager
def projecting_again(runner: Any) -> Iterator[None]:
    """As with ``--recompute-modules mla_up_proj``."""
    for gpt in runner.model.gpts:
        for layer in gpt.decoder.layers:
            layer.self_attention.recompute_up_proj = True
    yield


def experts_of(runner: Any) -> list[Any]:
    layers = [layer for gpt in runner.model.gpts for layer in gpt.decoder.layers]
    return [layer.mlp for layer in layers if hasattr(layer.mlp, "router")]


@contextlib.contextmanager
def experts_again(runner: Any) -> Iterator[None]:
    """Layers of experts are computed again in the backward pass, and nothing else is."""
    for moe in experts_of(runner):
        moe.recomputes = True
    yield
