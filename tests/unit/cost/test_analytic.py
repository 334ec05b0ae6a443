import json
import math

import pytest

from megatron_wlb.cost import DocumentCost, ModelShape, analytic_cost
from megatron_wlb.errors import ConfigError

LLAMA2_7B = ModelShape(
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_layers=32,
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    vocab_size=32000,
    gated=True,
)
COST = DocumentCost(2.0, 0.5, 3.0, 1.25, micro_batch_us=7.0)


def test_document_cost_is_linear_plus_quadratic_in_each_pass():
    assert COST.forward_us(4) == 2 * 4 + 0.5 * 16
    assert COST.backward_us(4) == 3 * 4 + 1.25 * 16
    assert COST.document_us(4) == COST.forward_us(4) + COST.backward_us(4)


def test_total_adds_what_every_micro_batch_takes_once():
    assert COST.total_us([4, 1]) == 7 + COST.document_us(4) + COST.document_us(1)
    assert COST.total_us([]) == 7
    assert COST.total_us(iter([4])) == 7 + COST.document_us(4)


def test_document_cost_survives_json():
    assert DocumentCost.from_dict(json.loads(json.dumps(COST.as_dict()))) == COST
    values = COST.as_dict()
    del values["micro_batch_us"]
    assert DocumentCost.from_dict(values).micro_batch_us == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"forward_linear_us": -1.0}, "forward_linear_us is -1.0, but must be finite"),
        ({"backward_quadratic_us": math.nan}, "backward_quadratic_us is nan"),
        ({"micro_batch_us": math.inf}, "micro_batch_us is inf"),
        ({"forward_linear_us": "2"}, "forward_linear_us is '2'; give a number"),
        ({"forward_linear": 2.0}, "unknown coefficient forward_linear; use forward_linear_us"),
        (dict.fromkeys(COST.as_dict(), 0.0), "all coefficients are 0"),
    ],
)
def test_document_cost_refuses_bad_coefficients(change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        DocumentCost.from_dict(COST.as_dict() | change)


def test_document_cost_refuses_a_missing_coefficient():
    values = COST.as_dict()
    del values["backward_linear_us"]
    with pytest.raises(ConfigError, match="backward_linear_us is missing"):
        DocumentCost.from_dict(values)


def test_model_shape_counts_the_weights_of_llama2_7b():
    # 6.74 billion parameters less the embedding (131 million); norms have no matrix products.
    assert LLAMA2_7B.linear_parameters == 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert LLAMA2_7B.linear_parameters == pytest.approx(6.738e9 - 0.131e9, rel=1e-3)
    assert LLAMA2_7B.linear_flops == 2 * LLAMA2_7B.linear_parameters


def test_model_shape_counts_grouped_queries_and_plain_mlps():
    shape = ModelShape(
        hidden_size=10,
        ffn_hidden_size=7,
        num_layers=3,
        num_attention_heads=6,
        num_query_groups=2,
        kv_channels=5,
        vocab_size=11,
        gated=False,
    )
    qkv, output, mlp = 10 * (6 + 2 + 2) * 5, 6 * 5 * 10, 2 * 10 * 7
    assert shape.linear_parameters == 3 * (qkv + output + mlp) + 10 * 11
    # QKᵀ and PV: 2 · 2 · heads · dim FLOPs for each of length² / 2 pairs.
    assert shape.attention_flops(8) == 3 * 4 * 6 * 5 * 8**2 // 2


def test_analytic_cost_is_flops_over_rate():
    cost = analytic_cost(
        LLAMA2_7B, attention_tflops=400, linear_tflops=600, num_devices=16, micro_batch_us=3
    )
    length = 131072
    linear_us = length * LLAMA2_7B.linear_flops / (16 * 600e12) * 1e6
    attention_us = 32 * 2 * 4096 * length**2 / (16 * 400e12) * 1e6
    assert cost.forward_us(length) == pytest.approx(linear_us + attention_us)
    assert cost.backward_us(length) == pytest.approx(2 * linear_us + 2.5 * attention_us)
    assert cost.micro_batch_us == 3
    # At 128K attention outweighs the rest: 3.9 times, from the FLOPs alone.
    assert attention_us / linear_us == pytest.approx(3.9, abs=0.05)


@pytest.mark.parametrize("name", ["attention_tflops", "linear_tflops", "num_devices"])
def test_analytic_cost_refuses_rates_that_are_not_positive(name):
    rates = {"attention_tflops": 4.0, "linear_tflops": 6.0, "num_devices": 2} | {name: 0}
    with pytest.raises(ConfigError, match=f"{name} is 0; give a positive number"):
        analytic_cost(LLAMA2_7B, **rates)


def test_model_shape_refuses_sizes_below_one():
    with pytest.raises(ConfigError, match="num_query_groups is 0; give at least 1"):
        ModelShape(4, 4, 1, 2, 0, 2, 8, True)
