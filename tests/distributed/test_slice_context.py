"""Slices over context-parallel ranks are attention by its definition, each document whole.

Every sharding, number of key/value heads and option, in fp64; a slice alone, with whole documents
behind it, with padding, and of fewer tokens than there are ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.gloo import GlooPool
from helpers.layouts import further

from megatron_wlb.plan import Document, MicroBatchPlan, Span
from megatron_wlb.plan.sharding import Sharding
from megatron_wlb.plan.sharding.shard import KINDS

HEADS, HEAD_DIM, SCALE = 4, 8, 0.6
SHARDINGS = [Sharding(kind, 9 if kind == "hybrid" else 0) for kind in KINDS]
LENGTHS = (61, 32, 5, 1, 40)
"""The first two documents run in slices."""
UNITS = (
    ((0, 0, 16),),  # A slice alone, without padding.
    ((0, 16, 17), (4, 0, 40)),  # On some ranks no token of the slice, under per-sequence sharding.
    ((0, 17, 61), (3, 0, 1)),  # On some ranks nothing else.
    ((1, 0, 3),),
    ((1, 3, 32), (2, 0, 5)),
)
Unit = Sequence[tuple[int, int, int]]


# On a rank.


@dataclasses.dataclass
class Tokens:
    """All documents, then the padding of each unit; a unit's tokens by their numbers."""

    lengths: list[int]
    units: list[np.ndarray]
    inputs: list[Any]
    """Query, key, value and the output's gradient of all tokens."""

    @classmethod
    def of(cls, cp_size: int, num_groups: int, dtype: Any) -> Tokens:
        import torch

        lengths, units = list(LENGTHS), []
        for unit in UNITS:
            first = [0, *accumulate(lengths)]
            padding = -sum(stop - start for _, start, stop in unit) % (2 * cp_size)
            runs = [np.arange(first[d] + start, first[d] + stop) for d, start, stop in unit]
            if padding:
                runs.append(np.arange(first[-1], first[-1] + padding))
                lengths.append(padding)
            units.append(np.concatenate(runs))
        generator = torch.Generator().manual_seed(num_groups)
        inputs = [
            torch.randn(sum(lengths), heads, HEAD_DIM, generator=generator).to(dtype)
            for heads in (HEADS, num_groups, num_groups, HEADS)
        ]
        return cls(lengths, units, inputs)

    def definition(self, dtype: Any) -> list[Any]:
        """Output, dQ, dK and dV, computed in ``dtype``."""
        import torch
        from helpers.attention import document_attention

        query, key, value, grad = (t.to(dtype) for t in self.inputs)
        leaves = [t.requires_grad_() for t in (query, key, value)]
        out = document_attention(*leaves, self.lengths, self.lengths, SCALE)
        return [t.double() for t in (out.detach(), *torch.autograd.grad(out, leaves, grad))]


def params_of(
    unit: Unit, num_tokens: int, sharding: Sharding, store: Any, divided: bool = False
) -> tuple[Any, Any]:
    import torch

    from megatron_wlb.runtime.stepping.batch import local_params

    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    lengths = [stop - start for _, start, stop in unit]
    padding = num_tokens - sum(lengths)
    number, *cut = unit[0]
    span = Span(Document(0, number, 0, LENGTHS[number], True, 0, number, 0), *cut)
    plan = MicroBatchPlan(0, (span,), span.length, 1.0, divided=divided)
    return local_params(
        [*lengths, padding] if padding else lengths,
        np.zeros(num_tokens, dtype=np.int64),
        "cpu",
        cp_rank=rank,
        cp_size=size,
        sharding=sharding,
        cut=store.part(plan) if store else None,
    )


def attend(
    inputs: Sequence[Any],
    unit: Unit,
    numbers: np.ndarray,
    sharding: Sharding,
    store: Any,
    kernel: Any,
    divided: bool = False,
    **options: Any,
) -> tuple[Any, list[Any], Any]:
    """Output, query, key and value of a unit's local tokens, and their numbers; without a store
    the first of its documents is whole.
    """
    import torch

    from megatron_wlb.runtime.gpt.attention.context_parallel import context_attention
    from megatron_wlb.runtime.gpt.attention.key_exchange import ContextParallel
    from megatron_wlb.runtime.gpt.attention.slice_attention import LayerSlice

    tokens_here, params = params_of(unit, len(numbers), sharding, store, divided)
    local = torch.from_numpy(numbers[tokens_here])
    leaves = [t[local].requires_grad_() for t in inputs[:3]]
    layer = LayerSlice(params.slice, 1, kernel, SCALE) if store else None
    group, parallel = torch.distributed.group.WORLD, ContextParallel(**options)
    rest = (params.segments, params.gather, kernel, SCALE, group, parallel, layer)
    return context_attention(*leaves, *rest), leaves, local


