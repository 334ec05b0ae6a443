import json
import logging

import numpy as np
import pytest
from helpers.strategies import ListStream, runs
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost import DocumentCost
from megatron_wlb.cost.attention_latency import AnalyticAttention
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.errors import CheckpointError, ConfigError, PackingError
from megatron_wlb.plan import MicroBatchPlan
from megatron_wlb.plan.sharding import Selector
from megatron_wlb.planning.packing import packer
from megatron_wlb.planning.planner import Planner, assign, deal, run_order

AHEAD = {"look_ahead": 2, "fixed_batches": 3}
ALL = [
    pytest.param(name, more, id=f"{name}{' ahead' if more else ''}")
    for name, more in [
        ("original", {}), ("wlb", {}), ("hold", {}), ("hold", AHEAD),
        ("fixed-greedy", {}), ("fixed-greedy", AHEAD),
    ]
]  # fmt: skip
COST = DocumentCost(1, 0.1, 2, 0.25, micro_batch_us=5)
UNEVEN = [[3, 9, 1, 7, 4, 2, 2], [10, 10, 1], [5, 5, 5, 5, 6, 2], [8, 1, 1, 1, 1]]


def planner(name="hold", steps=UNEVEN, dp_size=2, length_multiple=1, selector=None, **more):
    settings = {"num_micro_batches": 4, "window": 10, "cost": COST} | more
    return Planner(
        ListStream(steps),
        packer(name, length_multiple=max(1, length_multiple), **settings),
        settings["cost"],
        dp_size=dp_size,
        length_multiple=length_multiple,
        selector=selector,
    )


def all_plans(planner):
    return list(iter(planner.next_plan, None))


@pytest.mark.parametrize(("name", "ahead"), ALL)
def test_plans_after_skipped_steps_are_what_they_would_be(name, ahead):
    steps = UNEVEN * 3
    one, other = planner(name, steps, **ahead), planner(name, steps, **ahead)
    expected = [one.next_plan() for _ in range(9)]
    for _ in range(4):
        other.skip()
    assert other.next_plan() == expected[4]
    other.skip()
    state = json.loads(json.dumps(other.state_dict()))
    assert [other.next_plan() for _ in range(3)] == expected[6:]
    again = planner(name, steps, **ahead)
    again.load_state_dict(state)
    assert again.next_plan() == expected[6]


