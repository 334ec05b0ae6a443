import numpy as np
import pytest
from helpers.strategies import documents
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.packing.base import Limits
from megatron_wlb.planning.packing.placement import CostTable, Placement, place, rank
from megatron_wlb.planning.packing.reference import REFERENCE_COST


def limits(num_micro_batches=4, window=10, max_tokens=20, step_tokens=40, **others):
    return Limits(num_micro_batches, window, max_tokens, step_tokens, **others)


def naive_place(costs_us, lengths, num_micro_batches, max_tokens, cap=None, num_due=0):
    bins = [[] for _ in range(num_micro_batches)]
    loads, sizes, left = [0.0] * num_micro_batches, [0] * num_micro_batches, []
    for number, (cost_us, length) in enumerate(zip(costs_us, lengths, strict=True)):
        fits = [i for i, size in enumerate(sizes) if size + length <= max_tokens]
        above = cap is not None and sum(sizes) > 0 and sum(sizes) + length > cap
        if not fits or (above and number >= num_due):
            left.append(number)
            continue
        best = min(fits, key=lambda i: (loads[i], i))
        bins[best].append(number)
        loads[best] += cost_us
        sizes[best] += length
    return bins, loads, left


def check_same(placement, expected, max_tokens, lengths):
    bins, loads, left = expected
    index_of = placement.index_of.tolist()
    assert [
        [i for i, of in enumerate(index_of) if of == index] for index in range(len(bins))
    ] == bins
    assert placement.loads_us == loads
    assert placement.left.tolist() == left
    assert placement.room == [max_tokens - sum(lengths[i] for i in numbers) for numbers in bins]


