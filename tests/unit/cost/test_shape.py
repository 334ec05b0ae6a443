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
