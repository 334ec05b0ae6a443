"""What all packings share: their interface, their limits, greedy placement, and their state."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import CheckpointError, ConfigError, PackingError
from megatron_wlb.plan import Document


@dataclass(frozen=True, slots=True)
class Limits:
    """What every packing keeps to; sizes in tokens.

    Raises :class:`ConfigError` if they contradict each other or let documents pile up for ever.
    """

    num_micro_batches: int
    """N: micro-batches a step, over all data-parallel ranks."""
    window: int
    """Tokens of a Megatron sample (``--seq-length``)."""
    max_tokens: int
    """S_max: the most tokens of a micro-batch."""
    step_tokens: int
    """Tokens that arrive in a step, in the mean."""
    max_step_tokens: int | None = None
    """The most tokens of a step, where age and balance leave the choice; None is N · S_max."""

    max_age: int = 12
    """Steps after which a delayed document runs whatever it costs, if S_max leaves room."""

    def __post_init__(self) -> None:
        for name in ("num_micro_batches", "window", "step_tokens", "max_age"):
            value, least = getattr(self, name), int(name != "max_age")
            if value < least:
                raise ConfigError(f"{name} is {value}; give at least {least}")
        if self.max_tokens < self.window:
            raise ConfigError(
                f"max_tokens (S_max) {self.max_tokens} is below the window of {self.window}; "
                "documents of a whole window must fit, so raise it or shorten the window"
            )
        capacity = self.num_micro_batches * self.max_tokens
        if capacity < self.step_tokens:
            raise ConfigError(
                f"{self.num_micro_batches} micro-batches of at most {self.max_tokens} tokens hold "
                f"{capacity}, but {self.step_tokens} arrive in a step; raise max_tokens (S_max) or "
                "num_micro_batches"
            )
        if self.max_step_tokens is not None and self.max_step_tokens < self.step_tokens:
            raise ConfigError(
                f"max_step_tokens {self.max_step_tokens} is below the {self.step_tokens} tokens "
                "that arrive in a step; raise it"
            )

    @property
    def token_cap(self) -> int:
        """The most tokens of a step."""
        capacity = self.num_micro_batches * self.max_tokens
        return min(capacity, self.max_step_tokens or capacity)

    def check(self, documents: Sequence[Document]) -> None:
        """Raises :class:`PackingError` for a document that no micro-batch could ever hold."""
        if max([document.length for document in documents], default=0) <= self.max_tokens:
            return
        for document in documents:
            if document.length > self.max_tokens:
                raise PackingError(
                    f"document {document.index} of corpus {document.corpus} has {document.length} "
                    f"tokens, above max_tokens (S_max) {self.max_tokens}; raise it or split long "
                    "documents"
                )


class Packer(Protocol):
    """Decides, step after step, which documents run now and with which others.

    The same documents in the same order give the same micro-batches, on every rank and after
    every ``state_dict → JSON → load_state_dict``. No document is lost or run twice; ``wlb`` and
    ``hold`` cut none. As long as a document is at hand, each step runs at least one.
    """

    name: ClassVar[str]
    in_stream_order: ClassVar[bool]
    """Whether the order of the micro-batches, and of the documents in them, is the stream's and
    must be kept; otherwise it means nothing."""
    look_ahead: int
    """To how many steps after the present one documents are to be given already. They may run
    before they arrive; what could not be given by then, at the end of the data, is no loss."""

    @property
    def limits(self) -> Limits: ...

    @property
    def waiting(self) -> Sequence[Document]:
        """Documents that were given to :meth:`pack` and have not run yet; with ``look_ahead``, some
        of them arrive in later steps.
        """
        ...

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        """The N micro-batches of ``step``; some may be empty.

        ``documents`` are those, in stream order, that arrive in ``step`` or, read ahead, up to
        ``look_ahead`` steps later, and were not given before.

        Raises, and changes nothing, :class:`PackingError` for a document longer than S_max.
        """
        ...

    def flush(self, step: int) -> list[list[Document]]:
        """The N micro-batches of a step after the stream's end: nothing is held back for balance.

        To be called, with rising steps, until nothing waits.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on, JSON-able."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken.

        Raises, and changes nothing, :class:`CheckpointError` for a state of another packing or of
        another N, and :class:`PackingError` if a waiting document is above a lowered S_max.
        """
        ...


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


def save_state(packer: Packer, **waiting: Iterable[Document]) -> dict[str, Any]:
    """JSON-able: whose state it is, and lists of waiting documents by name."""
    lists = {name: [d.as_list() for d in documents] for name, documents in waiting.items()}
    return {"packing": packer.name, "num_micro_batches": packer.limits.num_micro_batches, **lists}


def load_state(packer: Packer, state: Mapping[str, Any], *names: str) -> list[list[Document]]:
    """The named lists of a state that :func:`save_state` wrote for such a packer.

    Raises :class:`CheckpointError` where ``packer`` cannot continue from it.
    """
    try:
        saved = state["packing"], state["num_micro_batches"]
        ours = packer.name, packer.limits.num_micro_batches
        if saved != ours:
            raise CheckpointError(
                f"the checkpoint was packed by {saved[0]} into {saved[1]} micro-batches, but this "
                f"run is to pack by {ours[0]} into {ours[1]}; resume with the same settings"
            )
        lists = [[Document.from_list(values) for values in state[name]] for name in names]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"not the state of a packing ({error!r}); use an intact checkpoint"
        ) from None
    return lists
