"""Documents to units of like work: who runs which, and where heavy ones are cut."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from math import ceil, sqrt
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeAlias

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document, Span, Units
from megatron_wlb.planning.greedy import Bins
from megatron_wlb.planning.planner import merged_multiple

TOLERANCE = 0.05
"""Share of a unit by which a document, or the rest of one, may be heavier and is not cut."""
SLICE_MULTIPLE = 128
"""Tokens that cuts are multiples of, as kernels like it."""
SLICES_OF_A_WINDOW = 64
"""The most slices of a window: of short ones, cuts are multiples of a share of it."""

Timed: TypeAlias = tuple[float, Document]
"""A document behind what it takes, in µs."""

_US, _IN_STREAM = itemgetter(0), attrgetter("arrival", "offset")


def slice_multiple(window: int, given: int | None = None) -> int:
    """Tokens that cuts are multiples of: as ``given``, or else by the window."""
    return given or max(1, min(SLICE_MULTIPLE, window // SLICES_OF_A_WINDOW))


def check_units(num_units: int | None, step_tokens: int, multiple: int) -> None:
    """Raises :class:`ConfigError` for more units than a rank's step has slices to cut at all."""
    most = step_tokens // multiple
    if num_units is not None and num_units > most:
        raise ConfigError(
            f"--wlb-units (slim:K) is {num_units}, but a data-parallel rank's step of "
            f"{step_tokens} tokens has only {most} slices of {multiple} (--wlb-slice-multiple); "
            "use at most that, or leave it out: simulated step time chooses"
        )


class Merged(NamedTuple):
    """A document that several data-parallel ranks run together."""

    us: float
    """What the whole document takes on one rank."""
    document: Document
    ranks: tuple[int, ...]


class Dealt(NamedTuple):
    """Which documents a group runs: a data-parallel rank, or several that run alike."""

    alone: list[list[Timed]]
    """The documents of each group, heaviest first."""
    together: list[Merged]
    """Heaviest first."""
    mean_us: float
    """Work of a data-parallel rank, in the mean."""
    heaviest: int
    """The group with most work."""


class Chains:
    """The chains that replicas have in common, where they meet in each pass, and how many of their
    units are taken.
    """

    def __init__(self, num_merged: int, num_replicas: int) -> None:
        """The first chain runs documents of several replicas, if there are any."""
        self.lengths = [num_merged] if num_merged else []
        self.num_units = num_merged
        """Units of all chains."""
        self._free: list[list[range]] = [[] for _ in range(num_replicas)]
        self._num_used = [0] * num_replicas

    def place(self, num_slices: int) -> tuple[int, int]:
        """A replica and the unit in which a document's first slice runs there.

        It is behind the documents of a chain that has room, of the replica with the fewest slices,
        and of its chains the one with the least room. Else it begins a chain, which is then one of
        all replicas.
        """
        rooms = [
            (self._num_used[replica], len(free), number, replica)
            for replica, own in enumerate(self._free)
            for number, free in enumerate(own)
            if len(free) >= num_slices
        ]
        if rooms:
            *_, number, replica = min(rooms)
        else:
            number, replica = len(self._free[0]), self._num_used.index(min(self._num_used))
            begin = self.num_units
            self.num_units += num_slices
            self.lengths.append(num_slices)
            for own in self._free:
                own.append(range(begin, self.num_units))
        free = self._free[replica][number]
        self._free[replica][number] = free[num_slices:]
        self._num_used[replica] += num_slices
        return replica, free.start


