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
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.schedule.messages import meet_in_order
from megatron_wlb.cost.slices import LAYERS, NOTHING
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document, Units
from megatron_wlb.planning.slicing.pipeline import Pipeline
from megatron_wlb.planning.slicing.units import TOLERANCE, Cuts, Dealt
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
SURE = 0.8
"""Share of the memory limit up to which no step is looked at. The steps that should need most are
made up; with virtual stages real ones may need a tenth more."""
HOPELESS = 1.4
"""Share of the memory limit above which, with the most units, a search tries no other number. Where
all were tried, none needed less than 0.76 of what the most units do."""
WINDOWS = (8, 10, 12, 16)
"""Windows that are tried, as :attr:`Way.windows`, until one leaves enough room. Large ones let
copies lag behind longer before passes wait for them."""


class Way(NamedTuple):
    """How a step is cut."""

    num_units: int
    """Number to aim at on each data-parallel rank."""
    divided: bool = False
    """Whether context-parallel ranks divide keys and values."""
    windows: int = 0
    """Whether micro-batches may wait in the host's memory. If so, each of two windows for what is
    on its way has one of so many parts of the device's memory; else 0."""


def numbers_of_units(num_micro_batches: int, pp_size: int) -> list[int]:
    """Numbers of units to try where a rank of plain training has so many micro-batches."""
    numbers = [factor * num_micro_batches for factor in FACTORS]
    return numbers[: 1 + bisect_left(numbers, ENOUGH_UNITS * (pp_size - 1))]


