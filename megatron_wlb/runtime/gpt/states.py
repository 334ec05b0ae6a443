"""Layers that carry a state through a document: what they are told of a micro-batch, and what
slices of a document hand on.

A state begins at zero with each document. A slice takes the one that the slice before has left, and
leaves its own. In backward, last slice to first, each leaves the gradient of the state that it
took, and the slice before begins with that. Both are kept here between passes, so a pass has no
root but its output, as Megatron's schedules have it.

Documents that share rows (:attr:`.Sharing.above`) begin with the state behind these, which several
may take; its gradient is the sum of theirs. Each is scanned in pieces, from branch to branch; those
whose states are known run in one call (:class:`Branches`).

Legend: ``T`` tokens of the micro-batch over all context-parallel ranks, ``P`` pieces of its
documents, ``S`` states that it takes of micro-batches before, ``L`` that it leaves to later ones,
``W`` the most taps of a convolution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import NO_SHARING, HandedState, RowRun, Sharing
from megatron_wlb.plan.sharding import Sharding, rank_layout
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.gpt.attention.slice_attention import KVSlice, SliceStore

Name: TypeAlias = tuple[tuple[int, int], int, str, int]
"""A state's document, layer, kind and the token before which it stands."""


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
    """Pieces that run in one call, as they begin with states that are known before."""

    rows: ScannedRows
    index: slice | torch.Tensor
    """Their rows in the micro-batch; ``[n]`` int64 where these do not lie together."""
    numbers: tuple[int, ...]
    """The number of each piece."""
    parents: torch.Tensor | None
    """``[pieces]`` int64: places in the last level before that is read, or without one among the
    states taken, and S where a piece begins with zero. None: all do."""
    is_read: bool
    """Whether other pieces begin with their states, or micro-batches."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[1, T, …] -> [1, n, …]``."""
        if isinstance(self.index, slice):
            return tensor[:, self.index]
        return tensor.index_select(1, self.index)