@dataclass(frozen=True)
class Cuts:
    """Deals documents to replicas, and lays them out in units."""

    cost: CostModel
    """What documents take. A slice takes what its document does to its end, not to its beginning.
    """
    max_tokens: int
    """S_max: no unit is longer."""
    length_multiple: int = 1
    """What units are padded to a multiple of, as S_max is one; those of several replicas to one of
    ``2 · length_multiple`` for each."""
    multiple: int = SLICE_MULTIPLE
    """Tokens that cuts are multiples of."""
    dp_size: int = 1
    alike: int = 1
    """How many neighbouring replicas meet in each pass, and so run units alike."""

    def heaviest_first(self, documents: Sequence[Document]) -> list[Timed]:
        in_order = sorted(documents, key=_IN_STREAM)
        times_us = map(self.cost.document_us, [document.length for document in in_order])
        # A stable sort: equal ones stay in the order of the stream.
        return sorted(zip(times_us, in_order, strict=True), key=_US, reverse=True)

    def deal(self, heaviest: Sequence[Timed], *, merges: bool = False) -> Dealt:
        """Gives each document to the rank, or group of ranks that run alike, with the least work.

        With ``merges``, a document that is heavier than a rank's mean work goes to a block of
        groups: the smallest power of 2 whose ranks have no more than the mean of it each.
        """
        dp_size, alike = self.dp_size, self.alike
        mean_us = sum([us for us, _ in heaviest]) / dp_size
        alone: list[list[Timed]] = [[] for _ in range(dp_size // alike)]
        together: list[Merged] = []
        loads_us = [0.0] * len(alone)
        for us, document in heaviest if merges and dp_size > 1 else ():
            size, limit_us = 1, (1 + TOLERANCE) * mean_us
            while us > limit_us * size and not dp_size % (larger := max(2 * size, alike)):
                size = larger
            if size == 1:
                break
            num = size // alike
            blocks = [range(at, at + num) for at in range(0, len(alone), num)]
            groups = min(blocks, key=lambda block: (max(loads_us[g] for g in block), block.start))
            ranks = range(groups.start * alike, groups.stop * alike)
            together.append(Merged(us, document, tuple(ranks)))
            for group in groups:
                loads_us[group] += us / num
        bins = Bins((load_us, group) for group, load_us in enumerate(loads_us))
        for us, document in heaviest[len(together) :]:
            chosen = bins.place(us)
            assert chosen is not None  # Each has room for all.
            alone[chosen].append((us, document))
        heaviest_group = max((load_us, group) for group, load_us, _ in bins)[1]
        return Dealt(alone, together, mean_us, heaviest_group)

    def lay(self, dealt: Dealt, group: int, num_units: int) -> list[Units]:
        """Lays the units of each replica of a group: slices of heavy documents one after another,
        then whole documents where work is missing.

        Documents that several ranks run come first, in one chain, so that all ranks run them in one
        order. The others come heaviest first, and so do the chains: then fewest units are held.
        """
        alone, alike = dealt.alone[group], range(self.alike)
        merged: list[list[Span]] = []
        replicas: list[tuple[int, ...]] = []
        for us, document, ranks in dealt.together:
            if group * self.alike in ranks:
                multiple = merged_multiple(self.length_multiple, len(ranks))
                most = max(multiple, self.max_tokens - self.max_tokens % multiple)
                each_us = dealt.mean_us / num_units * len(ranks)
                slices = self.slices(document, us, each_us, most)
                merged += ([span] for span, _ in slices)
                replicas += [ranks] * len(slices)
        begin = len(merged)
        num_units = max(1, num_units - begin) if alone else 0
        unit_us = sum([us for us, _ in alone]) / max(1, num_units * self.alike)
        heavy_us = (1 + TOLERANCE) * unit_us
        cut = [*takewhile(lambda own: own[0] > heavy_us or own[1].length > self.max_tokens, alone)]
        counts = [ceil(us / unit_us - TOLERANCE) for us, _ in cut]
        # The last slice of a document leaves room for whole ones. Where there are too few of
        # these, all slices of a document are of like work instead.
        filled_us = sum([us for us, _ in alone[len(cut) :]])
        lacking_us = unit_us * sum(counts) - sum([us for us, _ in cut])
        even = 2 * filled_us < lacking_us
        chains = Chains(begin, self.alike)
        placed: dict[tuple[int, int], tuple[Span, float]] = {}  # by unit and replica
        for (us, document), count in zip(cut, counts, strict=True):
            each_us = us / max(1, count) if even else unit_us
            slices = self.slices(document, us, each_us, self.max_tokens)
            replica, at = chains.place(len(slices))
            placed |= {(n, replica): one for n, one in enumerate(slices, at)}
        num_units = max(begin + num_units, chains.num_units)
        spans = [[*merged, *([] for _ in range(begin, num_units))] for _ in alike]
        bins = Bins[tuple[int, int]]()  # by what is missing
        for place in product(range(begin, num_units), alike):
            done_us, room = 0.0, self.max_tokens
            if place in placed:
                span, done_us = placed[place]
                room -= span.length
                spans[place[1]][place[0]].append(span)
            bins.add(done_us - unit_us, place, room)
        for us, document in alone[len(cut) :]:
            found = bins.place(us, document.length)
            while found is None:
                for replica, own in enumerate(spans):
                    bins.add(-unit_us, (len(own), replica), self.max_tokens)
                    own.append([])
                found = bins.place(us, document.length)
            spans[found[1]][found[0]].append(Span(document, 0, document.length))
        used = [at for at, row in enumerate(zip(*spans, strict=True)) if any(row)]
        spans = [[own[at] for at in used] or [[]] for own in spans]
        num_units = len(spans[0])
        lengths = chains.lengths + [1] * (num_units - chains.num_units)
        replicas += [()] * (num_units - begin)
        return [Units(own, replicas, lengths) for own in spans]

    def slices(
        self, document: Document, document_us: float, unit_us: float, max_tokens: int
    ) -> list[tuple[Span, float]]:
        """Slices of ``unit_us``, and what each takes; the last is the rest."""
        slices: list[tuple[Span, float]] = []
        start, before_us = 0, 0.0
        length_of = self._curve(document.length, document_us)
        while start < document.length:
            stop = document.length
            if document_us - before_us > (1 + TOLERANCE) * unit_us:
                until_us = before_us + unit_us
                stop = self.stop(document, start, until_us, length_of(until_us))
            stop = min(stop, start + max_tokens)
            after_us = self.cost.document_us(stop)
            slices.append((Span(document, start, stop), after_us - before_us))
            start, before_us = stop, after_us
        return slices

    def _curve(self, length: int, whole_us: float) -> Callable[[float], float]:
        """From a time to about the length that takes it.

        It goes by ``linear · d + quadratic · d²`` through a document of ``length`` and its half.
        """
        half = length // 2 or 1
        half_us = self.cost.document_us(half)
        quadratic_us = (whole_us / length - half_us / half) / max(1, length - half)
        linear_us = half_us / half - quadratic_us * half

        def length_of(us: float) -> float:
            slope_us = linear_us + sqrt(max(0.0, linear_us * linear_us + 4 * quadratic_us * us))
            return min(2 * us / slope_us, length) if slope_us > 0 else length

        return length_of

    def stop(self, document: Document, start: int, until_us: float, guess: float) -> int:
        """The end of the slice from ``start`` on: where the document has taken ``until_us``.

        It is looked for from the ``guess`` on, wider and wider.
        """
        multiple, document_us = self.multiple, self.cost.document_us
        first, last = start // multiple + 1, document.length // multiple
        # The first multiple that takes so long is none below low, and at most high.
        low = high = min(max(first, ceil(guess / multiple)), last + 1)
        reach = 1
        while low > first and document_us((low - 1) * multiple) >= until_us:
            low, high, reach = max(first, low - 1 - reach), low - 1, 2 * reach
        reach = 1
        while high <= last and document_us(high * multiple) < until_us:
            low, high, reach = high + 1, min(last + 1, high + reach), 2 * reach
        if low < high:
            numbers = range(low, high)
            low += bisect_left(numbers, until_us, key=lambda n: document_us(n * multiple))
        stop = low * multiple
        if low > first and until_us - document_us(stop - multiple) < document_us(stop) - until_us:
            stop -= multiple  # the nearer one
        return document.length if document.length - stop < multiple // 2 else stop