class Slicer:
    """Cuts steps into units of like work, in the way that simulated time chooses.

    Args:
        cuts: deals documents out and lays them in units.
        pipeline: says what units take, and what devices hold.
        numbers: of units to aim at on each data-parallel rank; one is taken.
        merges: whether a document that outweighs a replica's mean may run on several together,
            where that is faster in simulation (DP-Merge). Of replicas that run alike all do.
        cache: whether context-parallel ranks divide the keys and values of documents in slices,
            each have all of them, or whichever makes steps faster.
        worst: lengths of a rank's documents in the steps that need most memory.
    """

    def __init__(
        self,
        cuts: Cuts,
        pipeline: Pipeline,
        numbers: Sequence[int],
        *,
        merges: bool = True,
        cache: Literal["auto", "whole", "divided"] = "auto",
        worst: Sequence[Sequence[int]] = (),
    ) -> None:
        self.cuts, self.pipeline, self._merges, self._worst = cuts, pipeline, merges, worst
        several = pipeline.layout.cp_size > 1
        self._peaks_bytes: dict[Way, float] = {}
        self._tight: set[Way] = set()  # with which something may be recomputed
        if pipeline.memory is not None and not pipeline.memory.exact:
            numbers = [*numbers[:1], *numbers[1::3]]  # these say enough
        self.ways = [Way(number, several and cache == "divided") for number in numbers]
        """What is tried."""
        if pipeline.memory is not None:
            may_divide = several and cache == "auto"
            self.ways = self._fitting(pipeline.memory.limit_bytes, may_divide)
        self.way = self.ways[0] if len(self.ways) == 1 else None
        """The way of the last step; None before one is chosen."""
        self._next_sweep = 0  # the first step in which it is chosen again
        self._spent_us = dict.fromkeys(self.ways, 0.0)  # in the steps by which it is chosen

    @property
    def dp_size(self) -> int:
        return self.cuts.dp_size

    @property
    def num_units(self) -> int | None:
        return None if self.way is None else self.way.num_units

    @property
    def peak_bytes(self) -> float:
        """The most that a device holds in one of the ``worst`` steps; 0 if not known.

        Before the first step it is that of the way that needs least.
        """
        ways = self.ways if self.way is None else [self.way]
        return min(self._peaks_bytes.get(way, 0.0) for way in ways)

    def check_room(self) -> None:
        """Raises :class:`ConfigError` where a device has no room for one of the ``worst`` steps."""
        memory = self.pipeline.memory
        if memory is not None and self.peak_bytes > memory.limit_bytes:
            longest = max((max(own) for own in self._worst), default=0)
            raise ConfigError(
                f"slices of documents of {longest} tokens need {self.peak_bytes / GIB:.2f} "
                f"GiB, above the {memory.limit_bytes / GIB:.2f} GiB that tensors may take "
                "(--wlb-memory-gib, or what --wlb-hardware has); recompute activations, use more "
                "TP, CP or PP, or let shorter documents reach it (--wlb-long-documents split, "
                "--seq-length)"
            )

    def _fitting(self, limit_bytes: float, may_divide: bool) -> list[Way]:
        """The ways that fit memory, or the one that is nearest to that.

        Where one is tight, it is also tried with keys and values divided, if they may be.
        """
        more: list[Way] = []
        memory = self.pipeline.memory
        assert memory is not None
        finest = self.ways[-1]._replace(divided=self.ways[-1].divided or may_divide)
        if not memory.exact and (peak_bytes := self._look_at([finest])[0]) > limit_bytes:
            if peak_bytes > HOPELESS * limit_bytes:
                return [finest]
            if may_divide and not self.pipeline.may_host:  # Divided ones hold less.
                self.ways, may_divide = [way._replace(divided=True) for way in self.ways], False
        for way, peak_bytes in zip(self.ways, self._look_at(self.ways), strict=True):
            if peak_bytes <= SURE * limit_bytes and (memory.exact or way not in self._tight):
                continue
            divided = [way._replace(divided=True)] if may_divide else []
            more += divided
            for one in [way, *divided] if self.pipeline.may_host else ():
                for windows in WINDOWS:
                    more.append(one._replace(windows=windows))
                    if self._look_at(more[-1:])[0] <= limit_bytes:
                        break
        every = (*self.ways, *more)
        peaks = dict(zip(every, self._look_at(every), strict=True))
        fitting = [way for way in peaks if peaks[way] <= limit_bytes]
        return fitting or [min(peaks, key=lambda way: (peaks[way], way))]

    def _look_at(self, ways: Sequence[Way]) -> list[float]:
        """What the worst steps need. Notes whether something must be recomputed for that."""
        memory = self.pipeline.memory
        assert memory is not None
        laid: list[tuple[Way, Units]] = []
        for way in ways:
            if way in self._peaks_bytes:
                continue
            self._peaks_bytes[way] = 0.0
            for lengths in self._worst:
                documents = [Document(0, at, 0, n, True, 0, at, 0) for at, n in enumerate(lengths)]
                # The first of replicas that run alike has the longest document of each chain.
                heaviest = self.cuts.heaviest_first(documents)
                timed = [one for one in heaviest for _ in range(self.cuts.alike)]
                alone = Dealt([timed], [], sum([us for us, _ in timed]), 0)
                laid.append((way, self._lay(alone, 0, way)[0]))
        programs = memory.programs([units for _, units in laid])
        for (way, units), program in zip(laid, programs, strict=True):
            every = np.zeros(len(units.spans), dtype=np.int64)
            peak_bytes = memory.program_bytes(program, every + NOTHING)
            if memory.recomputes and peak_bytes > SURE * memory.limit_bytes:
                self._tight.add(way)
                peak_bytes = min(peak_bytes, memory.program_bytes(program, every + LAYERS))
                fits = peak_bytes <= memory.limit_bytes
                if (fits and memory.exact) or way.windows:
                    peak_bytes = memory.peak_bytes(self.pipeline.with_room([units])[0])
            self._peaks_bytes[way] = max(self._peaks_bytes[way], peak_bytes)
        return [self._peaks_bytes[way] for way in ways]

    def alone(self, documents: Sequence[Document], num_units: int) -> Units:
        """The units of one replica that runs all of the documents, in about so many.

        Nothing is chosen, and no later step depends on it.
        """
        way = self.ways[0]
        dealt = Dealt([self.cuts.heaviest_first(documents)], [], 0.0, 0)
        laid = self._lay(dealt, 0, way._replace(num_units=num_units))
        most_tokens = max(map(sum, self._worst), default=0)
        larger = sum([document.length for document in documents]) > most_tokens
        return (self.pipeline.with_room(laid) if larger or way in self._tight else laid)[0]

    def cut(self, documents: Sequence[Document], step: int) -> list[Units]:
        """The units of each data-parallel rank; a rank without documents has an empty one."""
        way = self.settle(documents, step)
        heaviest = self.cuts.heaviest_first(documents)
        tried = [self.cuts.deal(heaviest)]
        if self._merges and heaviest and heaviest[0][0] > (1 + TOLERANCE) * tried[0].mean_us:
            tried.insert(0, self.cuts.deal(heaviest, merges=True))
            merged_us, alone_us = (self.step_us(dealt, [way])[0] for dealt in tried)
            if merged_us >= alone_us:
                tried.pop(0)
        sizes = self.pipeline.layout.pp_size, self.pipeline.layout.vpp_size
        for dealt in tried:  # the last merges nothing
            groups = range(len(dealt.alone))
            laid = [units for group in groups for units in self._lay(dealt, group, way)]
            if meet_in_order(*sizes, [u.chains for u in laid], [u.replicas for u in laid]):
                break
        return self.pipeline.with_room(laid) if way in self._tight else laid

    def settle(self, documents: Sequence[Document], step: int) -> Way:
        """The way of a step, which is chosen in some and stays for those after."""
        if self.way is None or (len(self.ways) > 1 and step >= self._next_sweep):
            self.way = self._choose(self.cuts.deal(self.cuts.heaviest_first(documents)))
            # Steps in which no document arrives are left out, and a multiple may be one of them.
            sweep = (step // STEPS_A_SWEEP + 1) * STEPS_A_SWEEP
            self._next_sweep = sweep if step + 1 >= FIRST_STEPS else step + 1
        return self.way

    def state_dict(self) -> dict[str, Any]:
        """What later steps depend on, JSON-able."""
        _, divided, windows = self.way or self.ways[0]
        state: dict[str, Any] = {"num_units": self.num_units, "next_sweep": self._next_sweep}
        more: dict[str, Any] = {"divided": divided, "windows": windows}
        if len(self.ways) > 1:
            more["spent_us"] = [[*way, us] for way, us in self._spent_us.items()]
        return state | {name: value for name, value in more.items() if value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken.

        If the saved way does not fit this run's memory, the next step chooses another. Raises
        :class:`CheckpointError` for anything that is not such a state.
        """
        with reading_state("a slicer"):
            num_units, next_sweep = state.get("num_units"), state.get("next_sweep", 0)
            whole_number("num_units", 1 if num_units is None else num_units, 1)
            whole_number("next_sweep", next_sweep, 0, MAX_COUNT)
            spent_us = {
                Way(number, divided, windows): real_number("spent_us", us, 0)
                for number, divided, windows, us in state.get("spent_us", [])
            }
        saved = (num_units, state.get("divided", False), state.get("windows", 0))
        found = [way for way in self.ways if tuple(way) == saved]
        self._next_sweep = next_sweep if found else 0
        self.way = (found or self.ways)[0] if found or len(self.ways) == 1 else None
        if found and spent_us.keys() == self._spent_us.keys():
            self._spent_us = spent_us

    def _choose(self, dealt: Dealt) -> Way:
        """The first way in which this step and those looked at before are shortest, or about so."""
        for way, us in zip(self.ways, self.step_us(dealt, self.ways), strict=True):
            self._spent_us[way] += us
        best = min(self.ways, key=self._spent_us.__getitem__)
        if best.windows:
            return best
        limit_us = (1 + WORTH_MORE_UNITS) * self._spent_us[best]
        within = (way for way in self.ways if self._spent_us[way] <= limit_us)
        return next(way for way in within if not way.windows)

    def step_us(self, dealt: Dealt, ways: Sequence[Way], group: int | None = None) -> list[float]:
        """Time of forwards and backwards in each of the ways, simulated, of a group; of that with
        most work if None.
        """
        group = dealt.heaviest if group is None else group
        laid = {way: self._lay(dealt, group, way) for way in ways}
        tight = [way for way in ways if way in self._tight]
        rooms = self.pipeline.with_rooms([laid[way] for way in tight])
        laid |= zip(tight, rooms, strict=True)
        return [self.pipeline.simulated_us(laid[way]) for way in ways]

    def _lay(self, dealt: Dealt, group: int, way: Way) -> list[Units]:
        memory, window_bytes = self.pipeline.memory, 0.0
        if memory is not None and way.windows:
            window_bytes = memory.limit_bytes / way.windows
        return [
            units._replace(divided=way.divided, window_bytes=window_bytes)
            for units in self.cuts.lay(dealt, group, way.num_units)
        ]
