"""Replicas of strategies that cut their documents: longer ones, all of them, in the time told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, starmap

import numpy as np
import pytest

from megatron_wlb.cost import Execution, ModelShape, load_hardware
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.schedule.order import sliced
from megatron_wlb.cost.slices import UnitTable
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document, StepPlan
from megatron_wlb.planning.balance.dispatch import StepDocuments, lower_bound_us
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.planning.slicing.room import unit_of
from megatron_wlb.strategies.plan.assigner import Assignment, Candidate, assign, step_plan
from megatron_wlb.strategies.plan.propose import (
    StrategySpace,
    _rounded_strategies,
    _simulated,
    propose,
)
from megatron_wlb.strategies.plan.replica_steps import StrategySimulator
from megatron_wlb.strategies.plan.sliced_replica import SlicedCosts
from megatron_wlb.strategies.plan.strategy import Strategy

SHAPE = ModelShape(
    1024, 2816, 8, 8, 8, 128, 8192, True, rms_norm=True, linear_bias=False, tied_embeddings=False
)
SPACE = StrategySpace(SHAPE, Execution(), load_hardware("a100"), 8, memory_gib=3.0, schemes=())
WHOLE, CUT = Scheme(2, 1, 4), Scheme(2, 1, 4, sliced=True)
PADDING = 1e-3
"""What a unit is padded by is not counted where it is chosen."""
SCHEMES = [
    Scheme(2, 1, 2, sliced=True),
    CUT,
    Scheme(1, 2, 2, sliced=True),
    Scheme(1, 1, 4, 2, True),
]


def costs_of(scheme: Scheme) -> SlicedCosts:
    found = SPACE.price(scheme)
    assert isinstance(found, SlicedCosts)
    return found


def drawn(seed: int, num_tokens: int, longest: int, num_long: int = 1) -> list[int]:
    """Lengths of a step: documents of the longest length, and others of every size."""
    random, lengths = np.random.default_rng(seed), [longest] * num_long
    while sum(lengths) < num_tokens:
        lengths.append(int(min(longest, max(1, random.lognormal(6.5, 1.5)))))
    return lengths


def planned(candidate: Candidate, lengths: list[int]) -> tuple[Assignment, StepPlan]:
    found = assign(StepDocuments(lengths), candidate)
    assert found is not None
    documents = [Document(0, n, 0, length, True, 0, n, 0) for n, length in enumerate(lengths)]
    return found, step_plan(0, documents, found)


def peak_gib(costs: SlicedCosts, lengths: list[int]) -> float:
    """The most that a rank holds in a step, counted from its plan alone."""
    candidate = Candidate(Strategy.of(SPACE.cluster, [costs.kind]), {costs.kind: costs})
    _, plan = planned(candidate, lengths)
    (own,), (chains,), scheme = plan.micro_batches, plan.chains, costs.scheme
    units = [
        unit_of(m.spans, m.padded_length)._replace(recomputed=m.recomputed, divided=m.divided)
        for m in own
    ]
    orders = enumerate(sliced(scheme.pp_size, chains, scheme.vpp_size))
    model = costs.memory
    assert model is not None
    peaks = [max(model.program_bytes(*order, UnitTable.of(units)).peak) for order in orders]
    return max(starmap(model.alive_bytes, enumerate(peaks))) / GIB


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_slices_take_longer_documents_in_the_same_memory(scheme: Scheme) -> None:
    costs = costs_of(scheme)
    assert costs.max_tokens > 1.5 * SPACE.price(replace(scheme, sliced=False)).max_tokens
    # Also where a replica has several times the documents that it is likely to have.
    peaks = [
        peak_gib(costs, drawn(seed, times * costs.max_tokens, costs.max_tokens, max(1, times // 2)))
        for seed, times in enumerate((1, 2, 2, 4, 8, 16))
    ]
    assert 0.8 * 3 < max(peaks) <= 3


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_steps_fit_that_are_longer_than_any_that_was_looked_at(scheme: Scheme) -> None:
    costs = SPACE.price(scheme, 10240)
    assert isinstance(costs, SlicedCosts) and costs.slicer.peak_bytes < 0.8 * 3 * GIB
    peaks = [peak_gib(costs, [10240] + [512] * number) for number in (20, 300, 1280, 2560)]
    assert max(peaks) <= 3


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_every_token_runs_once_in_the_time_told(scheme: Scheme, seed: int) -> None:
    costs, other = costs_of(scheme), SPACE.price(Scheme(2))
    kinds = [costs.kind] + [other.kind] * ((8 - scheme.num_ranks) // 2)
    strategy = Strategy.of(SPACE.cluster, kinds)
    lengths = drawn(seed, 3 * costs.max_tokens, costs.max_tokens)
    candidate = Candidate(strategy, {costs.kind: costs, other.kind: other})
    found, plan = planned(candidate, lengths)

    pieces: dict[int, list[tuple[int, int]]] = {}
    for micro_batch in plan:
        assert not any(span.is_slice for span in micro_batch.spans[1:])
        for document, start, stop in micro_batch.spans:
            pieces.setdefault(document.number, []).append((start, stop))
    assert sorted(pieces) == [*range(len(lengths))]
    for number, own in pieces.items():
        assert own[0][0] == 0 and own[-1][1] == lengths[number]
        assert all(before[1] == after[0] for before, after in pairwise(own))
    assert len(pieces[0]) > 4, "the longest is cut"
    assert [sum(chains) for chains in plan.chains[:1]] == [len(plan.micro_batches[0])]
    assert all(not chains for chains in plan.chains[1:])
    assert plan.alone(0).chains == plan.chains[:1]
    assert all(plan.alone(n).chains == () for n in range(1, len(kinds)))

    line = StrategySimulator(candidate.costs).step(plan)
    assert line.propagation_us == pytest.approx(max(found.replica_us), rel=PADDING)
    assert lower_bound_us(StepDocuments(lengths), candidate.groups) <= found.step_us


def test_slices_do_not_let_the_longest_document_stall_the_others() -> None:
    lengths = drawn(1, 4 * SPACE.price(WHOLE).max_tokens, SPACE.price(WHOLE).max_tokens)
    step_us = []
    for scheme in (WHOLE, CUT):
        costs = SPACE.price(scheme)
        candidate = Candidate(Strategy.of(SPACE.cluster, [costs.kind]), {costs.kind: costs})
        step_us.append(planned(candidate, lengths)[0].step_us)
    assert step_us[1] < 0.9 * step_us[0]


def test_proposal_cuts_documents_where_whole_ones_have_no_room() -> None:
    schemes = tuple(Scheme(tp, 1, pp, sliced=cut) for tp in (1, 2) for pp in (2, 4)
                    for cut in (False, True))  # fmt: skip
    whole = replace(SPACE, schemes=tuple(s for s in schemes if not s.sliced))
    longest = 2 * max(tokens for _, tokens in whole.costs)
    steps = [drawn(seed, 3 * longest, longest) for seed in range(4)]
    with pytest.raises(ConfigError, match=f"takes a document of {longest} tokens"):
        propose(whole, steps)
    found = propose(replace(SPACE, schemes=schemes, longest=longest), steps)
    first, *_ = found.candidates
    assert any(replica.scheme.sliced for replica in first.strategy.replicas)
    assert Strategy.parse(str(first.strategy), SPACE.cluster) == first.strategy


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_documents_are_dispatched_by_about_what_their_slices_take(scheme: Scheme) -> None:
    """Where nothing is recomputed; the longest document is a quarter of the step, and its units of
    unlike work.
    """
    costs = replace(SPACE, memory_gib=60.0, longest=65536).price(scheme)
    step = StepDocuments(drawn(1, 4 * costs.max_tokens, costs.max_tokens))
    assert isinstance(costs, SlicedCosts)
    took_us = costs.step_us(step.sizes, 0.0, 0.0)
    assert 0.94 * took_us < float(step.us(costs).sum()) < took_us
    waits_us = (
        costs.step_us(step.sizes, *exchange) - took_us for exchange in ((0.9, 1e6), (1e6, 0.9))
    )
    assert all(0.9e6 - took_us / 4 < us < 1e6 + 1 for us in waits_us), "a unit hides some of it"


def test_strategies_of_whole_documents_are_proposed_beside_those_with_slices() -> None:
    whole = replace(SPACE, schemes=(Scheme(8),))
    lengths = np.sort(np.array(drawn(2, 80000, 10000)))
    cut = replace(whole, schemes=(Scheme(8), *SCHEMES), longest=10000)
    both = {str(one) for one in _rounded_strategies(cut, lengths)}
    alone = {str(one) for one in _rounded_strategies(whole, lengths)}
    assert alone and alone < both


def test_strategies_that_cannot_be_fastest_are_not_simulated_and_the_fastest_are() -> None:
    space = replace(SPACE, schemes=tuple(Scheme(tp) for tp in (1, 2, 4)))
    of = {str(scheme): (scheme, tokens) for scheme, tokens in space.costs}
    equal = [space.equal(costs) for costs in space.costs.values()]
    unlike = "tp4 tp2 tp2", "tp4 tp1 tp1 tp1 tp1", "tp2 tp2 tp2 tp1 tp1", "tp4"
    pool = equal + [
        space.candidate(Strategy.of(space.cluster, [of[name] for name in names.split()]))
        for names in unlike
    ]
    # Many short documents take the host longer than the devices.
    others = [[700] * 60, [700] * 480, [6000] * 20, [6000] * 60]
    steps = [StepDocuments([of["tp4"][1], *own]) for own in others]
    every = _simulated(pool, steps, np.full(len(pool), True), lambda *_: None)
    first = np.arange(len(pool)) < len(equal)
    found = _simulated(pool, steps, first, lambda *_: None)
    assert (found[first] == every[first]).all() and (found <= every).all()
    assert (found.min(axis=0) == every.min(axis=0)).all() and (found < every).any()
    fastest = every[~first].min(axis=0) < every[first].min(axis=0)
    assert fastest.any() and not fastest.all(), "the others, and not always"


def test_no_more_than_memory_holds_is_asked_for() -> None:
    costs = costs_of(CUT)
    strategy = Strategy.of(SPACE.cluster, [(CUT, 16 * costs.max_tokens)])
    with pytest.raises(ConfigError, match="but memory holds"):
        SPACE.candidate(strategy)
    shorter = Strategy.of(SPACE.cluster, [(CUT, costs.max_tokens // 2)])
    candidates = [SPACE.candidate(shorter) for _ in range(2)]
    assert candidates[0].costs[shorter.replicas[0].kind].max_tokens == costs.max_tokens // 2
