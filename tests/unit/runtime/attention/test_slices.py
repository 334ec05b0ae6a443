"""Attention of a document in slices is that of the whole document, whatever the cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from helpers.attention import document_attention
from torch.utils.checkpoint import checkpoint

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import Document, MicroBatchPlan, Span
from megatron_wlb.runtime.gpt.attention.joined_rows import RowsSeen
from megatron_wlb.runtime.gpt.attention.kernels import Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen
from megatron_wlb.runtime.gpt.attention.kernels.torch_cpu import torch_cpu_varlen
from megatron_wlb.runtime.gpt.attention.slice_attention import (
    LayerSlice,
    SliceStore,
    slice_attention,
)

HEADS, HEAD_DIM, SCALE = 4, 8, 0.6
CUTS = [(0, 1, 64, 65, 90), (0, 89, 90), (0, 30, 45, 90)]
KERNELS = [sdpa_varlen, torch_cpu_varlen]


def run_of(
    store: SliceStore, span: Span, kernel: VarlenKernel = sdpa_varlen, joined_from: int = 2
) -> LayerSlice:
    cut = store.part(MicroBatchPlan(0, (span,), span.length, 1.0))
    rows = slice(0, span.start), [slice(0, span.length)]
    before = RowsSeen.of(*rows, "cpu") if span.start else None
    own = Segments.of([span.length])
    chunks = (Segments.of([span.length], [span.stop]),)
    cut = replace(cut, chunks=chunks, own=own, before=before)
    return LayerSlice(cut, 3, kernel, SCALE, joined_from=joined_from)


def document_of(number: int, length: int) -> Document:
    return Document(0, number, 0, length, True, 0, number, 0)


@dataclass
class Sliced:
    """A document's tensors and the passes of its slices."""

    cuts: Sequence[int]
    number: int = 0
    num_groups: int = 2
    dtype: torch.dtype = torch.float64
    store: SliceStore = field(default_factory=SliceStore)
    kernel: VarlenKernel = sdpa_varlen
    again: bool = False
    """Whether activations are computed again in the backward pass."""
    joined_from: int = 2

    def __post_init__(self) -> None:
        length = self.cuts[-1]
        generator = torch.Generator().manual_seed(length)
        self.inputs = [
            torch.randn(length, heads, HEAD_DIM, generator=generator, dtype=torch.float64)
            .to(self.dtype)
            .requires_grad_()
            for heads in (HEADS, self.num_groups, self.num_groups)
        ]
        self.grad = torch.randn(length, HEADS, HEAD_DIM, generator=generator).to(self.dtype)
        document = document_of(self.number, length)
        self.spans = [Span(document, start, stop) for start, stop in pairwise(self.cuts)]
        self.outs: dict[int, torch.Tensor] = {}

    def forward(self, at: int) -> None:
        span = self.spans[at]
        run = run_of(self.store, span, self.kernel, self.joined_from)
        own = [t[span.start : span.stop] for t in self.inputs]
        if self.again:
            self.outs[at] = checkpoint(slice_attention, *own, run, use_reentrant=True)
        else:
            self.outs[at] = slice_attention(*own, run)

    def backward(self, at: int) -> None:
        span = self.spans[at]
        self.outs[at].backward(self.grad[span.start : span.stop])

    def do(self, name: str) -> None:
        """Runs such as ``F0`` or ``B2``."""
        (self.forward if name[0] == "F" else self.backward)(int(name[1:]))

    def run(self) -> list[torch.Tensor]:
        """Output, dQ, dK and dV, after all passes in the right order."""
        numbers = range(len(self.spans))
        for name in [f"F{i}" for i in numbers] + [f"B{i}" for i in numbers][::-1]:
            self.do(name)
        return self.found()

    def found(self) -> list[torch.Tensor]:
        outs = [self.outs[at].detach() for at in range(len(self.spans))]
        return [torch.cat(outs), *(t.grad for t in self.inputs if t.grad is not None)]

    def expected(self) -> list[torch.Tensor]:
        """By definition, in fp64."""
        leaves = [t.detach().double().requires_grad_() for t in self.inputs]
        lengths = [self.cuts[-1]]
        out = document_attention(*leaves, lengths, lengths, SCALE)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad.double())]