@pytest.mark.parametrize("many", [1, 1000], ids=["in rounds", "one by one"])
@settings(max_examples=200)
@given(data=st.data())
def test_place_chooses_the_least_loaded_micro_batch_with_room(many, data):
    num_micro_batches = data.draw(st.sampled_from([1, 2, 3, 5, 40]))
    weight = st.tuples(st.integers(1, 20), st.sampled_from([0.5, 1, 2, 3.25]))
    weights = data.draw(st.lists(weight, max_size=2 * num_micro_batches + 40))
    weights = [(unit * length, length) for length, unit in weights]
    if data.draw(st.booleans()):
        weights.sort(reverse=True)
    costs_us, lengths = [float(cost_us) for cost_us, _ in weights], [n for _, n in weights]
    max_tokens = data.draw(st.sampled_from([20, 23, 60, 1000]))
    more = max_tokens, data.draw(st.none() | st.integers(1, 400)), data.draw(st.integers(0, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_wlb.planning.packing.placement.MANY_MICRO_BATCHES", many)
        placement = place(np.array(costs_us), np.array(lengths, int), num_micro_batches, *more)
    expected = naive_place(costs_us, lengths, num_micro_batches, *more)
    check_same(placement, expected, max_tokens, lengths)


@pytest.mark.parametrize("many", [1, 1000], ids=["in rounds", "one by one"])
def test_place_breaks_ties_by_lowest_index(many, monkeypatch):
    monkeypatch.setattr("megatron_wlb.planning.packing.placement.MANY_MICRO_BATCHES", many)
    placement = place(np.array([3.0, 6.0, 3.0, 5.0]), np.ones(4, int), 2, 10)
    assert placement.index_of.tolist() == [0, 1, 0, 0]  # both had 6 before the last


@pytest.mark.parametrize("max_tokens", [95, 150, 10_000])
def test_place_is_exact_where_many_micro_batches_differ_in_load(max_tokens):
    """So that few of 70 micro-batches are served between two sorts; S_max binds, or does not."""
    lengths = [*range(90, 20, -1), *range(60, 1, -1), *[3, 1, 2] * 200]
    costs_us = [length**1.5 for length in lengths]
    placement = place(np.array(costs_us), np.array(lengths), 70, max_tokens)
    check_same(placement, naive_place(costs_us, lengths, 70, max_tokens), max_tokens, lengths)


def test_placement_imbalance_is_max_over_mean():
    placement = place(np.array([6.0, 3.0, 2.0]), np.array([6, 3, 2]), 2, 10)
    assert placement.loads_us == [6, 5]
    assert placement.imbalance == pytest.approx(6 * 2 / 11)
    assert place(np.zeros(0), np.zeros(0, int), 4, 20).imbalance == float("inf")


def test_rank_puts_due_documents_by_age_and_the_others_by_cost():
    old = documents([4, 9], step=0, first=0)
    new = documents([5, 7, 5, 8], step=3, first=2)
    costs_us = CostTable(REFERENCE_COST, limits())
    ranking = rank([old[1], old[0], *new], costs_us, 0)
    assert ranking.num_due == 2
    assert [d.key[0] for d in ranking.take(np.arange(6))] == [0, 1, 5, 3, 2, 4]
    assert ranking.lengths.tolist() == [4, 9, 8, 7, 5, 5]
    assert ranking.costs_us.tolist() == [REFERENCE_COST.document_us(n) for n in ranking.lengths]
    assert rank([old[1], *new], costs_us, -1).lengths.tolist() == [9, 8, 7, 5, 5]
    assert not len(rank([], costs_us, 4).lengths)


def test_ranking_takes_each_document_to_its_micro_batch():
    costs_us = CostTable(REFERENCE_COST, limits())
    ranking = rank(documents([4, 9, 5, 1, 7, 8]), costs_us).without(0, 1)
    placement = Placement(np.array([2, 0, 3, 2, 0]), [0.0] * 3, [0] * 3)  # of 8, 7, 5, 4 and 1
    taken, others = ranking.take_each(placement)
    assert [[d.length for d in m] for m in taken] == [[1, 7], [], [4, 8]]
    assert [d.length for d in others] == [9, 5]


def test_ranking_of_some_keeps_their_order():
    some = [*documents([4, 9], step=0), *documents([5, 7, 8], step=3, first=2)]
    costs_us = CostTable(REFERENCE_COST, limits())
    ranking = rank(some, costs_us, 0).only(np.array([1, 2, 4]))
    assert (ranking.lengths.tolist(), ranking.num_due) == ([9, 8, 5], 1)
    assert [d.length for d in ranking.take(np.array([2, 0]))] == [5, 9]
    ranking = rank(some, costs_us).without(1, 3)
    assert ranking.lengths.tolist() == [9, 5, 4]
    assert [d.length for d in ranking.take(np.arange(3))] == [9, 5, 4]


def test_ranking_beside_others_puts_them_after_what_is_due_by_cost():
    some = [*documents([2, 9], step=0), *documents([5, 7], step=3, first=2)]
    others = documents([8, 6, 5, 1], step=4, first=4)
    costs_us = CostTable(REFERENCE_COST, limits())
    ranking = rank(some, costs_us, 0).beside(others, costs_us)
    assert ranking.num_due == 2
    assert [d.key[0] for d in ranking.take(np.arange(8))] == [0, 1, 4, 3, 5, 2, 6, 7]
    assert ranking.lengths.tolist() == [2, 9, 8, 7, 6, 5, 5, 1]
    assert ranking.costs_us.tolist() == [REFERENCE_COST.document_us(n) for n in ranking.lengths]


class Odd:
    """Costs a document its length, but for one length."""

    def __init__(self, length, cost_us):
        self.length, self.cost_us, self.num_asked = length, cost_us, 0

    def document_us(self, length):
        self.num_asked += 1
        return self.cost_us if length == self.length else float(length)


@pytest.mark.parametrize("cost_us", [float("nan"), -1.0, float("inf")])
@pytest.mark.parametrize("length", [1, 8, 50])
def test_costs_refuse_what_cannot_be_balanced_before_the_first_step(length, cost_us):
    with pytest.raises(ConfigError, match=f"of {length} tokens is {cost_us} µs, but must be"):
        CostTable(Odd(length, cost_us), limits(window=50, max_tokens=60))


def test_costs_refuse_what_cannot_be_balanced_when_it_comes():
    costs_us = CostTable(Odd(49, -1.0), limits(window=50, max_tokens=60))
    with pytest.raises(ConfigError, match="of 49 tokens"):
        costs_us.of(np.array([3, 49]))


def test_costs_are_asked_once_a_length():
    cost = Odd(0, 0.0)
    costs_us = CostTable(cost, limits(window=4, max_tokens=200))
    before = cost.num_asked
    assert costs_us.of(np.array([3, 199, 3])).tolist() == [3, 199, 3]
    assert costs_us.of(np.array([199, 4])).tolist() == [199, 4]
    assert cost.num_asked == before + 2
