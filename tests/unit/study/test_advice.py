"""What is recommended is never slower, as tables print it, than what is not, within the limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost import DocumentCost, Parallelism
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Workload
from megatron_wlb.study import tune as tuning
from megatron_wlb.study.advice import Option, by_part, check_max_delay, gain, recommended
from megatron_wlb.study.evaluate import evaluate
from megatron_wlb.study.tune import tune

WINDOW = 512
rates = st.floats(0.05, 1.0) | st.sampled_from([0.5, 0.5001, 0.5004, 0.501])
delays = st.floats(0.0, 3.0) | st.sampled_from([0.0, 0.5])


def option(name: str, rate: float, delay: float = 0.0, **changes) -> Option[str]:
    values = {"parts": (rate,) * 4, "imbalance": 1.1, "max_tokens": 8} | changes
    return Option(name, rate, values["parts"], delay, values["imbalance"], values["max_tokens"])


@settings(max_examples=300)
@given(st.lists(st.tuples(rates, delays), min_size=1, max_size=9), delays, st.booleans())
def test_recommended_option_is_the_fastest_within_the_limit(rows, limit: float, plain: bool):
    options = [option(str(number), *row) for number, row in enumerate(rows)]
    original = options[0] if plain else None
    base = options[0]
    best = recommended(options, limit, original)
    within = [o for o in options if o.delay_steps <= limit]
    if best is None:
        assert not within
        return
    assert best in within
    for other in within:
        faster = float(f"{best.speedup(base):.3f}") - float(f"{other.speedup(base):.3f}")
        assert faster >= 0
        if faster == 0:
            assert best.delay_steps <= other.delay_steps


lengths = st.lists(st.integers(1, 3 * WINDOW), min_size=70, max_size=120)


@settings(max_examples=8)
@given(
    lengths,
    st.sampled_from([0.0, 0.1, 0.5, 2.0]),
    st.sampled_from([None, Parallelism(dp_size=2, pp_size=2)]),
)
def test_tuner_recommends_nothing_slower_than_its_held_out_table_has(
    stored, limit: float, layout: Parallelism | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "THRESHOLDS", (1 / 2,))
        patch.setattr(tuning, "DELAY_PRICES", (0.05,))
        patch.setattr(tuning, "TAUS", (1.0,))
        patch.setattr(tuning, "NUM_REFINED", 1)
        source = LengthSource("made up", array_of(stored))
        works = [
            Workload(half, WINDOW, 4, DocumentCost(1, 0.01, 2, 0.02), 1, layout=layout)
            for half in source.halves(1)
        ]
        found = tune(*works, max_tokens=2 * WINDOW, max_delay=limit, steps=6, warm_up=2)
    assert found.chosen.delay <= limit and found.chosen in found.judged
    for other in found.judged:
        if other.delay <= limit:
            ours, theirs = (
                float(f"{e.efficiency / found.original.efficiency:.3f}")
                for e in (found.chosen, other)
            )
            assert ours >= theirs


def array_of(stored: list[int]) -> np.ndarray:
    return np.array(stored, dtype=np.int64)


def test_gain_of_order_alone_is_said_to_be_one() -> None:
    original = option("original", 1.0, imbalance=1.136)
    assert "comes from the order" in gain(option("ordered", 1.07, imbalance=1.136), original)
    assert "comes from the order" not in gain(option("even", 1.07, imbalance=1.05), original)
    sliced = replace(option("slim", 1.07, imbalance=1.136), sliced=True)
    assert "comes from slices, with which the pipeline fills" in gain(sliced, original)


def test_gain_below_its_spread_is_said_to_be_so() -> None:
    original = option("original", 1.0)
    parts = (0.97, 1.01, 1.02, 1.04)
    said = gain(option("other", 1.01, parts=parts), original)
    assert "1.010 × " in said and "(0.970 to 1.040 in parts of the steps)" in said
    assert "less than it varies by" in said
    steady = gain(option("other", 1.1, parts=(1.09, 1.1, 1.1, 1.11)), original)
    assert "less than it varies by" not in steady
    assert "too few steps" in gain(option("other", 1.1, parts=(1.1,)), original)


def test_parts_of_the_steps_hold_each_step_once() -> None:
    assert by_part([1, 2, 3, 4, 5], [1, 1, 1, 1, 1]) == (1.0, 2.0, 3.0, 4.5)
    assert by_part([6.0], [2.0]) == (3.0,)


@pytest.mark.parametrize("limit", [-0.1, float("nan")])
def test_limit_that_is_none_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"--max-delay is .*; give at least 0 steps"):
        check_max_delay(limit)


@pytest.mark.parametrize("packing", ["wlb", "hold", "original", "fixed-greedy"])
def test_flags_hold_every_rule_that_was_packed_by(packing: str) -> None:
    source = LengthSource("made up", array_of([5, 300, 80, 512] * 20))
    work = Workload(source, WINDOW, 4, DocumentCost(1, 0.01, 2, 0.02), 1, long_documents="truncate")
    chosen = PackingSettings(packing, 2 * WINDOW, max_age=5, max_step_tokens=3000)
    flags = " ".join(evaluate(work, chosen, 2, warm_up=0).flags)
    assert "--wlb-long-documents truncate" in flags
    held = packing in ("wlb", "hold")
    assert ("--wlb-max-age 5" in flags) == ("--wlb-max-step-tokens 3000" in flags) == held
