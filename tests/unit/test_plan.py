from dataclasses import replace

import pytest

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan
from megatron_wlb.plan.sharding import Sharding
from megatron_wlb.strategies.plan.strategy import Cluster, Strategy

LONG = Document(corpus=1, number=7, offset=0, length=10, ends=True, epoch=2, arrival=5, step=3)
SHORT = Document(corpus=0, number=2, offset=0, length=4, ends=False, epoch=2, arrival=6, step=4)


def micro_batch(index, *documents, padded=16, us=1.0):
    return MicroBatchPlan(index, tuple(Span(d, 0, d.length) for d in documents), padded, us)


def step_plan(*ranks, step=5, strategy=None):
    own = tuple(map(tuple, ranks))
    return StepPlan(step, "any", own, num_waiting=0, waiting_tokens=0, strategy=strategy)


def test_document_cut_keeps_tokens_and_labels():
    head, tail = LONG.cut(6, tail_step=4)
    assert (head.offset, head.length, head.ends, head.step) == (0, 6, False, 3)
    assert (tail.offset, tail.length, tail.ends, tail.step) == (6, 4, True, 4)
    assert head.num_targets + tail.num_targets == LONG.num_targets == 9
    assert head.key < tail.key
    assert tail.cut(1, 4)[1].offset == 7


def test_step_plan_sums_over_ranks():
    plan = step_plan(
        [micro_batch(0, LONG, us=9.0), micro_batch(2, us=1.0)],
        [micro_batch(1, SHORT, us=3.0), micro_batch(3, us=1.0)],
    )
    assert [m.index for m in plan] == [0, 2, 1, 3]
    assert list(plan.documents) == [LONG, SHORT]
    assert (plan.num_tokens, plan.padding_tokens, plan.num_targets) == (14, 50, 13)
    assert plan.imbalance == pytest.approx(9 * 4 / 14)
    assert plan.delay_steps == pytest.approx((10 * 2 + 4 * 1) / 14)


def test_digest_changes_with_whatever_ranks_must_agree_on():
    plan = step_plan([micro_batch(0, LONG)], [micro_batch(1, SHORT)])
    changed = [
        replace(plan, step=6),
        replace(plan, packing="other"),
        step_plan([micro_batch(1, LONG)], [micro_batch(0, SHORT)]),
        step_plan([micro_batch(0, LONG), micro_batch(1, SHORT)]),
        step_plan([micro_batch(0, LONG, SHORT)], [micro_batch(1)]),
        step_plan([micro_batch(0, LONG, padded=24)], [micro_batch(1, SHORT)]),
        *(
            step_plan([replace(micro_batch(0, LONG), sharding=other)], [micro_batch(1, SHORT)])
            for other in (Sharding("per-document"), Sharding("hybrid", 3), Sharding("hybrid", 4))
        ),
        *(
            step_plan([micro_batch(0, LONG._replace(**change))], [micro_batch(1, SHORT)])
            for change in (
                {"corpus": 0}, {"number": 8}, {"offset": 1}, {"length": 9}, {"ends": False},
                {"epoch": 0},
            )
        ),
    ]  # fmt: skip
    # In which order passes run, and with whom: ranks that disagreed would wait for ever.
    changed.append(replace(plan, chains=tuple((1,) * len(rank) for rank in plan.micro_batches)))
    changed += [
        replace(
            plan,
            micro_batches=tuple(
                tuple(replace(m, **change) for m in rank) for rank in plan.micro_batches
            ),
        )
        for change in ({"replicas": (0, 1)}, {"recomputed": True})
    ]
    digests = {plan.digest, *(other.digest for other in changed)}
    assert len(digests) == 1 + len(changed)
    assert len(plan.digest) == 64
    assert step_plan([micro_batch(0, LONG)], [micro_batch(1, SHORT)]).digest == plan.digest


def test_digest_leaves_out_what_may_differ_between_ranks():
    """Predicted times are floats of a cost model; plans that agree on documents agree."""
    plan = step_plan([micro_batch(0, LONG, us=1.0)])
    assert step_plan([micro_batch(0, LONG, us=1.0 + 1e-9)]).digest == plan.digest


def test_digest_of_a_plan_without_slices_is_what_it_was_before_there_were_any():
    document = Document(0, 3, 0, 8, True, 0, 3, 0)
    whole = MicroBatchPlan(0, (Span(document, 0, 8),), 8, 1.0)
    assert StepPlan(7, "slim", ((whole,), (whole,)), 0, 0).digest[:16] == "94c94d4ada6425f7"


def test_strategy_is_part_of_a_plan_and_of_its_digest():
    cluster = Cluster(8, 4)
    plan = step_plan([micro_batch(0, LONG)], [micro_batch(1, SHORT)], [])
    texts = "tp4:4k+2*tp2:1k", "tp4:8k+2*tp2:1k", "tp4:4k+tp2:1k+tp1:1k", "cp4:4k+2*tp2:1k"
    plans = [replace(plan, strategy=Strategy.parse(text, cluster)) for text in texts]
    assert len({p.digest for p in [plan, *plans]}) == len(plans) + 1
    second, rests = (plans[0].alone(number) for number in (1, 2))
    assert second.micro_batches[0][0].length == SHORT.length and rests.micro_batches == ((),)
    assert second.strategy is None and [m.index for m in plans[0]] == [0, 1]
    with pytest.raises(PlanError, match=r"of 1 replicas, but its strategy .* has 3"):
        step_plan([micro_batch(0)], strategy=plans[0].strategy)


def test_digest_of_equal_layouts_is_what_it_was_before_there_were_strategies():
    plan = step_plan([micro_batch(0, LONG)], [micro_batch(1, SHORT)])
    assert plan.digest == ("aac9532920b4a6e132f6b47c4f0911aae4220945e212a5022a2c5d062b4d2443")
