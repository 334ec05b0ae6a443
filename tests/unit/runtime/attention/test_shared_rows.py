"""Queries of documents that share rows: joined calls, copies, and chunks of ranks are the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron_wlb.plan import RowRun
from megatron_wlb.runtime.gpt.attention.joined_rows import JoinedRows
from megatron_wlb.runtime.gpt.attention.kernels.torch_cpu import torch_cpu_varlen
from megatron_wlb.runtime.gpt.attention.shared_rows import CopiedRows, SharedRows

# A root, a branch of it, a branch of that, one of the root again, and padding.
LENGTHS = [20, 7, 5, 9, 3]
ABOVE = [(), (RowRun(0, 12),), (RowRun(0, 12), RowRun(20, 24)), (RowRun(0, 6),)]
BEFORE = 11
"""Rows of micro-batches before, where there are any; two segments see some of them."""


def known(
    query: torch.Tensor, pair: torch.Tensor, above: Sequence[Sequence[RowRun]], start: int
) -> torch.Tensor:
    """Each query alone, by softmax over the rows of its path."""
    out, row = torch.empty_like(query), 0
    for number, length in enumerate(LENGTHS):
        rows = [at for run in (above[number] if number < len(above) else ()) for at in range(*run)]
        first = row
        for _ in range(length):
            seen = torch.tensor([*rows, *range(start + first, start + row + 1)])
            keys, values = (half[seen].repeat_interleave(2, dim=1) for half in pair.unbind(1))
            scores = torch.einsum("hd,khd->hk", query[row], keys) * 0.4
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(1), values)
            row += 1
    return out


def moved(above: Sequence[Sequence[RowRun]], by: int) -> list[tuple[RowRun, ...]]:
    return [tuple(RowRun(start + by, stop + by) for start, stop in runs) for runs in above]


@pytest.mark.parametrize("start", [0, BEFORE])
@pytest.mark.parametrize("way", ["joined", "unchecked kernel", "chunks"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 4e-3)])
def test_each_query_sees_its_path(start: int, way: str, dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(1)
    number, rows = sum(LENGTHS), sum(LENGTHS) + start
    above = moved(ABOVE, start)
    if start:
        above[0], above[3] = (RowRun(0, start),), (RowRun(2, start), *above[3])
    draws = [
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((number, 4, 8), (rows, 2, 2, 8), (number, 4, 8))
    ]
    query, pair, grad = draws
    exact = [t.double().clone().requires_grad_() for t in draws[:2]]
    expected = known(*exact, above, start)
    gradients = torch.autograd.grad(expected, exact, grad.double())
    chunks = None
    if way == "chunks":  # halves of each segment; the last one is a single chunk
        chunks, first = [], 0
        for length in LENGTHS[:-1]:
            half = length // 2
            chunks += [(first, half, half), (first + half, length - half, length)]
            first += length
        chunks.append((first, LENGTHS[-1], LENGTHS[-1]))
    shared = SharedRows.of(LENGTHS, above, "cpu", None, start, chunks)
    may_join = way != "unchecked kernel"
    call = shared.call(
        query, (pair[:, 0], pair[:, 1]), torch_cpu_varlen, 0.4, keep=True, may_join=may_join
    )
    assert type(call) is (JoinedRows if may_join else CopiedRows)
    out = call.out.detach().clone()
    sums = [torch.zeros(rows, 2, 8, dtype=torch.promote_types(dtype, torch.float32))
            for _ in range(2)]  # fmt: skip
    grad_query = call.backward(grad, sums)
    found = out, grad_query, torch.stack(sums, dim=1)
    for a, b in zip(found, (expected.detach(), *gradients), strict=True):
        assert float((a.double() - b).abs().mean()) < bound * float(b.abs().max())


def test_gradients_of_many_runs_are_as_exact_as_those_of_few() -> None:
    """In bf16: the parts of a query's gradient are summed in fp32."""

    def error(number: int) -> float:
        generator = torch.Generator().manual_seed(1)
        above = [tuple(RowRun(20 * at, 20 * at + 15) for at in range(n)) for n in range(number)]
        shared, rows = SharedRows.of([20] * number, above, "cpu"), 20 * number
        query, grad = torch.randn(2, rows, 4, 8, generator=generator).bfloat16()
        pair = torch.randn(rows, 2, 2, 8, generator=generator).bfloat16()

        def grad_query(dtype: torch.dtype) -> torch.Tensor:
            halves = pair[:, 0].to(dtype), pair[:, 1].to(dtype)
            given = query.to(dtype), halves, torch_cpu_varlen, 0.4
            call = shared.call(*given, keep=True, may_join=True)
            exact = torch.promote_types(dtype, torch.float32)
            return call.backward(grad.to(dtype), torch.zeros(2, rows, 2, 8, dtype=exact)).double()

        known = grad_query(torch.float64)
        return float((grad_query(torch.bfloat16) - known).abs().mean() / known.abs().mean())

    assert error(16) < 1.15 * error(3)  # 1.06; 1.29 where parts are rounded one by one
