"""Keys and values of a document in slices, divided over the ranks that share its tokens.

Row ``p`` of a document is on rank ``p % R``, the ``p // R``-th there. A slice's forward pass
gathers the rows before it, adds its own, and lets go of all but its share. Its backward pass
gathers them again; the gradients that it gives to rows of others are reduced at once, and each rank
adds what it gets to its share.

Legend: ``R`` ranks, ``m`` rows that each of them has of those that are gathered, ``G`` key/value
heads of a head group, ``D`` head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_wlb.runtime.gpt.attention.key_exchange import (
    ContextParallel,
    UnderWay,
    all_gather,
    free,
    one_ahead,
    reduce_scatter,
    regain,
)
from megatron_wlb.runtime.gpt.attention.slice_attention import (
    Buffer,
    LayerSlice,
    SliceCall,
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

    def start_reduce(self, sums: torch.Tensor, dtype: torch.dtype) -> UnderWay | None:
        """Starts to sum the gradients of the rows before the slice over the ranks, if there are
        any, in ``dtype``; for :meth:`add`.
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
        return UnderWay(reduce_scatter, torch.empty_like(sent[0]), sent.flatten(0, 1), self.group)

    def add(self, share: torch.Tensor, reduced: torch.Tensor) -> None:
        """Adds this rank's part of these sums to its share."""
        share[self._each(self.start)] += reduced

    def start_gather(self, share: torch.Tensor, stop: int) -> UnderWay:
        """Starts to gather the rows up to ``stop``, for :meth:`fill`."""
        sent = share[self._each(stop)].contiguous()
        received = sent.new_empty(self.group.size(), *sent.shape)
        return UnderWay(all_gather, received.flatten(0, 1), sent, self.group, received)

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


@dataclass(frozen=True)
class DividedSlice(LayerSlice):
    """Attention of a slice in one layer where ranks divide the buffer: each has a share of it."""

    group: dist.ProcessGroup = field(kw_only=True)
    parallel: ContextParallel = field(kw_only=True)
    _gathered: list[Iterator[UnderWay]] = field(default_factory=list, init=False)
    """What the present pass gathers, a head group after another."""
    _opened: list[torch.Tensor] = field(default_factory=list, init=False)
    """``[rows, 2, G, D]``: the rows that the slice sees, of each head group, until they are
    differentiated."""
    _reducing: list[tuple[torch.Tensor, UnderWay]] = field(default_factory=list, init=False)
    """Gradients on the way to this rank's shares."""

    @classmethod
    def of(
        cls, run: LayerSlice, group: dist.ProcessGroup, parallel: ContextParallel
    ) -> DividedSlice:
        known = {each.name: getattr(run, each.name) for each in fields(LayerSlice)}
        return cls(**known, group=group, parallel=parallel)

    @property
    def num_shares(self) -> int:
        return self.group.size()

    def fill(self, key: torch.Tensor) -> Buffer:
        buffer = super().fill(key)
        self._gather(buffer, self.slice.start)
        return buffer

    def write(
        self, tensor: torch.Tensor, values: torch.Tensor, index: torch.Tensor | None = None
    ) -> None:
        opened = self._take(tensor.new_empty(self.slice.stop, *tensor.shape[1:]), self.slice.start)
        super().write(opened, values, index)
        self._rows.keep(opened, tensor)
        self._opened.append(opened)

    def attend(self, pair: torch.Tensor, query: torch.Tensor, *, keep: bool) -> list[SliceCall]:
        calls = super().attend(self._opened[-1], query, keep=keep)
        if not (keep and self.parallel.keep_gathered):
            free(self._opened[-1])
        return calls

    def turn(self) -> tuple[Buffer, torch.Tensor]:
        buffer, sums = super().turn()
        if not self.parallel.keep_gathered:
            self._gather(buffer, self.slice.stop)
        return buffer, sums

    def differentiate(
        self, calls: Sequence[SliceCall], grad_out: torch.Tensor, grad: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        opened = self._opened.pop(0)
        if not self.parallel.keep_gathered:
            self._take(opened, self.slice.stop)
        sums = self._rows.sums(grad)
        found = super().differentiate(calls, grad_out, sums)
        free(opened)
        reducing = self._rows.start_reduce(sums, self.parallel.sum_dtype(opened.dtype))
        if reducing is not None:
            self._reducing.append((grad, reducing))
        return found

    def turned(self) -> None:
        for share, reducing in self._reducing:
            self._rows.add(share, reducing.wait())
        super().turned()

    @property
    def _rows(self) -> Rows:
        return Rows(self.group, self.slice.first_row, self.slice.start, self.slice.stop)

    def _gather(self, buffer: Buffer, stop: int) -> None:
        """Begins to gather the rows up to ``stop``; the layer before may have done so."""
        shares = self.parallel.heads(buffer.pair)
        first = self.slice.store.take((self.name, self.slice.first_row, stop))
        first = first or self._rows.start_gather(shares[0], stop)
        self._gathered[:] = [one_ahead(self._begun(first, shares[1:], stop))]

    def _begun(
        self, first: UnderWay, shares: Sequence[torch.Tensor], stop: int
    ) -> Iterator[UnderWay]:
        """Each head group's gather. Behind the last one that of the layer which runs next begins:
        it comes while this one works.
        """
        yield first
        for share in shares:
            yield self._rows.start_gather(share, stop)
        is_backward, store = stop == self.slice.stop, self.slice.store
        following = replace(self, layer=self.layer + (-1 if is_backward else 1))
        buffer = following.comes_next(is_backward)
        if buffer is not None and buffer.num_shares > 1:
            store.leave()
            # What is not taken after all does no harm: these rows stay as they are.
            ahead = self._rows.start_gather(self.parallel.heads(buffer.pair)[0], stop)
            store.ahead = (following.name, self.slice.first_row, stop), ahead

    def _take(self, opened: torch.Tensor, stop: int) -> torch.Tensor:
        """Has the next head group's rows up to ``stop`` come to where all that it sees are."""
        under_way = next(self._gathered[0])
        self._rows.fill(regain(opened), under_way.wait(), stop)
        return opened
