"""Documents by cost, and greedily into micro-batches: the part of packing that has to be fast."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import ConfigError
from megatron_wlb.packing.base import Limits
from megatron_wlb.plan import Document


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
        """None above S_max."""
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
    """Documents in the order in which they are to be placed, and what placing asks of them.

    Lists by rank, because a large step has more documents than a processor's cache can hold: each
    is looked at once in the order given, and once when it has its place.
    """

    documents: Sequence[Document]
    """As given."""
    order: list[int]
    """By rank: which of ``documents``."""
    lengths: list[int]
    costs_us: list[float]
    num_due: int
    """Documents that have waited ``max_age`` steps: they come first."""

    def take(self, ranks: Iterable[int]) -> list[Document]:
        documents, order = self.documents, self.order
        return [documents[order[rank]] for rank in ranks]

    def take_each(self, micro_batches: Sequence[Sequence[int]]) -> list[list[Document]]:
        """The documents of each micro-batch.

        Of many in the order given, which is how they lie in memory: twice as fast as by rank.
        """
        count = len(micro_batches)
        if count < MANY_MICRO_BATCHES:
            return [self.take(ranks) for ranks in micro_batches]
        ranks = np.array([*chain.from_iterable(micro_batches)], dtype=np.int64)
        index_of = np.full(len(self.documents), count)
        index_of[np.array(self.order, dtype=np.int64)[ranks]] = np.repeat(
            np.arange(count), [len(ranks) for ranks in micro_batches]
        )
        taken: list[list[Document]] = [[] for _ in range(count + 1)]
        for document, index in zip(self.documents, index_of.tolist(), strict=True):
            taken[index].append(document)
        return taken[:count]

    def without_heaviest(self, count: int) -> Ranking:
        """Ranked anew, by slices, which is fast; nothing may be due."""
        assert not self.num_due
        order, lengths, costs_us = self.order[count:], self.lengths[count:], self.costs_us[count:]
        return Ranking(self.documents, order, lengths, costs_us, 0)

    def only(self, ranks: Sequence[int]) -> Ranking:
        """Ranked anew; due ones and then others have to come in ``ranks``, which ascend."""
        return Ranking(
            self.documents,
            [self.order[rank] for rank in ranks],
            [self.lengths[rank] for rank in ranks],
            [self.costs_us[rank] for rank in ranks],
            bisect_left(ranks, self.num_due),
        )

    def place(self, num_micro_batches: int, max_tokens: int) -> Placement:
        """All of them; see :func:`place`."""
        return place(self.costs_us, self.lengths, num_micro_batches, max_tokens)


def rank(
    documents: Sequence[Document],
    costs_us: CostTable,
    due_from_step: int | None = None,
) -> Ranking:
    """Those that arrived by ``due_from_step``, oldest first; then the others, heaviest first.

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
    return Ranking(
        documents,
        order.tolist(),
        lengths[order].tolist(),
        weights_us[order].tolist(),
        len(due),
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """Numbers of documents in N micro-batches, and of those that found no room."""

    micro_batches: list[list[int]]
    loads_us: list[float]
    left: list[int]

    @property
    def imbalance(self) -> float:
        """``max · N / Σ``; infinite if no document was placed."""
        total_us = sum(self.loads_us)
        return max(self.loads_us) * len(self.loads_us) / total_us if total_us else math.inf


def place(
    costs_us: Sequence[float], lengths: Sequence[int], num_micro_batches: int, max_tokens: int
) -> Placement:
    """Each document in turn goes to the least loaded micro-batch that has room for it.

    Ties go to the lowest index. In descending order of cost this is the LPT rule, which is close
    to the optimum where documents are many.

    Micro-batches are sorted by load and served in this order for as long as the next one is less
    loaded than all that were served since the sort. In descending order of cost that is nearly all
    of them, so that few sorts are needed, and those of lists that are almost sorted: faster than a
    heap from 32 micro-batches on. Where few were served, they are inserted one by one instead:
    ``O(log N)`` comparisons a document in all cases. Micro-batches without room are parked by the
    room they have: each is looked at again only when it can serve.
    """
    if num_micro_batches >= MANY_MICRO_BATCHES:
        loads_us, room, micro_batches = _deal(costs_us, lengths, num_micro_batches, max_tokens)
    else:
        loads_us, room = [0.0] * num_micro_batches, [max_tokens] * num_micro_batches
        micro_batches = [[] for _ in range(num_micro_batches)]
    first = sum(map(len, micro_batches))
    numbers = range(first, len(lengths))
    parked: list[tuple[int, float, int]] = []  # heap by most room
    left = []
    # Sorted from ``served`` on.
    open_ = sorted(zip(loads_us, range(num_micro_batches), strict=True))
    num_open, served, least_served_us = num_micro_batches, 0, math.inf
    for number, cost_us, length in zip(numbers, costs_us[first:], lengths[first:], strict=True):
        while parked and -parked[0][0] >= length:
            insort(open_, heappop(parked)[1:], lo=served)
            num_open += 1
        while num_open:
            if served == num_open or open_[served][0] >= least_served_us:
                _sort(open_, served)
                served, least_served_us = 0, math.inf
            load_us, index = open_[served]
            if room[index] >= length:
                break
            del open_[served]
            num_open -= 1
            heappush(parked, (-room[index], load_us, index))
        else:
            left.append(number)
            continue
        load_us += cost_us
        open_[served] = (load_us, index)
        served += 1
        if load_us < least_served_us:
            least_served_us = load_us
        room[index] -= length
        micro_batches[index].append(number)
    for load_us, index in chain(open_, (entry[1:] for entry in parked)):
        loads_us[index] = load_us
    return Placement(micro_batches, loads_us, left)


MANY_MICRO_BATCHES = 64
"""From here on numpy serves them faster."""


def _deal(
    costs_us: Sequence[float], lengths: Sequence[int], num_micro_batches: int, max_tokens: int
) -> tuple[list[float], list[int], list[list[int]]]:
    """What :func:`place` does, as long as there is room: loads, room and micro-batches by then.

    Each round serves at once all micro-batches that :func:`place` serves between two sorts.
    """
    costs, sizes = np.array(costs_us), np.array(lengths, dtype=np.int64)
    loads = np.zeros(num_micro_batches)
    room = np.full(num_micro_batches, max_tokens)
    dealt: list[npt.NDArray[np.int64]] = []
    first = 0
    # Rounds that serve few are slower than serving one by one: there may be only so many.
    for _ in range(16 + 4 * len(costs) // num_micro_batches):
        order = np.argsort(loads, kind="stable")[: len(costs) - first]
        before = loads[order]
        after = before + costs[first : first + len(order)]
        can_serve = sizes[first : first + len(order)] <= room[order]
        can_serve[1:] &= before[1:] < np.minimum.accumulate(after)[:-1]
        count = len(order) if can_serve.all() else int(can_serve.argmin())
        if not count:
            break
        order = order[:count]
        loads[order] = after[:count]
        room[order] -= sizes[first : first + count]
        dealt.append(order)
        first += count
    indices = np.concatenate([*dealt, np.zeros(0, dtype=np.int64)])
    numbers = np.argsort(indices, kind="stable").tolist()
    stops = np.cumsum(np.bincount(indices, minlength=num_micro_batches)).tolist()
    starts = [0, *stops[:-1]]
    micro_batches = [numbers[start:stop] for start, stop in zip(starts, stops, strict=True)]
    return loads.tolist(), room.tolist(), micro_batches


def _sort(loads: list[tuple[float, int]], num_changed: int) -> None:
    """Sorts what is sorted but for its first ``num_changed``."""
    if 16 * num_changed < len(loads):
        changed = loads[:num_changed]
        del loads[:num_changed]
        for load in changed:
            insort(loads, load)
    else:
        loads.sort()
