import dataclasses

import pytest

from megatron_wlb.cost import ModelShape, Parallelism, Recompute
from megatron_wlb.errors import ConfigError

SHAPE = ModelShape(
    hidden_size=10,
    ffn_hidden_size=8,
    num_layers=6,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=5,
    vocab_size=12,
    gated=False,
)
LLAMA2_7B = ModelShape(4096, 11008, 32, 32, 32, 128, 32000, True)


def test_shape_counts_the_weights_of_llama2_7b() -> None:
    # 6.74 billion parameters less the embedding (131 million); norms have no matrix products.
    assert LLAMA2_7B.linear_parameters == 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert LLAMA2_7B.linear_parameters == pytest.approx(6.738e9 - 0.131e9, rel=1e-3)
    assert LLAMA2_7B.linear_flops == 2 * LLAMA2_7B.linear_parameters


def test_shape_counts_grouped_queries_and_plain_mlps() -> None:
    qkv, output, mlp = 10 * (6 + 2 + 2) * 5, 6 * 5 * 10, 2 * 10 * 8
    assert SHAPE.linear_parameters == 6 * (qkv + output + mlp) + 10 * 12
    # QKᵀ and PV: 2 · 2 · heads · dim FLOPs for each of length² / 2 pairs.
    assert SHAPE.attention_flops(8) == 6 * 4 * 6 * 5 * 8**2 // 2
    gated = dataclasses.replace(SHAPE, gated=True)
    assert gated.linear_parameters == SHAPE.linear_parameters + 6 * 10 * 8


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_query_groups": 0}, "num_query_groups is 0; give at least 1"),
        ({"vocab_size": -1}, "vocab_size is -1; give at least 1"),
    ],
)
def test_impossible_shape_is_refused(change: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        dataclasses.replace(SHAPE, **change)


@pytest.mark.parametrize(
    ("layout", "complaint"),
    [
        ({"pp_size": 4}, "6 layers do not divide over 4 model chunks"),
        ({"pp_size": 2, "vpp_size": 2}, "6 layers do not divide over 4 model chunks"),
        ({"tp_size": 4}, "num_attention_heads 6 does not divide over TP 4"),
        ({"tp_size": 3}, "num_query_groups 2 does not divide over TP 3"),
        ({"pp_size": 3, "stage_layers": (2, 4)}, "stage_layers 2, 4 do not spread 6 layers over 3"),
        ({"pp_size": 3, "stage_layers": (2, 2, 3)}, "stage_layers 2, 2, 3 do not spread 6 layers"),
        ({"pp_size": 2, "stage_layers": (7, -1)}, "stage_layers 7, -1 do not spread"),
    ],
)
def test_layout_that_does_not_divide_the_model_is_refused(layout: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Parallelism(**layout).layers_of_stages(SHAPE)


def test_layout_divides_layers_over_chunks() -> None:
    assert Parallelism(pp_size=3, tp_size=2).layers_of_stages(SHAPE) == (2,) * 3
    assert Parallelism(pp_size=3, vpp_size=2).layers_of_stages(SHAPE) == (1,) * 6
    assert Parallelism(pp_size=2, stage_layers=(4, 2)).layers_of_stages(SHAPE) == (4, 2)
    assert Parallelism(pp_size=3, stage_layers=(4, 2, 0)).layers_of_stages(SHAPE) == (4, 2, 0)
    assert Parallelism(tp_size=2).sequence_shards == 1
    assert Parallelism(tp_size=2, sequence_parallel=True).sequence_shards == 2
    with pytest.raises(ConfigError, match="dp_size is 0"):
        Parallelism(dp_size=0)


def test_recompute_groups_layers_as_megatron_does() -> None:
    assert Recompute().groups(3) == Recompute("selective").groups(3) == [(1, False)] * 3
    assert Recompute("full", "uniform", 2).groups(5) == [(2, True), (2, True), (1, True)]
    assert Recompute("full", "block", 2).groups(3) == [(1, True), (1, True), (1, False)]
    assert Recompute("full", "block", 9).groups(2) == [(1, True)] * 2
    assert Recompute("full", "uniform", 2).recomputed_layers(5) == 5
    assert Recompute("full", "block", 2).recomputed_layers(5) == 2
    assert Recompute("selective").recomputed_layers(5) == 0


@pytest.mark.parametrize(
    "settings", [("full", None, None), ("full", "block", None), (None, "block", 1)]
)
def test_recompute_needs_its_method_with_full_only(settings: tuple) -> None:
    with pytest.raises(ConfigError, match="full needs both, the others neither"):
        Recompute(*settings)
