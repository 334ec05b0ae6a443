"""The first stage of assigning documents: which replica runs which (Hydraulis §6.2).

Departures from the paper's Algorithm 1: documents are dispatched the longest first, in two ways of
which the better one is kept, and then moved and swapped, instead of in 100 random orders. It keeps
the first of equal choices; here ties go to the replica that is done first, so that a slow replica
does not hide bad choices on the others.

Legend: ``B`` documents of a step, numbered in descending order of length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapreplace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts

Numbers: TypeAlias = list[list[int]]
"""Numbers of documents, a list for each replica or micro-batch."""
Groups: TypeAlias = Sequence[tuple[ReplicaCosts, Sequence[int]]]
"""Replicas that are alike: what they cost, and their numbers; those for the longest documents
first."""

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


class StepDocuments:
    """The documents of a step, the longest first, and what they take on each kind of replica."""

    def __init__(self, lengths: Sequence[int]) -> None:
        given = np.array(lengths, dtype=np.int64)
        self.order = np.argsort(-given, kind="stable")
        self.lengths = given[self.order]
        self.sizes: list[int] = self.lengths.tolist()
        self.longest = self.sizes[0] if self.sizes else 0
        self._us: dict[int, tuple[ReplicaCosts, Floats, Floats, Floats]] = {}

    def us(self, costs: ReplicaCosts) -> Floats:
        """T(l, P): ``[B]``, each on the pipeline rank where it takes longest, with its share of
        filling; infinite for documents that are too long.
        """
        return self._times(costs)[0]

    def rank_us(self, costs: ReplicaCosts) -> Floats:
        """``[PP, B]``: on each pipeline rank."""
        return self._times(costs)[1]

    def least_us(self, costs: ReplicaCosts) -> Floats:
        """``[PP, B]``: what each takes on each pipeline rank at least, whatever runs with it."""
        return self._times(costs)[2]

    def _times(self, costs: ReplicaCosts) -> tuple[Floats, Floats, Floats]:
        if id(costs) not in self._us:
            by_rank = costs.rank_us(self.sizes)
            slowest = by_rank.max(axis=0) * (1 + costs.filling)
            slowest[: self.first(costs)] = math.inf
            launched = bool(costs.costs.stages.launches_us)
            least_us = costs.rank_us(self.sizes, least=True) if launched else by_rank
            self._us[id(costs)] = costs, slowest, by_rank, least_us
        return self._us[id(costs)][1:]

    def first(self, costs: ReplicaCosts) -> int:
        """The first, so the longest document that is short enough."""
        return int(np.searchsorted(-self.lengths, -costs.max_tokens))


def lower_bound_us(step: StepDocuments, groups: Groups) -> float:
    """Less than any assignment takes: the longest document alone; and documents that only some
    replicas take, spread evenly over the ranks of these as if each ran where it takes least of
    their time.
    """
    if not step.sizes:
        return 0.0
    alone_us, bound_us, num = math.inf, 0.0, 0
    least_us = np.full(len(step.sizes), math.inf)
    for number, (costs, members) in enumerate(groups):
        size = costs.scheme.num_ranks
        num += size * len(members)
        own_us, first = step.least_us(costs), step.first(costs)
        if not first:  # Whole, it passes one stage after another, forward and backward.
            longest_us = own_us[:, 0]
            least = longest_us.max() if costs.scheme.sliced else longest_us.sum()
            alone_us = min(alone_us, float(least))
        busiest = own_us[own_us.sum(axis=1).argmax()]
        least_us[first:] = np.minimum(least_us[first:], size * busiest[first:])
        later = groups[number + 1 :]
        stop = step.first(later[0][0]) if later else len(step.sizes)
        if stop:
            bound_us = max(bound_us, float(least_us[:stop].sum()) / num)
    return max(bound_us, alone_us)


def dispatch(step: StepDocuments, groups: Groups, limit_us: float) -> Numbers | None:
    """Documents of each replica, by the estimate of its time (Equation 2).

    Either each document goes where it is done first, or replica after replica is filled with the
    longest that are left. The first balances best where there are no bubbles. The second keeps long
    documents together, so that few replicas wait for them, and brings each to the replicas that are
    made for its length. None where the estimate is so far above the limit that packing cannot make
    up for it.
    """
    documents, loads_us = _spread(step, groups)
    likely_us = limit_us * (1 + ESTIMATED)
    if any(costs.warm_up for costs, _ in groups) or len(groups) > 1:
        least_us, most_us = lower_bound_us(step, groups), max(loads_us)
        if most_us > likely_us and _filled(step, groups, likely_us) is None:
            return None
        for _ in range(MOST_HALVINGS):
            if most_us - least_us <= WORTH * most_us:
                break
            limit_us = (least_us + most_us) / 2
            filled = _filled(step, groups, limit_us)
            if filled is None:
                least_us = limit_us
            else:
                documents, most_us = filled, limit_us
                group_of = {n: costs for costs, members in groups for n in members}
                loads_us = [_estimate_us(step, group_of[n], own) for n, own in enumerate(documents)]
    _improve(step, groups, documents, loads_us)
    return documents


def _spread(step: StepDocuments, groups: Groups) -> tuple[Numbers, list[float]]:
    """Each document in turn goes where it would be done first; and when all are done.

    The first one of an empty replica is its longest, and counts (PP - 1) / VPP times more.
    """
    heaps = [[(0.0, number) for number in members] for _, members in groups]
    times = [step.us(costs).tolist() for costs, _ in groups]
    firsts = [step.first(costs) for costs, _ in groups]
    warm_ups = [costs.warm_up for costs, _ in groups]
    documents: Numbers = [[] for _, members in groups for _ in members]
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


def _filled(step: StepDocuments, groups: Groups, limit_us: float) -> Numbers | None:
    """Fills one replica after the other up to a time; None where documents are left over.

    Each takes the longest that are left, one after another, and then shorter ones that still fit.
    """
    documents: Numbers = [[] for _, members in groups for _ in members]
    left = np.arange(len(step.sizes))
    for costs, members in groups:
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


def _improve(
    step: StepDocuments, groups: Groups, documents: Numbers, loads_us: list[float]
) -> None:
    """Moves documents off the slowest replica, or swaps them, for as long as that helps."""
    group_of = {n: costs for costs, members in groups for n in members}
    kinds = [members for _, members in groups]
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
    step: StepDocuments, of: ReplicaCosts, own: list[int], to: ReplicaCosts, theirs: list[int],
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


def _estimate_us(step: StepDocuments, costs: ReplicaCosts, documents: Sequence[int]) -> float:
    """Equation 2: all documents, and the longest once more for each other stage."""
    if not documents:
        return 0.0
    times_us = step.us(costs)
    return float(times_us[documents].sum()) + costs.warm_up * float(times_us[documents[0]])
