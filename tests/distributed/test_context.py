"""Attention over context-parallel ranks is attention by its definition, each document alone.

Every case runs all shardings and numbers of key/value heads on one world of ranks, and compares
output, dQ, dK and dV with :func:`helpers.attention.document_attention` in fp64.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.gloo import GlooPool
from helpers.layouts import further
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost.exchange import exchange_bytes
from megatron_wlb.errors import PlanError
from megatron_wlb.plan.sharding import RankLayout, Sharding, rank_layout
from megatron_wlb.plan.sharding.shard import KINDS

HEADS, HEAD_DIM, SCALE = 4, 8, 0.6
GROUPS = (1, 2, 4)
SHARDINGS = [Sharding(kind, 9 if kind == "hybrid" else 0) for kind in KINDS]

LENGTHS = [37, 1, 5, 60, 2, 23]


def padded(lengths: Sequence[int], cp_size: int) -> list[int]:
    """With a tail that makes the total divisible by 2·CP."""
    rest = -sum(lengths) % (2 * cp_size)
    return [*lengths, rest] if rest else list(lengths)


# On a rank.


def tensors(num_tokens: int, num_groups: int, dtype: Any) -> list[Any]:
    """Query, key, value and the output's gradient of all tokens, the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn(num_tokens, num_heads, HEAD_DIM, generator=generator).to(dtype)
        for num_heads in (HEADS, num_groups, num_groups, HEADS)
    ]


def definition(lengths: Sequence[int], inputs: Sequence[Any], dtype: Any) -> list[Any]:
    """Output, dQ, dK and dV in fp64, computed in ``dtype``."""
    import torch
    from helpers.attention import document_attention

    query, key, value, grad = (t.to(dtype) for t in inputs)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = document_attention(*leaves, lengths, lengths, SCALE)
    return [t.double() for t in (out.detach(), *torch.autograd.grad(out, leaves, grad))]


def rest_of(layout: RankLayout, kernel: Any, group: Any = None, **options: Any) -> tuple[Any, ...]:
    """What attention takes besides query, key and value."""
    import torch

    from megatron_wlb.runtime.gpt.attention.kernels import Segments
    from megatron_wlb.runtime.gpt.attention.key_exchange import ContextParallel, KeyGather

    return (
        Segments.of(layout.lengths_q.tolist(), layout.lengths_k.tolist()),
        KeyGather.of(layout, "cpu"),
        kernel,
        SCALE,
        group or torch.distributed.group.WORLD,
        ContextParallel(**options),
    )


def ours(
    layout: RankLayout, inputs: Sequence[Any], kernel: str = "sdpa", **options: Any
) -> list[Any]:
    """Output, dQ, dK and dV of the local tokens."""
    import torch

    from megatron_wlb.runtime.gpt.attention.context_parallel import context_attention
    from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen
    from megatron_wlb.runtime.gpt.attention.kernels.torch_cpu import torch_cpu_varlen

    local = torch.from_numpy(layout.tokens)
    query, key, value, grad = (t[local] for t in inputs)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    rest = rest_of(layout, torch_cpu_varlen if kernel == "torch-cpu" else sdpa_varlen, **options)
    out = context_attention(*leaves, *rest)
    results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    with torch.no_grad():  # as in evaluation
        assert torch.equal(context_attention(*leaves, *rest), results[0])
    return results


def head_starts(layout: RankLayout, inputs: Sequence[Any], num_groups: int) -> list[list[Any]]:
    """Runs that begin with near keys: in one head group, in several, and with far keys kept."""
    from megatron_wlb.runtime.gpt.attention import head_start

    joined = mock.Mock(wraps=head_start.join)
    runs = []
    with mock.patch.multiple(head_start, LINK_SHARE=0, join=joined):
        for groups, keep in ((1, False), (num_groups, True)):
            options = {"num_head_groups": groups, "keep_gathered": keep, "head_start_bytes": 0}
            runs.append(ours(layout, inputs, "torch-cpu", **options))
    has_far = len(set(layout.key_rows)) > len(layout.tokens)
    assert (joined.call_count > 0) == has_far
    return runs


def layout_of(lengths: Sequence[int], sharding: Sharding) -> RankLayout:
    import torch

    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return rank_layout(lengths, size, rank, sharding)


