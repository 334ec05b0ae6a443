"""Assigns a step's documents to unlike replicas in two stages, and chooses the step's strategy.

After Hydraulis §6 and Appendix C and D. First documents go to replicas, by the time that each takes
on each and by the bubbles that its longest one makes; then each replica packs its own in as many
micro-batches as is fastest. Departures, with their reasons:

* A replica's time is that of the simulated schedule. The paper's ``max · (PP - 1 + V)`` is an upper
  bound that is several times too high where micro-batches are unlike.
* Documents are dispatched once, the longest first, and then moved and swapped, instead of in 100
  random orders. Algorithm 1 keeps the first of equal choices; here ties go to the replica that is
  done first, so that a slow replica does not hide bad choices on the others.
* Micro-batches are packed by LPT instead of an ILP, which is 1-2 % better in a hundred times the
  time.

All is deterministic: the same lengths and candidates give the same choice on every rank.

Legend: ``B`` documents, in descending order of length; ``V`` micro-batches of a replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_wlb.errors import PackingError
from megatron_wlb.packing.placement import place
from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan
from megatron_wlb.planner import Stream
from megatron_wlb.schedule.graph import Floats, graph_of
from megatron_wlb.sharding.select import Selector
from megatron_wlb.strategy.costs import ReplicaCosts
from megatron_wlb.strategy.layout import Scheme, Strategy

Bins = list[list[int]]
"""``[V][documents]``: numbers of documents, counted in descending order of length."""

MOST_TRIES = 3
"""Numbers of micro-batches that are simulated of a replica."""
MOST_HALVINGS = 6
"""How often the time to which replicas are filled is searched for."""
MOST_RUNS = 4
"""Runs of neighbours by length that a replica is filled with."""
MOST_MOVES = 32
"""Documents that are moved or swapped between replicas, at most."""
ESTIMATED = 0.03
"""By how much, as a share, the estimate of a replica's time is above the simulated one at most."""
WORTH = 0.002
"""A share of the step's time that is not worth another try."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy that a run may choose, with what its replicas cost."""

    strategy: Strategy
    costs: Mapping[tuple[Scheme, int], ReplicaCosts]
    """Of each kind of replica that it has."""
    fixed_us: float = 0.0
    """Time of its steps besides forwards and backwards: exchange of parameters, update."""

    @cached_property
    def groups(self) -> list[tuple[ReplicaCosts, tuple[int, ...]]]:
        """Replicas that are alike, those for the longest documents first."""
        return [(self.costs[kind], numbers) for kind, numbers in self.strategy.kinds.items()]


@dataclass(frozen=True)
class Assignment:
    """Which replica of a strategy runs which documents together."""

    candidate: Candidate
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """``[replicas][micro-batches][documents]``, numbers of the documents as they were given."""
    replica_us: tuple[float, ...]
    """Simulated time of each replica's pipeline."""

    @property
    def propagation_us(self) -> float:
        """Time of all forwards and backwards: that of the slowest replica."""
        return max(self.replica_us)

    @property
    def step_us(self) -> float:
        return self.propagation_us + self.candidate.fixed_us


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
        step = _Step(lengths)
        if step.longest > self.max_tokens:
            raise PackingError(
                f"a document has {step.longest} tokens, but the strategies take up to "
                f"{self.max_tokens}; add one with more TP, CP or PP, or cut documents shorter"
            )
        able = [c for c in self.candidates if step.longest <= c.strategy.max_tokens]
        # In the order given where bounds are equal.
        order = sorted((_bound_us(step, c) + c.fixed_us, n) for n, c in enumerate(able))
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

    def assign(self, candidate: Candidate, lengths: Sequence[int]) -> Assignment | None:
        """Assigns documents to one candidate; None where it does not take the longest."""
        step = _Step(lengths)
        if step.longest > candidate.strategy.max_tokens:
            return None
        draft = _assign(step, candidate, math.inf)
        assert draft is not None
        return draft.assignment(step)


