"""Micro-batches that run slices of documents, and the memory that slices need.

The slices of a document run forward first to last and backward last to first. In each layer the
document's keys and values have one buffer on the rank. It is allocated whole in the forward of the
first slice, and freed in its backward. From the backward of the last slice on there is one of as
many fp32 numbers for their gradients. Context-parallel ranks each hold all of both, or divide
them. Then the layer that runs has the rows before the slice and its own once more, all of them.

A slice's attention works on views of the buffer. Where a micro-batch is a slice and nothing else,
autograd keeps neither its keys and values nor, with queries of their own, the product that they are
views of. Beside whole documents, whose values are views of the same product, all of it is kept, and
both outputs of attention besides the one that they are joined in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.attention_latency import TILE, filled, key_parts
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.tape import Runs, Tape, highest

_TOGETHER = 256
"""Slices whose moments are worked out together, in some MB."""


class Recomputed(IntEnum):
    """What of a micro-batch runs forward once more in its backward pass, and is not kept until
    then. Plans are compared by these numbers.
    """

    NOTHING = 0
    MLPS = 1
    """The dense MLPs of its layers, behind the norm."""
    LAYERS = 2
    """All its layers, of which inputs alone are kept, and keys and values of a slice."""
    HOST = 3
    """Nothing: all that it keeps waits in the host's memory
    (:mod:`megatron_wlb.cost.schedule.hosting`)."""


NOTHING, MLPS, LAYERS, HOST = Recomputed


class Slice(NamedTuple):
    """Tokens ``[start, stop)`` of a document of ``length`` tokens, or rows of a tree."""

    document: int
    """A number by which the document's slices are known."""
    start: int
    stop: int
    length: int


class Unit(NamedTuple):
    """A micro-batch: its padded tokens, and the slice that it runs first, if any."""

    num_tokens: int
    slice: Slice | None = None
    ranks: tuple[int, ...] = ()
    """Data-parallel ranks that run it together; empty if one rank runs it alone."""
    recomputed: Recomputed = NOTHING
    divided: bool = False
    """Whether context-parallel ranks divide the keys and values of the slice's document."""
    states: tuple[int, int] | None = None
    """How many pieces begin with the state of a layer that has one, and how many states and their
    gradients wait for later units; None: one each, but for a document's first slice and last."""


class UnitTable(NamedTuple):
    """Micro-batches in arrays, ``[units]`` each."""

    num_tokens: Floats
    num_ranks: Floats
    """Data-parallel ranks that run each; 1 if one runs it alone."""
    recomputed: Floats
    divided: Floats
    start: Floats
    """Where its slice starts; this and what follows are 0 where there is none."""
    stop: Floats
    length: Floats
    begun: Floats
    """The numbers of :attr:`Unit.states`."""
    left: Floats

    @classmethod
    def of(cls, units: Iterable[Unit]) -> UnitTable:
        rows = []
        for n, cut, ranks, again, divided, states in units:
            _, start, stop, length = cut or (0, 0, 0, 0)
            of_slice = start, stop, length, *(states or (start > 0, stop < length))
            rows.append((n, len(ranks) or 1, again, divided, *of_slice))
        return cls(*np.array(rows, dtype=np.float64).reshape(-1, 9).T)

    @classmethod
    def starting(cls, starts: npt.ArrayLike) -> UnitTable:
        """Micro-batches whose slices start there, which run alone and once: all that times ask."""
        start = np.asarray(starts, dtype=np.float64)
        none = np.zeros(len(start))
        return cls(none, none + 1, none, none, start, *[none] * 4)

    @classmethod
    def joined(cls, tables: Iterable[UnitTable]) -> UnitTable:
        return cls(*map(np.concatenate, zip(*tables, strict=True)))

    def some(self, at: Any) -> UnitTable:
        return UnitTable(*(column[at] for column in self))

    @property
    def is_alone(self) -> Any:
        """Whether a unit is a slice and nothing else: not even padding, which is attended to as a
        document.
        """
        return self.stop - self.start == self.num_tokens * self.num_ranks


