"""What strategies gain on a user's documents, and which documents go where; all *simulated*.

Strategies are proposed from one half of the documents and judged on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_wlb.data.documents import LongDocuments
from megatron_wlb.data.length_source import LengthSource, sample_steps
from megatron_wlb.plan import Document
from megatron_wlb.planning.balance.dispatch import StepDocuments
from megatron_wlb.strategies.plan.assigner import Assigner, Assignment, Candidate, assign, step_plan
from megatron_wlb.strategies.plan.propose import Proposal, StrategySpace, propose
from megatron_wlb.strategies.plan.replica_steps import StrategySimulator, StrategyTimeline
from megatron_wlb.strategies.plan.strategy import kind_text

SAMPLE_STEPS = 16
"""Steps from which strategies are proposed."""


@dataclass(frozen=True)
class Use:
    """The documents that replicas of one scheme ran in all steps of one strategy."""

    replicas: str
    """Such as ``2*tp4:32k``."""
    num_documents: int
    shortest: int
    longest: int
    token_share: float
    """The share of all tokens that the strategy's steps ran."""


@dataclass(frozen=True)
class StrategyOutcome:
    """How a strategy did."""

    candidate: Candidate
    num_chosen: int
    """How many of all steps chose it."""
    alone_us: float | None
    """Time of all steps with this strategy alone; None where it does not take them."""
    chosen_us: float
    """Time of the steps that chose it."""
    equal_us: float
    """Time of the same steps in the best equal layout."""
    exchange_us: float
    """Time of its pull and push; passes hide most of it."""
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class StrategyStudy:
    """What strategies gain over the best equal layout, with the same two stages of assigning."""

    proposal: Proposal
    num_steps: int
    equal_us: float
    """Time of all steps in the best equal layout."""
    dynamic_us: float
    """Time of all steps, each with the strategy that is chosen for it."""
    outcomes: tuple[StrategyOutcome, ...]

    @property
    def gain(self) -> float:
        """The speed-up over the best equal layout; 1 where it is chosen always."""
        return self.equal_us / self.dynamic_us

    @property
    def best_alone(self) -> StrategyOutcome:
        """The fastest that takes all steps; the first of the proposal always does so."""
        return min(
            (one for one in self.outcomes if one.alone_us is not None),
            key=lambda one: one.alone_us or 0.0,
        )


def study(
    space: StrategySpace,
    source: LengthSource,
    *,
    window: int,
    windows_a_step: int,
    num_steps: int,
    seed: int = 1,
    long_documents: LongDocuments = "split",
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> StrategyStudy:
    """Proposes strategies, and simulates steps of other documents with them.

    Raises :class:`ConfigError` where nothing takes a document of a whole window.
    """
    first, second = source.halves(seed)
    sample, judged = (
        sample_steps(
            half, num, window=window, windows_a_step=windows_a_step, seed=seed,
            long_documents=long_documents,
        )
        for half, num in ((first, SAMPLE_STEPS), (second, num_steps))
    )  # fmt: skip
    longest = min(window, source.longest(window))
    lengths = [[document.length for document in step] for step in sample]
    return judge(space, propose(space, lengths, longest=longest, progress=progress), judged)


def judge(
    space: StrategySpace, proposal: Proposal, steps: Sequence[Sequence[Document]]
) -> StrategyStudy:
    """Simulates steps with the proposal's strategies, and with its best equal layout."""
    candidates, base = proposal.candidates, proposal.best_equal
    assigner = Assigner(candidates)
    simulators = {id(c): StrategySimulator(c.costs, space.exchange) for c in (*candidates, base)}

    def simulated(number: int, found: Assignment) -> StrategyTimeline:
        plan = step_plan(number, steps[number], found)
        return simulators[id(found.candidate)].step(plan)

    chosen: list[tuple[Assignment, float, float]] = []
    alone_us: dict[int, float] = dict.fromkeys(range(len(candidates)), 0.0)
    for number, documents in enumerate(steps):
        lengths = [document.length for document in documents]
        step = StepDocuments(lengths)
        equal = assign(step, base)
        assert equal is not None
        best = assigner.choose(lengths)
        equal_us, best_us = simulated(number, equal).step_us, simulated(number, best).step_us
        chosen.append((best, best_us, equal_us))
        for at in [*alone_us]:
            own = assign(step, candidates[at])
            if own is None:
                del alone_us[at]
            else:
                alone_us[at] += simulated(number, own).step_us
    outcomes = []
    for at, candidate in enumerate(candidates):
        times = space.exchange(candidate.strategy)
        own_steps = [(n, *one) for n, one in enumerate(chosen) if one[0].candidate is candidate]
        outcomes.append(
            StrategyOutcome(
                candidate,
                len(own_steps),
                alone_us.get(at),
                sum(us for _, _, us, _ in own_steps),
                sum(us for *_, us in own_steps),
                float(times.pull_us.max() + times.push_us.max() + times.apart_us),
                _uses(candidate, [(steps[n], found) for n, found, _, _ in own_steps]),
            )
        )
    return StrategyStudy(
        proposal,
        len(steps),
        sum(us for *_, us in chosen),
        sum(us for _, us, _ in chosen),
        tuple(outcomes),
    )


def _uses(
    candidate: Candidate, ran: Sequence[tuple[Sequence[Document], Assignment]]
) -> tuple[Use, ...]:
    total = sum(document.length for documents, _ in ran for document in documents)
    found = []
    for costs, members in candidate.groups:
        lengths = np.array(
            [
                documents[n].length
                for documents, assignment in ran
                for replica in members
                for one in assignment.micro_batches[replica]
                for n in one
            ]
        )
        if lengths.size:
            name, ends = kind_text(*costs.kind), (int(lengths.min()), int(lengths.max()))
            name = f"{len(members)}*{name}" if len(members) > 1 else name
            found.append(Use(name, lengths.size, *ends, float(lengths.sum()) / total))
    return tuple(found)