def worst_errors(lengths: Sequence[int]) -> dict[str, float]:
    """Largest difference of any number, of every sharding, number of groups and option."""
    import torch

    found = {}
    for num_groups in GROUPS:
        inputs = tensors(sum(lengths), num_groups, torch.float64)
        expected = definition(lengths, inputs, torch.float64)
        for sharding in SHARDINGS:
            layout = layout_of(lengths, sharding)
            local = torch.from_numpy(layout.tokens)
            runs = [
                ours(layout, inputs, num_head_groups=num_head_groups, keep_gathered=keep)
                for num_head_groups in {1, num_groups}
                for keep in (False, True)
            ]
            runs.append(ours(layout, inputs, reduce_in_fp32=True))
            runs += head_starts(layout, inputs, num_groups)
            error = max(
                float((a - b[local]).abs().max())
                for run in runs
                for a, b in zip(run, expected, strict=True)
            )
            # Gathered again or kept: the same bits.
            assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
            found[f"{sharding} G={num_groups}"] = error
    return found


def low_precision_errors(
    lengths: Sequence[int], sharding: Sharding, has_head_start: bool
) -> list[list[list[float]]]:
    """Of output, dQ, dK and dV: ``(ours, the definition's)`` Σ of squared errors in bf16."""
    import torch

    sums = []
    for num_groups in GROUPS:
        inputs = tensors(sum(lengths), num_groups, torch.bfloat16)
        exact = definition(lengths, inputs, torch.float64)
        plain = definition(lengths, inputs, torch.bfloat16)
        layout = layout_of(lengths, sharding)
        local = torch.from_numpy(layout.tokens)
        runs = head_starts(layout, inputs, 1) if has_head_start else [ours(layout, inputs)]
        found = runs[0]
        sums.append(
            [
                [float(((t - e[local]) ** 2).sum()) for t in (mine.double(), p[local])]
                for mine, p, e in zip(found, plain, exact, strict=True)
            ]
        )
    return sums


def deterministic_errors(lengths: Sequence[int]) -> dict[str, float]:
    """The same in deterministic mode, in which torch fills new memory with NaN."""
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        return worst_errors(lengths)
    finally:
        torch.use_deterministic_algorithms(False)


def sum_errors(lengths: Sequence[int], sharding: Sharding) -> list[float]:
    """Of dK and dV of bf16: summed in bf16, and in fp32; Σ of squared errors."""
    import torch

    inputs = tensors(sum(lengths), 2, torch.bfloat16)
    exact = definition(lengths, inputs, torch.float64)[2:]
    layout = layout_of(lengths, sharding)
    local = torch.from_numpy(layout.tokens)

    errors = []
    for in_fp32 in (False, True):
        found = ours(layout, inputs, reduce_in_fp32=in_fp32)[2:]
        assert all(t.dtype == torch.bfloat16 for t in found)
        squares = (((a.double() - b[local]) ** 2).sum() for a, b in zip(found, exact, strict=True))
        errors.append(float(sum(squares)))
    return errors


def lean_kernel(query: Any, key: Any, value: Any, segments: Any, scale: float) -> Any:
    """What a flash kernel keeps and makes, without its arithmetic."""
    import torch

    class Lean(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            out = torch.empty_like(query)
            ctx.save_for_backward(query, key, value, out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])

    return Lean.apply(query, key, value)