def run(tokens: Tokens, sharding: Sharding, **options: Any) -> list[Any]:
    """Output, dQ, dK and dV of the local tokens, and their numbers; leaves nothing in the store."""
    import torch

    from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen
    from megatron_wlb.runtime.gpt.attention.kernels.torch_cpu import torch_cpu_varlen
    from megatron_wlb.runtime.gpt.attention.slice_attention import SliceStore

    kernel = sdpa_varlen if options.get("head_start_bytes") is None else torch_cpu_varlen
    store = SliceStore()

    def forward() -> list[tuple[Any, list[Any], Any]]:
        return [
            attend(tokens.inputs, unit, numbers, sharding, store, kernel, **options)
            for unit, numbers in zip(UNITS, tokens.units, strict=True)
        ]

    store.begin(forward_only=False)
    done = forward()
    results = [[out.detach() for out, _, _ in done], [], [], []]
    for out, leaves, local in reversed(done):
        gradients = torch.autograd.grad(out, leaves, tokens.inputs[3][local])
        for kept, gradient in zip(results[1:], gradients, strict=True):
            kept.insert(0, gradient)
    store.end()
    store.begin(forward_only=True)
    with torch.no_grad():  # as in evaluation
        assert all(map(torch.equal, (out for out, _, _ in forward()), results[0]))
    store.end()
    return [*map(torch.cat, results), torch.cat([local for _, _, local in done])]


def worst_errors(cp_size: int) -> dict[str, float]:
    """Largest difference of any number, of every sharding, number of groups and option."""
    import torch

    found = {}
    for num_groups in (1, 2, 4):
        tokens = Tokens.of(cp_size, num_groups, torch.float64)
        expected = tokens.definition(torch.float64)
        for sharding in SHARDINGS:
            for head_groups, keep, least_bytes, divided in (
                (1, False, None, False),
                (num_groups, True, 0, False),
                (num_groups, False, None, False),
                (num_groups, False, 0, False),
                (1, True, None, True),
                (num_groups, False, None, True),
                (num_groups, False, 0, True),
            ):
                with mock.patch("megatron_wlb.runtime.gpt.attention.head_start.LINK_SHARE", 0):
                    *mine, local = run(
                        tokens,
                        sharding,
                        divided=divided,
                        num_head_groups=head_groups,
                        keep_gathered=keep,
                        head_start_bytes=least_bytes,
                    )
                case = f"{sharding} G={num_groups}/{head_groups} {keep} {least_bytes} {divided}"
                found[case] = max(
                    float((a - b[local]).abs().max()) for a, b in zip(mine, expected, strict=True)
                )
    return found


def low_precision_errors(cp_size: int, sharding: Sharding) -> list[list[float]]:
    """Of output, dQ, dK and dV: ``(ours, the definition's)`` Σ of squared errors in bf16."""
    import torch

    tokens = Tokens.of(cp_size, 2, torch.bfloat16)
    exact, plain = tokens.definition(torch.float64), tokens.definition(torch.bfloat16)
    *mine, local = run(tokens, sharding)
    return [
        [float(((t - e[local]) ** 2).sum()) for t in (m.double(), p[local])]
        for m, p, e in zip(mine, plain, exact, strict=True)
    ]


def largest_errors(cp_size: int, **options: Any) -> list[float]:
    import torch

    tokens = Tokens.of(cp_size, 2, torch.float64)
    *mine, local = run(tokens, SHARDINGS[1], **options)
    expected = tokens.definition(torch.float64)
    return [float((a - b[local]).abs().max()) for a, b in zip(mine, expected, strict=True)]


def calls_of_kernel(cp_size: int) -> list[tuple[int, int, int]]:
    """Of the slices of the second document: calls forward and backward, and rows of their dK.

    They run alone, so all calls are theirs.
    """
    import torch

    from megatron_wlb.runtime.gpt.attention.kernels.kernel import LseKernel
    from megatron_wlb.runtime.gpt.attention.kernels.torch_cpu import torch_cpu_varlen
    from megatron_wlb.runtime.gpt.attention.slice_attention import SliceStore

    assert isinstance(torch_cpu_varlen, LseKernel)
    rows: list[tuple[str, int]] = []

    def forward(query: Any, key: Any, *rest: Any, **options: Any) -> Any:
        rows.append(("forward", len(key)))
        return torch_cpu_varlen.forward(query, key, *rest, **options)

    def backward(grad: Any, query: Any, key: Any, *rest: Any, **options: Any) -> Any:
        rows.append(("backward", len(key)))
        return torch_cpu_varlen.backward(grad, query, key, *rest, **options)

    store, done, found = SliceStore(), [], []
    kernel, inputs = LseKernel(forward, backward), [torch.randn(16, 2, HEAD_DIM) for _ in "qkv"]
    for start in (0, 16):
        unit = ((1, start, start + 16),)
        rows.clear()
        out, *_ = attend(inputs, unit, np.arange(16), Sharding("per-document"), store, kernel)
        done.append((out, len(rows)))
    for out, num_forward in reversed(done):
        rows.clear()
        out.sum().backward()
        found.insert(0, (num_forward, len(rows), sum(keys for _, keys in rows)))
    return found


