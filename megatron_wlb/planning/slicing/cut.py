"""Steps of slices: long documents are cut, so that no document waits and no unit stalls the rest.

After SlimPack §4, in two phases. Documents go to data-parallel ranks whole, the heaviest first,
each to the rank with the least work; one that is more than a rank's share runs on several ranks
together, which share its tokens as context-parallel ranks do (DP-Merge). Then each rank's work is
laid out in units of like work, which are its micro-batches: a document that is heavier than a unit
is cut into *slices* of like work, a unit each or less; whole documents fill up the last
slices and the units behind them. A slice attends to the slices before it, so it gets shorter the
later it lies in its document.

Where replicas meet in each pass, as those that exchange tokens with each other's experts do, they
run *alike*: as many units, in one order of forwards and backwards. For that the chains of a group
of replicas are common, and nothing else. A replica may run several documents one behind another in
one chain, whole documents in any of its units, or no document in a unit.

SlimPack solves a mixed-integer programme for backward units of their own; here both passes run the
same units, balanced by the sum of both. Units of two documents' slices are never made: backward
passes run last to first within a document, and one graph cannot wait for two.

Everything is computed in a fixed order, so that all ranks come to the same units.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from itertools import product, takewhile
from math import ceil, sqrt
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from megatron_wlb.cost import CostModel, Parallelism
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.schedule.graph import Floats, Graph
from megatron_wlb.cost.schedule.hosting import Copies
from megatron_wlb.cost.schedule.messages import meet_in_order, slice_graph
from megatron_wlb.cost.slices import HOST, KINDS, LAYERS
from megatron_wlb.cost.step_costs import StepCosts
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document, Span, Units
from megatron_wlb.planning.planner import merged_multiple
from megatron_wlb.planning.slicing.chains import Chains
from megatron_wlb.planning.slicing.room import MemoryLimit
from megatron_wlb.reading import MAX_COUNT, reading_state, real_number, whole_number

FACTORS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Units that are tried, in micro-batches of plain training."""
ENOUGH_UNITS = 64
"""Units for each pipeline rank but one, of which more are not tried: the pipeline fills and drains
in a 64th of the step then."""
WORTH_MORE_UNITS = 0.01
"""Share of the step that more units must save: their kernels are smaller."""
FIRST_STEPS, STEPS_A_SWEEP = 8, 64
"""The first steps each choose the number of units by all steps until then; later ones now and then.
"""
TOLERANCE = 0.05
"""Share of a unit by which a document, or the rest of one, may be heavier and is not cut."""
SURE = 0.8
"""Share of the memory limit up to which no step is looked at. The steps that should need most are
made up; with virtual stages real ones may need a tenth more."""
WINDOWS = (8, 10, 12, 16)
"""Windows that are tried, as :attr:`Way.windows`, until one leaves enough room. Large ones let
copies lag behind longer before passes wait for them."""
COPY_PRICE, LAG_PRICE = 0.05, 0.2
"""What of a copy's time to the host is a price, where units are chosen for it; and what of that by
which it is longer than the forward, so that it lags behind."""
SLICE_MULTIPLE = 128
"""Tokens that cuts are multiples of, as kernels like it."""
SLICES_OF_A_WINDOW = 64
"""The most slices of a window: of short ones, cuts are multiples of a share of it."""


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


Timed: TypeAlias = tuple[float, Document]
"""A document behind what it takes, in µs."""

_US, _IN_STREAM = itemgetter(0), attrgetter("arrival", "offset")


class Way(NamedTuple):
    """How a step is cut."""

    num_units: int
    divided: bool = False
    """Whether context-parallel ranks divide keys and values."""
    windows: int = 0
    """Whether micro-batches may wait in the host's memory. If so, each of two windows for what is
    on its way has one of so many parts of the device's memory; else 0."""


class Merged(NamedTuple):
    """A document that several data-parallel ranks run together."""

    us: float
    """What the whole document takes on one rank."""
    document: Document
    ranks: tuple[int, ...]


class _Dealt(NamedTuple):
    """Which documents a group runs: a data-parallel rank, or several that run alike."""

    alone: list[list[Timed]]
    """The documents of each group, heaviest first."""
    together: list[Merged]
    """Heaviest first."""
    mean_us: float
    """Work of a data-parallel rank, in the mean."""
    heaviest: int
    """The group with most work."""


