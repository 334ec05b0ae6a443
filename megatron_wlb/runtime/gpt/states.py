"""Layers that carry a state through a document: what they are told of a micro-batch, and what
slices of a document hand on.

A state begins at zero with each document. A slice takes the one that the slice before has left, and
leaves its own. In backward, last slice to first, each leaves the gradient of the state that it
took, and the slice before begins with that. Both are kept here between passes, so a pass has no
root but its output, as Megatron's schedules have it.

Documents that share rows (:attr:`.Sharing.above`) begin with the state behind these. Each is
scanned in pieces, from branch to branch; those whose states are known run in one call
(:class:`Branches`).

Legend: ``T`` tokens of the micro-batch over all context-parallel ranks, ``N`` its documents, ``P``
pieces of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import RowRun
from megatron_wlb.plan.sharding import Sharding, rank_layout
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.gpt.attention.slice_attention import KVSlice

Name: TypeAlias = tuple[tuple[int, int], int, str, int]
"""A state's document, layer, kind and the token before which it stands."""


MOST_TAPS = 8
"""The most taps of a convolution, whose first ones see rows above."""


class ScannedPiece(NamedTuple):
    """Rows of one document that are scanned in one go: from branch to branch."""

    start: int
    stop: int
    parent: int | None
    """The piece whose state it begins with; None: it begins with zero."""


