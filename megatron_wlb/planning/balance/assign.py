"""Assigns a step's documents to unlike replicas in two stages, and chooses the step's strategy.

After Hydraulis §6 and Appendix C and D. First documents go to replicas, by the time that each takes
on each and by the bubbles that its longest one makes; then each replica packs its own in as many
micro-batches as is fastest. Departures, with their reasons:

* A replica's time is that of the simulated schedule. The paper's ``max · (PP - 1 + V)`` is an upper
  bound that is several times too high where micro-batches are unlike.
* Documents are dispatched the longest first, in two ways of which the better one is kept, and then
  moved and swapped, instead of in 100 random orders
  (:mod:`megatron_wlb.planning.balance.dispatch`).
  Algorithm 1 keeps the first of equal choices; here ties go to the replica that is done first, so
  that a slow replica does not hide bad choices on the others.
* Micro-batches are packed by LPT instead of an ILP, which takes a hundred times the time and is no
  faster in the mean (docs/hydraulis.md).

All is deterministic: the same lengths and candidates give the same choice on every rank.

Legend: ``B`` documents, in descending order of length; ``V`` micro-batches of a replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.schedule.graph import Floats, graph_of
from megatron_wlb.cost.slices import NOTHING, UnitTable
from megatron_wlb.errors import CheckpointError, PackingError
from megatron_wlb.plan import Document, MicroBatchPlan, StepPlan, Units
from megatron_wlb.plan.replicas import Scheme
from megatron_wlb.plan.sharding.select import Selector
from megatron_wlb.planning.balance.dispatch import (
    WORTH,
    Candidate,
    Numbers,
    StepDocuments,
    dispatch,
    lower_bound_us,
)
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts
from megatron_wlb.planning.greedy import small_at_ends
from megatron_wlb.planning.packing.placement import place
from megatron_wlb.planning.planner import Stream
from megatron_wlb.reading import MAX_COUNT, reading_state, shown, whole_number
from megatron_wlb.strategies.plan.sliced_replica import SlicedCosts

MOST_TRIES = 3
"""Numbers of micro-batches that are simulated of a replica."""


@dataclass(frozen=True)
class Assignment:
    """Which replica of a strategy runs which documents together."""

    candidate: Candidate
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """``[replicas][micro-batches][documents]``, numbers of the documents as they were given. A
    replica that cuts them has one list of all."""
    replica_us: tuple[float, ...]
    """Simulated time of each replica's pipeline, with what it waits for the exchange."""

    @property
    def step_us(self) -> float:
        return max(self.replica_us) + self.candidate.fixed_us


class Assigner:
    """Assigns steps to one of some candidates: the one whose simulated step is shortest.

    Raises :class:`PackingError` without candidates.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        if not candidates:
            raise PackingError("there are no strategies to choose from; give at least one")
        self.candidates = tuple(candidates)
        self.max_tokens = max(c.strategy.max_tokens for c in candidates)

    def choose(self, lengths: Sequence[int]) -> Assignment:
        """Assigns documents of these lengths.

        Candidates come in the order of their bounds; those whose bound is above the best step are
        not looked at. It takes some 10 ms for 512 documents and 10 candidates.

        Raises :class:`PackingError` for a document that no candidate takes.
        """
        step = StepDocuments(lengths)
        if step.longest > self.max_tokens:
            raise PackingError(
                f"a document has {step.longest} tokens, but the strategies take up to "
                f"{self.max_tokens}; add one with more TP, CP or PP, or cut documents shorter"
            )
        able = [c for c in self.candidates if step.longest <= c.strategy.max_tokens]
        # In the order given where bounds are equal.
        order = sorted((lower_bound_us(step, c) + c.fixed_us, n) for n, c in enumerate(able))
        best: _Draft | None = None
        for bound_us, number in order:
            limit_us = best.step_us if best else math.inf
            if bound_us >= limit_us:
                break
            draft = _assign(step, able[number], limit_us)
            if draft is not None and draft.step_us < limit_us:
                best = draft
        assert best is not None  # The first has no limit.
        return best.assignment(step)


def assign(step: StepDocuments, candidate: Candidate) -> Assignment | None:
    """Assigns documents to one candidate; None where it does not take the longest."""
    if step.longest > candidate.strategy.max_tokens:
        return None
    draft = _assign(step, candidate, math.inf)
    assert draft is not None
    return draft.assignment(step)


@dataclass(frozen=True)
class _Packed:
    """A replica's documents in micro-batches."""

    us: float
    bins: Numbers


