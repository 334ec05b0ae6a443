"""Attention of documents that run in slices: their keys and values wait in buffers.

A document's slices run forward first to last, and backward last to first (SlimPack §4). In each
layer a buffer has room for the keys and values of the whole document. A slice's forward pass
writes its rows, and its queries attend to a view of all rows up to its last, or with a sliding
window of those in reach. Its backward pass adds the gradients of all these rows to a running sum,
and hands out those of its own, which are then complete: every slice behind it has added its part.
Autograd holds no key or value but views of the buffer.

A rank of several has chunks of a slice. If each were a call of its own, short queries would meet
the whole prefix in one call after another, which leaves a GPU idle. So where the kernel tells
log-sum-exps, all of the slice's local queries attend to the rows before the slice in one call, and
in another to the slice's own (:class:`.JoinedRows`).

A layer of a document of ``L`` tokens holds ``2·L·G·D`` numbers in the activations' dtype from its
first forward to its last backward, and as many of at least fp32 from its first backward on.
Context-parallel ranks may divide both (:mod:`megatron_wlb.runtime.gpt.attention.divided`).

Legend: ``n`` tokens of the slice, ``L`` of its document, ``H`` query heads, ``G`` key/value heads,
``D`` head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import MicroBatchPlan
from megatron_wlb.runtime.gpt.attention.joined_rows import JoinedRows, RowsSeen
from megatron_wlb.runtime.gpt.attention.kernels import Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.kernels.kernel import KernelCall, LseKernel
from megatron_wlb.runtime.gpt.attention.key_exchange import UnderWay, halves

if TYPE_CHECKING:
    from megatron_wlb.runtime.gpt.attention.shared_rows import CopiedRows, SharedRows

Key: TypeAlias = tuple[int, int]
"""A document's arrival and offset: ``Document.key``."""
RowsKey: TypeAlias = tuple[tuple[Key, int], int, int]
"""Whose rows: of which document and layer, from which to which."""