@dataclass(frozen=True)
class ScannedRows:
    """Rows of documents, or of pieces of them, that a kernel takes in one call."""

    lengths: tuple[int, ...]
    """Rows of each."""
    ends: torch.Tensor
    """``[number + 1]`` int64: where each begins, and where the last one ends."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> ScannedRows:
        return cls(tuple(lengths), torch.tensor([0, *accumulate(lengths)]))

    @cached_property
    def ends_on_host(self) -> torch.Tensor:
        """:attr:`ends`, which kernels would else have to wait for."""
        return torch.tensor([0, *accumulate(self.lengths)])


@dataclass(frozen=True)
class Level:
    """Pieces that run in one call, as they begin with states of the level before."""

    rows: ScannedRows
    index: torch.Tensor
    """``[n]`` int64: their rows in the micro-batch."""
    parents: torch.Tensor
    """``[pieces]`` int64: places of their parents in the level before; not read in the first."""


@dataclass(frozen=True)
class Branches:
    """How documents that share rows are scanned."""

    pieces: tuple[ScannedPiece, ...]
    """In the order of their rows."""
    rows: ScannedRows
    """All of them."""
    before: torch.Tensor
    """``[P, MOST_TAPS]`` int64: the last rows before each on its path; T where there is none."""
    levels: tuple[Level, ...]
    back: torch.Tensor
    """``[T]`` int64: where each row is in those of all levels."""

    @classmethod
    def of(cls, lengths: Sequence[int], above: Sequence[Sequence[RowRun]]) -> Branches:
        """On the host. ``above`` is :attr:`.Sharing.above` of the first documents."""
        ends = [0, *accumulate(lengths)]
        up = {start: runs[-1].stop for start, runs in zip(ends, above, strict=False) if runs}
        first = {*ends}
        edges = sorted(first | {*up.values()})
        numbers = {stop: number for number, stop in enumerate(edges[1:])}
        pieces: list[ScannedPiece] = []
        before: list[list[int]] = []
        levels: list[list[int]] = []
        places: list[tuple[int, int]] = []  # of each piece: its level, and its place in that
        for number, (start, stop) in enumerate(pairwise(edges)):
            parent = None
            if start in up or start not in first:
                parent = numbers[up.get(start, start)]
            pieces.append(ScannedPiece(start, stop, parent))
            path, depth = [ends[-1]] * MOST_TAPS, 0
            if parent is not None:
                above_from, above_to, _ = pieces[parent]
                own = range(max(above_from, above_to - MOST_TAPS), above_to)
                path = [*before[parent], *own][-MOST_TAPS:]
                depth = places[parent][0] + 1
            before.append(path)
            levels += [[]] * (depth == len(levels))
            levels[depth] = [*levels[depth], number]
            places.append((depth, len(levels[depth]) - 1))
        made = [
            Level(
                ScannedRows.of([pieces[n].stop - pieces[n].start for n in own]),
                torch.cat([torch.arange(*pieces[n][:2]) for n in own]),
                torch.tensor([places[pieces[n].parent or 0][1] for n in own]),
            )
            for own in levels
        ]
        return cls(
            tuple(pieces),
            ScannedRows.of([piece.stop - piece.start for piece in pieces]),
            torch.tensor(before),
            tuple(made),
            torch.argsort(torch.cat([level.index for level in made])),
        )

    def rows_before(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        """``[1, T, C] -> [P, number, C]``: the last rows before each piece; zeros for no row.

        Raises :class:`PlanError` for more than are known.
        """
        if number > MOST_TAPS:
            raise PlanError(
                f"a convolution sees {number} rows above, but {MOST_TAPS} are known; plan without "
                "shared"
            )
        padded = torch.nn.functional.pad(rows[0], (0, 0, 0, 1))
        return padded[self.before[:, MOST_TAPS - number :]]


@dataclass(frozen=True)
class ScannedDocuments:
    """The documents of a micro-batch, of all context-parallel ranks: each rank scans all tokens,
    with its share of the heads.
    """

    rows: ScannedRows
    """What it has of each, padding last."""
    numbers: torch.Tensor
    """``[T]`` int32: each token's document."""
    order: torch.Tensor | None = None
    """``[T]`` int64: which of the tokens, rank by rank, stand where in documents; None on one
    rank."""
    back: torch.Tensor | None = None
    """``[T]`` int64: the way back."""
    cut: KVSlice | None = None
    """The slice that the first document is, if it is one."""
    branches: Branches | None = None
    """How they are scanned where they share rows; None where they share none."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        cp_size: int,
        sharding: Sharding,
        cut: KVSlice | None,
        above: Sequence[Sequence[RowRun]] = (),
    ) -> ScannedDocuments:
        """On the host. ``above`` is :attr:`.Sharing.above`."""
        order = back = None
        if cp_size > 1:
            tokens = tokens_of_ranks(lengths, cp_size, sharding)
            order, back = torch.from_numpy(np.argsort(tokens)), torch.from_numpy(tokens)
        numbers = torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
        branches = Branches.of(lengths, above) if any(above) else None
        return cls(ScannedRows.of(lengths), numbers, order, back, cut, branches)

    @property
    def num_own(self) -> int:
        """Tokens of the first document."""
        return self.rows.lengths[0]

    @cached_property
    def others(self) -> ScannedRows:
        """All but the first."""
        return ScannedRows(self.rows.lengths[1:], self.rows.ends[1:] - self.num_own)


def tokens_of_ranks(
    lengths: Sequence[int], cp_size: int, sharding: Sharding
) -> npt.NDArray[np.int64]:
    """``[T]``: a micro-batch's tokens as context-parallel ranks have them, rank by rank."""
    layouts = (rank_layout(lengths, cp_size, rank, sharding) for rank in range(cp_size))
    return np.concatenate([own.tokens for own in layouts])