class _Step:
    """The documents of a step, the longest first, and what they take on each kind of replica."""

    def __init__(self, lengths: Sequence[int]) -> None:
        given = np.array(lengths, dtype=np.int64)
        self.order = np.argsort(-given, kind="stable")
        self.lengths = given[self.order]
        self.sizes: list[int] = self.lengths.tolist()
        self.longest = self.sizes[0] if self.sizes else 0
        self._us: dict[int, tuple[ReplicaCosts, Floats, Floats]] = {}

    def us(self, costs: ReplicaCosts) -> Floats:
        """T(l, P): ``[B]``, each on the pipeline rank where it takes longest; infinite for
        documents that are too long.
        """
        return self._times(costs)[0]

    def rank_us(self, costs: ReplicaCosts) -> Floats:
        """``[PP, B]``: on each pipeline rank."""
        return self._times(costs)[1]

    def _times(self, costs: ReplicaCosts) -> tuple[Floats, Floats]:
        if id(costs) not in self._us:
            by_rank = costs.rank_us(self.sizes)
            slowest = by_rank.max(axis=0)
            slowest[: self.first(costs)] = math.inf
            self._us[id(costs)] = costs, slowest, by_rank
        return self._us[id(costs)][1:]

    def first(self, costs: ReplicaCosts) -> int:
        """The first, so the longest document that is short enough."""
        return int(np.searchsorted(-self.lengths, -costs.max_tokens))


@dataclass(frozen=True)
class _Packed:
    """A replica's documents in micro-batches."""

    us: float
    bins: Bins


@dataclass(frozen=True)
class _Draft:
    candidate: Candidate
    packed: list[_Packed]

    @property
    def step_us(self) -> float:
        return max(own.us for own in self.packed) + self.candidate.fixed_us

    def assignment(self, step: _Step) -> Assignment:
        names = step.order.tolist()
        return Assignment(
            self.candidate,
            tuple(tuple(tuple(names[n] for n in one) for one in own.bins) for own in self.packed),
            tuple(own.us for own in self.packed),
        )


def _bound_us(step: _Step, candidate: Candidate) -> float:
    """Less than any assignment takes: the longest document alone; and documents that only some
    replicas take, spread evenly over the ranks of these as if each ran where it takes least of
    their time.
    """
    if not step.sizes:
        return 0.0
    groups = candidate.groups
    alone_us, bound_us, num = math.inf, 0.0, 0
    least_us = np.full(len(step.sizes), math.inf)
    for number, (costs, members) in enumerate(groups):
        size = costs.scheme.num_ranks
        num += size * len(members)
        own_us, first = step.rank_us(costs), step.first(costs)
        if not first:  # It passes all stages, forward and backward.
            alone_us = min(alone_us, float(own_us[:, 0].sum()))
        busiest = own_us[own_us.sum(axis=1).argmax()]
        least_us[first:] = np.minimum(least_us[first:], size * busiest[first:])
        later = groups[number + 1 :]
        stop = step.first(later[0][0]) if later else len(step.sizes)
        if stop:
            bound_us = max(bound_us, float(least_us[:stop].sum()) / num)
    return max(bound_us, alone_us)


def _assign(step: _Step, candidate: Candidate, limit_us: float) -> _Draft | None:
    """Both stages. None where the step takes longer than the limit."""
    limit_us -= candidate.fixed_us
    documents = _dispatch(step, candidate, limit_us)
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
        found = _pack(step, costs, [documents[number] for number in busy], floor_us)
        for number, own in zip(busy, found, strict=True):
            packed[number] = own
            floor_us = max(floor_us, own.us)
    return _Draft(candidate, packed) if floor_us < limit_us else None


# ── stage 1: documents to replicas ──────────────────────────────────────────────────────────────


def _dispatch(step: _Step, candidate: Candidate, limit_us: float) -> Bins | None:
    """Documents of each replica, by the estimate of its time (Equation 2).

    Either each document goes where it is done first, or replica after replica is filled with the
    longest that are left. The first balances best where there are no bubbles. The second keeps long
    documents together, so that few replicas wait for them, and brings each to the replicas that are
    made for its length. None where the estimate is so far above the limit that packing cannot make
    up for it.
    """
    documents, loads_us = _spread(step, candidate)
    likely_us = limit_us * (1 + ESTIMATED)
    if any(costs.warm_up for costs, _ in candidate.groups) or len(candidate.groups) > 1:
        least_us, most_us = _bound_us(step, candidate), max(loads_us)
        if most_us > likely_us and _filled(step, candidate, likely_us) is None:
            return None
        for _ in range(MOST_HALVINGS):
            if most_us - least_us <= WORTH * most_us:
                break
            limit_us = (least_us + most_us) / 2
            filled = _filled(step, candidate, limit_us)
            if filled is None:
                least_us = limit_us
            else:
                documents, most_us = filled, limit_us
                group_of = {n: costs for costs, members in candidate.groups for n in members}
                loads_us = [_estimate_us(step, group_of[n], own) for n, own in enumerate(documents)]
    _improve(step, candidate, documents, loads_us)
    return documents


