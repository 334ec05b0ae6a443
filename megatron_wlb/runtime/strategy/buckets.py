"""The order of elements in the store, and who keeps which.

The tensors of a layer are a *bucket* (:mod:`megatron_wlb.plan.strategy.store`), by their groups of
parameters. Each is divided as finely as any strategy divides it, and stands part by part: so what
a tensor-parallel rank needs is a run of elements. Every rank keeps a contiguous shard of each
bucket.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.plan.strategy.store import part
from megatron_wlb.runtime.strategy.pieces import Piece, WholeTensor


class Run(NamedTuple):
    """Elements ``[offset, offset + length)`` of a bucket, and the part of a piece that they are:
    ``(axis, start, size)``, or all of it.
    """

    offset: int
    length: int
    cut: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class _Place:
    offset: int
    axis: int
    parts: int


class Buckets:
    """Where every element of the model stands. ``pieces`` are those of all ranks and strategies."""

    def __init__(self, pieces: Iterable[Piece], num_buckets: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        finest: dict[WholeTensor, tuple[int, int]] = {}
        groups: dict[WholeTensor, int] = defaultdict(int)
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
        self.sizes = [0] * num_buckets
        num_groups = max(groups.values(), default=0) + 1
        self.ends = [[0] * num_groups for _ in range(num_buckets)]
        """Where the elements of each group end in each bucket."""
        self._places: dict[WholeTensor, _Place] = {}
        order = sorted(finest.items(), key=lambda one: (groups[one[0]], one[0].key, one[0].stack))
        for whole, (axis, parts) in sorted(order, key=lambda one: one[0].bucket):
            bucket = whole.bucket
            self._places[whole] = _Place(self.sizes[bucket], axis, parts)
            self.sizes[bucket] += whole.num_elements
            at = groups[whole]
            self.ends[bucket][at:] = [self.sizes[bucket]] * (num_groups - at)

    def shard(self, bucket: int, rank: int) -> tuple[int, int]:
        """The elements ``[start, stop)`` of a bucket that a rank keeps."""
        return part(self.sizes[bucket], rank, self.num_ranks)

    def runs(self, piece: Piece) -> Iterator[Run]:
        """The elements of a piece, in runs."""
        place, num = self._places[piece.whole], piece.whole.num_elements
        own = place.parts // piece.parts
        start, length = place.offset + piece.index * (num // piece.parts), num // place.parts
        if place.axis == 0 or own == 1:  # in memory they are in one order
            yield Run(start, own * length)
            return
        size = piece.whole.shape[place.axis] // place.parts
        for at in range(own):
            yield Run(start + at * length, length, (place.axis, at * size, size))
