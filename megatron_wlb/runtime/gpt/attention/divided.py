"""Keys and values of a document in slices, divided over the ranks that share its tokens.

Row ``p`` of a document is on rank ``p % R``, the ``p // R``-th there. A slice's forward pass
gathers the rows before it, adds its own, and lets go of all but its share. Its backward pass
gathers them again; the gradients that it gives to rows of others are reduced at once, and each rank
adds what it gets to its share.

Legend: ``R`` ranks, ``m`` rows that each of them has of those that are gathered, ``G`` key/value
heads of a head group, ``D`` head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

# Their names from torch 2.13 on; the old ones warn there.
all_gather, reduce_scatter = (
    getattr(dist, new, None) or getattr(dist, old)
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a document that a pass of a slice works on: those before it that it sees, and its
    own.
    """

    group: dist.ProcessGroup
    first: int
    """The first that any query of the slice sees."""
    start: int
    """Where the slice begins."""
    stop: int

    def _each(self, stop: int) -> slice:
        """Where every rank has its share of the rows up to ``stop``; some have one less."""
        size = self.group.size()
        return slice(self.first // size, -(-stop // size))

    @property
    def _own(self) -> tuple[slice, slice]:
        """The slice's rows that this rank keeps: among all rows, and in its share."""
        size = self.group.size()
        first = self.start + (self.group.rank() - self.start) % size
        num = len(range(first, self.stop, size))
        return slice(first, self.stop, size), slice(first // size, first // size + num)

    def keep(self, whole: torch.Tensor, share: torch.Tensor) -> None:
        """Puts what this rank keeps of the slice's own rows ``[rows, 2, G, D]`` to its share."""
        of_all, own = self._own
        with torch.no_grad():
            share[own] = whole[of_all]

    def sums(self, share: torch.Tensor) -> torch.Tensor:
        """Zeros, to which gradients of the rows ``[rows, 2, G, D]`` are added; of the slice's own
        begin those of this rank's share with what slices behind it have given.
        """
        num = max(self.stop, self._each(self.start).stop * self.group.size())
        sums = share.new_zeros(num, *share.shape[1:])
        of_all, own = self._own
        sums[of_all] = share[own]
        return sums

    def start_reduce(self, sums: torch.Tensor, dtype: torch.dtype) -> Reduction | None:
        """Starts to sum the gradients of the rows before the slice over the ranks, if there are
        any, in ``dtype``.
        """
        each, size = self._each(self.start), self.group.size()
        if each.start == each.stop:
            return None
        grouped = sums[: each.stop * size].view(each.stop, size, *sums.shape[1:])[each]
        sent = grouped.new_empty(size, len(grouped), *sums.shape[1:], dtype=dtype)
        sent.copy_(grouped.transpose(0, 1))  # [m, R, 2, G, D] -> [R, m, 2, G, D]
        own = self.start % size
        if own:  # The last of these rows are the slice's.
            sent[own:, -1] = 0
        received = torch.empty_like(sent[0])
        work = reduce_scatter(received, sent.flatten(0, 1), group=self.group, async_op=True)
        return Reduction(each, received, sent, work)

    def start_gather(
        self, share: torch.Tensor, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Starts to gather the rows up to ``stop``: what is received, what is sent, and the work,
        if there are any.
        """
        sent = share[self._each(stop)].contiguous()
        received = sent.new_empty(self.group.size(), *sent.shape)
        work = None
        if len(sent):
            out = received.flatten(0, 1)
            work = all_gather(out, sent, group=self.group, async_op=True)
        return received, sent, work

    def fill(self, whole: torch.Tensor, received: torch.Tensor, stop: int) -> None:
        """Puts gathered rows to ``[rows, 2, G, D]``, in their order. Graphs that hold it need not
        know.
        """
        size = self.group.size()
        first, (full, rest) = self.first // size, divmod(stop, size)
        with torch.no_grad(), _unsafe_preserve_version_counter(whole):
            to = whole[first * size : full * size].view(full - first, size, *whole.shape[1:])
            to.copy_(received[:, : full - first].transpose(0, 1))
            if rest:
                whole[full * size : stop] = received[:rest, -1]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Gradients on the way to the ranks that have the rows."""

    rows: slice
    received: torch.Tensor
    _sent: torch.Tensor
    _work: Any

    def add_to(self, share: torch.Tensor) -> None:
        self._work.wait()
        share[self.rows] += self.received


class Gathered:
    """Each head group's rows, one after another, the next one's collective under way."""

    def __init__(self, rows: Rows, shares: Sequence[torch.Tensor], stop: int) -> None:
        self.rows, self._shares, self._stop = rows, shares, stop
        self._next = 0
        self.then: Callable[[], object] = int
        """What is to be done when the last group's have come."""
        self._started = [rows.start_gather(shares[0], stop)]

    def take(self, into: torch.Tensor | None = None) -> torch.Tensor:
        """The next group's, ``[stop of the slice, 2, G, D]``; those that are not gathered are
        undefined. ``into`` is such a tensor, whose storage was freed.
        """
        (received, _sent, work), share = self._started.pop(), self._shares[self._next]
        self._next += 1
        if self._next < len(self._shares):
            self._started.append(self.rows.start_gather(self._shares[self._next], self._stop))
        else:
            self.then()
        if into is None:
            into = share.new_empty(self.rows.stop, *share.shape[1:])
        else:
            into.untyped_storage().resize_(into.numel() * into.element_size())
        if work is not None:
            work.wait()
            self.rows.fill(into, received, self._stop)
        return into

    def leave(self) -> None:
        """Waits for what is under way and will not be taken: its memory is in use until then."""
        for *_, work in self._started:
            if work is not None:
                work.wait()