def assert_equal(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float
) -> None:
    assert len(found) == len(expected) == 4
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_parts_of_the_rows_before_are_joined(
    cuts: Sequence[int], again: bool, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "megatron_wlb.runtime.gpt.attention.joined_rows"
    monkeypatch.setattr(f"{where}.TILE", 16)
    monkeypatch.setattr(f"{where}.key_parts", lambda blocks, processors: num_parts)
    given = Sliced(cuts, kernel=torch_cpu_varlen, again=again, joined_from=1)
    assert_equal(given.run(), given.expected(), 1e-12)
    span = given.spans[-1]
    cut, num = run_of(given.store, span).slice, min(num_parts, max(1, span.start // 16))
    with monkeypatch.context() as patched:  # in a pass nothing is copied to the device
        patched.delattr(f"{Segments.__module__}.to_device")
        parts = cut.before.in_parts(num)
    assert sum(parts.lengths_k) == span.start
    assert set(parts.lengths_q) == {span.length}
    told = Segments.of_unlike(parts.lengths_q, parts.lengths_k, "cpu")
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert torch.equal(getattr(parts, name), getattr(told, name))
    assert (parts.max_q, parts.max_k) == (told.max_q, told.max_k)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("again", [False, True])
def test_slices_are_the_whole_document(
    cuts: Sequence[int], kernel: VarlenKernel, num_groups: int, again: bool
) -> None:
    # Sums of up to some hundred terms, in fp64 and in fp32.
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        document = Sliced(cuts, num_groups=num_groups, dtype=dtype, kernel=kernel, again=again)
        assert_equal(document.run(), document.expected(), tolerance)
        document.store.end()


@pytest.mark.parametrize(
    "passes",
    [
        "F1",  # Rows before it were never written.
        "F0 F2",
        "F0 F0",
        "F0 F1 F2 F1",
        "F0 B0",  # Slices behind it have not run.
        "F0 F1 F2 B1",
        "F0 F1 F2 B0",
        "F0 F1 F2 B2 F2",  # It was done.
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_slices_in_another_order_are_refused(passes: str, again: bool) -> None:
    document = Sliced((0, 30, 45, 90), 7, again=again)
    *order, refused = passes.split()
    for name in order:
        document.do(name)
    with pytest.raises(PlanError, match="first to last, and then backward") as error:
        document.do(refused)
    span = document.spans[int(refused[1])]
    assert f"rows {span.start} to {span.stop} of document (7, 0) run" in str(error.value)
    assert "in layer 3" in str(error.value)


def test_an_unfinished_document_ends_no_step() -> None:
    document = Sliced((0, 30, 90), 7)
    for name in ("F0", "F1", "B1"):
        document.do(name)
    with pytest.raises(PlanError, match="run backward"):
        document.backward(1)  # a second time
    with pytest.raises(PlanError, match=r"document \(7, 0\) open in layer 3, rows 0 to 30 there"):
        document.store.end()
    document.store.end()


def test_a_step_begins_without_what_a_failed_one_left() -> None:
    document = Sliced((0, 30, 90))
    document.forward(0)
    document.store.begin(forward_only=False)
    again = Sliced((0, 30, 90), store=document.store)
    assert_equal(again.run(), again.expected(), 1e-12)
    document.store.end()


def test_evaluation_frees_a_document_after_its_last_slice() -> None:
    document = Sliced((0, 30, 45, 90))
    document.store.begin(forward_only=True)
    with torch.no_grad():
        for at in range(3):
            assert len(document.store.buffers) == (at > 0)
            document.forward(at)
    assert not document.store.buffers
    torch.testing.assert_close(document.found()[0], document.expected()[0], rtol=0, atol=1e-12)


def saved_by(function: Callable[[], object]) -> list[torch.Tensor]:
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function()
    return saved


def test_slices_save_views_of_one_buffer() -> None:
    document = Sliced((0, 500, 900, 1000), kernel=torch_cpu_varlen)
    for at, span in enumerate(document.spans):
        saved = saved_by(lambda at=at: document.forward(at))
        buffer = document.store.buffers[(0, 0), 3].pair
        assert buffer.numel() == 1000 * 2 * 2 * HEAD_DIM
        keys = [t for t in saved if t.data_ptr() == buffer.data_ptr()]
        assert [len(t) for t in keys] == [span.stop]
        others = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in saved
            if t.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
            and t.untyped_storage().data_ptr() != document.inputs[0].untyped_storage().data_ptr()
        }
        # The output and its log-sum-exp.
        assert sum(others.values()) == span.length * HEADS * (HEAD_DIM + 1) * 8


def test_the_last_backward_frees_the_buffers() -> None:
    from helpers.memory import LiveBytes

    with LiveBytes() as live:
        document = Sliced((0, 300, 500, 1000), dtype=torch.bfloat16, kernel=torch_cpu_varlen)
        for at in range(3):
            document.forward(at)
        pair = 1000 * 2 * 2 * HEAD_DIM
        document.outs[2].backward(document.grad[500:])
        del document.outs[2]
        held = live.live
        for at in (1, 0):
            document.backward(at)
            del document.outs[at]
        # Keys and values in bf16, their gradients in fp32; of two slices the output, its
        # log-sum-exp in fp32, and where segments start.
        freed = pair * (2 + 4) + 500 * HEADS * (HEAD_DIM * 2 + 4) + 5 * 16
        assert held - live.live == freed
    assert not document.store.buffers
