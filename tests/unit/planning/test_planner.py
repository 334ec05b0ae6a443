import json
import logging
import time

import numpy as np
import pytest
from helpers.slowness import slowness
from helpers.soak import PACKINGS
from helpers.strategies import ListStream, documents

from megatron_wlb.cost import DocumentCost
from megatron_wlb.cost.attention_latency import AnalyticAttention
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.plan import MicroBatchPlan
from megatron_wlb.plan.sharding import Selector
from megatron_wlb.planning.packing import packer
from megatron_wlb.planning.planner import Planner, assign, deal

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


def micro_batches(*times_us):
    return [MicroBatchPlan(i, (), 1, us) for i, us in enumerate(times_us)]


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


@pytest.mark.parametrize("packing", PACKINGS)
def test_planner_goes_on_at_its_pace_with_more_epochs_after_the_end(packing: str) -> None:
    """The steps that the flush took, and the rest of the last one, bring no documents at once."""

    def planner(num_epochs: int) -> Planner:
        name, more = packing.partition(",")[0], PACKINGS[packing]
        lengths = np.random.default_rng(3).integers(1, 1025, 120)
        stream = DocumentStream(
            [lengths], window=1024, step_tokens=4096, seed=1, num_epochs=num_epochs
        )
        packing_ = packer(name, num_micro_batches=4, window=1024, cost=COST, **more)
        return Planner(stream, packing_, COST, dp_size=1)

    first = planner(1)
    while first.next_plan() is not None:
        pass
    second = planner(2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    end = second.step
    if not packing.startswith(("fixed", "original")):
        arrived = second._read()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert min(d.step for d in arrived) == end
        of_each = [sum(d.length for d in arrived if d.step == end + k) for k in range(8)]
        steps = second.packer.look_ahead + 1
        assert all(4096 - 1024 <= tokens <= 4096 + 1024 for tokens in of_each[:steps])
    plans = list(iter(second.next_plan, None))
    assert plans[0].step == end
    assert all(d.step >= end for plan in plans for d in plan.documents)
    expected = np.random.default_rng(3).integers(1, 1025, 120).sum()
    assert sum(plan.num_tokens for plan in plans) == expected


def test_planner_state_takes_a_microsecond_a_document_at_most() -> None:
    """It is taken in every step, in the process that trains.

    About 0.3 here, most of it for sorting what is read ahead.
    """
    lengths = np.random.default_rng(3).integers(1, 1025, 100_000)
    packing = packer(
        "hold", num_micro_batches=64, window=1024, cost=COST, max_step_tokens=2**17, look_ahead=1
    )
    packing.pack(documents(lengths.tolist(), step=1), 0)
    num_waiting = len(packing.waiting)
    assert num_waiting > 90_000

    def us_a_document() -> float:
        start_s = time.process_time()
        packing.state_dict()
        return (time.process_time() - start_s) / num_waiting * 1e6

    assert min(us_a_document() for _ in range(5)) < slowness()