def _spread(step: _Step, candidate: Candidate) -> tuple[Bins, list[float]]:
    """Each document in turn goes where it would be done first; and when all are done.

    The first one of an empty replica is its longest, and counts (PP - 1) / VPP times more.
    """
    groups = candidate.groups
    heaps = [[(0.0, number) for number in members] for _, members in groups]
    times = [step.us(costs).tolist() for costs, _ in groups]
    firsts = [step.first(costs) for costs, _ in groups]
    warm_ups = [costs.warm_up for costs, _ in groups]
    documents: Bins = [[] for _ in candidate.strategy.replicas]
    num = 0
    for at in range(len(step.sizes)):
        while num < len(groups) and firsts[num] <= at:
            num += 1
        best_us, best = math.inf, 0
        for group in range(num):
            load_us = heaps[group][0][0]
            own_us = times[group][at]
            done_us = load_us + own_us if load_us else own_us * (1 + warm_ups[group])
            if done_us < best_us:
                best_us, best = done_us, group
        number = heaps[best][0][1]
        heapreplace(heaps[best], (best_us, number))
        documents[number].append(at)
    loads_us = [0.0] * len(documents)
    for heap in heaps:
        for load_us, number in heap:
            loads_us[number] = load_us
    return documents, loads_us


def _filled(step: _Step, candidate: Candidate, limit_us: float) -> Bins | None:
    """Fills one replica after the other up to a time; None where documents are left over.

    Each takes the longest that are left, one after another, and then shorter ones that still fit.
    """
    documents: Bins = [[] for _ in candidate.strategy.replicas]
    left = np.arange(len(step.sizes))
    for costs, members in candidate.groups:
        us, warm_up = step.us(costs), costs.warm_up
        for number in members:
            if not len(left):
                return documents
            times_us = us[left]
            ends_us = np.cumsum(np.where(np.isinf(times_us), 0.0, times_us))
            runs: list[tuple[int, int]] = []
            at = int(np.searchsorted(-times_us, -limit_us / (1 + warm_up)))
            room_us = limit_us - (warm_up * float(times_us[at]) if at < len(left) else 0.0)
            while at < len(left) and len(runs) < MOST_RUNS:
                before_us = float(ends_us[at - 1]) if at else 0.0
                stop = int(np.searchsorted(ends_us, before_us + room_us, side="right"))
                if stop > at:
                    runs.append((at, stop))
                    room_us -= float(ends_us[stop - 1]) - before_us
                at = max(stop, int(np.searchsorted(-times_us, -room_us)))
            taken = np.zeros(len(left), dtype=bool)
            for start, stop in runs:
                taken[start:stop] = True
            documents[number] = left[taken].tolist()
            left = left[~taken]
    return None if len(left) else documents


def _improve(step: _Step, candidate: Candidate, documents: Bins, loads_us: list[float]) -> None:
    """Moves documents off the slowest replica, or swaps them, for as long as that helps."""
    group_of = {n: costs for costs, members in candidate.groups for n in members}
    kinds = [members for _, members in candidate.groups]
    for _ in range(MOST_MOVES):
        slowest = max(range(len(loads_us)), key=lambda n: (loads_us[n], -n))
        limit_us = loads_us[slowest] * (1 - WORTH)
        found = None
        for members in kinds:
            others = [n for n in members if n != slowest]
            if not others:
                continue
            other = min(others, key=lambda n: (loads_us[n], n))
            if loads_us[other] < limit_us:
                change = _best_change(
                    step, group_of[slowest], documents[slowest],
                    group_of[other], documents[other], limit_us,
                )  # fmt: skip
                if change is not None and (found is None or change[0] < found[0]):
                    found = (*change, other)
                    limit_us = change[0]
        if found is None:
            return
        _, given, taken, other = found
        documents[slowest].remove(given)
        documents[other].append(given)
        if taken >= 0:
            documents[other].remove(taken)
            documents[slowest].append(taken)
        for number in (slowest, other):
            documents[number].sort()
            loads_us[number] = _estimate_us(step, group_of[number], documents[number])