class Buffer:
    """The keys and values of one document in one layer, and their gradients."""

    def __init__(self, length: int, like: torch.Tensor, num_shares: int = 1) -> None:
        self.num_shares = num_shares
        """Ranks that divide the rows."""
        self.pair = like.new_empty(-(-length // num_shares), 2, *like.shape[1:])
        """``[L, 2, G, D]``, or the share of this rank: see :func:`halves`."""
        self.grad: torch.Tensor | None = None
        """Gradients summed so far, of at least fp32; None before the first backward pass."""
        self.cuts = [0]
        """Where the slices end that ran forward and not yet backward."""


class SliceStore:
    """The buffers of all documents on this rank that are open: begun, and not yet finished."""

    def __init__(self) -> None:
        self.forward_only = False
        self.buffers: dict[tuple[Key, int], Buffer] = {}
        """By document and layer number."""
        self.choices: dict[tuple[Key, Any], dict[int, Any]] = {}
        """What a router notes of a document's slices, by where they start; until the next step."""
        self.ahead: tuple[RowsKey, UnderWay] | None = None
        """What a layer gathers already of another one's rows."""
        self.states: dict[Any, torch.Tensor] = {}
        """What slices leave to the next ones (:mod:`megatron_wlb.runtime.gpt.states`)."""
        self.takers: dict[Any, int] = {}
        """How many documents have yet to take each."""
        self.state_grads: dict[Any, torch.Tensor] = {}
        """And these back to them."""

    def begin(self, forward_only: bool) -> None:
        """Starts a step; what a failed one has left is dropped.

        With ``forward_only`` a document is finished once its last slice has run forward.
        """
        for kept in (self.buffers, self.choices, self.states, self.takers, self.state_grads):
            kept.clear()
        self.ahead = None
        self.forward_only = forward_only

    def end(self) -> None:
        """Ends a step.

        Raises :class:`PlanError` where a document was not finished.
        """
        self.leave()
        for document, layer, *_ in [*self.states, *self.state_grads]:
            raise PlanError(
                f"the step ends with a state of document {document} in layer {layer}; run all its "
                "slices forward, and then all backward"
            )
        for (document, layer), buffer in self.buffers.items():
            self.buffers.clear()
            raise PlanError(
                f"the step ends with document {document} open in layer {layer}, rows 0 to "
                f"{buffer.cuts[-1]} there; run all its slices forward, and "
                "then all backward"
            )

    def take(self, rows: RowsKey) -> UnderWay | None:
        """What was gathered already of these rows."""
        if self.ahead is None or self.ahead[0] != rows:
            return None
        (_, found), self.ahead = self.ahead, None
        return found

    def leave(self) -> None:
        """Ends what is gathered already, as nobody takes it: its memory is in use until then."""
        if self.ahead is not None:
            self.ahead[1].wait()
            self.ahead = None

    def part(self, plan: MicroBatchPlan) -> KVSlice | None:
        """The handle of a micro-batch's slice whose queries are not laid out yet, if it has one; or
        of its part of a tree, whose rows have one buffer, as those of a document.
        """
        if (tree := plan.sharing.tree) is not None:
            of = (tree.name, 0), tree.start, tree.start + plan.length, tree.length
            return KVSlice(self, *of, of_tree=True)
        if (span := plan.slice) is None:
            return None
        document = span.document
        of = document.key, span.start, span.stop, document.length
        return KVSlice(self, *of, divided=plan.divided)


@dataclass(frozen=True, eq=False, slots=True)
class KVSlice:
    """Tokens ``[start, stop)`` of a document, and where its keys and values are."""

    store: SliceStore
    document: Key
    start: int
    stop: int
    length: int
    """Tokens of the whole document."""
    chunks: tuple[Segments, ...] = ()
    """The local queries, one kernel call each: ``q`` queries, the last of which sees ``k`` keys of
    the document up to its own."""
    first_keys: tuple[int, ...] | None = None
    """The row of each chunk's first key; 0 if not given."""
    own: Segments | None = None
    """The same queries, to the slice's own keys alone; None where there are no others."""
    before: RowsSeen | None = None
    """The rows before the slice, if there are any, which all of them see."""
    divided: bool = False
    """Whether context-parallel ranks divide the document's keys and values."""
    first_row: int = 0
    """The first row that any query sees, on whichever rank."""
    of_tree: bool = False
    """Whether it is a part of a tree, whose queries do not see all rows before their own."""
    rows: SharedRows | None = None
    """What they see then."""

    @property
    def num_queries(self) -> int:
        if self.rows is not None:
            return sum(self.rows.own.lengths_q)
        return sum(chunk.max_q for chunk in self.chunks)

    @property
    def key_rows(self) -> list[slice]:
        """The rows of the document that each chunk sees."""
        starts = self.first_keys or (0,) * len(self.chunks)
        return [
            slice(start, start + chunk.max_k)
            for start, chunk in zip(starts, self.chunks, strict=True)
        ]


SliceCall: TypeAlias = "KernelCall | JoinedRows | CopiedRows"


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """Attention of a slice in one layer.

    A pass is ``fill``, ``write``, ``attend``, ``filled``, or ``turn``, ``differentiate``,
    ``turned``. Between the first and the last come groups of heads, one after another, each with
    its part of the buffer's tensors.
    """

    slice: KVSlice
    layer: int
    kernel: VarlenKernel
    scale: float
    value_dim: int | None = None
    """Numbers of a value's head; None: as many as a key's."""
    joined_from: int | None = 2
    """Chunks from which on a kernel that tells log-sum-exps attends in two parts; None: never."""

    @property
    def num_shares(self) -> int:
        """Ranks that divide the buffer."""
        return 1

    def fill(self, key: torch.Tensor) -> Buffer:
        """The buffer for the slice's rows; ``key`` is any ``[…, G, D]`` of the right dtype.

        A slice follows the one before it. Or it is computed again for its own backward pass,
        which must be the next one; then the same rows are written again.

        Raises :class:`PlanError` for any other order.
        """
        cut, buffers = self.slice, self.slice.store.buffers
        buffer = buffers.get(self.name)
        if buffer is None and cut.start == 0:
            buffer = buffers[self.name] = Buffer(cut.length, key, self.num_shares)
        if buffer is None or not self._is_next(buffer):
            if buffer is None or buffer.grad is not None or buffer.cuts[-1] != cut.start:
                self._refuse("forward", buffer)
            buffer.cuts.append(cut.stop)
        if buffer.num_shares != self.num_shares:
            raise PlanError(
                f"rows {cut.start} to {cut.stop} of document {cut.document} are to be divided over "
                f"{self.num_shares} ranks, those before over {buffer.num_shares}; give all slices "
                "of a document the same"
            )
        return buffer

    def comes_next(self, is_backward: bool) -> Buffer | None:
        """The buffer, if the slice's next pass may be through this layer for the first time."""
        buffer = self.slice.store.buffers.get(self.name)
        if buffer is None:
            return None
        is_behind = buffer.grad is None and buffer.cuts[-1] == self.slice.start
        return buffer if (self._is_next(buffer) if is_backward else is_behind) else None

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slice's own rows of a buffer's tensor."""
        return tensor[self.slice.start : self.slice.stop]

    def write(
        self, tensor: torch.Tensor, values: torch.Tensor, index: torch.Tensor | None = None
    ) -> None:
        """Sets the slice's own rows to ``values``, or to those at ``index``.

        Graphs hold views of the buffer. Autograd need not know: what they see stays the same.
        """
        rows = self.rows(tensor)
        with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
            if index is None:
                rows.copy_(values)
            else:
                torch.index_select(values, 0, index, out=rows)

    @property
    def _is_joined(self) -> bool:
        if self.joined_from is None:
            return False
        return len(self.slice.chunks) >= self.joined_from and isinstance(self.kernel, LseKernel)

    def attend(self, pair: torch.Tensor, query: torch.Tensor, *, keep: bool) -> list[SliceCall]:
        """Each chunk's queries to the buffer's rows that it sees: ``[q, H, D]`` each, or those of
        all chunks.
        """
        if self.slice.rows is not None:
            halves = self.halves(pair)
            may_join = self.joined_from is not None
            return [
                self.slice.rows.call(
                    query, halves, self.kernel, self.scale, keep=keep, may_join=may_join
                )
            ]
        if (own := self.slice.own) is not None and self._is_joined:
            kernel, start = cast(LseKernel, self.kernel), self.slice.start
            rows = [slice(start, start + number) for number in own.lengths_k]
            seen = [] if self.slice.before is None else [self.slice.before]
            return [JoinedRows(kernel, query, self.halves(pair), self.scale, own, rows, seen)]
        queries = torch.split(query, [chunk.max_q for chunk in self.slice.chunks])
        return [
            KernelCall.of(self.kernel, own, *self.halves(pair[rows]), chunk, self.scale, keep)
            for own, chunk, rows in zip(
                queries, self.slice.chunks, self.slice.key_rows, strict=True
            )
        ]

    def halves(self, pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of rows, or their gradients."""
        return halves(pair, self.value_dim)

    def filled(self) -> None:
        """Ends the forward pass: without a backward pass, the last slice's frees the buffer."""
        if self.slice.store.forward_only and self.slice.stop == self.slice.length:
            del self.slice.store.buffers[self.name]

    def turn(self) -> tuple[Buffer, torch.Tensor]:
        """The buffer and its gradients, for the slice's backward pass.

        Raises :class:`PlanError` unless it is the last slice of the document that is still open.
        """
        buffer = self.slice.store.buffers.get(self.name)
        if buffer is None or not self._is_next(buffer):
            self._refuse("backward", buffer)
        if buffer.grad is None:
            exact = torch.promote_types(buffer.pair.dtype, torch.float32)
            buffer.grad = torch.zeros_like(buffer.pair, dtype=exact)
        return buffer, buffer.grad

    def differentiate(
        self,
        calls: Sequence[SliceCall],
        grad_out: torch.Tensor,
        grad: torch.Tensor,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Gradients of each call's queries; those of keys and values are added to ``grad``. Also
        those of the slice's own rows, which are complete with that.
        """
        grads_query = []
        parts = torch.split(grad_out, [len(call.out) for call in calls])
        every = self.slice.key_rows or [slice(0, self.slice.stop)]
        for call, part, rows in zip(calls, parts, every, strict=False):
            if not isinstance(call, KernelCall):
                grads_query.append(call.backward(part, self.halves(grad)))
                continue
            grad_query, *own = call.backward(part)
            grads_query.append(grad_query)
            for half, total in zip(own, self.halves(grad[rows]), strict=True):
                total += half
        return grads_query, self.rows(grad)

    def turned(self) -> None:
        """Ends the backward pass: the document's first slice's frees the buffer."""
        self.slice.store.buffers[self.name].cuts.pop()
        if self.slice.start == 0:
            del self.slice.store.buffers[self.name]

    @property
    def name(self) -> tuple[Key, int]:
        return self.slice.document, self.layer

    def _is_next(self, buffer: Buffer) -> bool:
        """Whether the slice's backward pass is the next one that may run."""
        at_end = buffer.grad is not None or self.slice.stop == self.slice.length
        return at_end and buffer.cuts[-2:] == [self.slice.start, self.slice.stop]

    def _refuse(self, what: str, buffer: Buffer | None) -> NoReturn:
        cut = self.slice
        held = f"rows 0 to {buffer.cuts[-1]} are" if buffer else "none is"
        turned = " and backward has begun" if buffer and buffer.grad is not None else ""
        raise PlanError(
            f"rows {cut.start} to {cut.stop} of document {cut.document} run {what} in layer "
            f"{self.layer}, where of its {cut.length} rows {held} open{turned}; slices run forward "
            "first to last, and then backward last to first"
        )


def slice_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: LayerSlice,
    segments: Segments | None = None,
) -> torch.Tensor:
    """A slice's queries to all of its document so far, and behind them the ``segments`` of whole
    documents: ``[n, H, D], [n, G, D] ×2 -> [n, H, D]``, with all tokens on this rank.

    Values, and so the output, may be narrower than ``D``.

    Raises :class:`PlanError` where slices run in another order, backward too.
    """
    apply: Any = _SliceAttention.apply
    if segments is None:
        out: torch.Tensor = apply(query, key, value, run, torch.is_grad_enabled())
        return out
    counts = [run.slice.num_queries, sum(segments.lengths_q)]
    (q, query), (k, key), (v, value) = (torch.split(t, counts) for t in (query, key, value))
    own = apply(q, k, v, run, torch.is_grad_enabled())
    return torch.cat([own, run.kernel(query, key, value, segments, run.scale)])


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        run: LayerSlice,
        keep: bool,
    ) -> torch.Tensor:
        buffer = run.fill(key)
        for half, rows in zip((key, value), run.halves(buffer.pair), strict=True):
            run.write(rows, half)
        with torch.set_grad_enabled(keep):
            calls = run.attend(buffer.pair, query, keep=keep)
        run.filled()
        ctx.run, ctx.calls = run, calls
        return calls[0].out.detach()

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        run, calls, ctx.calls = ctx.run, ctx.calls, ()
        buffer, sums = run.turn()
        (grad_query,), own = run.differentiate(calls, grad_out, sums)
        pair = own.to(buffer.pair.dtype)
        run.turned()
        return grad_query, *run.halves(pair), None, None