@dataclass(frozen=True)
class _Draft:
    candidate: Candidate
    packed: list[_Packed]

    @property
    def step_us(self) -> float:
        return max(own.us for own in self.packed) + self.candidate.fixed_us

    def assignment(self, step: StepDocuments) -> Assignment:
        names = step.order.tolist()
        return Assignment(
            self.candidate,
            tuple(tuple(tuple(names[n] for n in one) for one in own.bins) for own in self.packed),
            tuple(own.us for own in self.packed),
        )


def _assign(step: StepDocuments, candidate: Candidate, limit_us: float) -> _Draft | None:
    """Both stages. None where the step takes longer than the limit."""
    limit_us -= candidate.fixed_us
    documents = dispatch(step, candidate, limit_us)
    if documents is None:
        return None
    packed = [_Packed(0.0, [])] * len(documents)
    floor_us = 0.0
    work: list[tuple[float, ReplicaCosts, list[int]]] = []
    for costs, members in candidate.groups:
        busy = [number for number in members if documents[number]]
        if busy:
            least_us = max(_least_us(step, costs, documents[number]) for number in busy)
            work.append((least_us, costs, busy))
            floor_us = max(floor_us, least_us)
    for _, costs, busy in sorted(work, key=lambda one: -one[0]):
        if floor_us >= limit_us:
            return None
        given, exchange_us = [documents[number] for number in busy], candidate.exchange_us(busy)
        if isinstance(costs, SlicedCosts):
            sizes = [[step.sizes[n] for n in own] for own in given]
            times_us = map(costs.step_us, sizes, *exchange_us.tolist())
            found = [_Packed(us, [own]) for us, own in zip(times_us, given, strict=True)]
        else:
            found = pack(step, costs, given, floor_us, exchange_us)
        for number, own in zip(busy, found, strict=True):
            packed[number] = own
            floor_us = max(floor_us, own.us)
    return _Draft(candidate, packed) if floor_us < limit_us else None


def _least_us(step: StepDocuments, costs: ReplicaCosts, documents: Sequence[int]) -> float:
    """Less than any packing takes: the busiest rank's work, where nothing waits."""
    work_us = step.least_us(costs)[:, documents].sum(axis=1).max()
    return float(work_us) + costs.micro_batch_us * (not costs.warm_up)