@dataclass(frozen=True, slots=True)
class PrefixCosts:
    """What attention of slices takes besides the pairs of tokens, for the rows before them."""

    num_heads: int
    """Query heads of a device."""
    cp_size: int
    num_processors: int
    """Blocks of a kernel that a device runs at once."""
    gradient_us: tuple[float, ...]
    """µs a row before the slice, in the backward of each virtual stage: gradients are written,
    read, and added to what is there."""
    merged_us: tuple[tuple[float, ...], ...] = ()
    """By how much 1, 2, 4, … data-parallel ranks that run a unit together take longer for its keys
    and values than their shares of one rank's time: µs a token of the unit, in the forward of each
    virtual stage and as much in its backward."""
    divided_us: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = ()
    """What the exchange of a row before the slice takes, where 1, 2, 4, … data-parallel ranks'
    context-parallel ranks divide these: µs in the forward and backward of each virtual stage."""

    def idle(self, num_tokens: float) -> float:
        """By how much longer the forward of so many queries takes than on a device that is full."""
        blocks = self.num_heads * int(-(-num_tokens // (self.cp_size * TILE)))
        parts = key_parts(blocks, self.num_processors)
        return 1 / filled(blocks * parts, self.num_processors)


def _buffers(backward: bool, start: Floats, goes_on: Any, length: Floats) -> Floats:
    """Tokens of the documents' buffers around slices' actions: keys and gradients, before, after.

    ``[4, slices]``; ``goes_on`` says whether the document does behind the slice.
    """
    left = np.where(start > 0, length, 0.0)
    if not backward:
        return np.array([left, 0 * length, length, 0 * length])
    return np.array([length, np.where(goes_on, length, 0.0), left, left])


@dataclass(frozen=True)
class SliceTape:
    """What a chunk's tape keeps and needs for slices."""

    tape: Tape
    cp_size: int = 1
    in_fp32: bool = False
    """Whether context-parallel ranks sum gradients of keys and values in fp32."""

    def action_bytes(self, kind: str, units: UnitTable, hosted: bool = False) -> Floats:
        """What actions let go of, the most alive while they run, and what they keep.

        ``[units, 3]``. The buffers of a slice's document are in all three. If units are ``hosted``
        what goes to the host is in none but the peaks.
        """
        backward = kind == "B"
        share = self._share(units)
        held = _buffers(backward, units.start, units.stop < units.length, units.length * share)
        keys, gradients = self._buffers
        before, after = held[0] * keys + held[1] * gradients, held[2] * keys + held[3] * gradients
        kept = self._kept(units)
        gone = kept - self.hosted_bytes(units) if hosted else kept
        let_go, keeps = (before + gone, after) if backward else (before, after + gone)
        rows = np.stack([let_go, np.empty(len(kept)), keeps], axis=1)
        whole, cut = np.flatnonzero(units.length == 0), np.flatnonzero(units.length)
        if len(whole):
            some = units.some(whole)
            peaks = self.tape.peak_bytes(some.num_tokens, backward=backward)
            rows[whole, 1] = peaks + self._states(some)
        if len(cut):
            some = units.some(cut)
            alive = self._peaks(some, share[cut], held[:, cut], backward)
            rows[cut, 1] = alive + self._states(some)
        return rows

    def kept_bytes(self, units: UnitTable) -> Floats:
        """What is kept behind forwards of units, with the buffers of their documents."""
        kept: Floats = self._kept(units) + units.length * self._share(units) * self._buffers[0]
        return kept

    def _share(self, units: UnitTable) -> Floats:
        """What a rank has of the buffers of each unit's document."""
        return np.where(units.divided, 1 / (self.cp_size * units.num_ranks), 1.0)

    def _kept(self, units: UnitTable) -> Floats:
        """Bytes of activations from a forward to its backward."""
        saved = np.where(units.is_alone, self._saved[True], self._saved[False])
        kept: Floats = np.where(units.length, saved, self.tape.saved_per_token) * units.num_tokens
        return kept + self._states(units)

    def _states(self, units: UnitTable) -> Floats:
        """Bytes of the states that slices leave, and of those that kernels keep of the ones before;
        of layers that run again, none of the latter.
        """
        both: Floats = self._left(units) + units.begun * self._handed[1]
        return both

    def _left(self, units: UnitTable) -> Floats:
        """Bytes of the states behind slices: until the next slice has run backward, and then of
        their gradients.
        """
        left: Floats = units.left * self._handed[0]
        return left

    def _peaks(self, units: UnitTable, share: Floats, held: Floats, backward: bool) -> Floats:
        start, length = units.start, units.length * share
        # In backward, the kernel of the layer that runs gives gradients of the keys before the
        # slice, too, besides those of its own that the tape has.
        own = length + start if backward else length
        buffers = [held[0], own, held[2], held[1], length * backward, held[3]]
        # The rows that are gathered, all that are seen, and what of the former is got back.
        rows = (share < 1) * np.array([start, units.stop, start * share])
        tokens = units.num_tokens
        coefficients = np.array([tokens, tokens**0, *buffers, start, *rows])
        peaks = np.empty(len(start))
        for alone in (False, True):
            moments, at = self._rows[backward, alone], np.flatnonzero(units.is_alone == alone)
            grows = np.flatnonzero(moments.any(axis=1) & coefficients.any(axis=1))
            for some in np.split(at, range(_TOGETHER, len(at), _TOGETHER)):
                parts = moments[grows, :, None] * coefficients[grows][:, None, some]
                peaks[some] = parts.sum(axis=0).max(axis=0, initial=0.0)
        return peaks

    def hosted_bytes(self, units: UnitTable) -> Floats:
        """What of units would go to the host, ``[units]``."""
        stays = self.tape.stays_per_token * units.num_tokens + self._left(units)
        return self._kept(units) - stays

    @cached_property
    def _saved(self) -> tuple[float, float]:
        """Bytes a token that a micro-batch keeps, with others and alone."""
        total = self.tape.total
        return total(lambda o: o.kept(Runs.BOTH)), total(lambda o: o.kept(Runs.SLICE))

    @cached_property
    def _handed(self) -> tuple[float, float]:
        """Bytes of the states of all layers, and of those that do not run again."""
        total = self.tape.total
        return total(attrgetter("state")), total(lambda o: 0.0 if o.inner else o.state)

    @cached_property
    def _buffers(self) -> tuple[float, float]:
        """Bytes of all layers' keys and gradients, a token of the document."""
        return self.tape.total(attrgetter("keys")), self.tape.total(attrgetter("gradients"))

    @cached_property
    def _rows(self) -> dict[tuple[bool, bool], Floats]:
        return {
            (backward, alone): highest(self.tape.moments(backward, runs, self.in_fp32))
            for backward in (False, True)
            for alone, runs in ((False, Runs.BOTH), (True, Runs.SLICE))
        }
