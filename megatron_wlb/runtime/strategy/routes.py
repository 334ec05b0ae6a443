"""What goes between the ranks that keep elements and those that use them, bucket by bucket.

Shards and runs are both in the order of a bucket, so what a user gets from an owner are parts of
its runs, one after another: nothing is sent but the elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from megatron_wlb.runtime.strategy.buckets import Buckets, Run
from megatron_wlb.runtime.strategy.pieces import Piece

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
        self.mine: list[list[tuple[Run, int]]] = [[] for _ in range(num)]
        """``[buckets]``: this rank's runs in order, and the numbers of their pieces."""
        for user, pieces in enumerate(needs):
            by_bucket: dict[int, list[tuple[Run, int]]] = defaultdict(list)
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


class Pull:
    """Elements on their way from their owners to those who use them.

    All buckets are under way at once; :meth:`wait` is for what one of them fills. All ranks of the
    world make it together. ``shards`` are this rank's, by bucket, ``tensors`` those to fill.
    """

    def __init__(
        self,
        routes: Routes,
        shards: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._routes, self._tensors = routes, tensors
        self._coming: dict[int, tuple[dist.Work | None, torch.Tensor, torch.Tensor]] = {}
        for bucket, shard in enumerate(shards):
            spans = [span for user in routes.given[bucket] for span in user]
            sent = _joined([shard[start:stop] for start, stop in spans], shard).to(dtype)
            got = sent.new_empty(sum(routes.taken[bucket]))
            work = dist.all_to_all_single(
                got, sent, routes.taken[bucket], routes.num_given(bucket), async_op=True
            )
            self._coming[bucket] = work, got, sent

    @torch.no_grad()
    def wait(self, bucket: int) -> None:
        """Fills the tensors of a bucket, once it is there; a second call does nothing."""
        if bucket not in self._coming:
            return
        work, got, _ = self._coming.pop(bucket)
        assert work is not None
        work.wait()
        views = self._routes.views(bucket, self._tensors)
        if views:
            parts = torch.split(self._routes.in_order(bucket, got), [v.numel() for v in views])
            pairs = zip(views, parts, strict=True)
            torch._foreach_copy_(views, [values.view(view.shape) for view, values in pairs])

    def finish(self) -> None:
        """Waits for all that is still under way."""
        for bucket in [*self._coming]:
            self.wait(bucket)


class Push:
    """Elements on their way back to their owners, where those of several users are added up.

    Buckets go last to first, as backward passes are done with them, on all ranks alike.
    """

    def __init__(self, routes: Routes, tensors: Sequence[torch.Tensor]) -> None:
        self._routes, self._tensors = routes, tensors
        self._next = len(routes.mine) - 1
        self._going: list[tuple[dist.Work | None, torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def post(self, down_to: int) -> None:
        """Starts to send all buckets down to this one that have not gone yet."""
        routes = self._routes
        while self._next >= down_to:
            bucket, self._next = self._next, self._next - 1
            views = routes.views(bucket, self._tensors)
            empty = torch.empty(0, device=torch.cuda.current_device())
            sent = routes.by_owner(bucket, _joined([view.reshape(-1) for view in views], empty))
            num_given = routes.num_given(bucket)
            got = sent.new_empty(sum(num_given))
            work = dist.all_to_all_single(got, sent, num_given, routes.taken[bucket], async_op=True)
            self._going.append((work, got, sent))

    @torch.no_grad()
    def finish(self, shards: Sequence[torch.Tensor]) -> None:
        """Waits until all is there, and adds it to this rank's shards, user by user."""
        self.post(0)
        for bucket, (work, got, _) in zip(reversed(range(len(shards))), self._going, strict=True):
            assert work is not None
            work.wait()
            spans = [span for user in self._routes.given[bucket] for span in user]
            parts = torch.split(got, [stop - start for start, stop in spans])
            for (start, stop), values in zip(spans, parts, strict=True):
                shards[bucket][start:stop] += values
        self._going.clear()


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