def numbers_to_try(
    costs: ReplicaCosts, times_us: Floats, lengths: npt.NDArray[np.int64], dp_size: int = 1
) -> list[int]:
    """Numbers of micro-batches to try of each of so many equal replicas, the most promising first.
    ``times_us`` and ``lengths`` are those of all their documents, the longest first.

    By ``Σ + (PP - 1) / VPP · max``, whose maximum is at least the mean and the longest document.
    From V = Σ ÷ longest on only simulation tells them apart, so they stand apart by a quarter.
    """
    total_us, longest_us = float(times_us.sum()) / dp_size, float(times_us[0])
    num_tokens, num_documents = -(-int(lengths.sum()) // dp_size), -(-len(lengths) // dp_size)
    least = max(1, -(-num_tokens // costs.max_tokens))
    most = max(least, min(num_documents, num_tokens // costs.least_tokens))
    unit = costs.number_multiple
    if costs.scheme.pp_size == 1:
        return [_round_up(least, unit)]
    each_us = costs.micro_batch_us

    def bound_us(number: int) -> float:
        slowest_us = max(total_us / number, longest_us) + each_us
        return total_us + number * each_us + costs.warm_up * slowest_us

    grid = {_round_up(number, unit) for number in (least, *_grid(least, most), most)}
    chosen: list[int] = []
    for number in sorted(grid, key=lambda number: (bound_us(number), number)):
        if all(max(number, other) >= 1.25 * min(number, other) for other in chosen):
            chosen.append(number)
    return chosen[:MOST_TRIES]


def _grid(least: int, most: int) -> Iterator[int]:
    """Numbers in ``[least, most]``: all up to 8, then eight in each doubling, so that schedules
    are few and known.
    """
    for number in range(least, most + 1):
        if number <= 8 or number % (1 << (number.bit_length() - 4)) == 0:
            yield number


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def pack(
    step: StepDocuments,
    costs: ReplicaCosts,
    replicas: Sequence[list[int]],
    floor_us: float,
    exchange_us: Floats | None = None,
) -> list[_Packed]:
    """Packs each replica's documents, with the number of micro-batches that is fastest.

    Only replicas that the step may wait for are tried with other numbers: ``floor_us`` is less
    than the step takes. ``exchange_us`` is ``[2, replicas]``: what weights and gradients take.
    """
    times_us, lengths = step.us(costs), step.lengths
    tries = [numbers_to_try(costs, times_us[own], lengths[own]) for own in replicas]
    best: list[_Packed | None] = [None] * len(replicas)
    for turn in range(MOST_TRIES):
        enough_us = floor_us * (1 + WORTH)
        due: dict[int, list[tuple[int, Numbers]]] = {}
        for at, own in enumerate(replicas):
            known = best[at]
            if turn < len(tries[at]) and (known is None or known.us > enough_us):
                bins = bins_of(step, costs, own, tries[at][turn])
                due.setdefault(len(bins), []).append((at, bins))
        if not due:
            break
        for some in due.values():
            own_us = None if exchange_us is None else exchange_us[:, [at for at, _ in some]]
            for (at, bins), us in zip(some, replica_us(step, costs, some, own_us), strict=True):
                known = best[at]
                if known is None or us < known.us:
                    best[at] = _Packed(us, bins)
    return [own for own in best if own is not None]


def bins_of(step: StepDocuments, costs: ReplicaCosts, documents: list[int], number: int) -> Numbers:
    """LPT into so many micro-batches, or more where they would not hold all, in running order."""
    unit = costs.number_multiple
    times_us, lengths = step.us(costs)[documents], step.lengths[documents]
    assert lengths.max(initial=0) <= costs.max_tokens  # Else no number has room.
    while True:
        found = place(times_us, lengths, number, costs.max_tokens)
        if not len(found.left):
            break
        number += unit
    bins: Numbers = [[] for _ in range(number)]
    for document, at in zip(documents, found.index_of.tolist(), strict=True):
        bins[at].append(document)
    order = sorted(range(number), key=lambda at: (found.loads_us[at], at))
    if costs.scheme.pp_size == 1:  # no bubbles; the largest two hide most of the exchange
        order = [order[-1], *order[:-1]]
        return [bins[at] for at in order]
    return [bins[at] for at in small_at_ends(order)]


def replica_us(
    step: StepDocuments,
    costs: ReplicaCosts,
    some: Sequence[tuple[int, Numbers]],
    exchange_us: Floats | None = None,
) -> list[float]:
    """Simulated times of replicas with equally many micro-batches, together."""
    scheme, number = costs.scheme, len(some[0][1])
    multiple, sizes = scheme.length_multiple, step.sizes
    segments, padded = [], []
    for _, bins in some:
        for own in bins:
            lengths = [sizes[n] for n in own]
            total = max(1, -(-sum(lengths) // multiple)) * multiple
            segments.append([*lengths, total - sum(lengths)])
            padded.append(total)
    stages = costs.costs.stages
    times_us = stages.times_us(segments).reshape(2, -1, len(some), number)
    graph = graph_of(scheme.pp_size, scheme.vpp_size, number, costs.group_size)
    p2p_us = costs.costs.p2p_us(padded).reshape(len(some), number)
    done = graph.step_us(np.moveaxis(times_us, 2, 3), p2p_us.T)
    if exchange_us is not None:
        # The first stage runs first and last: the first forward hides the pull, the last backward
        # the push.
        beside_us = times_us[0, 0, :, 0], times_us[1, 0, :, -1]
        for own_us, passes_us in zip(exchange_us, beside_us, strict=True):
            done = done + costs.waits_us(own_us, passes_us)
    result: list[float] = np.atleast_1d(done).tolist()
    return result


# ── plans ───────────────────────────────────────────────────────────────────────────────────────


class StrategyPlanner:
    """Plans steps whose strategy follows their documents; no document waits.

    ``selectors`` choose how micro-batches are divided over context-parallel ranks, by scheme.
    """

    def __init__(
        self,
        stream: Stream,
        assigner: Assigner,
        selectors: Mapping[Scheme, Selector] | None = None,
    ) -> None:
        self.stream = stream
        self.assigner = assigner
        self.selectors = selectors or {}
        self.step = 0
        self._packer: Mapping[str, Any] | None = None  # of the run before, whose documents wait

    @property
    def dp_size(self) -> int:
        """The ranks of the run: all are data-parallel ones to Megatron."""
        return self.assigner.candidates[0].strategy.cluster.num_devices

    @property
    def num_waiting(self) -> int:
        """Documents of the run before that wait."""
        return len(_waiting(self._packer))

    def next_plan(self) -> StepPlan | None:
        """The next step; None at the stream's end."""
        while self._packer or not self.stream.exhausted:
            step, known = self.step, _waiting(self._packer)
            if self.stream.step <= step and not self.stream.exhausted:
                self.stream.step = step  # more epochs may follow after steps without documents
                known += self.stream.next_step()
            documents = [document for document in known if document.step <= step]
            ahead = [document for document in known if document.step > step]
            self._packer = {**(self._packer or {}), "held": [], "ahead": ahead} if ahead else None
            self.step += 1
            if documents:
                chosen = self.assigner.choose([d.length for d in documents])
                return step_plan(step, documents, chosen, self.selectors)
        return None

    def state_dict(self) -> dict[str, Any]:
        """All that later plans depend on, JSON-able, as a planner has it that holds nothing
        back (:class:`~megatron_wlb.planning.planner.Planner`).
        """
        return {
            "step": self.step,
            "steps_read": self.stream.step,
            "packer": self._packer,
            "stream": self.stream.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken. What a ``Planner`` held back runs in the next step,
        and what it read ahead in the step that it is of.

        Raises :class:`CheckpointError` for documents of a packing that cannot be taken over.
        """
        with reading_state("a planner"):
            step = whole_number("step", state["step"], 0, MAX_COUNT)
            packer, stream = state["packer"], state["stream"]
            _waiting(packer)
        self.stream.load_state_dict(stream)
        self.step, self._packer = step, packer


def _waiting(packer: Mapping[str, Any] | None) -> list[Document]:
    """The documents that wait in a packer's state."""
    if packer is None:
        return []
    if packer["packing"] != "hold":
        raise CheckpointError(
            f"the checkpoint is of --wlb-packing {shown(packer['packing'])}, whose waiting "
            "documents strategies do not take over; resume without --wlb-strategies"
        )
    return [Document.from_list(values) for values in (*packer["held"], *packer["ahead"])]


def step_plan(
    step: int,
    documents: Sequence[Document],
    chosen: Assignment,
    selectors: Mapping[Scheme, Selector] | None = None,
) -> StepPlan:
    """The plan of a step that runs these documents as assigned."""
    candidate = chosen.candidate
    strategy = candidate.strategy
    given = []
    for replica, bins in zip(strategy.replicas, chosen.micro_batches, strict=True):
        costs = candidate.costs[replica.kind]
        given.append((costs.units([[documents[n] for n in one] for one in bins]), costs))
    ranks, chains = laid_out(given)
    found = [(selectors or {}).get(replica.scheme) for replica in strategy.replicas]
    ranks = tuple(map(_sharded, ranks, found))
    return StepPlan(step, "strategies", ranks, 0, 0, chains, strategy)


Ranks: TypeAlias = tuple[tuple[MicroBatchPlan, ...], ...]


def laid_out(
    replicas: Iterable[tuple[Units, ReplicaCosts]],
) -> tuple[Ranks, tuple[tuple[int, ...], ...]]:
    """The micro-batches of each replica, numbered on, and its chains; no chains where no replica
    has any.
    """
    ranks: list[tuple[MicroBatchPlan, ...]] = []
    chains, numbers = [], count()
    for units, costs in replicas:
        lengths = [[span.length for span in spans] for spans in units.spans]
        starts = UnitTable.starting([spans[0].start if spans else 0 for spans in units.spans])
        times_us = costs.costs.stages.times_us(lengths, None, starts).sum(axis=(0, 1))
        multiple, again = costs.scheme.length_multiple, units.recomputed or [NOTHING] * len(lengths)
        rows = zip(units.spans, lengths, times_us.tolist(), again, strict=True)
        own = (
            MicroBatchPlan(
                next(numbers),
                tuple(spans),
                max(1, -(-sum(tokens) // multiple)) * multiple,
                us,
                recomputed=each,
                divided=units.divided and bool(spans) and spans[0].is_slice,
            )
            for spans, tokens, us, each in rows
        )
        ranks.append(tuple(own))
        chains.append(tuple(units.chains))
    return tuple(ranks), tuple(chains) if any(chains) else ()


def _sharded(
    own: tuple[MicroBatchPlan, ...], selector: Selector | None
) -> tuple[MicroBatchPlan, ...]:
    """The same, with the sharding that is chosen over context-parallel ranks."""
    if selector is None:
        return own
    found = selector.choose_each([m.lengths for m in own])
    return tuple(replace(m, sharding=one.sharding) for m, one in zip(own, found, strict=True))
