import numpy as np
import pytest
from helpers.strategies import documents
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost import DocumentCost
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.packing.base import Limits
from megatron_wlb.planning.packing.hold import TOLERANCE, HoldPacker
from megatron_wlb.planning.packing.placement import place

SQUARE = DocumentCost(0, 1, 0, 0)
COST = DocumentCost(1, 0.1, 2, 0.25)


def hold(
    num_micro_batches=2, window=10, max_tokens=1000, cost=SQUARE, price=0.001, tau=1.0, ahead=0,
    **limits,
):  # fmt: skip
    some = Limits(num_micro_batches, window, max_tokens, num_micro_batches * window, **limits)
    return HoldPacker(some, cost, tau, delay_price=price, look_ahead=ahead)


def lengths(micro_batches):
    return sorted(d.length for m in micro_batches for d in m)


def test_hold_keeps_back_what_the_others_cannot_balance_until_they_can():
    packing = hold()
    # 2 · 10² > 10² + 2 · 5², but 2 · 5² ≤ 5² + 5².
    assert lengths(packing.pack(documents([5, 10, 5]), 0)) == [5, 5]
    # 2 · 10² ≤ 10² + 6² + 8².
    packed = packing.pack(documents([6, 8], 1, first=3), 1)
    assert sorted(sorted(d.length for d in m) for m in packed) == [[6, 8], [10]]


@pytest.mark.parametrize(("tau", "ran"), [(1.0, [6, 6]), (1.05, [6, 6]), (1.1, [6, 6, 9])])
def test_hold_tau_is_the_imbalance_that_is_good_enough(tau, ran):
    # 2 · 9² ÷ (9² + 2 · 6²) = 1.06
    assert lengths(hold(tau=tau).pack(documents([6, 9, 6]), 0)) == ran


@pytest.mark.parametrize(("price", "ran"), [(0.1, [6, 6]), (0.2, [6, 6, 9])])
def test_hold_weighs_delay_against_balance(price, ran):
    # Holding the 9, of the 20 tokens of a step, saves 0.06: 0.13 of imbalance a step's tokens.
    assert lengths(hold(price=price).pack(documents([6, 9, 6]), 0)) == ran


@settings(max_examples=300)
@given(
    some=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    num_micro_batches=st.integers(1, 4),
    max_tokens=st.sampled_from([60, 80, 10_000]),
    price=st.sampled_from([0.0, 0.15, 2.0]),
    tau=st.sampled_from([1.0, 1.2, float("inf")]),
)
def test_hold_keeps_back_the_number_of_heaviest_that_scores_best(
    some, num_micro_batches, max_tokens, price, tau
):
    """Against every number, as far as that can be better than the tolerance."""
    packing = hold(num_micro_batches, 60, max_tokens, COST, price, tau)

    def score(micro_batches, waiting):
        loads = [COST.total_us(d.length for d in m) for m in micro_batches]
        delay = sum(d.length for d in waiting) / packing.limits.step_tokens
        return max(tau, max(loads) * num_micro_batches / sum(loads)) + price * delay

    def packed_without(num_held):
        """By the plain rule, in plain words."""
        rest = sorted(documents(some), key=lambda d: -d.length)
        bins, waiting = [[] for _ in range(num_micro_batches)], rest[:num_held]
        for document in rest[num_held:]:
            fits = [b for b in bins if sum(d.length for d in b) + document.length <= max_tokens]
            if fits:
                min(fits, key=lambda b: COST.total_us(d.length for d in b)).append(document)
            else:
                waiting.append(document)
        return bins, waiting

    ours = score(packing.pack(documents(some), 0), packing.waiting)
    best = min(score(*packed_without(k)) for k in range(len(some)))
    assert ours <= best + TOLERANCE + 1e-12


def test_hold_balances_within_s_max():
    """LPT alone would give 4 micro-batches of 12-30 µs here; S_max keeps the light ones apart."""
    arrived = documents([12] + [2] * 30)
    loose = hold(2, 20, 1000).pack(arrived, 0)
    assert lengths(loose) == [2] * 30  # 2 · 144 > 144 + 120: held for balance
    arrived = documents([10] + [2] * 30)
    assert lengths(hold(2, 20, 1000, price=0.1).pack(arrived, 0)) == [2] * 30 + [10]
    # With 36 tokens a micro-batch, 18 light documents make 72 µs against at least 100.
    tight = hold(2, 20, 36, price=0.1).pack(arrived, 0)
    assert lengths(tight) == [2] * 30


def test_hold_takes_the_best_there_is_when_nothing_is_good():
    packing = hold(4, price=0.1)
    assert lengths(packing.pack(documents([9, 4, 1]), 0)) == [1, 4, 9]  # fewer than N: all run
    # 4 · max ÷ Σ: 1.33 of all five, 1.40 without the 9, never at most 1.05.
    assert lengths(packing.pack(documents([8, 9, 8, 6, 4], 1, first=3), 1)) == [4, 6, 8, 8, 9]
    # 1.36 of all five, 1.13 without the 11.
    assert lengths(packing.pack(documents([8, 8, 9, 11, 9], 2, first=8), 2)) == [8, 8, 9, 9]