class Slicer:
    """Cuts steps into units of like work.

    Args:
        cost: of documents; a slice takes what its document takes up to its end and not to its
            beginning.
        costs: of stages and transfers, for the choice of the number of units.
        layout: its ``dp_size`` replicas share a step.
        num_micro_batches: of plain training, on one data-parallel rank.
        max_tokens: S_max: no unit is longer.
        length_multiple: what units are padded to a multiple of, as S_max is one; those of several
            replicas to one of ``2 · length_multiple`` for each.
        num_units: how many to aim at on each data-parallel rank; chosen by simulated time if None.
        multiple: tokens that cuts are multiples of.
        alike: how many neighbouring replicas meet in each pass, and so run units alike.
        merges: whether a document that outweighs a replica's mean may run on several together,
            where that is faster in simulation (DP-Merge). Of replicas that run alike all do.
        memory: what a device may hold.
        cache: whether context-parallel ranks divide the keys and values of documents in slices,
            each have all of them, or whichever makes steps faster.
        worst: lengths of a rank's documents in the steps that need most memory.
    """

    def __init__(
        self,
        cost: CostModel,
        costs: StepCosts,
        layout: Parallelism,
        *,
        num_micro_batches: int,
        max_tokens: int,
        length_multiple: int = 1,
        num_units: int | None = None,
        multiple: int = SLICE_MULTIPLE,
        alike: int = 1,
        merges: bool = True,
        memory: MemoryLimit | None = None,
        cache: Literal["auto", "whole", "divided"] = "auto",
        worst: Sequence[Sequence[int]] = (),
    ) -> None:
        self._cost, self._costs, self._layout = cost, costs, layout
        self._max_tokens, self._length_multiple = max_tokens, length_multiple
        self._given, self._multiple = num_units, multiple
        self._alike, self._merges = alike, merges
        self.num_units = num_units
        """Units of a data-parallel rank; None before the first step."""
        factors = [factor * num_micro_batches for factor in FACTORS]
        tried = factors[: 1 + bisect_left(factors, ENOUGH_UNITS * (layout.pp_size - 1))]
        several = layout.cp_size > 1
        divides = several and cache == "divided"
        self._tried = [Way(number, divides) for number in ([num_units] if num_units else tried)]
        self._next_sweep = 0  # the first step in which the number is chosen again
        self._peaks_bytes: dict[Way, float] = {}
        self._may_host = bool(memory and memory.host_bytes and costs.stages.host)
        self._memory, self._longest = memory, max((max(own) for own in worst), default=0)
        self._most_tokens = max(map(sum, worst), default=0)  # of steps that were looked at
        self._tight: set[Way] = set()  # with which something may be recomputed
        if memory is not None:
            self._keep_what_fits(memory, worst, may_divide=several and cache == "auto")
        self._spent_us = dict.fromkeys(self._tried, 0.0)  # in the steps by which a way is chosen
        self.divided = self._tried[0].divided
        """Whether context-parallel ranks divide keys and values."""
        self.windows = self._tried[0].windows
        """Whether micro-batches may wait in the host's memory: :attr:`Way.windows`."""

    @property
    def dp_size(self) -> int:
        return self._layout.dp_size

    @property
    def peak_bytes(self) -> float:
        """The most that a device holds in one of the ``worst`` steps; 0 if not known.

        Before the first step it is that of the number of units that needs least.
        """
        chosen = self.num_units, self.divided, self.windows
        tried = [way for way in self._tried if way == chosen] or self._tried
        return min(self._peaks_bytes.get(way, 0.0) for way in tried)

    def check_room(self) -> None:
        """Raises :class:`ConfigError` where a device has no room for one of the ``worst`` steps."""
        if self._memory is not None and self.peak_bytes > self._memory.limit_bytes:
            raise ConfigError(
                f"slices of documents of {self._longest} tokens need {self.peak_bytes / GIB:.2f} "
                f"GiB, above the {self._memory.limit_bytes / GIB:.2f} GiB that tensors may take "
                "(--wlb-memory-gib, or what --wlb-hardware has); recompute activations, use more "
                "TP, CP or PP, or let shorter documents reach it (--wlb-long-documents split, "
                "--seq-length)"
            )

    def _keep_what_fits(
        self, memory: MemoryLimit, worst: Sequence[Sequence[int]], may_divide: bool
    ) -> None:
        """Leaves the ways that fit memory, or the one that is nearest to that.

        Where one is tight, it is also tried with keys and values divided, if they may be.
        """
        for way in [*self._tried]:
            self._look_at(way, memory, worst)
            if self._peaks_bytes[way] > SURE * memory.limit_bytes:
                others = [way._replace(divided=True)] if may_divide else []
                for other in others:
                    self._look_at(other, memory, worst)
                for one in [way, *others] if self._may_host else ():
                    for windows in WINDOWS:
                        others.append(one._replace(windows=windows))
                        self._look_at(others[-1], memory, worst)
                        if self._peaks_bytes[others[-1]] <= memory.limit_bytes:
                            break
                self._tried += others
        peaks = self._peaks_bytes
        fitting = [way for way in self._tried if peaks[way] <= memory.limit_bytes]
        self._tried = fitting or [min(self._tried, key=lambda way: (peaks[way], way))]

    def _look_at(self, way: Way, memory: MemoryLimit, worst: Sequence[Sequence[int]]) -> None:
        """Notes what the worst steps need, and whether something must be recomputed for that."""
        self._peaks_bytes[way] = 0.0
        for lengths in worst:
            documents = [Document(0, at, 0, n, True, 0, at, 0) for at, n in enumerate(lengths)]
            # The first of replicas that run alike has the longest document of each chain.
            timed = [one for one in self._heaviest_first(documents) for _ in range(self._alike)]
            alone = _Dealt([timed], [], sum([us for us, _ in timed]), 0)
            units = self._lay(alone, 0, way)[:1]
            peak_bytes = memory.peak_bytes(units[0])
            if memory.recomputes and peak_bytes > SURE * memory.limit_bytes:
                self._tight.add(way)
                units = self._with_room(units)
                peak_bytes = memory.peak_bytes(units[0])
            self._peaks_bytes[way] = max(self._peaks_bytes[way], peak_bytes)

    def alone(self, documents: Sequence[Document], num_units: int) -> Units:
        """The units of one replica that runs all of the documents, in about so many.

        Nothing is chosen, and no later step depends on it.
        """
        heaviest, way = self._heaviest_first(documents), self._tried[0]
        dealt = _Dealt([heaviest], [], 0.0, 0)
        laid = self._lay(dealt, 0, way._replace(num_units=num_units))
        larger = sum([document.length for document in documents]) > self._most_tokens
        return self._with_room(laid, is_tight=larger or way in self._tight)[0]

    def cut(self, documents: Sequence[Document], step: int) -> list[Units]:
        """The units of each data-parallel rank; a rank without documents has an empty one."""
        way = self.settle(documents, step)
        heaviest = self._heaviest_first(documents)
        tried = [self._deal(heaviest, merges=False)]
        if self._merges and heaviest and heaviest[0][0] > (1 + TOLERANCE) * tried[0].mean_us:
            tried.insert(0, self._deal(heaviest, merges=True))
            if self._step_us(tried[0], way) >= self._step_us(tried[1], way):
                tried.pop(0)
        sizes = self._layout.pp_size, self._layout.vpp_size
        for dealt in tried:  # the last merges nothing
            groups = range(len(dealt.alone))
            laid = [units for group in groups for units in self._lay(dealt, group, way)]
            if meet_in_order(*sizes, [u.chains for u in laid], [u.replicas for u in laid]):
                break
        return self._with_room(laid, is_tight=way in self._tight)

    def _with_room(self, replicas: Sequence[Units], *, is_tight: bool = True) -> list[Units]:
        """The same, of which units are recomputed as memory asks: alike in replicas that run alike,
        and those that several replicas run together in all of them.
        """
        if self._memory is None or not (is_tight and self._memory.recomputes):
            return [*replicas]
        together: dict[Span, int] = {}
        chosen = []
        pairs = [*zip(self._memory.programs(replicas), replicas, strict=True)]
        for at in range(0, len(replicas), self._alike):
            group = replicas[at : at + self._alike]
            again = [0] * len(group[0].spans)
            for program, units in pairs[at : at + self._alike]:
                given = [*map(_both, again, _shared(units, together))]
                again = self._memory.recomputed(program, units, given, self._again_us(units))
                rows = zip(units.spans, units.replicas, again, strict=True)
                together |= {spans[0]: each for spans, ranks, each in rows if ranks}
            chosen += [again] * len(group)
        return [
            units._replace(recomputed=[*map(_both, again, _shared(units, together))])
            for units, again in zip(replicas, chosen, strict=True)
        ]

    def settle(self, documents: Sequence[Document], step: int) -> Way:
        """The number of units, and whether keys and values are divided; which is chosen in some
        steps and stays for those after.
        """
        may_change = self._given is None or len(self._tried) > 1
        if self.num_units is None or (may_change and step >= self._next_sweep):
            dealt = self._deal(self._heaviest_first(documents), merges=False)
            self.num_units, self.divided, self.windows = self._choose(dealt)
            # Steps in which no document arrives are left out, and a multiple may be one of them.
            sweep = (step // STEPS_A_SWEEP + 1) * STEPS_A_SWEEP
            self._next_sweep = sweep if step + 1 >= FIRST_STEPS else step + 1
        return Way(self.num_units, self.divided, self.windows)

    def state_dict(self) -> dict[str, Any]:
        """What later steps depend on, JSON-able."""
        chosen = {"num_units": self.num_units, "next_sweep": self._next_sweep}
        more: dict[str, Any] = {"divided": self.divided, "windows": self.windows}
        if len(self._tried) > 1:
            more["spent_us"] = [[*way, us] for way, us in self._spent_us.items()]
        return chosen | {name: value for name, value in more.items() if value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken.

        If the saved number of units does not fit this run's memory, the next step chooses another.
        Raises :class:`CheckpointError` for anything that is not such a state.
        """
        with reading_state("a slicer"):
            num_units, next_sweep = state.get("num_units"), state.get("next_sweep", 0)
            whole_number("num_units", 1 if num_units is None else num_units, 1)
            whole_number("next_sweep", next_sweep, 0, MAX_COUNT)
            spent_us = {
                Way(number, divided, windows): real_number("spent_us", us, 0)
                for number, divided, windows, us in state.get("spent_us", [])
            }
        self.num_units, (_, self.divided, self.windows) = self._given, self._tried[0]
        self._next_sweep = 0
        way = (num_units, state.get("divided", False), state.get("windows", 0))
        if way in self._tried:
            self.num_units, self.divided, self.windows = way
            self._next_sweep = next_sweep
            if spent_us.keys() == self._spent_us.keys():
                self._spent_us = spent_us

    def _heaviest_first(self, documents: Sequence[Document]) -> list[Timed]:
        in_order = sorted(documents, key=_IN_STREAM)
        times_us = map(self._cost.document_us, [document.length for document in in_order])
        # A stable sort: equal ones stay in the order of the stream.
        return sorted(zip(times_us, in_order, strict=True), key=_US, reverse=True)

    def _deal(self, heaviest: Sequence[Timed], *, merges: bool) -> _Dealt:
        """Gives each document to the rank, or group of ranks that run alike, with the least work.

        With ``merges``, a document that is heavier than a rank's mean work goes to a block of
        groups: the smallest power of 2 whose ranks have no more than the mean of it each.
        """
        dp_size, alike = self._layout.dp_size, self._alike
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
        loads = [(load_us, group) for group, load_us in enumerate(loads_us)]
        heapify(loads)
        for us, document in heaviest[len(together) :]:
            load_us, group = loads[0]
            alone[group].append((us, document))
            heapreplace(loads, (load_us + us, group))
        return _Dealt(alone, together, mean_us, max(loads)[1])

    def _choose(self, dealt: _Dealt) -> Way:
        """The first way in which this step and those looked at before are shortest, or about so."""
        for way in self._tried:
            self._spent_us[way] += self._step_us(dealt, way)
        best = min(self._tried, key=self._spent_us.__getitem__)
        if best.windows:
            return best
        limit_us = (1 + WORTH_MORE_UNITS) * self._spent_us[best]
        within = (way for way in self._tried if self._spent_us[way] <= limit_us)
        return next(way for way in within if not way.windows)

    def _step_us(self, dealt: _Dealt, way: Way) -> float:
        """Time of forwards and backwards, simulated, of the group with most work."""
        laid = self._lay(dealt, dealt.heaviest, way)
        return self.simulated_us(self._with_room(laid, is_tight=way in self._tight))

    def simulated_us(self, group: Sequence[Units]) -> float:
        """Time of forwards and backwards of replicas that run alike, or of one."""
        times, gaps, tokens = zip(*map(self.times_us, group), strict=True)
        layout, experts = self._layout, self._costs.experts
        graph = slice_graph(layout.pp_size, tuple(group[0].chains), layout.vpp_size)
        copies = [self._copies(graph, units) for units in group]
        if experts is None:
            given = zip(times, gaps, copies, strict=True)
            return max(float(graph.step_us(us, gap, [own])) for us, gap, own in given)
        return float(experts.replay(graph, times, tokens, gaps, copies)[2].stop_us.max())

    def _copies(self, graph: Graph, units: Units) -> Copies | None:
        """What goes to the host and comes back, if anything does."""
        link = self._costs.stages.host
        if link is None or self._memory is None or HOST not in units.recomputed:
            return None
        held = self._memory.held(units, units.recomputed)
        return link.copies(graph, held, units.window_bytes)

    def times_us(self, units: Units) -> tuple[Floats, Floats, list[float]]:
        """Times ``[2, S, N]`` of a replica's units, times of their transfers, and its tokens."""
        lengths = [[span.length for span in unit] or [0] for unit in units.spans]
        prefixes = [[span.start for span in unit] or [0] for unit in units.spans]
        together = [len(replicas) or 1 for replicas in units.replicas]
        tokens = [sum(own) / num for own, num in zip(lengths, together, strict=True)]
        divided = [units.divided] * len(tokens)
        more = together, units.recomputed, divided
        times_us = self._costs.stages.times_us(lengths, None, prefixes, *more)
        return times_us, self._costs.p2p_us(tokens), tokens

    def _again_us(self, units: Units) -> Floats:
        """What it takes to recompute units, ``[kinds, units]``, by :attr:`.Unit.recomputed`.

        Copies run beside passes, so that their price is a share of their time.
        """
        (forward_us, _), _, tokens = self.times_us(units._replace(recomputed=()))
        given, stages = (forward_us, np.array(tokens)), self._costs.stages
        again = [stages.again_us(*given, kind).sum(axis=0) for kind in KINDS]
        if units.window_bytes and self._memory and stages.host:
            copies_us = stages.host.times_us(self._memory.held(units, [0] * len(tokens)))
            lags_us = np.maximum(0.0, copies_us - forward_us)
            again[HOST] = (COPY_PRICE * copies_us + LAG_PRICE * lags_us).sum(axis=0)
        return np.array(again)

    def _lay(self, dealt: _Dealt, group: int, way: Way) -> list[Units]:
        """Lays the units of each replica of a group: slices of heavy documents one after another,
        then whole documents where work is missing.

        Documents that several ranks run come first, in one chain, so that all ranks run them in one
        order. The others come heaviest first, and so do the chains: then fewest units are held.
        """
        alone, alike, num_units = dealt.alone[group], range(self._alike), way.num_units
        merged: list[list[Span]] = []
        replicas: list[tuple[int, ...]] = []
        for us, document, ranks in dealt.together:
            if group * self._alike in ranks:
                multiple = merged_multiple(self._length_multiple, len(ranks))
                slices = self._slices(
                    document,
                    us,
                    dealt.mean_us / num_units * len(ranks),
                    max(multiple, self._max_tokens - self._max_tokens % multiple),
                )
                merged += ([span] for span, _ in slices)
                replicas += [ranks] * len(slices)
        num_units = max(1, num_units - len(merged)) if alone else 0
        unit_us = sum([us for us, _ in alone]) / max(1, num_units * self._alike)
        num_units += len(merged)
        cut = list(takewhile(partial(self._is_cut, unit_us), alone))
        counts = [ceil(us / unit_us - TOLERANCE) for us, _ in cut]
        # The last slice of a document leaves room for whole ones. Where there are too few of
        # these, all slices of a document are of like work instead.
        filled_us = sum([us for us, _ in alone[len(cut) :]])
        lacking_us = unit_us * sum(counts) - sum([us for us, _ in cut])
        even = 2 * filled_us < lacking_us
        chains = Chains(len(merged), self._alike)
        placed: dict[tuple[int, int], tuple[Span, float]] = {}  # by unit and replica
        for (us, document), count in zip(cut, counts, strict=True):
            each_us = us / max(1, count) if even else unit_us
            slices = self._slices(document, us, each_us, self._max_tokens)
            replica, at = chains.place(len(slices))
            placed |= {(n, replica): one for n, one in enumerate(slices, at)}
        num_units = max(num_units, chains.num_units)
        spans = [[*merged, *([] for _ in range(len(merged), num_units))] for _ in alike]
        missing: list[tuple[float, int, int, int]] = []  # minus µs, unit, replica, tokens of room
        for place in product(range(len(merged), num_units), alike):
            minus_us, room = -unit_us, self._max_tokens
            if place in placed:
                span, done_us = placed[place]
                minus_us, room = minus_us + done_us, room - span.length
                spans[place[1]][place[0]].append(span)
            missing.append((minus_us, *place, room))
        heapify(missing)
        for us, document in alone[len(cut) :]:
            full, length = [], document.length
            while missing and missing[0][3] < length:
                full.append(heappop(missing))
            if not missing:
                missing += ((-unit_us, len(spans[0]), n, self._max_tokens) for n in alike)
                for own in spans:
                    own.append([])
            minus_us, number, replica, room = missing[0]
            spans[replica][number].append(Span(document, 0, length))
            heapreplace(missing, (minus_us + us, number, replica, room - length))
            for entry in full:
                heappush(missing, entry)
        used = [at for at, row in enumerate(zip(*spans, strict=True)) if any(row)]
        spans = [[own[at] for at in used] or [[]] for own in spans]
        num_units = len(spans[0])
        lengths = chains.lengths + [1] * (num_units - chains.num_units)
        replicas += [()] * (num_units - len(replicas))
        window_bytes = 0.0
        if self._memory is not None and way.windows:
            window_bytes = self._memory.limit_bytes / way.windows
        more = (), way.divided, window_bytes
        return [Units(own, replicas, lengths, *more) for own in spans]

    def _is_cut(self, unit_us: float, timed: Timed) -> bool:
        us, document = timed
        return us > (1 + TOLERANCE) * unit_us or document.length > self._max_tokens

    def _slices(
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
                stop = self._cut(document, start, until_us, length_of(until_us))
            stop = min(stop, start + max_tokens)
            after_us = self._cost.document_us(stop)
            slices.append((Span(document, start, stop), after_us - before_us))
            start, before_us = stop, after_us
        return slices

    def _curve(self, length: int, whole_us: float) -> Callable[[float], float]:
        """From a time to about the length that takes it.

        It goes by ``linear · d + quadratic · d²`` through a document of ``length`` and its half.
        """
        half = length // 2 or 1
        half_us = self._cost.document_us(half)
        quadratic_us = (whole_us / length - half_us / half) / max(1, length - half)
        linear_us = half_us / half - quadratic_us * half

        def length_of(us: float) -> float:
            slope_us = linear_us + sqrt(max(0.0, linear_us * linear_us + 4 * quadratic_us * us))
            return min(2 * us / slope_us, length) if slope_us > 0 else length

        return length_of

    def _cut(self, document: Document, start: int, until_us: float, guess: float) -> int:
        """The end of the slice from ``start`` on: where the document has taken ``until_us``.

        It is looked for from the ``guess`` on, wider and wider.
        """
        multiple, document_us = self._multiple, self._cost.document_us
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


def _both(one: int, other: int) -> int:
    """What is recomputed of a unit for two replicas' sake: layers, if they differ."""
    return max(one, other) if one == other or 0 in (one, other) else LAYERS


def _shared(units: Units, together: Mapping[Span, int]) -> list[int]:
    """What is recomputed of units that several replicas run together, by the others."""
    return [
        together.get(spans[0], 0) if ranks else 0
        for spans, ranks in zip(units.spans, units.replicas, strict=True)
    ]
