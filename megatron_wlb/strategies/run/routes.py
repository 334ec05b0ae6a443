"""What goes between the ranks that keep elements and those that use them, bucket by bucket.

Shards and runs are both in the order of a bucket, so what a user gets from an owner are parts of
its runs, one after another: nothing is sent but the elements.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_wlb.strategies.run.buckets import BucketRun, Buckets
from megatron_wlb.strategies.run.pieces import Piece

Span = tuple[int, int]


class Routes:
    """The routes of one table: ``needs`` are the pieces that each rank uses."""

    def __init__(self, buckets: Buckets, needs: Sequence[Sequence[Piece]], rank: int) -> None:
        num = len(buckets.sizes)
        self.buckets = buckets
        self.given: list[list[list[Span]]] = [[[] for _ in needs] for _ in range(num)]
        """``[buckets][users]``: the elements of this rank's shard that each user needs."""
        self.taken: list[list[int]] = [[0] * len(needs) for _ in range(num)]
        """``[buckets][owners]``: how many elements this rank gets from each."""
        self._segments: list[list[tuple[int, int]]] = [[] for _ in range(num)]
        """``[buckets]``: the owners of what this rank uses, and how many elements, in order."""
        self.mine: list[list[tuple[BucketRun, int]]] = [[] for _ in range(num)]
        """``[buckets]``: this rank's runs in order, and the numbers of their pieces."""
        for user, pieces in enumerate(needs):
            by_bucket: dict[int, list[tuple[BucketRun, int]]] = defaultdict(list)
            for number, piece in enumerate(pieces):
                for run in buckets.runs(piece):
                    by_bucket[piece.whole.bucket].append((run, number))
            for bucket, runs in by_bucket.items():
                runs.sort(key=lambda one: one[0].offset)
                spans = [(run.offset, run.offset + run.length) for run, _ in runs]
                assert all(one[1] <= two[0] for one, two in pairwise(spans)), "used twice"
                before = 0
                for limits in buckets.parts(bucket, rank):
                    inside = _within(spans, limits)
                    self.given[bucket][user] += [(before + a, before + b) for a, b in inside]
                    before += limits[1] - limits[0]
                if user == rank:
                    self.mine[bucket] = runs
                    for at, owner in enumerate(buckets.owners[bucket]):
                        own = sum(b - a for a, b in _within(spans, buckets.part(bucket, at)))
                        self.taken[bucket][owner] += own
                        self._segments[bucket].append((owner, own))

    def num_given(self, bucket: int) -> list[int]:
        """Counts the elements that each user needs of this rank."""
        return [sum(stop - start for start, stop in spans) for spans in self.given[bucket]]

    def num_bytes(self, bucket: int, dtype: torch.dtype) -> int:
        """What the buffers of a bucket take, of what goes and of what comes."""
        return dtype.itemsize * (sum(self.num_given(bucket)) + sum(self.taken[bucket]))

    def in_order(self, bucket: int, got: torch.Tensor) -> torch.Tensor:
        """What came from owners, one after another, in the order of the bucket."""
        segments, order = self._segments[bucket], self._order(bucket)
        parts = torch.split(got, [segments[n][1] for n in order])
        return _joined([parts[n] for n in np.argsort(order)], got)

    def by_owner(self, bucket: int, runs: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`in_order`."""
        segments = self._segments[bucket]
        parts = torch.split(runs, [own for _, own in segments])
        return _joined([parts[n] for n in self._order(bucket)], runs)

    def _order(self, bucket: int) -> list[int]:
        """The numbers of segments as they travel: owner by owner."""
        segments = self._segments[bucket]
        return sorted(range(len(segments)), key=lambda number: segments[number][0])

    def views(self, bucket: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of ``tensors``, one for each of this rank's pieces, in the order of runs."""
        return [
            tensors[number] if run.cut is None else tensors[number].narrow(*run.cut)
            for run, number in self.mine[bucket]
        ]


@dataclass(frozen=True, eq=False)
class _Transfer:
    """A bucket on its way."""

    bucket: int
    work: Any
    got: torch.Tensor
    sent: torch.Tensor


class Pull:
    """Elements on their way from their owners to those who use them.

    As many buckets are under way as there is room for, first to last; for others it waits at the
    start, where no rank waits for another's passes. :meth:`wait` is for what one of them fills. All
    ranks of the world make it together. ``shards`` are this rank's, by bucket, ``tensors`` those to
    fill; ``room_bytes`` what buffers may take, though one bucket always goes.
    """

    def __init__(
        self,
        routes: Routes,
        shards: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        dtype: torch.dtype = torch.float32,
        room_bytes: float = math.inf,
    ) -> None:
        self._routes, self._tensors = routes, tensors
        self._coming: deque[_Transfer] = deque()
        for bucket, shard in enumerate(shards):
            own_bytes = routes.num_bytes(bucket, dtype)
            while self._coming and own_bytes + _alive_bytes(self._coming) > room_bytes:
                self._take(self._coming.popleft())
            self._coming.append(self._post(bucket, shard, dtype))

    def wait(self, bucket: int) -> None:
        """Fills the tensors of a bucket and those before, once it is there, and lets go of buckets
        that others have; a second call does no more.
        """
        while self._coming and self._coming[0].bucket <= bucket:
            self._take(self._coming.popleft())
        for one in [*self._coming]:
            if not self._routes.mine[one.bucket] and one.work.is_completed():
                self._coming.remove(one)

    def finish(self) -> None:
        """Waits for all that is still under way."""
        self.wait(len(self._routes.mine))

    def _post(self, bucket: int, shard: torch.Tensor, dtype: torch.dtype) -> _Transfer:
        routes = self._routes
        spans = [span for user in routes.given[bucket] for span in user]
        sent = _joined([shard[start:stop] for start, stop in spans], shard).to(dtype)
        return _begun(bucket, sent, routes.num_given(bucket), routes.taken[bucket])

    @torch.no_grad()
    def _take(self, one: _Transfer) -> None:
        one.work.wait()
        views = self._routes.views(one.bucket, self._tensors)
        if views:
            got = self._routes.in_order(one.bucket, one.got)
            parts = torch.split(got, [v.numel() for v in views])
            pairs = zip(views, parts, strict=True)
            torch._foreach_copy_(views, [values.view(view.shape) for view, values in pairs])


class Push:
    """Elements on their way back to their owners, where those of several users are added up.

    Buckets go last to first, as backward passes are done with them, on all ranks alike. What
    ``room_bytes`` do not hold goes at the end: a rank that waited earlier could wait for one that
    needs its gradients.
    """

    def __init__(
        self, routes: Routes, tensors: Sequence[torch.Tensor], room_bytes: float = math.inf
    ) -> None:
        self._routes, self._tensors, self._room_bytes = routes, tensors, room_bytes
        self._next = len(routes.mine) - 1
        self._going: deque[_Transfer] = deque()

    def post(self, down_to: int) -> None:
        """Starts to send all buckets down to this one that have not gone yet, if there is room."""
        while self._next >= down_to and self._has_room:
            self._send()

    def finish(self, shards: Sequence[torch.Tensor]) -> None:
        """Sends the rest, and adds what comes to this rank's shards, user by user."""
        self.post(0)
        while self._going:
            self._take(self._going.popleft(), shards)
            self.post(0)

    @property
    def _has_room(self) -> bool:
        own_bytes = self._routes.num_bytes(self._next, torch.float32)
        return not self._going or own_bytes + _alive_bytes(self._going) <= self._room_bytes

    @torch.no_grad()
    def _send(self) -> None:
        routes, bucket = self._routes, self._next
        views = routes.views(bucket, self._tensors)
        empty = torch.empty(0, device=torch.cuda.current_device())
        sent = routes.by_owner(bucket, _joined([view.reshape(-1) for view in views], empty))
        num_given = routes.num_given(bucket)
        self._going.append(_begun(bucket, sent, routes.taken[bucket], num_given))
        self._next -= 1

    @torch.no_grad()
    def _take(self, one: _Transfer, shards: Sequence[torch.Tensor]) -> None:
        one.work.wait()
        spans = [span for user in self._routes.given[one.bucket] for span in user]
        parts = torch.split(one.got, [stop - start for start, stop in spans])
        for (start, stop), values in zip(spans, parts, strict=True):
            shards[one.bucket][start:stop] += values


def _begun(
    bucket: int, sent: torch.Tensor, sizes: Sequence[int], coming: Sequence[int]
) -> _Transfer:
    """Starts to send ``sizes`` elements to each rank, and to receive those ``coming`` of each."""
    got = sent.new_empty(sum(coming))
    work = dist.all_to_all_single(got, sent, coming, sizes, async_op=True)
    return _Transfer(bucket, work, got, sent)


def _alive_bytes(transfers: Iterable[_Transfer]) -> int:
    return sum(one.got.nbytes + one.sent.nbytes for one in transfers)


def _joined(parts: Sequence[torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
    return torch.cat([*parts]) if parts else empty.new_empty(0)


def _within(spans: Sequence[Span], limits: Span) -> list[Span]:
    """The parts of spans inside limits, counted from where these start; neighbours joined."""
    low, high = limits
    found: list[Span] = []
    for start, stop in spans:
        start, stop = max(start, low) - low, min(stop, high) - low
        if start >= stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found
