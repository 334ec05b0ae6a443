"""The order of elements in the store, and who keeps which.

The tensors of a layer are a *bucket* (:mod:`megatron_wlb.strategies.plan.store_costs`), by their
groups of parameters. Each is divided in tiles, as finely as any strategy divides it. The first
tiles of all stand first: so what a tensor-parallel rank needs stands together. A bucket is cut into
as many even parts as there are ranks. Each rank keeps as many parts as there are buckets, of those
that it uses where it can: what a rank keeps need not come to it (Hydraulis §5: only what a rank
lacks moves).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.strategies.plan.store_costs import part
from megatron_wlb.strategies.run.pieces import Piece, WholeTensor


class BucketRun(NamedTuple):
    """Elements ``[offset, offset + length)`` of a bucket, and the part of a piece that they are:
    ``(axis, start, size)``, or all of it.
    """

    offset: int
    length: int
    cut: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class _TilePlace:
    axis: int
    offsets: list[int]
    """Where each of the tensor's tiles begins."""


class Buckets:
    """Where every element of the model stands. ``pieces`` are those of all ranks and strategies."""

    def __init__(self, pieces: Iterable[Piece], num_buckets: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        finest: dict[WholeTensor, tuple[int, int]] = {}
        groups: dict[WholeTensor, int] = defaultdict(int)
        folds: dict[WholeTensor, int] = defaultdict(int)
        for piece in pieces:
            axis, parts = finest.get(piece.whole, (piece.axis, 1))
            if piece.parts > 1 < parts and axis != piece.axis:
                raise CompatibilityError(
                    f"{piece.whole.key} is divided along axis {axis} by one strategy and "
                    f"{piece.axis} by another; the store of strategies knows one axis"
                )
            axis = piece.axis if piece.parts > 1 else axis
            finest[piece.whole] = axis, math.lcm(parts, piece.parts)
            groups[piece.whole] = max(groups[piece.whole], piece.group)
            folds[piece.whole] = max(folds[piece.whole], piece.folds)
        self.sizes = [0] * num_buckets
        num_groups = max(groups.values(), default=0) + 1
        self.ends = [[0] * num_groups for _ in range(num_buckets)]
        """Where the elements of each group end in each bucket."""
        self._places: dict[WholeTensor, _TilePlace] = {}
        tiles = [
            # first tiles first, undivided tensors last
            ((groups[whole], own == 1, Fraction(tile % own, own), whole.key, whole.stack), whole)
            for whole, (_, parts) in finest.items()
            for own in [parts // folds[whole]]
            for tile in range(parts)
        ]
        for (group, *_), whole in sorted(tiles, key=lambda one: one[0]):
            bucket, (axis, parts) = whole.bucket, finest[whole]
            place = self._places.setdefault(whole, _TilePlace(axis, []))
            place.offsets.append(self.sizes[bucket])
            self.sizes[bucket] += whole.num_elements // parts
            self.ends[bucket][group:] = [self.sizes[bucket]] * (num_groups - group)

        self.owners = [list(range(num_ranks)) for _ in self.sizes]
        """``[buckets][parts]``: the rank that keeps each part."""

    def place(self, strategies: Sequence[Sequence[Sequence[Piece]]]) -> None:
        """Gives parts to ranks that use them in most strategies: ``[strategies][ranks][pieces]``.

        Of buckets of one size each rank keeps equally many parts, so that all keep as much. Of one
        bucket it keeps no more than its share where most ranks use it, so that no more gradients
        come to it at a time than the bucket has.
        """
        used: dict[tuple[int, int], list[BucketRun]] = defaultdict(list)
        most = [self.num_ranks] * len(self.sizes)
        for ranks in strategies:
            users: dict[int, set[int]] = defaultdict(set)
            for rank, pieces in enumerate(ranks):
                for piece in pieces:
                    used[piece.whole.bucket, rank] += self.runs(piece)
                    users[piece.whole.bucket].add(rank)
            for bucket, some in users.items():
                most[bucket] = min(most[bucket], self.num_ranks // len(some))
        left = {size: np.full(self.num_ranks, num) for size, num in Counter(self.sizes).items()}
        for bucket, size in enumerate(self.sizes):
            edges = np.array([self.part(bucket, at)[0] for at in range(self.num_ranks + 1)])
            # [parts, ranks]: how many elements of a part a rank uses, in all strategies
            wanted = np.zeros((self.num_ranks, self.num_ranks), dtype=np.int64)
            for rank in range(self.num_ranks):
                if runs := used.get((bucket, rank)):
                    starts, lengths = np.array([run[:2] for run in runs]).T
                    reached = np.clip(edges, starts[:, None], (starts + lengths)[:, None])
                    wanted[:, rank] = np.diff(reached, axis=1).sum(axis=0)
            room, kept = left[size], np.zeros(self.num_ranks, dtype=np.int64)
            for at, uses in enumerate(wanted):
                by_use = uses * (len(self.sizes) + 1) + room  # of equal ones that with most room
                above = by_use.max() + 1
                by_use -= above * ((kept >= most[bucket]) + 2 * (room == 0))
                owner = int(by_use.argmax())
                self.owners[bucket][at] = owner
                room[owner] -= 1
                kept[owner] += 1

    def part(self, bucket: int, at: int) -> tuple[int, int]:
        """The elements ``[start, stop)`` of a part of a bucket."""
        return part(self.sizes[bucket], at, self.num_ranks)

    def parts(self, bucket: int, rank: int) -> list[tuple[int, int]]:
        """The parts of a bucket that a rank keeps: its shard, one behind another."""
        return [self.part(bucket, at) for at, own in enumerate(self.owners[bucket]) if own == rank]

    def runs(self, piece: Piece) -> Iterator[BucketRun]:
        """The elements of a piece, in runs."""
        place, whole = self._places[piece.whole], piece.whole
        parts = len(place.offsets)
        own, length = parts // piece.parts, whole.num_elements // parts
        size = whole.shape[place.axis] // parts if parts > 1 else 0
        for at in range(own):
            cut = (place.axis, at * size, size) if own > 1 else None
            yield BucketRun(place.offsets[piece.index * own + at], length, cut)
