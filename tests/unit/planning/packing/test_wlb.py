import pytest
from helpers.strategies import documents

from megatron_wlb.cost import DocumentCost
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.packing.base import Limits
from megatron_wlb.planning.packing.wlb import WLBPacker

COST = DocumentCost(1, 0.1, 2, 0.25)


def wlb(num_micro_batches=3, window=20, max_tokens=40, thresholds=(10, 16), **limits):
    some = Limits(num_micro_batches, window, max_tokens, num_micro_batches * window, **limits)
    return WLBPacker(some, COST, thresholds)


def lengths(micro_batches):
    return sorted(d.length for m in micro_batches for d in m)


def test_wlb_holds_outliers_until_each_micro_batch_can_have_one():
    packing = wlb()
    assert lengths(packing.pack(documents([5, 12, 9, 17]), 0)) == [5, 9]
    assert lengths(packing.pack(documents([4, 10, 20], 1, first=4), 1)) == [4]
    # The third outlier of the first queue comes; the second queue still has two.
    packed = packing.pack(documents([15, 3], 2, first=7), 2)
    assert lengths(packed) == [3, 10, 12, 15]
    assert all(sum(d.length >= 10 for d in m) == 1 for m in packed)
    assert lengths([packing.waiting]) == [17, 20]


def test_wlb_fires_first_in_first_out():
    packing = wlb(num_micro_batches=2)
    packing.pack(documents([1, 11]), 0)
    packed = packing.pack(documents([12, 13, 1], 1, first=2), 1)
    assert lengths(packed) == [1, 11, 12]
    assert lengths([packing.waiting]) == [13]


def test_wlb_thresholds_are_inclusive_lower_bounds():
    packing = wlb(num_micro_batches=2)
    assert lengths(packing.pack(documents([9, 10, 15, 16, 17]), 0)) == [9, 10, 15, 16, 17]
    packing = wlb(num_micro_batches=2)
    assert lengths(packing.pack(documents([9, 10, 16]), 0)) == [9]


def test_wlb_fires_a_queue_whose_first_document_is_due_with_what_it_holds():
    packing = wlb(max_age=3)
    packing.pack(documents([1, 12]), 0)
    packing.pack(documents([1, 13, 17], 1, first=2), 1)
    assert lengths(packing.pack(documents([1], 2, first=5), 2)) == [1]
    assert lengths(packing.pack(documents([1], 3, first=6), 3)) == [1, 12, 13]
    assert lengths(packing.pack(documents([1], 4, first=7), 4)) == [1, 17]


def test_wlb_fires_several_queues_at_once_only_under_the_token_cap():
    arrived = documents([17, 18, 11, 12, 30])
    capped = wlb(num_micro_batches=2, max_step_tokens=57)
    # 35 + 23 tokens are above 57: the queue that has waited longest fires alone.
    assert lengths(capped.pack(arrived[:4], 0)) == [17, 18]
    assert lengths(capped.pack([], 1)) == [11, 12]
    enough = wlb(num_micro_batches=2, max_step_tokens=58)
    assert lengths(enough.pack(arrived[:4], 0)) == [11, 12, 17, 18]


def test_wlb_fires_a_queue_again_while_it_is_full():
    """Otherwise a queue that gains more than N documents a step would grow for ever."""
    packing = wlb(num_micro_batches=2)
    assert lengths(packing.pack(documents([11, 12, 13, 14, 15]), 0)) == [11, 12, 13, 14]


def test_wlb_runs_the_longest_wait_when_nothing_else_would_run():
    packing = wlb()
    assert lengths(packing.pack(documents([17, 12, 13]), 0)) == [17]
    assert lengths(packing.pack([], 1)) == [12, 13]


def test_wlb_runs_first_what_did_not_fit_before_once_it_is_due():
    packing = wlb(num_micro_batches=1, window=10, max_tokens=12, thresholds=(100,), max_age=1)
    assert lengths(packing.pack(documents([9, 8, 2]), 0)) == [2, 9]
    # The 8 is due: it goes before the heavier 12, which no longer fits.
    assert lengths(packing.pack(documents([12], 1, first=3), 1)) == [8]
    assert lengths(packing.flush(2)) == [12]


def test_wlb_sorts_what_remained_among_the_new_documents():
    """The algorithm as printed would place the remaining 6 before the 9, and unbalance them."""
    packing = wlb(num_micro_batches=2, window=10, max_tokens=10, thresholds=(100,))
    assert lengths(packing.pack(documents([8, 7, 6]), 0)) == [7, 8]
    packed = packing.pack(documents([9, 4, 1], 1, first=3), 1)
    assert [[d.length for d in m] for m in packed] == [[9, 1], [6, 4]]


def test_wlb_keeps_waiting_documents_in_order_when_thresholds_change():
    before = wlb()
    before.pack(documents([1, 17, 11, 14]), 0)
    after = wlb(thresholds=(13,))
    after.load_state_dict(before.state_dict())
    assert [d.length for d in after.waiting] == [11, 17, 14]
    assert lengths(after.pack(documents([2], 1, first=4), 1)) == [2, 11]


def test_wlb_derives_thresholds_from_the_window():
    assert wlb(window=30, thresholds=()).queue_thresholds == [10, 20]
    assert wlb(window=1, max_tokens=2, thresholds=()).queue_thresholds == [1, 2]


@pytest.mark.parametrize("thresholds", [(0, 5), (5, 5), (5, 8, 7)])
def test_wlb_refuses_thresholds_out_of_order(thresholds):
    with pytest.raises(ConfigError, match=r"queue_thresholds .* strictly ascending"):
        wlb(thresholds=thresholds)
