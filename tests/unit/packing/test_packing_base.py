import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.errors import ConfigError
from megatron_wlb.packing.base import Limits, due_and_rest, place
from megatron_wlb.testing.strategies import REFERENCE_COST, documents


def limits(num_micro_batches=4, window=10, max_tokens=20, step_tokens=40, **others):
    return Limits(num_micro_batches, window, max_tokens, step_tokens, **others)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches is 0; give at least 1"),
        ({"window": 0}, "window is 0"),
        ({"max_age": -1}, "max_age is -1; give at least 0"),
        ({"max_tokens": 9}, r"\(S_max\) 9 is below the window of 10.*raise it"),
        ({"step_tokens": 81}, "4 micro-batches of at most 20 tokens hold 80, but 81 arrive"),
        ({"max_step_tokens": 39}, "max_step_tokens 39 is below the 40 tokens"),
    ],
)
def test_limits_refuse_what_cannot_run(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        limits(**settings)


def test_limits_may_be_tight():
    assert limits(max_tokens=10, max_step_tokens=40).token_cap == 40
    assert limits().token_cap == 80
    assert limits(max_step_tokens=50).token_cap == 50
    assert limits(max_step_tokens=500).token_cap == 80


def naive_place(weighted, limits):
    bins = [[] for _ in range(limits.num_micro_batches)]
    loads = [0.0] * len(bins)
    left = []
    for cost_us, document in weighted:
        fits = [
            i
            for i, bin_ in enumerate(bins)
            if sum(d.length for d in bin_) + document.length <= limits.max_tokens
        ]
        if not fits:
            left.append(document)
            continue
        best = min(fits, key=lambda i: (loads[i], i))
        bins[best].append(document)
        loads[best] += cost_us
    return bins, loads, left


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    num_micro_batches=st.integers(1, 5),
    max_tokens=st.integers(20, 60),
    weights=st.lists(
        st.tuples(st.integers(1, 20), st.sampled_from([0.5, 1, 2, 3.25])), max_size=40
    ),
    sort=st.booleans(),
)
def test_place_chooses_the_least_loaded_micro_batch_with_room(
    num_micro_batches, max_tokens, weights, sort
):
    some = limits(num_micro_batches, 20, max_tokens, 20)
    arrived = documents([length for length, _ in weights])
    weighted = [(unit * d.length, d) for d, (_, unit) in zip(arrived, weights, strict=True)]
    if sort:
        weighted.sort(key=lambda w: -w[0])
    placement = place(weighted, some)
    bins, loads, left = naive_place(weighted, some)
    assert (placement.micro_batches, placement.left) == (bins, left)
    assert placement.loads_us == loads


def test_placement_imbalance_is_max_over_mean():
    arrived = documents([6, 3, 2])
    placement = place(
        [(6.0, arrived[0]), (3.0, arrived[1]), (2.0, arrived[2])], limits(2, 10, 10, 10)
    )
    assert placement.loads_us == [6, 5]
    assert placement.imbalance == pytest.approx(6 * 2 / 11)
    assert place([], limits()).imbalance == float("inf")


def test_due_documents_come_by_age_and_the_others_by_cost():
    old = documents([4, 9], step=0, first=0)
    new = documents([5, 7, 5, 8], step=3, first=2)
    due, rest = due_and_rest([*new, old[1], old[0]], 4, limits(max_age=4), REFERENCE_COST)
    assert [d.length for _, d in due] == [4, 9]
    assert [d.key for _, d in rest] == [(5, 0), (3, 0), (2, 0), (4, 0)]
    assert rest[0][0] == REFERENCE_COST.document_us(8)