def _best_change(
    step: _Step, of: ReplicaCosts, own: list[int], to: ReplicaCosts, theirs: list[int],
    limit_us: float,
) -> tuple[float, int, int] | None:  # fmt: skip
    """The move or swap that leaves the slower of two replicas soonest done: its time, the document
    given, the one taken or -1. None where that is not below the limit.
    """
    a, b = np.array(own), np.array([*theirs, -1])
    of_us, to_us = step.us(of), step.us(to)
    gives_us, gets_us = of_us[a], to_us[a]
    takes_us = np.append(of_us[b[:-1]], 0.0)
    spares_us = np.append(to_us[b[:-1]], 0.0)
    # The longest counts more: of what is left, and of what comes. Documents ascend by number.
    second = a[1] if len(a) > 1 else -1
    left = np.where(a == a[0], second, a[0])
    longest_own = _longer(left[:, None], b[None, :])
    their_second = b[1] if len(b) > 1 else -1
    stays = np.where(b == b[0], their_second, b[0])
    stays[-1] = b[0]
    longest_theirs = _longer(a[:, None], stays[None, :])
    own_us = gives_us.sum() - gives_us[:, None] + takes_us[None, :]
    own_us = own_us + _waits_us(of, of_us, longest_own)
    their_us = spares_us.sum() - spares_us[None, :] + gets_us[:, None]
    their_us = their_us + _waits_us(to, to_us, longest_theirs)
    slower_us = np.maximum(own_us, their_us)
    row, column = np.unravel_index(int(np.argmin(slower_us)), slower_us.shape)
    best_us = float(slower_us[row, column])
    return (best_us, int(a[row]), int(b[column])) if best_us < limit_us else None


