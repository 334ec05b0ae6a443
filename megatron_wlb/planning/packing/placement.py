"""Ranks documents by cost and places them greedily: the part of packing that has to be fast."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document
from megatron_wlb.planning.greedy import Bins
from megatron_wlb.planning.packing.base import Limits


class CostTable:
    """Cost in µs of documents by their length: asks the model once a length, and checks it.

    Raises :class:`ConfigError` for a cost that is negative or not finite: at once for the window
    and powers of two below it, for other lengths when they come. Memory: 8 bytes a token of S_max.
    """

    def __init__(self, cost: CostModel, limits: Limits) -> None:
        self._cost = cost
        self._us = np.full(limits.max_tokens + 1, np.nan)
        self.of(np.array([2**exponent for exponent in range(limits.window.bit_length())]))
        self.of(np.array([limits.window]))

    def of(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Costs of documents of these lengths, of which none is above S_max."""
        costs_us = self._us[lengths]
        unknown = np.isnan(costs_us)
        if unknown.any():
            for length in set(lengths[unknown].tolist()):
                self._us[length] = self._ask(length)
            costs_us = self._us[lengths]
        return costs_us

    def _ask(self, length: int) -> float:
        cost_us = self._cost.document_us(length)
        if not 0 <= cost_us < math.inf:
            raise ConfigError(
                f"the cost of a document of {length} tokens is {cost_us} µs, but must be finite "
                "and not negative; correct the cost model"
            )
        return cost_us


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents in the order in which they are to be placed, and what placing asks of them."""

    documents: Sequence[Document]
    """The documents in the order in which they were given."""
    order: npt.NDArray[np.int64]
    """The number in ``documents`` of each rank."""
    lengths: npt.NDArray[np.int64]
    costs_us: npt.NDArray[np.float64]
    num_due: int
    """Documents that have waited ``max_age`` steps: they come first."""

    def take(self, ranks: npt.NDArray[np.int64]) -> list[Document]:
        return [self.documents[number] for number in self.order[ranks].tolist()]

    def take_each(self, placement: Placement) -> tuple[list[list[Document]], list[Document]]:
        """Returns the documents of each micro-batch and those left over, in the order given.

        That is how they lie in memory: of a large step, twice as fast as by rank.
        """
        num_micro_batches = len(placement.loads_us)
        index_of = np.full(len(self.documents), num_micro_batches)
        index_of[self.order] = placement.index_of
        taken: list[list[Document]] = [[] for _ in range(num_micro_batches + 1)]
        for document, index in zip(self.documents, index_of.tolist(), strict=True):
            taken[index].append(document)
        return taken[:-1], taken[-1]

    def only(self, ranks: npt.NDArray[np.int64]) -> Ranking:
        """Keeps these ``ranks`` only; they ascend, and due documents come before others."""
        num_due = int(np.searchsorted(ranks, self.num_due))
        return Ranking(
            self.documents, self.order[ranks], self.lengths[ranks], self.costs_us[ranks], num_due
        )

    def without(self, start: int, stop: int) -> Ranking:
        """Leaves out the documents of ranks ``[start, stop)``."""
        if start == stop:
            return self
        ranks = np.arange(len(self.order) - (stop - start))
        ranks[start:] += stop - start
        return self.only(ranks)

    def beside(self, others: Sequence[Document], costs_us: CostTable) -> Ranking:
        """Adds others that are not due."""
        more_lengths = np.array([document.length for document in others], dtype=np.int64)
        order = np.concatenate([self.order, len(self.documents) + np.arange(len(others))])
        lengths = np.concatenate([self.lengths, more_lengths])
        weights_us = np.concatenate([self.costs_us, costs_us.of(more_lengths)])
        ranks = np.arange(len(order))
        ranks[self.num_due :] = self.num_due + np.argsort(
            -weights_us[self.num_due :], kind="stable"
        )
        documents = [*self.documents, *others]
        return Ranking(documents, order[ranks], lengths[ranks], weights_us[ranks], self.num_due)

    def place(
        self, num_micro_batches: int, max_tokens: int, step_cap: int | None = None
    ) -> Placement:
        """Places all of them, those that are due above a step's cap too; see :func:`place`."""
        columns = self.costs_us, self.lengths
        return place(*columns, num_micro_batches, max_tokens, step_cap, self.num_due)


