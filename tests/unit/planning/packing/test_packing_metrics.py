import json

import pytest
from helpers.strategies import documents

from megatron_wlb.cost import DocumentCost
from megatron_wlb.errors import PlanError
from megatron_wlb.plan import MicroBatchPlan, Span, StepPlan
from megatron_wlb.planning.packing.metrics import measure

COST = DocumentCost(1, 0, 0, 0)  # a document costs its length


def plan(step, *ranks, padded=None, waiting=()):
    """``ranks`` are lists of micro-batches, which are lists of ``(length, step of arrival)``."""
    index = 0
    built = []
    for rank in ranks:
        micro_batches = []
        for micro_batch in rank:
            arrived = [documents([length], arrival)[0] for length, arrival in micro_batch]
            total = sum(d.length for d in arrived)
            micro_batches.append(
                MicroBatchPlan(
                    index,
                    tuple(Span(d, 0, d.length) for d in arrived),
                    padded or total,
                    COST.total_us(d.length for d in arrived),
                )
            )
            index += 1
        built.append(tuple(micro_batches))
    return StepPlan(step, "any", tuple(built), len(waiting), sum(d.length for d in waiting))


def test_metrics_of_two_steps_are_as_computed_by_hand():
    waiting = documents([5, 10], step=1)
    plans = [
        plan(0, [[(30, 0)], [(10, 0)]], [[(20, 0)], [(20, 0)]], padded=40),
        plan(1, [[(7, 0)], [(1, 1)]], [[(4, 1)], [(4, 1)]], padded=8, waiting=waiting),
    ]
    m = measure(plans, waiting)
    assert (m.num_steps, m.num_documents, m.num_tokens) == (2, 8, 96)
    first, second = 30 * 4 / 80, 7 * 4 / 16
    assert m.imbalance_mean == pytest.approx((first + second) / 2)
    assert m.imbalance_weighted == pytest.approx((30 + 7) * 4 / 96)
    assert m.imbalance_p95 == pytest.approx(first + 0.95 * (second - first))
    assert m.imbalance_worst == second
    assert m.rank_imbalance_mean == pytest.approx((40 * 2 / 80 + 8 * 2 / 16) / 2)
    assert m.delay_mean_steps == pytest.approx(7 / 96)
    assert (m.delay_p99_steps, m.delay_max_steps) == (1, 1)
    assert (m.num_waiting, m.waiting_tokens) == (2, 15)
    assert m.waiting_age_mean_steps == 1
    assert m.tokens_cv == pytest.approx(32 / 48)
    assert m.padding_share == pytest.approx((80 + 16) / (160 + 32))
    assert json.loads(json.dumps(m.as_dict()))["num_tokens"] == 96


def test_rank_imbalance_sums_over_a_rank():
    m = measure([plan(0, [[(30, 0)], [(30, 0)]], [[(20, 0)], [(0 + 10, 0)]])])
    assert m.rank_imbalance_mean == pytest.approx(60 * 2 / 90)


@pytest.mark.parametrize(("late_tokens", "p99"), [(10, 0), (11, 7)])
def test_delay_p99_counts_tokens(late_tokens, p99):
    m = measure([plan(7, [[(1000 - late_tokens, 7), (late_tokens, 0)]])])
    assert (m.delay_p99_steps, m.delay_max_steps) == (p99, 7)


def test_delay_of_running_early_counts_like_running_late():
    m = measure([plan(2, [[(10, 2), (30, 4)]]), plan(3, [[(20, 2)]])])
    assert m.delay_mean_steps == pytest.approx((30 * 2 + 20 * 1) / 60)
    assert m.delay_max_steps == 2


def test_metrics_do_not_count_what_was_only_read_ahead_as_waiting():
    arrived, ahead = documents([5], step=1), documents([7], step=3)
    m = measure([plan(2, [[(10, 2)]], waiting=arrived)], [*arrived, *ahead])
    assert (m.num_waiting, m.waiting_tokens) == (1, 5)


def test_metrics_refuse_nothing_and_other_waiting_documents():
    with pytest.raises(PlanError, match="no steps"):
        measure([])
    with pytest.raises(PlanError, match="1 documents wait after step 3, but 0 were given"):
        measure([plan(3, [[(4, 3)]], waiting=documents([2]))])


def test_metrics_of_an_empty_step_are_defined():
    m = measure([plan(0, [[], []])])
    assert (m.imbalance_mean, m.imbalance_weighted, m.padding_share) == (1, 1, 0)