def _longer(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The longer of documents, which has the lower number; -1 is none."""
    return np.where(a < 0, b, np.where(b < 0, a, np.minimum(a, b)))


def _waits_us(costs: ReplicaCosts, us: Floats, longest: npt.NDArray[Any]) -> Floats:
    """What the longest document adds besides its own time."""
    if not costs.warm_up:  # times infinity would be no number
        return np.zeros(longest.shape)
    return costs.warm_up * np.where(longest < 0, 0.0, us[longest])


def _estimate_us(step: _Step, costs: ReplicaCosts, documents: Sequence[int]) -> float:
    """Equation 2: all documents, and the longest once more for each other stage."""
    if not documents:
        return 0.0
    times_us = step.us(costs)
    return float(times_us[documents].sum()) + costs.warm_up * float(times_us[documents[0]])


# ── stage 2: a replica's documents to micro-batches ─────────────────────────────────────────────


def _least_us(step: _Step, costs: ReplicaCosts, documents: Sequence[int]) -> float:
    """Less than any packing takes: the busiest rank's work, where nothing waits."""
    work_us = step.rank_us(costs)[:, documents].sum(axis=1).max()
    return float(work_us) + costs.micro_batch_us * (not costs.warm_up)


def _numbers(step: _Step, costs: ReplicaCosts, documents: Sequence[int]) -> list[int]:
    """Numbers of micro-batches to try, the most promising first.

    By ``Σ + (PP - 1) / VPP · max``, whose maximum is at least the mean and the longest document.
    From V = Σ ÷ longest on only simulation tells them apart, so they stand apart by a quarter.
    """
    times_us = step.us(costs)[documents]
    total_us, longest_us = float(times_us.sum()), float(times_us[0])
    tokens = int(step.lengths[documents].sum())
    least = max(1, -(-tokens // costs.max_tokens))
    most = max(least, min(len(documents), tokens // costs.least_tokens))
    unit = costs.scheme.pp_size if costs.scheme.vpp_size > 1 else 1
    if costs.scheme.pp_size == 1:
        return [least]
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


def _pack(
    step: _Step, costs: ReplicaCosts, replicas: Sequence[list[int]], floor_us: float
) -> list[_Packed]:
    """Packs each replica's documents, with the number of micro-batches that is fastest.

    Only replicas that the step may wait for are tried with other numbers: ``floor_us`` is less
    than the step takes.
    """
    tries = [_numbers(step, costs, own) for own in replicas]
    best: list[_Packed | None] = [None] * len(replicas)
    for turn in range(MOST_TRIES):
        enough_us = floor_us * (1 + WORTH)
        due: dict[int, list[tuple[int, Bins]]] = {}
        for at, own in enumerate(replicas):
            known = best[at]
            if turn < len(tries[at]) and (known is None or known.us > enough_us):
                bins = _bins(step, costs, own, tries[at][turn])
                due.setdefault(len(bins), []).append((at, bins))
        if not due:
            break
        for some in due.values():
            for (at, bins), us in zip(some, _replica_us(step, costs, some), strict=True):
                known = best[at]
                if known is None or us < known.us:
                    best[at] = _Packed(us, bins)
    return [own for own in best if own is not None]


def _bins(step: _Step, costs: ReplicaCosts, documents: list[int], number: int) -> Bins:
    """LPT into so many micro-batches, or more where they would not hold all, in running order."""
    unit = costs.scheme.pp_size if costs.scheme.vpp_size > 1 else 1
    times_us, lengths = step.us(costs)[documents], step.lengths[documents]
    while True:
        found = place(times_us, lengths, number, costs.max_tokens)
        if not len(found.left):
            break
        number += unit
    bins: Bins = [[] for _ in range(number)]
    for document, at in zip(documents, found.index_of.tolist(), strict=True):
        bins[at].append(document)
    order = sorted(range(number), key=lambda at: (found.loads_us[at], at))
    # As planner.run_order: the smallest first and last.
    return [bins[at] for at in (*order[::2], *order[1::2][::-1])]


def _replica_us(step: _Step, costs: ReplicaCosts, some: Sequence[tuple[int, Bins]]) -> list[float]:
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
    graph = graph_of(scheme.pp_size, scheme.vpp_size, number)
    p2p_us = costs.costs.p2p_us(padded).reshape(len(some), number)
    done = graph.step_us(np.moveaxis(times_us, 2, 3), p2p_us.T)
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

    def next_plan(self) -> StepPlan | None:
        """The next step; None at the stream's end."""
        while not self.stream.exhausted:
            step = self.stream.step
            if documents := self.stream.next_step():
                chosen = self.assigner.choose([d.length for d in documents])
                return step_plan(step, documents, chosen, self.selectors)
        return None

    def state_dict(self) -> dict[str, Any]:
        """All that later plans depend on, JSON-able."""
        return {"stream": self.stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])


def step_plan(
    step: int,
    documents: Sequence[Document],
    chosen: Assignment,
    selectors: Mapping[Scheme, Selector] | None = None,
) -> StepPlan:
    """The plan of a step that runs these documents as assigned."""
    ranks: list[tuple[MicroBatchPlan, ...]] = []
    index = 0
    for replica, bins in zip(chosen.candidate.strategy.replicas, chosen.micro_batches, strict=True):
        costs = chosen.candidate.costs[replica.kind]
        own = [
            _micro_batch(number, [documents[n] for n in one], costs)
            for number, one in enumerate(bins, start=index)
        ]
        index += len(own)
        selector = (selectors or {}).get(replica.scheme)
        if selector is not None:
            found = selector.choose_each([m.lengths for m in own])
            own = [
                MicroBatchPlan(m.index, m.spans, m.padded_length, m.predicted_us, one.sharding)
                for m, one in zip(own, found, strict=True)
            ]
        ranks.append(tuple(own))
    strategy = chosen.candidate.strategy
    return StepPlan(step, "strategies", tuple(ranks), 0, 0, strategy=strategy)


def _micro_batch(index: int, documents: Iterable[Document], costs: ReplicaCosts) -> MicroBatchPlan:
    spans = tuple(Span(document, 0, document.length) for document in documents)
    lengths = [span.stop for span in spans]
    multiple = costs.scheme.length_multiple
    return MicroBatchPlan(
        index,
        spans,
        max(1, -(-sum(lengths) // multiple)) * multiple,
        float(costs.costs.stages.times_us([lengths]).sum()),
    )