def rank(
    documents: Sequence[Document],
    costs_us: CostTable,
    due_from_step: int | None = None,
) -> Ranking:
    """Ranks what arrived by ``due_from_step``, oldest first; then the others, heaviest first.

    Placed in this order, a due document finds no room only where older ones have taken it: age
    goes before cost. Others of equal cost stay in the order given.
    """
    lengths = np.array([document.length for document in documents], dtype=np.int64)
    weights_us = costs_us.of(lengths)
    order = np.argsort(-weights_us, kind="stable")
    due: list[int] = []
    if due_from_step is not None:
        due = [i for i, document in enumerate(documents) if document.step <= due_from_step]
    if due:
        due.sort(key=lambda i: documents[i].key)
        is_due = np.zeros(len(documents), dtype=np.bool_)
        is_due[due] = True
        order = np.concatenate([due, order[~is_due[order]]])
    return Ranking(documents, order, lengths[order], weights_us[order], len(due))


@dataclass(frozen=True, slots=True)
class Placement:
    """The micro-batch of each document, and what the micro-batches come to."""

    index_of: npt.NDArray[np.int64]
    """The micro-batch of each document; N where none had room."""
    loads_us: list[float]
    room: list[int]
    """Tokens that each micro-batch could still take."""

    @property
    def left(self) -> npt.NDArray[np.int64]:
        """Numbers of the documents that found no room."""
        return np.flatnonzero(self.index_of == len(self.loads_us))

    @property
    def imbalance(self) -> float:
        """``max · N / Σ``; infinite if no document was placed."""
        total_us = sum(self.loads_us)
        return max(self.loads_us) * len(self.loads_us) / total_us if total_us else math.inf


def place(
    costs_us: npt.NDArray[np.float64],
    lengths: npt.NDArray[np.int64],
    num_micro_batches: int,
    max_tokens: int,
    step_cap: int | None = None,
    num_due: int = 0,
) -> Placement:
    """Each document in turn goes to the least loaded micro-batch that has room for it.

    Ties go to the lowest index. Many micro-batches are served in rounds before, for as long as all
    have room.

    Documents with which those that have room would be above ``step_cap`` tokens are left out, but
    the first ``num_due`` are not, and one document runs at least.
    """
    cap, served = sys.maxsize if step_cap is None else step_cap, len(lengths)
    if num_micro_batches < MANY_MICRO_BATCHES:
        placed = np.zeros(0, dtype=np.int64)
        loads_us, room = [0.0] * num_micro_batches, [max_tokens] * num_micro_batches
    else:
        if step_cap is not None:
            served = max(num_due, int(np.searchsorted(np.cumsum(lengths), cap, side="right")))
        placed, loads_us, room = _place_in_rounds(
            costs_us[:served], lengths[:served], num_micro_batches, max_tokens
        )
    num_tokens, exempt = int(lengths[: len(placed)].sum()), num_due - len(placed)
    bins = Bins[int]()
    for index, (load_us, tokens) in enumerate(zip(loads_us, room, strict=True)):
        bins.add(load_us, index, tokens)
    indices: list[int] = []
    costs, sizes = costs_us[len(placed) :].tolist(), lengths[len(placed) :].tolist()
    for at, (cost_us, length) in enumerate(zip(costs, sizes, strict=True)):
        found = None
        if num_tokens + length <= cap or not num_tokens or at < exempt:
            found = bins.place(cost_us, length)
        num_tokens += 0 if found is None else length
        indices.append(num_micro_batches if found is None else found)
    every = [*bins]
    return Placement(
        np.concatenate([placed, np.array(indices, dtype=np.int64)]),
        [load_us for _, load_us, _ in every],
        [tokens for _, _, tokens in every],
    )


MANY_MICRO_BATCHES = 64
"""Number of micro-batches from which on numpy is faster."""


def _place_in_rounds(
    costs_us: npt.NDArray[np.float64],
    lengths: npt.NDArray[np.int64],
    num_micro_batches: int,
    max_tokens: int,
) -> tuple[npt.NDArray[np.int64], list[float], list[int]]:
    """What :func:`place` does, as long as there is room.

    The micro-batches of the first documents, and by then the loads and the room of all. Each round
    serves at once, in ascending order of load, those that are less loaded than any served before.
    """
    loads, room = np.zeros(num_micro_batches), np.full(num_micro_batches, max_tokens)
    placed: list[npt.NDArray[np.int64]] = []
    first = 0
    # Rounds that serve few are slower than serving one by one: there may be only so many.
    for _ in range(16 + 4 * len(costs_us) // num_micro_batches):
        order = np.argsort(loads, kind="stable")[: len(costs_us) - first]
        before = loads[order]
        after = before + costs_us[first : first + len(order)]
        can_serve = lengths[first : first + len(order)] <= room[order]
        can_serve[1:] &= before[1:] < np.minimum.accumulate(after)[:-1]
        count = len(order) if can_serve.all() else int(can_serve.argmin())
        if not count:
            break
        order = order[:count]
        loads[order] = after[:count]
        room[order] -= lengths[first : first + count]
        placed.append(order)
        first += count
    return np.concatenate([*placed, np.zeros(0, dtype=np.int64)]), loads.tolist(), room.tolist()
