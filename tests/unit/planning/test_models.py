from __future__ import annotations

from pathlib import Path

import pytest

from megatron_wlb.cost.shape import ModelShape, padded_vocabulary
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.models import load_model, model_names


def num_parameters(shape: ModelShape) -> float:
    """In 10⁹, embeddings and all experts too."""
    routed = sum(
        num * part.num_experts * part.expert_numbers * (part.latent_size or shape.hidden_size)
        - num * part.routed_weights(shape.hidden_size)
        for num, layer in shape.runs
        for part in layer.parts
        if part in shape.experts
    )
    return (shape.linear_parameters + shape.head_linear_parameters + routed) / 1e9


def test_models_have_the_sizes_of_their_names() -> None:
    found = {name: round(num_parameters(load_model(name)), 2) for name in model_names()}
    assert found == {
        "550m": 0.55, "7b": 6.74, "30b": 30.14, "70b": 70.32, "llama-3-8b": 8.03,
        "llama-3-70b": 70.55, "qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.09,
        "mixtral-8x7b": 46.7, "deepseek-v3": 672.64, "qwen3.5-35b-a3b": 34.66,
        "nemotron-3-super": 120.67,
    }  # fmt: skip


def test_vocabulary_is_padded_as_megatron_does() -> None:
    padded = [padded_vocabulary(load_model("7b"), tp).vocab_size for tp in (1, 3, 4)]
    assert padded == [32000, 32256, 32256]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("hiden_size: 3", "unknown flag --hiden-size; did you mean --hidden-size?"),
        ("num_layers: 2.5", "--num-layers"),
        ("num_layers: 0", "--num-layers is 0; give at least 1"),
        ("num_experts: 2\nmoe_layer_freq: '[1]'", r"--moe-layer-freq is '\[1\]'; give N"),
        ("num_experts: 2\nmoe_router_topk: 3", "passes 3 experts, but there are 2"),
        ("group_query_attention: true\nnum_query_groups: 5", "do not divide into 5 query groups"),
    ],
)
def test_impossible_file_is_an_error_of_one_line(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(f"hidden_size: 96\n{line}\n")
    with pytest.raises(ConfigError, match=says) as error:
        load_model(str(file))
    assert "\n" not in str(error.value)


def test_unknown_model_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown model 7bb; did you mean 7b\? There are 550m, .*7b, llama-3-8b,"
    ):
        load_model("7bb")
    with pytest.raises(ConfigError, match=r"No such file"):
        load_model(str(tmp_path / "none.yaml"))