def layer_bytes(
    lengths: Sequence[int], sharding: Sharding, options: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Kept, most in forward and most in backward: measured and by the formula."""
    import torch
    from _quickstart.live_bytes import LiveBytes

    from megatron_wlb.runtime.gpt.attention import key_exchange
    from megatron_wlb.runtime.gpt.attention.context_parallel import context_attention

    layout = layout_of(lengths, sharding)
    local = torch.from_numpy(layout.tokens)
    num_groups = 2
    in_fp32 = options.get("reduce_in_fp32", False)
    dtype = torch.bfloat16 if in_fp32 else torch.float32
    query, key, value, grad = (t[local] for t in tensors(sum(lengths), num_groups, torch.float32))
    leaves = [t.to(dtype).requires_grad_() for t in (query, key, value)]
    grad, size = grad.to(dtype), dtype.itemsize
    rest = rest_of(layout, lean_kernel, **options)
    # gloo's threads let go of buffers some time after a collective is done.
    done = mock.Mock()
    no_exchange = mock.patch.multiple(
        key_exchange,
        all_gather=lambda rows, local, **_: done,
        reduce_scatter=lambda local, rows, **_: done,
    )
    with no_exchange, LiveBytes() as live:
        live.watch([*leaves, grad, rest[1].rows, rest[1].first])
        before = live.live
        live.reset_peak()
        out = context_attention(*leaves, *rest)
        output_bytes = out.numel() * size
        kept, forward = live.live - before - output_bytes, live.peak - before
        before = live.live
        live.reset_peak()
        gradients = torch.autograd.grad(out, leaves, grad)
        backward = live.peak - before
        del out, gradients
    numbers = 2 * num_groups * HEAD_DIM
    formula = exchange_bytes(
        len(local),
        sum(lengths),
        len(layout.key_rows),
        size * numbers,
        4 * numbers if in_fp32 else None,
    )
    queries = len(local) * HEADS * HEAD_DIM * size
    keep = options.get("keep_gathered", False)
    expected_kept = formula.copy if keep else 0
    return [kept, forward, backward], [
        expected_kept,
        max(formula.gathering, formula.copy + queries),
        max(formula.gradients + queries - expected_kept, 0 if keep else formula.gathering),
    ]


def misuse(what: str) -> None:
    import torch

    from megatron_wlb.runtime.gpt.attention.context_parallel import context_attention
    from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen

    layout = layout_of([8, 4], SHARDINGS[0])
    query, key, value, grad = tensors(len(layout.tokens) - (what == "tokens"), 2, torch.float32)
    out = context_attention(query.requires_grad_(), key, value, *rest_of(layout, sdpa_varlen))
    out.backward(grad, retain_graph=True)
    out.backward(grad)


# In pytest.


@pytest.mark.parametrize("cp_size", [1, further(2), 4])
@settings(max_examples=6)
@given(st.lists(st.one_of(st.integers(1, 12), st.integers(1, 70)), min_size=1, max_size=9))
def test_context_attention_is_attention_by_definition(
    gloo: GlooPool, cp_size: int, lengths: list[int]
) -> None:
    for found in gloo.run(cp_size, deterministic_errors, padded(lengths, cp_size)):
        assert len(found) == len(SHARDINGS) * len(GROUPS)
        # fp64 sums of up to some hundred terms of order 1.
        assert {case: error for case, error in found.items() if not error < 1e-12} == {}


@pytest.mark.parametrize("has_head_start", [False, True])
@pytest.mark.parametrize("sharding", SHARDINGS[1:2], ids=str)
def test_context_attention_in_bf16_is_as_good_as_bf16_by_definition(
    gloo: GlooPool, sharding: Sharding, has_head_start: bool
) -> None:
    ranks = gloo.run(4, low_precision_errors, padded(LENGTHS, 4), sharding, has_head_start)
    sums = np.sum(ranks, axis=0)  # [groups, what, (ours, definition)]
    assert (sums > 0).all()
    ratio = np.sqrt(sums[..., 0] / sums[..., 1])
    assert (ratio <= 2).all(), ratio


@pytest.mark.parametrize("sharding", [Sharding("per-document"), Sharding("per-sequence")], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"keep_gathered": True}, {"reduce_in_fp32": True}],
    ids=["gathered-again", "kept", "summed-in-fp32"],
)
def test_attention_holds_one_copy_of_keys_and_values(
    gloo: GlooPool, sharding: Sharding, options: dict[str, Any]
) -> None:
    """To the byte what the formula says, on ranks of unequal keys, of one document and of many."""
    for lengths in ([512], padded([10 * n for n in LENGTHS], 4)):
        for measured, formula in gloo.run(4, layer_bytes, lengths, sharding, options):
            assert measured == formula


def ordered(events: list[str], kernel: Any, **options: Any) -> None:
    """Notes the order in which a GPU's streams are given work, forward and then backward."""
    import torch

    from megatron_wlb.runtime.gpt.attention import head_start, key_exchange
    from megatron_wlb.runtime.gpt.attention.context_parallel import context_attention

    def collective(name: str) -> Any:
        def start(out: Any, _: Any, *, group: Any, async_op: bool) -> Any:
            assert async_op
            passed = events.index("---") if "---" in events else 0
            number = sum(event.startswith(name) for event in events[passed:])
            events.append(f"{name} {number}")
            out.zero_()
            return mock.Mock(wait=lambda: events.append(f"wait for {name} {number}"))

        return start

    layout = rank_layout([16], 2, 0, Sharding())
    query, key, value, grad = tensors(8, 2, torch.float32)
    group = mock.Mock(**{"size.return_value": 2})
    replaced = {"all_gather": collective("gather"), "reduce_scatter": collective("reduce")}
    with (
        mock.patch.multiple(key_exchange, **replaced),
        mock.patch.object(head_start, "LINK_SHARE", 0),
    ):
        rest = rest_of(layout, kernel, group, **options)
        out = context_attention(query.requires_grad_(), key, value, *rest)
        events.append("---")
        out.backward(grad)


def test_next_head_group_is_exchanged_while_one_is_computed() -> None:
    """Waits come as late as they can."""
    events: list[str] = []

    def kernel(*args: Any) -> Any:
        events.append("kernel")
        out = lean_kernel(*args)
        out.register_hook(lambda grad: events.append("kernel backward"))
        return out

    ordered(events, kernel, num_head_groups=2)
    assert events == [
        "gather 0", "gather 1", "wait for gather 0", "kernel", "wait for gather 1", "kernel",
        "---",
        "gather 0", "gather 1", "wait for gather 0", "kernel backward", "reduce 0",
        "wait for gather 1", "kernel backward", "reduce 1",
        "wait for reduce 0", "wait for reduce 1",
    ]  # fmt: skip


def test_near_keys_are_attended_to_while_the_first_head_group_is_exchanged() -> None:
    from megatron_wlb.runtime.gpt.attention.kernels.kernel import LseKernel
    from megatron_wlb.runtime.gpt.attention.kernels.torch_cpu import torch_cpu_varlen

    assert isinstance(torch_cpu_varlen, LseKernel)
    events: list[str] = []

    def told(function: Any, name: str) -> Any:
        def call(*args: Any, causal: bool) -> Any:
            events.append(f"{'' if causal else 'far '}{name}")
            return function(*args, causal=causal)

        return call

    kernel = LseKernel(
        told(torch_cpu_varlen.forward, "forward"), told(torch_cpu_varlen.backward, "backward")
    )
    ordered(events, kernel, num_head_groups=2, head_start_bytes=0)
    assert events == [
        "gather 0", "gather 1", "forward", "wait for gather 0", "far forward",
        "wait for gather 1", "forward",
        "---",
        "gather 0", "gather 1", "backward", "wait for gather 0", "far backward", "reduce 0",
        "wait for gather 1", "backward", "reduce 1", "wait for reduce 0", "wait for reduce 1",
    ]  # fmt: skip
    events.clear()
    ordered(events, kernel, num_head_groups=2, head_start_bytes=10**6)
    assert events[:4] == ["gather 0", "gather 1", "wait for gather 0", "forward"]


def test_gradients_summed_in_fp32_are_more_exact(gloo: GlooPool) -> None:
    """By a little, as each chunk's own are in bf16 in either case."""
    ranks = gloo.run(4, sum_errors, padded(LENGTHS, 4), SHARDINGS[1])
    in_bf16, in_fp32 = np.sum(ranks, axis=0)
    assert 0 < in_fp32 < 0.98 * in_bf16


def test_attention_in_head_groups_holds_less(gloo: GlooPool) -> None:
    for (measured, _), (halves, _) in zip(
        gloo.run(4, layer_bytes, [512], SHARDINGS[1], {}),
        gloo.run(4, layer_bytes, [512], SHARDINGS[1], {"num_head_groups": 2}),
        strict=True,
    ):
        assert halves[1] < measured[1] and halves[2] < measured[2]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_ranks_in_turn_are_attention_by_definition(sharding: Sharding) -> None:
    """What GPU tests run, where collectives are stood in for."""
    import torch
    from helpers.attention import ranks_in_turn

    from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen

    lengths = padded(LENGTHS, 4)
    inputs = tensors(sum(lengths), 2, torch.float32)
    found = ranks_in_turn(*inputs, lengths, 4, sharding, sdpa_varlen, SCALE)
    expected = definition(lengths, inputs, torch.float64)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_layouts_are_awkward() -> None:
    """Cuts inside documents, documents shorter than 2·CP, more than two chunks of a document."""
    lengths = padded(LENGTHS, 4)
    layouts = [
        rank_layout(lengths, 4, rank, sharding)
        for sharding, rank in itertools.product(SHARDINGS, range(4))
    ]
    assert any((layout.lengths_q < layout.lengths_k).any() for layout in layouts)
    assert any(len(layout.rounds) > 1 for layout in layouts)
    assert min(lengths) < 8 < max(lengths)


def test_shards_of_another_plan_are_refused(gloo: GlooPool) -> None:
    with pytest.raises(PlanError, match="where the plan has 12 in all"):
        gloo.run(2, misuse, "tokens")


def test_second_backward_is_refused(gloo: GlooPool) -> None:
    with pytest.raises(RuntimeError, match="run forward again"):
        gloo.run(2, misuse, "backward")
