"""``plan_batch``: each sample of a step runs once, under the cap, and ranks have like work."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import settings

import megatron_wlb as wlb
from megatron_wlb.plan import StepPlan

few_examples = settings(max_examples=50)
ROLLOUTS = wlb.sample_lengths("slimpack", 24, seed=3, window=32768)[:300]
TP2_PP4 = wlb.Parallelism(tp_size=2, pp_size=4, dp_size=2, sequence_parallel=True)


def rank_us(plan: StepPlan) -> list[float]:
    return [sum(m.predicted_us for m in rank) for rank in plan.micro_batches]


@pytest.mark.parametrize("cost", ["mixtral-8x7b", wlb.DocumentCost(1.0, 1e-4, 2.0, 2e-4)])
def test_slices_run_alike_on_replicas_that_share_experts(cost) -> None:
    layout = wlb.Parallelism(pp_size=2, dp_size=4, ep_size=2)
    batch = {"max_tokens": 16384, "slices": True, "cost": cost}
    window = {"window": 16384, "num_micro_batches": 8, "packing": "slim"}
    steps = [wlb.plan_batch(ROLLOUTS[:90], layout=layout, **batch)]
    if not isinstance(cost, str):
        steps += wlb.plan_steps(ROLLOUTS[:90], layout=layout, cost=cost, **window)
    for plan in steps:
        assert plan.chains[::2] == plan.chains[1::2]
        assert wlb.simulate_step(plan, layout, model="mixtral-8x7b").num_tokens == plan.num_tokens
    assert steps[0].num_tokens == sum(ROLLOUTS[:90])
    unequal = wlb.Parallelism(dp_size=3, ep_size=2)
    for plan in (partial(wlb.plan_batch, **batch), partial(wlb.plan_steps, **window)):
        with pytest.raises(wlb.WLBError, match="EP 2 × expert TP 1 does not divide the 3 ranks"):
            plan([5, 70], layout=unequal)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_without_a_pipeline_are_as_balanced_as_can_be(seed: int) -> None:
    """Against all ways of dealing ten samples to two ranks."""
    lengths = np.random.default_rng(seed).integers(100, 30000, 10)
    cost = wlb.DocumentCost(1.0, 1e-4, 2.0, 2e-4)
    plan = wlb.plan_batch(lengths, max_tokens=10**6, layout=wlb.Parallelism(dp_size=2), cost=cost)
    times_us = [cost.document_us(int(n)) for n in lengths]
    best_us = min(
        max(sum(us for us, at in zip(times_us, own, strict=True) if at == rank) for rank in (0, 1))
        for own in product((0, 1), repeat=10)
    )
    assert best_us <= max(rank_us(plan)) * (1 + 1e-9) <= 1.1 * best_us


def test_a_pipeline_gets_more_micro_batches_and_slices_are_faster_still() -> None:
    same = {"max_tokens": 65536, "cost": "7b"}
    flat = wlb.Parallelism(tp_size=8, dp_size=2, sequence_parallel=True)
    few, more, cut = (
        wlb.plan_batch(ROLLOUTS, layout=layout, **same, **kind)
        for layout, kind in ((flat, {}), (TP2_PP4, {}), (TP2_PP4, {"slices": True}))
    )
    assert len(few.micro_batches[0]) < len(more.micro_batches[0])
    fixed = wlb.plan_batch(
        ROLLOUTS, layout=TP2_PP4, num_micro_batches=len(few.micro_batches[0]), **same
    )
    times_us = [wlb.simulate_step(plan, TP2_PP4).step_us for plan in (fixed, more, cut)]
    assert times_us[1] < 0.97 * times_us[0]
    assert times_us[2] < 0.97 * times_us[1]


def test_long_samples_lie_together_where_that_is_faster() -> None:
    """Then only one of the pipelines waits for long ones."""
    layout, lengths = wlb.Parallelism(pp_size=2, dp_size=2), [32768, 32768, *[3000] * 64]
    same = {"max_tokens": 32768, "layout": layout, "cost": "7b", "hardware": "h100-sxm"}
    plan = wlb.plan_batch(lengths, **same)
    spread = wlb.plan_batch(lengths, **same, groups=range(66))
    long = [
        [sum(0 in m.samples or 1 in m.samples for m in own) for own in one.micro_batches]
        for one in (plan, spread)
    ]
    assert {*long[0]} == {0, 2} and long[1] == [1, 1]
    times_us = [
        wlb.simulate_step(one, layout, hardware="h100-sxm").step_us for one in (plan, spread)
    ]
    assert times_us[0] < 0.96 * times_us[1]


def test_a_number_that_is_given_is_kept_and_packed_across_ranks() -> None:
    """One rank alone could not hold its share by work: room is found over all of them."""
    lengths = [60, 5, 5, 5, 5, 5, 5, 5, 5]
    layout = wlb.Parallelism(dp_size=2)
    cost = wlb.DocumentCost(1.0, 100.0, 2.0, 200.0)
    plan = wlb.plan_batch(lengths, max_tokens=60, layout=layout, cost=cost, num_micro_batches=1)
    assert [[m.length for m in rank] for rank in plan.micro_batches] in ([[60], [40]], [[40], [60]])
    more = wlb.plan_batch(lengths, max_tokens=60, layout=layout, num_micro_batches=12)
    assert [len(rank) for rank in more.micro_batches] == [12, 12] and more.num_tokens == 100


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"lengths": [5, 70]}, "sample 1 has 70 tokens, above max_tokens 64"),
        (
            {"lengths": [60, 60, 60], "num_micro_batches": 1},
            "3 samples of 180 tokens do not fit 1 micro-batches of 64 tokens on each of 2",
        ),
        ({"lengths": []}, "lengths has no lengths"),
        ({"lengths": [0]}, "length number 1 is 0"),
        ({"lengths": [[5], [6, 7]]}, "lengths holds object"),
        ({"groups": [1]}, r"groups holds int64 of shape \(1,\), but 3 samples need a whole number"),
        ({"groups": 3}, "groups holds int64 of shape"),
        ({"groups": ["a", 1, 2]}, "groups holds <U"),
        ({"groups": [1, 1, 2], "slices": True}, "slices are not grouped"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0"),
        ({"cost": "7bb"}, "7bb"),
        ({"cost": None}, "cost is None; give a cost"),
        ({"weights": [np.ones((1, n)) for n in (5, 6, 7)]}, r"mask of document 0 holds .*\(1, 5\)"),
        ({"weights": ["a" * n for n in (5, 6, 7)]}, "mask of document 0 holds <U5"),
        ({"weights": [np.ones(n) * 1j for n in (5, 6, 7)]}, "mask of document 0 holds complex128"),
        ({"weights": [[1] * 5, [[1], 2], [1] * 7]}, "mask of document 1 holds object"),
        ({"layout": 3}, "layout is 3"),
        (
            {"layout": wlb.Parallelism(dp_size=4, ep_size=2), "equal_numbers": False},
            "equal_numbers is False, but 2 data-parallel ranks exchange tokens",
        ),
    ],
)
def test_bad_batches_are_told(given: dict, complaint: str) -> None:
    right = {"lengths": [5, 6, 7], "max_tokens": 64, "layout": wlb.Parallelism(dp_size=2)}
    with pytest.raises(wlb.WLBError, match=complaint):
        wlb.plan_batch(**right | given)


@pytest.mark.parametrize("slices", [False, True])
def test_weights_are_counted_and_change_no_plan(slices: bool) -> None:
    random = np.random.default_rng(1)
    lengths = random.integers(100, 900, 40)
    weights = [random.choice([0.0, 1.0, 0.5], n) for n in lengths]
    given = {"max_tokens": 1024, "layout": wlb.Parallelism(pp_size=2, dp_size=2), "slices": slices}
    plan = wlb.plan_batch(lengths, **given, weights=weights)
    plain = wlb.plan_batch(lengths, **given)
    assert [m.samples for m in plan] == [m.samples for m in plain]
    assert plan.num_targets == sum(own[1:].sum() for own in weights)  # nothing predicts the first
    assert plan.digest != plain.digest
    with pytest.raises(wlb.WLBError, match="the batch has 40 documents of"):
        wlb.plan_batch(lengths, **given, weights=weights[1:])
    weights[3][5] = -1
    with pytest.raises(wlb.WLBError, match="the mask of document 3 has weights from -1"):
        wlb.plan_batch(lengths, **given, weights=weights)


def test_memory_bounds_micro_batches_and_slices() -> None:
    layout = wlb.Parallelism(tp_size=4, pp_size=4, sequence_parallel=True)
    lengths = [30000, *wlb.sample_lengths("slimpack", 2, seed=3, window=16384)[:60]]
    given = {"max_tokens": 65536, "layout": layout, "cost": "7b"}
    plain = wlb.plan_batch(lengths, **given, slices=True)
    assert not any(m.recomputed for m in plain)
    peak_gib = wlb.simulate_step(plain, layout, model="7b").peak_bytes / 2**30
    limit = 0.6 * peak_gib
    plan = wlb.plan_batch(lengths, **given, slices=True, memory_gib=limit)
    assert wlb.simulate_step(plan, layout, model="7b").peak_bytes <= limit * 2**30
    assert any(m.recomputed for m in plan) and plan.num_tokens == sum(lengths)
    with pytest.raises(wlb.WLBError, match=r"slices of \d+ samples need [\d.]+ GiB, above 8 GiB"):
        wlb.plan_batch(lengths, **given, slices=True, memory_gib=8)
    with pytest.raises(wlb.WLBError, match=r"sample 0 has 30000 tokens, above what fits 30 GiB"):
        wlb.plan_batch(lengths, **given, memory_gib=30)
    whole = wlb.plan_batch(lengths[1:], **given, memory_gib=30)
    assert max(m.padded_length for m in whole) < 30000
    assert wlb.simulate_step(whole, layout, model="7b").peak_bytes <= 30 * 2**30
    for wrong in ({"cost": wlb.DocumentCost(1, 1, 2, 2)}, {"memory_gib": 0}):
        with pytest.raises(wlb.WLBError, match="memory_gib"):
            wlb.plan_batch(lengths, **{**given, "memory_gib": 30, **wrong})


def test_memory_is_counted_of_as_many_micro_batches_as_virtual_stages_hold() -> None:
    layout = wlb.Parallelism(tp_size=4, pp_size=4, vpp_size=2, sequence_parallel=True)
    given = {"max_tokens": 10**6, "layout": layout, "cost": "7b", "memory_gib": 30}
    with pytest.raises(wlb.WLBError, match="above what fits 30 GiB") as told:
        wlb.plan_batch([10**6], **given)
    fitting = int(str(told.value).split("GiB, ")[1].split()[0])
    plan = wlb.plan_batch([fitting] * 32, **given)
    peak_gib = wlb.simulate_step(plan, layout).peak_bytes / 2**30
    assert 0.99 * 30 < peak_gib <= 30


def test_memory_is_that_of_the_rank_with_the_longest_sample() -> None:
    layout = wlb.Parallelism(tp_size=4, pp_size=4, dp_size=2, sequence_parallel=True)
    given = {"max_tokens": 65536, "layout": layout, "cost": "7b", "slices": True}
    lengths = [60000, *[1000] * 31]
    plan = wlb.plan_batch(lengths, **given, memory_gib=20)
    assert any(m.recomputed for m in plan)
    assert wlb.simulate_step(plan, layout).peak_bytes <= 20 * 2**30
    with pytest.raises(wlb.WLBError, match=r"slices of 32 samples need 13.68 GiB, above 13 GiB"):
        wlb.plan_batch(lengths, **given, memory_gib=13, num_micro_batches=16)


def test_replicas_that_share_experts_wait_little_for_each_other() -> None:
    """Whole samples go no slower than in a number of micro-batches that someone gives."""
    model, layout = "qwen3-30b-a3b", wlb.Parallelism(pp_size=4, dp_size=4, ep_size=4, etp_size=1)
    drawn = np.random.default_rng(4).lognormal(np.log(12000), 0.8, 96)
    lengths = [1024 + int(min(65536, length)) for length in drawn]

    def us(number: int | None) -> float:
        plan = wlb.plan_batch(
            lengths, max_tokens=131072, layout=layout, cost=model, num_micro_batches=number
        )
        return wlb.simulate_step(plan, layout, model=model).pipeline_us

    assert us(None) < 1.05 * min(map(us, (8, 16, 24, 32)))
