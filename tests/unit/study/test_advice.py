"""What is recommended is never slower, as tables print it, than what is not, within the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.machines import H100
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost import Execution, Parallelism
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.trial import Outcome, Steps, trial
from megatron_wlb.study.advice import check_max_delay, gain, recommended

RUN = Run(load_model("550m"), Execution(Parallelism(dp_size=2)), H100, 512, 4)
STEPS = Steps(LengthSource.of_distribution("reference"), num=4, warm_up=0)
PLAIN = trial(RUN, PackingSettings("original", 1024), STEPS)
rates = st.floats(0.05, 1.0) | st.sampled_from([0.5, 0.5001, 0.5004, 0.501])
delays = st.floats(0.0, 3.0) | st.sampled_from([0.0, 0.5])


def outcome(
    rate: float, delay: float = 0.0, *, imbalance: float = 1.1, parts: tuple[float, ...] = (),
    name: str = "hold", **changes: object,
) -> Outcome:  # fmt: skip
    metrics = replace(PLAIN.metrics, delay_mean_steps=delay, imbalance_weighted=imbalance)
    given = {"mfu": rate, "mfu_by_part": parts or (rate,) * 4, "metrics": metrics}
    return replace(PLAIN, setting=PackingSettings(name, 1024), **given | changes)


@settings(max_examples=300)
@given(st.lists(st.tuples(rates, delays), min_size=1, max_size=9), delays)
def test_recommended_outcome_is_the_fastest_within_the_limit(rows, limit: float):
    outcomes = [outcome(*row) for row in rows]
    base = outcomes[0]
    best = recommended(outcomes, limit, base)
    within = [one for one in outcomes if one.delay_steps <= limit]
    if best is None:
        assert not within
        return
    assert best in within
    for other in within:
        faster = float(f"{best.speedup(base):.3f}") - float(f"{other.speedup(base):.3f}")
        assert faster >= 0
        if faster == 0:
            assert best.delay_steps <= other.delay_steps


def test_what_does_not_fit_memory_is_recommended_only_where_nothing_does() -> None:
    slow, fast = outcome(0.5), outcome(0.6, out_of_memory="out of memory")
    assert recommended([slow, fast], 1, slow) is slow
    assert recommended([fast], 1, fast) is fast


def test_gain_of_order_alone_is_said_to_be_one() -> None:
    original = outcome(1.0, imbalance=1.136)
    assert "comes from the order" in gain(outcome(1.07, imbalance=1.136), original)
    assert "comes from the order" not in gain(outcome(1.07, imbalance=1.05), original)
    sliced = outcome(1.07, imbalance=1.136, name="slim")
    assert "comes from slices, with which the pipeline fills" in gain(sliced, original)


def test_gain_below_its_spread_is_said_to_be_so() -> None:
    original = outcome(1.0)
    said = gain(outcome(1.01, parts=(0.97, 1.01, 1.02, 1.04)), original, "original, fitted")
    assert "1.010 × the work a second of original, fitted" in said
    assert "(0.970 to 1.040 in parts of the steps)" in said
    assert "less than it varies by" in said
    steady = gain(outcome(1.1, parts=(1.09, 1.1, 1.1, 1.11)), original)
    assert "less than it varies by" not in steady
    alone = outcome(1.0, parts=(1.0,))
    assert "too few steps" in gain(outcome(1.1, parts=(1.1,)), alone)


@pytest.mark.parametrize("limit", [-0.1, float("nan")])
def test_limit_that_is_none_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"--max-delay is .*; give at least 0 steps"):
        check_max_delay(limit)
