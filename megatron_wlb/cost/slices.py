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
from megatron_wlb.cost.tape import Operation, Tape

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
        # What a rank has of the buffers of each unit's document.
        share = np.where(units.divided, 1 / (self.cp_size * units.num_ranks), 1.0)
        held = _buffers(backward, units.start, units.stop < units.length, units.length * share)
        keys, gradients = self._buffers
        before, after = held[0] * keys + held[1] * gradients, held[2] * keys + held[3] * gradients
        kept = self._kept(units)
        gone = kept - self.hosted_bytes(units) if hosted else kept
        let_go, keeps = (before + gone, after) if backward else (before, after + gone)
        rows = np.stack([let_go, np.empty(len(kept)), keeps], axis=1)
        whole, cut = np.flatnonzero(units.length == 0), np.flatnonzero(units.length)
        if len(whole):
            tape, tokens = self.tape, units.num_tokens[whole]
            peaks = tape.backward_peak_bytes if backward else tape.forward_peak_bytes
            rows[whole, 1] = peaks(tokens) + self._states(units.some(whole))
        if len(cut):
            some = units.some(cut)
            alive = self._peaks(some, share[cut], held[:, cut], backward)
            rows[cut, 1] = alive + self._states(some)
        return rows

    def kept_bytes(self, units: UnitTable) -> Floats:
        """What is kept behind forwards of units, with the buffers of their documents."""
        share = np.where(units.divided, 1 / (self.cp_size * units.num_ranks), 1.0)
        kept: Floats = self._kept(units) + units.length * share * self._buffers[0]
        return kept

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
        saved = self.tape.saved_per_token + total(attrgetter("apart"))
        return saved + total(attrgetter("joined")), saved - total(attrgetter("cached"))

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
            (backward, alone): _highest(_moments(self.tape, backward, alone, self.in_fp32))
            for backward in (False, True)
            for alone in (False, True)
        }


def _highest(moments: Floats) -> Floats:
    """Leaves out moments beside which another is as high in everything: no peak changes."""
    num = moments.shape[1]
    above = np.zeros((num, num), dtype=bool)  # whether one is higher than another in anything
    for row in moments:
        above |= row[:, None] > row
    before = ~np.tri(num, dtype=bool)  # of equal ones the first stays
    keep = (above.T | ~(above | before)).all(axis=0)
    return moments[:, keep]


def _moments(tape: Tape, backward: bool, alone: bool | None, in_fp32: bool) -> Floats:
    """What is alive in each moment of a pass, ``[12, moments]``, by what it grows with.

    Tokens; once; then the buffers of layers that have not run, that run now and that have run: of
    keys, and of their gradients; keys of the slices before. Then, where ranks divide the buffers,
    these keys, those of the slice besides, and this rank's share of the former. Of layers that are
    run again, ``alone`` None counts all that whole documents keep.
    """

    def saved(operation: Operation) -> float:
        if alone is None:
            return operation.saved + operation.apart
        besides = -operation.cached if alone else operation.joined
        return operation.saved + operation.apart + besides

    left = [tape.total(attrgetter("keys")), tape.total(attrgetter("gradients"))]
    own, done = [0.0, 0.0], [0.0, 0.0]
    kept = tape.total(saved) if backward else 0.0
    given = 0.0  # to attention, which does not keep it
    moments: list[list[float]] = []
    again_of: dict[int, list[list[float]]] = {}  # of the operations inside one

    def note(tokens: float, once: float, *rows: float) -> None:
        (keys, gradients), (own_keys, own_gradients) = left, own
        of_keys = keys - own_keys, own_keys, done[0]
        of_gradients = gradients - own_gradients, own_gradients, done[1]
        none = (0.0,) * (4 - len(rows))
        moments.append([tokens, once, *of_keys, *of_gradients, *rows, *none])

    note(kept, 0.0)
    for times, operation in tape.walked(backward=backward):
        own = [times * operation.keys, times * operation.gradients]
        if times > 1:
            kept += -times * saved(operation) if backward else times * saved(operation)
        elif backward:
            tokens, once = kept + operation.backward, float(operation.weight_bytes)
            # Divided rows as they come and in their order, then with their gradients, then these
            # as they go; those of the next layer come meanwhile.
            keys, sums = (0.0, 0.0) if operation.inner else own
            note(kept, once, 0.0, 0.0, 3 * keys)
            note(tokens, once, operation.prefix, 0.0, 2 * keys + sums)
            sent = sums if in_fp32 else keys
            note(tokens, once, 0.0, sent, keys + sums, sent)
            inner = operation.inner
            if inner and id(inner) not in again_of:
                both = (_moments(Tape.of(inner), again, None, in_fp32) for again in (False, True))
                again_of[id(inner)] = np.concatenate([*both], axis=1).T.tolist()
            for more, weight, *rest in again_of.get(id(inner), ()):
                note(tokens + more, once + weight, *rest[6:])
            kept -= saved(operation)
        else:
            working = operation.forward
            if operation.inner:
                working = max(o.forward + o.saved + o.apart for o in operation.inner)
            kept += saved(operation)
            given += operation.saved + operation.apart - saved(operation)
            keys = max((o.keys for o in operation.inner), default=operation.keys)
            note(kept + given + working, 0.0, 0.0, 2 * keys, keys)
            if operation.keys:
                given = 0.0
        left = [a - b for a, b in zip(left, own, strict=True)]
        done = [a + b for a, b in zip(done, own, strict=True)]
    return np.array(moments, dtype=np.float64).T
