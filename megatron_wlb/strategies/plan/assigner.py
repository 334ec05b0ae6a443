"""Assigns a step's documents to unlike replicas in two stages, and chooses the step's strategy.

After Hydraulis §6 and Appendix D. First documents go to replicas, by the time that each takes on
each and by the bubbles that its longest one makes (:mod:`megatron_wlb.planning.balance.dispatch`);
then each replica packs its own (:mod:`megatron_wlb.planning.balance.assign`). Departures from the
paper, with their reasons, are there.

All is deterministic: the same lengths and candidates give the same choice on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.errors import CheckpointError, PackingError
from megatron_wlb.plan import Document, MicroBatchPlan, StepPlan
from megatron_wlb.plan.sharding.select import Selector
from megatron_wlb.planning.balance.assign import Packed, laid_out, pack
from megatron_wlb.planning.balance.dispatch import StepDocuments, dispatch, lower_bound_us
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts, Scheme
from megatron_wlb.planning.planner import Stream
from megatron_wlb.reading import MAX_COUNT, reading_state, shown, whole_number
from megatron_wlb.strategies.plan.sliced_replica import SlicedCosts
from megatron_wlb.strategies.plan.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy that a run may choose, with what its replicas cost."""

    strategy: Strategy
    costs: Mapping[tuple[Scheme, int], ReplicaCosts]
    """What each kind of replica that it has costs."""
    fixed_us: float = 0.0
    """Time of its steps besides forwards and backwards: update, and exchange of parameters where no
    pass runs beside it."""
    pull_us: tuple[float, ...] = ()
    """Time in which each replica's weights come, where passes run beside that; else none."""
    push_us: tuple[float, ...] = ()
    """Time in which each replica's gradients go."""

    @cached_property
    def groups(self) -> list[tuple[ReplicaCosts, tuple[int, ...]]]:
        """Replicas that are alike, those for the longest documents first."""
        return [(self.costs[kind], numbers) for kind, numbers in self.strategy.kinds.items()]

    def exchange_us(self, numbers: Sequence[int]) -> Floats:
        """``[2, numbers]``: what weights and gradients of some replicas take beside passes."""
        if not self.pull_us:
            return np.zeros((2, len(numbers)))
        return np.array([self.pull_us, self.push_us])[:, numbers]


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
        order = sorted((lower_bound_us(step, c.groups) + c.fixed_us, n) for n, c in enumerate(able))
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
class _Draft:
    candidate: Candidate
    packed: list[Packed]

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
    documents = dispatch(step, candidate.groups, limit_us)
    if documents is None:
        return None
    packed = [Packed(0.0, [])] * len(documents)
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
            found = [Packed(us, [own]) for us, own in zip(times_us, given, strict=True)]
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


def _sharded(
    own: tuple[MicroBatchPlan, ...], selector: Selector | None
) -> tuple[MicroBatchPlan, ...]:
    """The same, with the sharding that is chosen over context-parallel ranks."""
    if selector is None:
        return own
    found = selector.choose_each([m.lengths for m in own])
    return tuple(replace(m, sharding=one.sharding) for m, one in zip(own, found, strict=True))