@dataclass(frozen=True)
class LayerScan:
    """A layer's pass over a micro-batch."""

    documents: ScannedDocuments
    layer: int

    def initial(
        self, kind: str, anchor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """``[N, *shape]``: the state that each document begins with; None where all are zero.

        ``anchor`` and errors are as in :meth:`taken`.
        """
        own = self.taken(kind, anchor)
        if own is None:
            return None
        others = own.new_zeros(len(self.documents.rows.lengths) - 1, *shape, dtype=dtype)
        return torch.cat([own[None].to(dtype), others])

    def taken(self, kind: str, anchor: torch.Tensor) -> torch.Tensor | None:
        """The state that the slice begins with; None where that is zero.

        ``anchor`` is an input with a gradient. Raises :class:`PlanError` where the slice before has
        left none.
        """
        cut = self.documents.cut
        if cut is None or not self.takes:
            return None
        take: Any = _Take.apply
        own: torch.Tensor = take(anchor, cut, self._name(kind, cut.start))
        return own

    @property
    def takes(self) -> bool:
        """Whether this slice takes a state of the one before."""
        cut = self.documents.cut
        return cut is not None and cut.start > 0

    @property
    def leaves(self) -> bool:
        """Whether the next slice takes this one's state."""
        cut = self.documents.cut
        return cut is not None and cut.stop < cut.length

    def left(self, kind: str, out: torch.Tensor, final: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``out``, once the state behind the slice is kept for the next one, if there is one."""
        cut = self.documents.cut
        if cut is None or not self.leaves:
            return out
        give: Any = _Give.apply
        kept: torch.Tensor = give(out, final(), cut, self._name(kind, cut.stop))
        return kept

    def _name(self, kind: str, row: int) -> Name:
        assert self.documents.cut is not None
        return self.documents.cut.document, self.layer, kind, row


class _Take(torch.autograd.Function):
    """The state that the slice before has left; its gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, cut: KVSlice, name: Name) -> torch.Tensor:
        ctx.store, ctx.name = cut.store, name
        states = cut.store.states
        if name not in states:
            raise PlanError(
                f"rows {cut.start} to {cut.stop} of document {cut.document} run in layer "
                f"{name[1]}, where the slice before has left no state; slices run forward first to "
                "last, and then backward last to first"
            )
        return states.pop(name) if cut.store.forward_only else states[name].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.store.state_grads[ctx.name] = grad.clone()  # of one document, not a view of all
        del ctx.store.states[ctx.name]
        return None, None, None


class _Give(torch.autograd.Function):
    """Leaves a state; in backward takes the gradient that the next slice has left."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, state: torch.Tensor, cut: KVSlice, name: Name
    ) -> torch.Tensor:
        ctx.store, ctx.name = cut.store, name
        if name not in cut.store.state_grads:  # else this slice is computed again, behind the next
            cut.store.states[name] = state.detach().clone()  # likewise
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        if ctx.name not in ctx.store.state_grads:
            document, layer, _, row = ctx.name
            raise PlanError(
                f"the slice of document {document} before row {row} runs backward in layer "
                f"{layer}, but the next one has left no gradient; slices run backward last to first"
            )
        return grad, ctx.store.state_grads.pop(ctx.name), None, None


_scan: LayerScan | None = None
_patches, _told = PatchSet(), set[str]()


def present() -> LayerScan | None:
    """The pass of the layer that runs, if it is one that scans documents."""
    return _scan


class ScansDocuments:
    """A mixer of Megatron's whose functions look up the micro-batch's documents while it runs. It
    stands before Megatron's class.
    """

    layer_number: int
    scans_documents = True
    """By which it is known without this module."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> Any:
        """``[T/CP, 1, h] -> [T/CP, 1, h]``, by sequence parallelism ÷ TP, and the bias.

        Raises :class:`PlanError` without documents.
        """
        global _scan
        documents = getattr(packed_seq_params, "scanned", None)
        if documents is None:
            raise PlanError(
                f"layer {self.layer_number} was called without the micro-batch's documents; the "
                "model must be run by megatron-wlb's forward step"
            )
        before, _scan = _scan, LayerScan(documents, self.layer_number)
        try:
            run: Any = super()
            return run.forward(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            _scan = before


def look_up(kernels: Any, name: str, function: Callable[..., Any], exchange: Any) -> None:
    """Lets a function of the module ``kernels`` look up documents, and the exchange between
    context-parallel ranks order tokens by the plan. Outside of :class:`ScansDocuments` both stay as
    they are. A second call does nothing.
    """
    if kernels.__name__ in _told:
        return
    _told.add(kernels.__name__)
    _patches.wrap(kernels, name, function)
    _patches.wrap(exchange, "_undo_attention_load_balancing", _ordered("order"))
    _patches.wrap(exchange, "_redo_attention_load_balancing", _ordered("back"))


def uninstall() -> None:
    """Restores all of them; a second call does nothing."""
    _patches.restore()
    _told.clear()


def _ordered(way: str) -> Callable[..., torch.Tensor]:
    """What takes the place of Megatron's order of a sequence over ranks."""

    def order(original: Any, tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        if _scan is None:
            made: torch.Tensor = original(tensor, *args, **named)
            return made
        index: torch.Tensor | None = getattr(_scan.documents, way)
        return tensor if index is None else tensor.index_select(0, index)

    return order