def test_hold_tries_every_number_where_documents_are_few():
    """Doubling steps from 10 over 9 to 7 would miss the 8 that divide evenly."""
    packing = hold(4, cost=COST)
    assert len(lengths(packing.pack(documents([9] * 10), 0))) == 8


def test_hold_lets_others_run_beside_a_due_document_that_is_heavier():
    packing = hold(3, max_age=2)
    assert lengths(packing.pack(documents([3, 3, 3, 30]), 0)) == [3, 3, 3]
    assert lengths(packing.pack(documents([3, 3, 3, 25, 50], 1, first=4), 1)) == [3, 3, 3]
    # The 30 is due and makes the step 900 µs long; the 25 does not make it longer, the 50 would.
    packed = packing.pack(documents([3, 3], 2, first=9), 2)
    assert sorted([d.length for d in m] for m in packed) == [[3, 3], [25], [30]]
    assert lengths([packing.waiting]) == [50]


def test_hold_keeps_back_the_lightest_above_the_token_cap():
    packing = hold(2, window=10, max_tokens=40, max_step_tokens=24)
    packed = packing.pack(documents([9, 1, 9, 2, 4]), 0)
    assert lengths(packed) == [2, 4, 9, 9]
    assert lengths([packing.waiting]) == [1]
    assert lengths(packing.pack(documents([5], 1, first=5), 1)) == [1, 5]


def test_hold_runs_due_documents_above_the_token_cap_and_nothing_else():
    packing = hold(2, window=10, max_tokens=40, max_step_tokens=20, max_age=1)
    assert lengths(packing.pack(documents([12, 12, 12, 1]), 0)) == [1, 12]
    assert lengths(packing.pack(documents([1], 1, first=4), 1)) == [12, 12]
    assert lengths([packing.waiting]) == [1]


def test_hold_runs_a_document_that_is_above_the_token_cap_by_itself():
    packing = hold(1, window=10, max_tokens=40, max_step_tokens=15)
    assert lengths(packing.pack(documents([30]), 0)) == [30]


def test_hold_runs_heavy_documents_early_beside_their_like():
    """10² needs 10² more: the 9 of the next step is nearly that, and heavier than all at hand."""
    arrived = [*documents([10, 4], 0), *documents([9, 5, 3], 1, first=2), *documents([8], 2, 5)]
    packing = hold(price=0.1, ahead=2)
    assert lengths(packing.pack(arrived, 0)) == [4, 9, 10]
    assert lengths([packing.waiting]) == [3, 5, 8]
    assert lengths(packing.pack([], 1)) == [3, 5]
    assert lengths(packing.pack([], 2)) == [8]


def test_hold_runs_nothing_early_that_does_not_pay():
    arrived = [*documents([10, 10], 0), *documents([9, 9], 1, first=2)]
    assert lengths(hold(ahead=1).pack(arrived, 0)) == [10, 10]  # balanced already
    arrived = [*documents([10, 4], 0), *documents([9, 4], 1, first=2)]
    dear = hold(price=5.0, ahead=1)
    assert lengths(dear.pack(arrived, 0)) == [4, 10]
    heavier = [*documents([10, 4], 0), *documents([12], 1, first=2)]  # than what is to be balanced
    assert lengths(hold(3, price=0.1, ahead=1).pack(heavier, 0)) == [4, 10]
    short = hold(window=80, price=0.1, ahead=1)  # 9 is below an eighth of the window
    assert 9 not in lengths(short.pack(arrived, 0))


def test_hold_counts_running_early_like_running_late():
    """One step early pays here, two do not."""
    for step, ran in ((1, [4, 9, 10]), (2, [4, 10])):
        arrived = [*documents([10, 4], 0), *documents([9], step, first=2)]
        assert lengths(hold(price=0.9, ahead=2).pack(arrived, 0)) == ran


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"tau": 0.99}, "--wlb-hold-tau is 0.99; give at least 1"),
        ({"tau": float("nan")}, "--wlb-hold-tau is nan"),
        ({"price": -0.1}, "delay_price is -0.1; give at least 0"),
        ({"price": float("nan")}, "delay_price is nan"),
        ({"ahead": -1}, "look_ahead is -1; give at least 0"),
    ],
)
def test_hold_refuses_settings_out_of_range(setting, complaint):
    with pytest.raises(ConfigError, match=complaint):
        hold(**setting)


def test_hold_finds_its_choice_with_one_placement_where_documents_are_many(monkeypatch):
    """What makes it fast."""
    calls = []
    monkeypatch.setattr(
        "megatron_wlb.planning.packing.placement.place",
        lambda *args: calls.append(1) or place(*args),
    )
    random = np.random.default_rng(5)
    packing = hold(4, window=5000, max_tokens=50_000, cost=COST, price=0.15)
    for step in range(20):
        some = random.lognormal(4, 1, size=120).astype(int) + 1
        packing.pack(documents(some.tolist(), step, 120 * step), step)
    assert len(calls) <= 22