@pytest.mark.parametrize(("name", "ahead"), ALL)
@settings(max_examples=50)
@given(run=runs(), num_per_rank=st.integers(1, 3), length_multiple=st.sampled_from([1, 2, 8]))
def test_planner_runs_each_token_once_on_ranks_of_equal_count(
    name, ahead, run, num_per_rank, length_multiple
):
    dp_size = run.settings["num_micro_batches"]
    n = dp_size * num_per_rank
    s_max = -(-run.settings["max_tokens"] // length_multiple) * length_multiple
    more = run.settings | {"num_micro_batches": n, "max_step_tokens": None} | ahead
    more["max_tokens"] = s_max
    plans = all_plans(planner(name, run.steps, dp_size, length_multiple, **more))

    assert [plan.step for plan in plans] == list(range(len(plans)))
    assert sum(plan.num_tokens for plan in plans) == sum(map(sum, run.steps))
    for plan in plans:
        assert plan.packing == name
        assert [len(rank) for rank in plan.micro_batches] == [num_per_rank] * dp_size
        assert sorted(m.index for m in plan) == list(range(n))
        for m in plan:
            assert m.padded_length % length_multiple == 0 < m.padded_length <= s_max
            assert 0 <= m.padded_length - m.length < length_multiple or not m.spans
            assert m.predicted_us == more["cost"].total_us(s.length for s in m.spans)
    assert not plans or plans[-1].num_waiting == plans[-1].waiting_tokens == 0


def test_planner_pads_an_empty_micro_batch_to_one_multiple():
    (plan,) = all_plans(planner(steps=[[9, 12]], dp_size=1, length_multiple=8, max_age=0))
    by_length = {m.length: (m.padded_length, m.predicted_us) for m in plan}
    assert by_length == {
        0: (8, COST.micro_batch_us),
        9: (16, COST.total_us([9])),
        12: (16, COST.total_us([12])),
    }


@pytest.mark.parametrize("mode", ["per-sequence", "per-document", "adaptive", "hybrid"])
def test_planner_shards_each_micro_batch_as_chosen_and_counts_the_wait(mode):
    selector = Selector(mode, 2, AnalyticAttention(4, 64, 1.0, tile=4))
    steps = [[90, 9, 33, 7, 4, 2, 2], [70, 61, 1, 50, 50, 2]]
    sizes = {"dp_size": 1, "length_multiple": 8, "window": 50, "num_micro_batches": 4}
    plans = all_plans(planner(steps=steps, selector=selector, **sizes))
    plain = all_plans(planner(steps=steps, **sizes))
    waits = 0
    for m in (m for plan in plans for m in plan):
        lengths = [span.length for span in m.spans]
        chosen = selector.choose(m.lengths)
        assert m.sharding == chosen.sharding
        work = COST.work(lengths)
        wait_us = work.forward_attention_us * (chosen.forward_imbalance - 1)
        wait_us += work.backward_attention_us * (chosen.backward_imbalance - 1)
        assert m.predicted_us == pytest.approx(COST.total_us(lengths) + wait_us)
        waits += wait_us > 0
    assert waits
    kinds = {kind for plan in plans for kind in plan.shardings}
    assert kinds <= {mode} or mode in ("adaptive", "hybrid")
    documents = [[m.spans for m in sorted(p, key=lambda m: m.index)] for p in plans]
    assert documents == [[m.spans for m in sorted(p, key=lambda m: m.index)] for p in plain]


def test_planner_refuses_lengths_that_slots_do_not_divide():
    selector = Selector("adaptive", 3, AnalyticAttention(4, 64, 1.0))
    with pytest.raises(ConfigError, match=r"length_multiple 8 is not divisible by 2 · CP = 6"):
        planner(length_multiple=8, selector=selector)


def test_planner_deals_the_windows_of_original_to_ranks_as_megatron_does():
    plan = planner("original", [[10] * 6], num_micro_batches=6, dp_size=3).next_plan()
    assert [[m.index for m in rank] for rank in plan.micro_batches] == [[0, 3], [1, 4], [2, 5]]
    first = [m.spans[0].document.arrival for rank in plan.micro_batches for m in rank]
    assert first == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("name", ["wlb", "hold"])
def test_planner_balances_ranks(name):
    """Nearly equal sums where micro-batches themselves are not."""
    steps = [[18, 17, 15, 8, 7, 6, 1, 1]]
    plan = planner(name, steps, num_micro_batches=8, dp_size=2, max_age=0).next_plan()
    sums_us = [sum(m.predicted_us for m in rank) for rank in plan.micro_batches]
    assert max(sums_us) / min(sums_us) < 1.1
    assert plan.imbalance > 2


def micro_batches(*times_us):
    return [MicroBatchPlan(i, (), 1, us) for i, us in enumerate(times_us)]


def test_assign_gives_each_rank_as_many():
    """LPT without places would give the first rank the 100 alone."""
    ranks = assign(micro_batches(1, 2, 100, 3), 2)
    assert [[m.index for m in rank] for rank in ranks] == [[2, 0], [3, 1]]


def test_assign_breaks_ties_by_lowest_index():
    ranks = assign(micro_batches(5, 5, 5, 5), 2)
    assert [[m.index for m in rank] for rank in ranks] == [[0, 2], [1, 3]]


def test_run_order_is_small_at_both_ends():
    ordered = run_order(micro_batches(3, 1, 2, 5, 4))
    assert [m.predicted_us for m in ordered] == [1, 3, 5, 4, 2]
    assert [m.index for m in run_order(micro_batches(1, 1, 1))] == [0, 2, 1]


def test_ranks_that_run_together_get_like_micro_batches_in_each_place():
    given = micro_batches(*np.random.default_rng(3).integers(1, 99, 24).tolist())
    ranks = deal(given, 4, ExpertGroups(2, ((0.0, 0.0),)))
    assert sorted(m.index for rank in ranks for m in rank) == list(range(24))
    descending = sorted(given, key=lambda m: (-m.predicted_us, m.index))
    pairs = {frozenset(m.index for m in descending[at : at + 2]) for at in range(0, 24, 2)}
    for first in (0, 2):
        rows = [*zip(ranks[first], ranks[first + 1], strict=True)]
        assert {frozenset(m.index for m in row) for row in rows} <= pairs
        sums_us = [sum(m.predicted_us for m in row) for row in rows]
        middle = sums_us.index(max(sums_us))
        assert sums_us[: middle + 1] == sorted(sums_us[: middle + 1])  # small at both ends
        assert sums_us[middle:] == sorted(sums_us[middle:], reverse=True)
    loads_us = [sum(m.predicted_us for m in rank) for rank in ranks]
    assert max(loads_us) < 1.1 * min(loads_us)


def test_ranks_that_run_together_are_told_by_what_experts_do_not_do():
    given = [
        MicroBatchPlan(index, (), tokens, 10.0 + own_us + 2 * tokens)
        for index, (tokens, own_us) in enumerate([(9, 0.0), (1, 9.0), (8, 1.0), (2, 8.0)])
    ]
    ranks = deal(given, 2, ExpertGroups(2, ((1.0, 1.0),)))
    rows = [{m.index for m in row} for row in zip(*ranks, strict=True)]
    assert sorted(map(sorted, rows)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("name", "ahead"), ALL)
def test_planner_ends_after_all_that_waits_has_run(name, ahead):
    planning = planner(name, **ahead)
    plans = all_plans(planning)
    assert planning.next_plan() is None
    assert not planning.packer.waiting
    assert sum(plan.num_tokens for plan in plans) == sum(map(sum, UNEVEN))


def test_planner_reads_as_far_ahead_as_the_packer_looks():
    planning = planner("hold", [[3], [4], [5], [6], [7]], look_ahead=2)
    planning.packer.pack = lambda documents, step: given.append([d.length for d in documents]) or []
    planning.dp_size = 1
    for expected in ([3, 4, 5], [6], [7]):
        given = []
        planning.next_plan()
        assert given == [expected]


def test_planner_counts_as_waiting_what_has_arrived_only():
    settings = {"num_micro_batches": 2, "look_ahead": 1, "delay_price": 0.01}
    planning = planner("hold", [[10, 5, 5], [5], [10, 10, 3]], **settings)
    plan = planning.next_plan()
    assert (plan.num_waiting, plan.waiting_tokens) == (1, 10)
    assert sum(d.length for d in planning.packer.waiting) == 15


def test_planner_of_nothing_plans_nothing():
    assert planner(steps=[]).next_plan() is None


@pytest.mark.parametrize(("name", "ahead"), ALL)
@pytest.mark.parametrize("stop", range(5))
def test_planner_continues_the_same_from_its_saved_state(name, ahead, stop):
    whole = planner(name, **ahead)
    digests = [plan.digest for plan in all_plans(whole)]
    stop = min(stop, len(digests))  # looking ahead may need fewer steps
    before = planner(name, **ahead)
    seen = [before.next_plan().digest for _ in range(stop)]
    after = planner(name, **ahead)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.step == stop
    assert seen + [plan.digest for plan in all_plans(after)] == digests


@pytest.mark.parametrize(("name", "ahead"), ALL)
def test_planner_resumes_a_document_stream_on_another_dp_size(name, ahead):
    lengths = np.random.default_rng(3).integers(1, 60, size=300)

    def build(dp_size):
        stream = DocumentStream([lengths], window=50, step_tokens=8 * 50, seed=5, num_epochs=2)
        packing = packer(name, num_micro_batches=8, window=50, cost=COST, **ahead)
        return Planner(stream, packing, COST, dp_size=dp_size)

    def documents_of(plan):
        return [(m.index, m.spans) for m in sorted(plan, key=lambda m: m.index)]

    whole = [documents_of(plan) for plan in all_plans(build(2))]
    assert sum(s.length for step in whole for _, spans in step for s in spans) == 2 * lengths.sum()
    before = build(2)
    for _ in range(5):
        before.next_plan()
    after = build(4)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [documents_of(plan) for plan in all_plans(after)] == whole[5:]


def test_planner_of_original_delays_nothing_on_a_document_stream():
    lengths = np.random.default_rng(3).integers(1, 60, size=300)
    stream = DocumentStream([lengths], window=50, step_tokens=4 * 50, seed=5, num_epochs=1)
    planning = Planner(
        stream, packer("original", num_micro_batches=4, window=50, cost=COST), COST, dp_size=1
    )
    plans = all_plans(planning)
    assert {plan.delay_steps for plan in plans} == {0}
    assert [m.length for plan in plans[:-1] for m in plan] == [50] * 4 * (len(plans) - 1)


def test_planner_refuses_the_state_of_another_packing_or_number():
    ours = planner("hold")
    with pytest.raises(CheckpointError, match="packed by wlb into 4"):
        ours.load_state_dict(planner("wlb").state_dict())
    with pytest.raises(CheckpointError, match=r"packed by hold into 6 .* --wlb-packing, --global"):
        ours.load_state_dict(planner("hold", num_micro_batches=6).state_dict())
    with pytest.raises(CheckpointError, match="not the state of a planner"):
        ours.load_state_dict({"step": 1})


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"dp_size": 3}, "4 micro-batches a step do not divide over 3 data-parallel ranks"),
        ({"dp_size": 0}, "dp_size is 0"),
        ({"length_multiple": 0}, "length_multiple is 0"),
    ],
)
def test_planner_refuses_sizes_that_do_not_fit(sizes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        planner(**sizes)


def test_planner_passes_on_a_document_above_s_max():
    with pytest.raises(PackingError, match="21 tokens"):
        planner(steps=[[3, 21]]).next_plan()


def test_planner_warns_of_a_growing_backlog_whenever_it_doubles(caplog):
    """Documents of 11 tokens fit once in an S_max of 20, so 2 of the 4 that arrive must wait."""
    steps = [[11] * 4 for _ in range(30)]
    planning = planner(
        "hold", steps, num_micro_batches=2, dp_size=1, max_tokens=20, max_step_tokens=0
    )
    with caplog.at_level(logging.WARNING):
        for _ in steps:
            planning.next_plan()
    warned = [record.getMessage() for record in caplog.records]
    # 22 tokens more each step; a step's worth is 20: above 80 after 4 steps, then doubled.
    assert [message.split(":")[0] for message in warned] == [
        f"hold, step {step}" for step in (3, 8, 18)
    ]
    assert "8 documents with 88 tokens wait, 4.4 steps' worth" in warned[0]


def test_planner_does_not_warn_of_what_waits_for_its_like(caplog):
    with caplog.at_level(logging.WARNING):
        all_plans(planner("hold"))
    assert not caplog.records


def test_assign_takes_the_lightest_rank_that_has_a_place():
    given = micro_batches(*np.random.default_rng(2).integers(1, 9, 60).tolist())
    ranks, loads = [[] for _ in range(5)], [0.0] * 5
    for one in sorted(given, key=lambda m: (-m.predicted_us, m.index)):
        free = [rank for rank in range(5) if len(ranks[rank]) < 12]
        best = min(free, key=lambda rank: (loads[rank], rank))
        ranks[best].append(one)
        loads[best] += one.predicted_us
    assert assign(given, 5) == ranks