@dataclass(frozen=True)
class Branches:
    """How documents are scanned that begin with states, or leave some."""

    rows: ScannedRows
    """All pieces, in the order of their rows."""
    seen: torch.Tensor
    """``[n]`` int64: rows that pieces behind them see."""
    before: torch.Tensor
    """``[P, W]`` int64: the last rows before each on its path, as :meth:`LayerScan.seen` has
    them."""
    levels: tuple[Level, ...]
    """By depth, of each those first that no other reads. Last those that neither begin with a state
    nor leave one."""
    back: torch.Tensor | None
    """``[T]`` int64: where each row is in those of all levels; None where they are in order."""
    taken: tuple[HandedState, ...]
    left: tuple[HandedState, ...]
    left_by: tuple[tuple[int, int], ...]
    """``[L]``: the level of the piece behind which each stands, and its place there."""
    behind: torch.Tensor
    """``[L, W]``: the last rows before each, as ``before``."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        taps: int,
        above: Sequence[Sequence[RowRun]] = (),
        start: int = 0,
        left: Sequence[HandedState] = (),
    ) -> Branches:
        """On the host. ``taps`` are W. ``above`` is :attr:`.Sharing.above` of the first documents,
        whose first row is ``start`` there; ``left`` is :attr:`.TreePart.left`.
        """
        ends = [0, *accumulate(lengths)]
        up = {at: runs[-1].stop - start for at, runs in zip(ends, above, strict=False) if runs}
        taken = sorted(Counter(row for row in up.values() if row <= 0).items())
        places_of_taken = {row: place for place, (row, _) in enumerate(taken)}
        first = {*ends}
        cuts = {*up.values(), *(state.row - start for state in left)}
        edges = sorted(first | {row for row in cuts if row > 0})
        pieces = [*pairwise(edges)]
        numbers = {stop: number for number, (_, stop) in enumerate(pieces)}
        before: list[list[int]] = []
        parents: list[int | None] = []  # of each piece: a piece, or below 0 a state taken
        depths: list[int] = []
        for at, _ in pieces:
            row = up.get(at, at)
            parent, path, depth = None, [ends[-1]] * taps, 0
            if at in up and row <= 0:
                parent = places_of_taken[row] - len(taken)
                rows_taken = ends[-1] + 1 + taps * places_of_taken[row]
                path = [*range(rows_taken, rows_taken + taps)]
            elif at in up or at not in first:
                parent = numbers[row]
                path = _path_behind(pieces[parent], before[parent])
                depth = depths[parent] + 1
            parents.append(parent)
            before.append(path)
            depths.append(depth)
        left_by = [numbers[state.row - start] for state in left]
        read = {*parents, *left_by}
        alone: list[int] = []
        levels: list[list[int]] = [[] for _ in range(2 * max(depths) + 2)]
        for number, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
            is_alone = parent is None and number not in read
            (alone if is_alone else levels[2 * depth + (number in read)]).append(number)
        made, last = [], [*range(-len(taken), 0)]
        for own in filter(len, [*levels, alone]):
            begun = [parents[number] for number in own]
            sources = None
            if any(parent is not None for parent in begun):
                sources = torch.tensor([len(last) if p is None else last.index(p) for p in begun])
            index = _rows_of([pieces[number] for number in own])
            sizes = ScannedRows.of([pieces[n][1] - pieces[n][0] for n in own])
            made.append(Level(sizes, index, tuple(own), sources, own[0] in read))
            last = own if own[0] in read else last
        order = [number for level in made for number in level.numbers]
        back = None
        if order != sorted(order):
            back = torch.argsort(torch.cat([torch.arange(*pieces[number]) for number in order]))
        behind = [_path_behind(pieces[number], before[number]) for number in left_by]
        where = {n: (at, place) for at, o in enumerate(made) for place, n in enumerate(o.numbers)}
        seen = sorted({row for path in (*before, *behind) for row in path if row < ends[-1]})
        places = {row: place for place, row in enumerate(seen)}

        def placed(paths: Sequence[Sequence[int]]) -> torch.Tensor:
            rows = [[places.get(row, len(seen) + row - ends[-1]) for row in own] for own in paths]
            return torch.tensor(rows, dtype=torch.int64).reshape(-1, taps)

        return cls(
            ScannedRows.of([stop - at for at, stop in pieces]),
            torch.tensor(seen, dtype=torch.int64),
            placed(before),
            tuple(made),
            back,
            tuple(HandedState(start + row, number) for row, number in taken),
            tuple(left),
            tuple(where[number] for number in left_by),
            placed(behind),
        )


def _path_behind(piece: tuple[int, int], before: Sequence[int]) -> list[int]:
    """The last rows before what begins behind a piece, as many as ``before`` it."""
    start, stop = piece
    return [*before, *range(max(start, stop - len(before)), stop)][-len(before) :]


def _rows_of(pieces: Sequence[tuple[int, int]]) -> slice | torch.Tensor:
    if all(one[1] == following[0] for one, following in pairwise(pieces)):
        return slice(pieces[0][0], pieces[-1][1])
    return torch.cat([torch.arange(*piece) for piece in pieces])


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
    """The slice that the first document is, if it is one; or the part of a tree."""
    branches: Branches | None = None
    """How they are scanned; None where none begins with a state or leaves one: in one call."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        cp_size: int,
        sharding: Sharding,
        taps: int,
        cut: KVSlice | None = None,
        sharing: Sharing = NO_SHARING,
    ) -> ScannedDocuments:
        """On the host. Convolutions have at most so many ``taps``."""
        order = back = None
        if cp_size > 1:
            tokens = tokens_of_ranks(lengths, cp_size, sharding)
            order, back = torch.from_numpy(np.argsort(tokens)), torch.from_numpy(tokens)
        numbers = torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
        above: Sequence[Sequence[RowRun]] = sharing.above
        left = sharing.tree.left if sharing.tree else ()
        if cut is not None and not cut.of_tree:  # a tree of one path
            above = [[RowRun(0, cut.start)]] if cut.start else ()
            left = (HandedState(cut.stop, 1),) if cut.stop < cut.length else ()
        branches = None
        if any(above) or left:
            branches = Branches.of(lengths, taps, above, 0 if cut is None else cut.start, left)
        return cls(ScannedRows.of(lengths), numbers, order, back, cut, branches)


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

    def seen(self, kind: str, rows: torch.Tensor, number: int) -> torch.Tensor:
        """The rows that convolutions see before pieces: ``[1, T, C] -> [n, C]``, of these, one
        of zeros, and those before each state taken, which keeps a ``number`` of them.

        ``kind`` and errors are as in :meth:`taken`.
        """
        branches = self.documents.branches
        assert branches is not None
        padding = 0, 0, branches.before.shape[1] - number, 0
        own = rows[0].index_select(0, branches.seen)
        above = [torch.nn.functional.pad(state, padding) for state in self.taken(kind, rows)]
        return torch.cat([own, torch.zeros_like(rows[0, :1]), *above])

    def each(
        self,
        kind: str,
        anchor: torch.Tensor,
        run: Callable[[Level, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]],
    ) -> torch.Tensor:
        """Runs levels, one behind another: ``[1, T, …]``, what all make.

        ``run`` takes one and the states that its pieces begin with, ``[pieces, …]``; None: all are
        zero. It gives what the level makes, ``[1, n, …]``, and of a level that is read the states
        behind its pieces. ``kind`` and errors are as in :meth:`taken`.
        """
        branches = self.documents.branches
        assert branches is not None
        parts, left = [], dict[tuple[int, int], torch.Tensor]()
        taken = self.taken(kind, anchor)
        states = torch.stack([*taken, torch.zeros_like(taken[0])]) if taken else None
        for number, level in enumerate(branches.levels):
            initial = None
            if level.parents is not None:
                assert states is not None
                initial = states.index_select(0, level.parents)
            part, finals = run(level, initial)
            parts.append(part)
            if level.is_read:
                assert finals is not None
                states = finals
                left |= {by: finals[by[1]] for by in branches.left_by if by[0] == number}
        out = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if branches.back is not None:
            out = out.index_select(1, branches.back)
        return self.left(kind, out, [left[by] for by in branches.left_by])

    def taken(self, kind: str, anchor: torch.Tensor) -> list[torch.Tensor]:
        """The S states that micro-batches before have left.

        ``anchor`` is an input with a gradient. Raises :class:`PlanError` where there is none.
        """
        branches, cut = self.documents.branches, self.documents.cut
        take: Any = _Take.apply
        handed = () if branches is None else branches.taken
        return [take(anchor, cut, self._name(kind, row), number) for row, number in handed]

    def left(self, kind: str, out: torch.Tensor, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """``out``, once the L ``states`` are kept for later micro-batches."""
        branches, cut = self.documents.branches, self.documents.cut
        give: Any = _Give.apply
        for (row, number), state in zip(branches.left if branches else (), states, strict=True):
            out = give(out, state, cut, self._name(kind, row), number)
        return out

    def _name(self, kind: str, row: int) -> Name:
        assert self.documents.cut is not None
        return self.documents.cut.document, self.layer, kind, row


class _Take(torch.autograd.Function):
    """The state that a micro-batch before has left; its gradient goes back there."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, cut: KVSlice, name: Name, number: int
    ) -> torch.Tensor:
        ctx.store, ctx.name, ctx.number = cut.store, name, number
        if name not in cut.store.states:
            raise PlanError(
                f"rows {cut.start} to {cut.stop} of document {cut.document} run in layer "
                f"{name[1]}, where the slice before has left no state; slices run forward first to "
                "last, and then backward last to first"
            )
        state = cut.store.states[name].clone()
        if cut.store.forward_only:
            _took(cut.store, name, number)
        return state

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:
        grads = ctx.store.state_grads
        if ctx.name in grads:
            grads[ctx.name] += grad
        else:
            grads[ctx.name] = grad.clone()  # of one document, not a view of all
        _took(ctx.store, ctx.name, ctx.number)
        return None, None, None, None


def _took(store: SliceStore, name: Name, number: int) -> None:
    """Drops a state behind the last document that takes it."""
    store.takers[name] -= number
    if not store.takers[name]:
        del store.states[name], store.takers[name]


class _Give(torch.autograd.Function):
    """Leaves a state; in backward takes the gradient that later micro-batches have left."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, state: torch.Tensor, cut: KVSlice, name: Name, number: int
    ) -> torch.Tensor:
        ctx.store, ctx.name = cut.store, name
        if name not in cut.store.state_grads:  # else this slice is computed again, behind the next
            cut.store.states[name] = state.detach().clone()  # likewise
            cut.store.takers[name] = number
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.name not in ctx.store.state_grads or ctx.name in ctx.store.takers:
            document, layer, _, row = ctx.name
            raise PlanError(
                f"the slice of document {document} before row {row} runs backward in layer "
                f"{layer}, but the next one has left no gradient; slices run backward last to first"
            )
        return grad, ctx.store.state_grads.pop(ctx.name), None, None, None


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
    scan_taps: int
    """Taps of its convolution. By this it is known without this module."""

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