def errors_in_parts(cp_size: int) -> tuple[list[float], int]:
    """As on a device with processors to spare, three parts of the prefix at once; how often."""
    where = "megatron_wlb.runtime.gpt.attention.joined_rows"
    with mock.patch(f"{where}.TILE", 4), mock.patch(f"{where}.key_parts", return_value=3) as chosen:
        errors = largest_errors(cp_size, head_start_bytes=1 << 40)
    return errors, chosen.call_count


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the numbers that collectives give."""
    from megatron_wlb.runtime.gpt.attention import key_exchange

    numbers: Counter[str] = Counter()

    def counting(name: str, collective: Any) -> Any:
        def call(out: Any, given: Any, **options: Any) -> Any:
            numbers[name] += out.numel()
            return collective(out, given, **options)

        return call

    with mock.patch.multiple(
        key_exchange,
        all_gather=counting("gather", key_exchange.all_gather),
        reduce_scatter=counting("reduce", key_exchange.reduce_scatter),
    ):
        yield numbers


def exchanged(cp_size: int, sharding: Sharding, in_slices: bool) -> list[dict[str, int]]:
    """Numbers that each unit gets from other ranks, forward and backward."""
    import torch

    from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen
    from megatron_wlb.runtime.gpt.attention.slice_attention import SliceStore

    tokens = Tokens.of(cp_size, 2, torch.float32)
    store = SliceStore() if in_slices else None
    done, found = [], []
    for unit, numbers in zip(UNITS, tokens.units, strict=True):
        with counted() as forward:
            out, _, local = attend(tokens.inputs, unit, numbers, sharding, store, sdpa_varlen)
        done.append((out, local, forward))
    for out, local, forward in reversed(done):
        with counted() as backward:
            out.backward(tokens.inputs[3][local])
        found.insert(0, {"forward": forward["gather"], "again": backward["gather"], **backward})
    return found


# In pytest.


@pytest.mark.parametrize("cp_size", [further(2), 4])
def test_slices_over_ranks_are_attention_by_definition(gloo: GlooPool, cp_size: int) -> None:
    for found in gloo.run(cp_size, worst_errors, cp_size):
        assert len(found) == len(SHARDINGS) * (6 + 7 + 7)
        # fp64 sums of up to some hundred terms of order 1.
        assert {case: error for case, error in found.items() if not error < 1e-12} == {}


@pytest.mark.parametrize("sharding", SHARDINGS[1:2], ids=str)
def test_slices_over_ranks_in_bf16_are_as_good_as_bf16_by_definition(
    gloo: GlooPool, sharding: Sharding
) -> None:
    sums = np.sum(gloo.run(4, low_precision_errors, 4, sharding), axis=0)
    assert (sums > 0).all()
    ratio = np.sqrt(sums[:, 0] / sums[:, 1])
    assert (ratio <= 2).all(), ratio


def test_parts_of_a_prefix_give_what_the_whole_gives(gloo: GlooPool) -> None:
    ranks = gloo.run(2, errors_in_parts, 2)
    assert max(max(errors) for errors, _ in ranks) < 1e-12
    assert sum(calls for _, calls in ranks) > 0


def test_chunks_of_a_slice_attend_to_its_prefix_in_one_call(gloo: GlooPool) -> None:
    """Each key's gradient before the slice comes once, and of the slice's once a chunk."""
    for rank, found in enumerate(gloo.run(2, calls_of_kernel, 2)):
        # Of 16 tokens a rank has the 4s at 0 and 12, or the two that touch, from 4 to 12.
        own = (4 + 16, 12)[rank]
        assert [calls[:2] for calls in found] == ([(1, 1), (2, 2)], [(1, 1), (1, 1)])[rank]
        assert [rows for *_, rows in found] == [own, 16 + own]


@pytest.mark.parametrize("sharding", [Sharding("per-document"), Sharding("per-sequence")], ids=str)
def test_slices_exchange_no_more_than_whole_documents(gloo: GlooPool, sharding: Sharding) -> None:
    for slices, whole in zip(
        gloo.run(4, exchanged, 4, sharding, True),
        gloo.run(4, exchanged, 4, sharding, False),
        strict=True,
    ):
        assert [unit["forward"] for unit in slices] == [unit["forward"] for unit in whole]
        assert [unit["reduce"] for unit in slices] == [unit["reduce"] for unit in whole]
        # A slice's own keys are still there in backward.
        assert [unit["again"] for unit in slices] == [0, *(unit["again"] for unit in whole[1:])]
        assert all(unit["forward"] == unit["again"] == unit["reduce"] * 4 > 0 for unit in whole)


def test_units_are_awkward() -> None:
    """On some ranks no token of the slice, on some no other."""
    from megatron_wlb.plan.sharding import rank_layout

    chunks = []
    for unit in UNITS:
        lengths = [stop - start for _, start, stop in unit]
        lengths += [-sum(lengths) % 8] if sum(lengths) % 8 else []
        for sharding in SHARDINGS:
            for rank in range(4):
                own, others = rank_layout(lengths, 4, rank, sharding).split(lengths[0])
                chunks.append((len(own), len(others.lengths_q)))
    own, others = zip(*chunks, strict=True)
    assert {0, 1, 2} <= set(own) and 0 in others
    assert any(a and b for a, b in chunks)
