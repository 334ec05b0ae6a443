"""What activations take around the actions of a step of slices, with what is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from megatron_wlb.cost.memory import Integers, MemoryModel, around
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.schedule.order import sliced, sliced_columns
from megatron_wlb.cost.slices import HOST, Recomputed, UnitTable
from megatron_wlb.cost.tape import Tape


class UnitBytes:
    """Bytes of the units of several programs in each kind of pass and chunk, whatever is
    recomputed: worked out once, for all programs at once and for all ranks whose chunks are equal.
    """

    def __init__(self, model: MemoryModel, tables: Sequence[UnitTable]) -> None:
        self._model, self._units = model, UnitTable.joined(tables)
        self._stops = np.cumsum([0, *(len(table.num_tokens) for table in tables)])
        self._known: dict[tuple[str, int, int], Floats] = {}

    def __call__(self, at: int, kind: str, tape: Tape, what: int) -> Floats:
        """What :meth:`.MemoryModel.unit_bytes` says of a table, if that is recomputed of each."""
        if (name := (kind, id(tape), what)) not in self._known:
            units = self._units._replace(recomputed=np.full_like(self._units.recomputed, what))
            self._known[name] = self._model.unit_bytes(tape, kind, units)
        return self._known[name][self._stops[at] : self._stops[at + 1]]


class Program:
    """The actions of all pipeline ranks, and the bytes of each, whatever is recomputed.

    Args:
        model: of the ranks' memory.
        chains: of the step, see :func:`megatron_wlb.cost.schedule.order.sliced`.
        units: the micro-batches.
        kinds: what may be recomputed of them (:attr:`.Unit.recomputed`).
        window_bytes: of each window of hosted ones.
        bytes_of: of the units' kinds of passes and chunks, if several programs share that.
    """

    def __init__(
        self,
        model: MemoryModel,
        chains: Sequence[int],
        units: UnitTable,
        kinds: Iterable[int] = (),
        window_bytes: float = 0.0,
        bytes_of: Callable[[str, Tape, int], Floats] | None = None,
    ) -> None:
        p = model.parallelism
        self._model, self._units, self._window_bytes = model, units, window_bytes
        self.kinds = [*kinds]
        self._layout = p.pp_size, tuple(chains), p.vpp_size
        self._columns = sliced_columns(*self._layout)
        self._in_transit = [
            model.sent_ahead_bytes(rank, own, units) for rank, own in enumerate(self._columns)
        ]
        self._bytes = bytes_of or partial(UnitBytes(model, [units]), 0)
        self._tables: dict[tuple[int, int], Floats] = {}
        self._windows: dict[tuple[int, bytes], Floats] = {}
        """What both windows of a rank hold, by what is hosted."""

    def peaks(self, rank: int, again: Integers) -> Floats:
        """The most alive while each of a rank's actions runs, if that is recomputed of units."""
        columns = self._columns[rank]
        of_actions, rows = again[columns[2]], np.empty((len(columns[2]), 3))
        for what in {*again.tolist()}:
            at = np.flatnonzero(of_actions == what)
            rows[at] = self._table(rank, what)[tuple(column[at] for column in columns)]
        beside, hosted = self._in_transit[rank], again == HOST
        if hosted.any():
            if (name := (rank, hosted.tobytes())) not in self._windows:
                given = self._units, hosted, self._window_bytes
                actions = sliced(*self._layout)[rank]
                self._windows[name] = self._model.windows_hold(rank, actions, *given)
            beside = beside + self._windows[name]
        return around(rows, beside)[0]

    def _table(self, rank: int, what: int) -> Floats:
        """Bytes of a rank's units, if that is recomputed of each: ``[2, chunks, units, 3]``."""
        if (name := (rank, what)) not in self._tables:
            tapes = self._model.tapes[rank]
            known = {(k, id(t)): self._bytes(k, t, what) for k in "FB" for t in tapes}
            self._tables[name] = self._model.rows(rank, known)
        return self._tables[name]

    def saved(self, rank: int) -> Floats:
        """Bytes that units do not keep, by what is recomputed, ``[kinds, units, chunks]``."""
        given = [k if k in self.kinds else 0 for k in Recomputed]
        kept: Floats = np.array([self._table(rank, k)[0, :, :, 2] for k in given])
        return np.maximum(kept[:1] - kept, 0.0).swapaxes(1, 2)

    def passes(self, rank: int) -> tuple[Integers, Integers]:
        """Which of a rank's actions are forwards, and which backwards: ``[units, chunks]`` each."""
        columns = self._columns[rank]
        shape = 2, len(self._model.tapes[rank]), len(self._units.num_tokens)
        found = np.empty(shape, dtype=np.int64)
        found[columns] = np.arange(len(columns[0]))
        forwards, backwards = found.swapaxes(1, 2)
        return forwards, backwards
