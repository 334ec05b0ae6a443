import pytest
from helpers.strategies import documents

from megatron_wlb.cost import DocumentCost
from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.planning.packing.base import Limits
from megatron_wlb.planning.packing.fixed import FixedGreedyPacker

COST = DocumentCost(1, 0.1, 2, 0.25)


def fixed(num_batches=1, grouping="sorted", num_micro_batches=2, window=10):
    limits = Limits(num_micro_batches, window, window, num_micro_batches * window)
    return FixedGreedyPacker(limits, COST, num_batches, grouping)


def lengths(micro_batches):
    return sorted(sorted(d.length for d in m) for m in micro_batches)


def test_fixed_balances_the_windows_of_a_step():
    assert lengths(fixed().pack(documents([8, 2, 4, 6]), 0)) == [[2, 8], [4, 6]]
    packed = fixed().pack(documents([6, 4, 5, 5]), 0)
    assert lengths(packed) == [[4, 6], [5, 5]]
    packed = fixed().pack(documents([6, 3, 1, 7, 2, 1]), 0)
    assert lengths(packed) == [[1, 2, 7], [1, 3, 6]]


def test_fixed_windows_are_full_where_enough_tokens_arrive():
    """LPT alone leaves gaps of 1 to 3 tokens here, and documents that find no room."""
    packing = fixed(num_micro_batches=4)
    packed = packing.pack(documents([7, 7, 7, 7, 4, 4, 4]), 0)
    assert [sum(d.length for d in m) for m in packed] == [10] * 4
    assert not packing.waiting


@pytest.mark.parametrize(
    ("grouping", "first", "second"),
    [
        ("sorted", [[10], [10]], [[1, 1, 1, 1, 1, 5], [1, 1, 1, 1, 1, 5]]),
        ("arrival", [[1, 1, 1, 1, 1, 5], [10]], [[1, 1, 1, 1, 1, 5], [10]]),
    ],
)
def test_fixed_groups_windows_by_work_or_by_arrival(grouping, first, second):
    packing = fixed(2, grouping)
    arriving = [*documents([10, *[1] * 10], 0), *documents([5, 5, 10], 1, first=11)]
    packed = [lengths(packing.pack(arriving, 0)), lengths(packing.pack([], 1))]
    assert packed == [sorted(first), sorted(second)]


def test_fixed_runs_groups_in_the_order_of_their_arrival():
    """Light windows arrive first here and heavy ones later: sorted by work they would swap."""
    packing = fixed(2)
    arriving = [*documents([1] * 20, 0), *documents([10, 10], 1, first=20)]
    assert lengths(packing.pack(arriving, 0)) == [[1] * 10] * 2
    assert lengths(packing.pack([], 1)) == [[10], [10]]


def test_fixed_balances_better_over_more_batches():
    arriving = [*documents([10, 1, 1, 8], 0), *documents([1, 9, 10], 1, first=4)]

    def worst(packing):
        steps = [packing.pack(arriving[:4], 0), packing.pack(arriving[4:], 1)]
        loads = [[COST.total_us(d.length for d in m) for m in step] for step in steps]
        return [max(step) * 2 / sum(step) for step in loads]

    assert max(worst(fixed(1))) > 1.1
    two = fixed(2)
    steps = [two.pack(arriving, 0), two.pack([], 1)]
    loads = [[COST.total_us(d.length for d in m) for m in step] for step in steps]
    assert max(max(step) * 2 / sum(step) for step in loads) < 1.06


@pytest.mark.parametrize("sizes", [None, [[1]], [[1, 2], [1, 9]], [[0, 0]]])
def test_fixed_refuses_planned_steps_that_do_not_add_up(sizes):
    packing = fixed(2)
    packing.pack([*documents([10, 10]), *documents([10, 6, 4], 1, first=2)], 0)
    state = packing.state_dict()
    assert state["planned_sizes"] != sizes
    state["planned_sizes"] = sizes
    with pytest.raises(CheckpointError, match="not the state of a packing"):
        fixed(2).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_batches": 0}, "fixed_batches is 0; give at least 1"),
        ({"grouping": "random"}, "unknown grouping random; use one of sorted, arrival"),
    ],
)
def test_fixed_refuses_settings_that_cannot_work(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        fixed(**settings)


def test_fixed_refuses_more_tokens_a_step_than_it_runs():
    with pytest.raises(ConfigError, match="fixed-greedy packing runs 2 windows of 10 tokens"):
        FixedGreedyPacker(Limits(2, 10, 20, 21), COST)
