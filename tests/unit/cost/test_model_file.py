from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_wlb.cost import ModelShape
from megatron_wlb.cost.model_file import load_model, model_names, padded_vocabulary
from megatron_wlb.cost.parts import Experts
from megatron_wlb.errors import ConfigError

SIZES = {
    "hidden_size": 96, "ffn_hidden_size": 160, "num_layers": 6, "num_attention_heads": 6,
    "num_query_groups": 3, "kv_channels": 16, "vocab_size": 500, "gated": True,
}  # fmt: skip


def write(path: Path, **changes: object) -> str:
    sizes = {name: value for name, value in (SIZES | changes).items() if value is not None}
    file = path / "model.yaml"
    file.write_text(yaml.safe_dump(sizes))
    return str(file)


def num_parameters(shape: ModelShape) -> float:
    return (shape.linear_parameters + shape.head_linear_parameters) / 1e9


def test_models_of_the_paper_have_the_sizes_of_their_names() -> None:
    names = [name for name in model_names() if not load_model(name).experts]
    found = {name: round(num_parameters(load_model(name)), 2) for name in names}
    assert found == {"550m": 0.55, "7b": 6.74, "30b": 30.14, "70b": 70.32}


@pytest.mark.parametrize("other", [{"kv_channels": 16}, {"num_query_groups": 3}], ids=str)
def test_heads_of_latents_are_those_of_the_model(other: dict[str, int], tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    right = {"latent": latent, "kv_channels": 24, "num_query_groups": 6}
    assert load_model(write(tmp_path, **right)).layer.query_size == 6 * (24 + 16) // 2
    with pytest.raises(ConfigError, match=r"give 24 \(qk_head_dim .* and 6, one group"):
        load_model(write(tmp_path, **right | other))


def test_file_gives_the_shape_it_says(tmp_path: Path) -> None:
    path = write(tmp_path, rotary_percent=0.5, description="a model")
    assert load_model(path) == ModelShape(**SIZES, rotary_percent=0.5)  # type: ignore[arg-type]


def test_heads_that_a_file_leaves_out_are_megatrons(tmp_path: Path) -> None:
    given = {"num_query_groups": None, "kv_channels": None}
    shape = load_model(write(tmp_path, **given, num_attention_heads=4))
    heads = shape.num_attention_heads, shape.num_query_groups, shape.kv_channels
    assert heads == (4, 4, SIZES["hidden_size"] // 4)
    latent = {"kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    shape = load_model(write(tmp_path, **given, latent=latent))
    assert (shape.num_query_groups, shape.kv_channels) == (SIZES["num_attention_heads"], 24)


def test_file_gives_experts_by_megatrons_names(tmp_path: Path) -> None:
    path = write(
        tmp_path, num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=32, moe_layer_freq=2,
        moe_shared_expert_intermediate_size=64,
    )  # fmt: skip
    experts = Experts(8, 3, 32, True, 64)
    shape = ModelShape(**SIZES)  # type: ignore[arg-type]
    assert load_model(path) == shape.with_experts(experts, [True, False] * 3)
    default = load_model(write(tmp_path, num_experts=8))
    assert default == shape.with_experts(Experts(8, 2, 160, True), [True] * 6)


def test_vocabulary_is_padded_as_megatron_does(tmp_path: Path) -> None:
    shape = load_model(write(tmp_path))
    assert [padded_vocabulary(shape, tp).vocab_size for tp in (1, 3, 4)] == [512, 768, 512]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_layers": None}, "num_layers is missing"),
        ({"hiden_size": 3}, "unknown size hiden_size; use hidden_size"),
        ({"num_layers": None, "gated": None}, "num_layers, gated are missing; add them"),
        ({"kv_channels": None, "num_attention_heads": 7}, "does not divide into 7 attention heads"),
        ({"kv_channels": None, "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"latent": 3}, "latent: 3 is not a table; give names and values"),
        ({"num_layers": 2.5}, "num_layers is 2.5; give a whole number"),
        ({"num_layers": True}, "num_layers is True; give a whole number"),
        ({"gated": 1}, "gated is 1; give true or false"),
        ({"kv_channels": 0}, "kv_channels is 0; give at least 1"),
        ({"moe_router_topk": 2}, "num_experts is None; give a whole number"),
        ({"num_experts": 2, "moe_router_topk": 3}, "passes 3 experts, but there are 2"),
        ({"num_experts": 2, "moe_layer_freq": "[1]"}, "moe_layer_freq is '\\[1\\]'; give N"),
        ({"num_query_groups": 4}, "6 attention heads do not divide into 4"),
    ],
)
def test_impossible_file_is_an_error_of_one_line(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        load_model(write(tmp_path, **changes))
    assert "\n" not in str(error.value)


def test_unknown_model_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown model 7bb; did you mean 7b\? There are 550m, 7b, mixtral-8x7b, 30b,",
    ):
        load_model("7bb")
    with pytest.raises(ConfigError, match=r"No such file"):
        load_model(str(tmp_path / "none.yaml"))
