import time

import numpy as np
import pytest
from helpers.slowness import slowness
from helpers.strategies import reference_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost.attention_latency import AnalyticAttention, pairs
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan.sharding import Selector, Sharding, predict, shard_arrays
from megatron_wlb.plan.sharding.select import MODES

GPU = AnalyticAttention(num_heads=4, head_dim=128, tflops=400)


class Exact:
    """A kernel that computes exact pairs at one rate: balance is all that counts."""

    call_us = (10.0, 20.0)

    def chunk_us(self, queries, keys):
        return pairs(queries, keys) * 1.0, pairs(queries, keys) * 2.0


class Uneven:
    """A kernel whose times have no exact sums, and backward other rates than forward."""

    call_us = (0.1, 0.7)

    def chunk_us(self, queries, keys):
        return np.log1p(queries * keys**0.7), np.sqrt(queries * 3.3 + keys)


class Calls:
    """A kernel whose chunks cost the same whatever they hold: as few as possible win."""

    call_us = (0.0, 0.0)

    def chunk_us(self, queries, keys):
        return np.ones(len(queries)), np.ones(len(queries))


@st.composite
def micro_batches(draw):
    cp_size = draw(st.integers(2, 8))
    lengths = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=20))
    return [*lengths, -sum(lengths) % (2 * cp_size) or 2 * cp_size], cp_size


@settings(max_examples=100)
@given(micro_batches(), st.sampled_from([GPU, Exact(), Calls(), Uneven()]))
def test_choice_is_never_predicted_slower_than_what_it_chooses_from(case, latency):
    lengths, cp_size = case
    us = {mode: Selector(mode, cp_size, latency).choose(lengths).latency_us for mode in MODES}
    assert us["adaptive"] == min(us["per-sequence"], us["per-document"])
    assert us["hybrid"] <= us["adaptive"]


@settings(max_examples=150)
@given(micro_batches(), st.sampled_from([GPU, Exact(), Calls(), Uneven()]))
def test_choice_is_the_best_of_all_lengths_each_predicted_alone(case, latency):
    """To the bit, though all are predicted at once."""
    lengths, cp_size = case
    shardings = [Sharding("per-sequence"), Sharding("per-document")]
    shardings += [Sharding("hybrid", threshold) for threshold in sorted(set(lengths))[1:]]
    alone = [predict(lengths, cp_size, sharding, latency) for sharding in shardings]
    selector = Selector("hybrid", cp_size, latency)
    assert selector.predictions_each([lengths])[0] == alone
    # Of equals the first one.
    assert selector.choose(lengths) == min(alone, key=lambda prediction: prediction.latency_us)


@settings(max_examples=50)
@given(micro_batches(), st.integers(0, 3000))
def test_prediction_adds_up_the_chunks_of_each_rank(case, threshold):
    lengths, cp_size = case
    sharding = Sharding("hybrid", threshold)
    predicted = predict(lengths, cp_size, sharding, Exact())
    expected = [
        sum((b - a) * b - (b - a) * (b - a - 1) // 2 for _, a, b in rows.tolist())
        for rows in shard_arrays(lengths, cp_size, sharding)
    ]
    assert predicted.forward_us == pytest.approx([10 + us for us in expected])
    assert predicted.backward_us == pytest.approx([20 + 2 * us for us in expected])
    assert predicted.latency_us == pytest.approx(30 + 3 * max(expected))
    mean = 10 + sum(expected) / cp_size
    assert predicted.forward_imbalance == pytest.approx((10 + max(expected)) / mean)


def test_hybrid_cuts_the_long_document_only():
    lengths = [5000, *[40] * 100, 152]
    chosen = Selector("hybrid", 4, GPU).choose(lengths)
    assert chosen.sharding.kind == "hybrid"
    assert 152 < chosen.sharding.threshold <= 5000
    assert chosen.latency_us < 0.95 * Selector("adaptive", 4, GPU).choose(lengths).latency_us


def test_choice_is_faster_on_the_reference_lengths():
    """Modelled, whole tiles at CP 4: what the packing of a window alone loses to balance."""
    us = {mode: 0.0 for mode in MODES}
    for seed in range(20):
        lengths = reference_lengths(1, seed)
        for mode in MODES:
            us[mode] += Selector(mode, 4, GPU).choose(lengths).latency_us
    assert us["per-sequence"] / us["adaptive"] > 1.3
    assert us["per-document"] / us["hybrid"] > 1.003


@pytest.mark.parametrize("mode", ["adaptive", "hybrid"])
def test_choice_for_a_thousand_documents_takes_milliseconds(mode):
    lengths = np.random.default_rng(0).integers(1, 250, 999).tolist()
    lengths.append(131072 - sum(lengths))
    selector = Selector(mode, 16, GPU)

    def seconds():
        began = time.process_time()
        selector.choose(lengths)
        return time.process_time() - began

    # 2 to 4 ms on a core that others share; twice that is no measure of the machine but of growth.
    assert min(seconds() for _ in range(20)) < 0.008 * slowness()


def test_selector_refuses_an_unknown_mode():
    with pytest.raises(ConfigError, match="unknown sharding best"):
        Selector("best", 2, GPU)
