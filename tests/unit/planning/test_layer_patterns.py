"""Megatron's flags say which layers have a sliding window and how far, and which have experts."""

from __future__ import annotations

import pytest

from megatron_wlb.cost.parts import Attention
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.planning.layer_patterns import expert_layers, reach_tokens, windowed_layers
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config
from megatron_wlb.settings.megatron import ModelConfig


def settings(*flags: str) -> Config:
    return parse(["--num-layers", "6", *flags])


@pytest.mark.parametrize(
    ("said", "pattern"),
    [
        (None, "111111"),
        ("1", "000000"),
        ("2", "101010"),
        ("4", "111011"),
        ("9", "111111"),
        ("[1, 1, 0, 0, 1, 1]", "110011"),
        ("([1]*2+[0])*2", "110110"),
        ("2*[0]+[1]*4", "001111"),
    ],
)
def test_pattern_says_which_layers_have_a_window(said: str | None, pattern: str) -> None:
    """As Megatron's ``is_layer_window_attention`` has it, with layers from 1."""
    flags = ["--window-size", "127,0"] + (["--window-attn-skip-freq", said] if said else [])
    model = settings(*flags).model
    assert "".join(str(int(windowed)) for windowed in windowed_layers(model)) == pattern
    assert reach_tokens(model) == (None if pattern == "000000" else 128)


@pytest.mark.parametrize("words", [["127,0"], ["127", "0"], ["(127,0)"], ["127, 0"]])
def test_window_size_is_read_as_megatron_writes_it(words: list[str]) -> None:
    assert settings("--window-size", *words).model.window_size == (127, 0)


@pytest.mark.parametrize(
    "said",
    ["0", "-2", "[1]*5", "[2]*6", "[1]*10**9", "[[1]]*6", "exit()", "[1]*6,", "x", "", "(" * 99],
)
def test_what_says_no_layers_is_refused(said: str) -> None:
    config = settings("--window-size", "8,0", f"--window-attn-skip-freq={said}")
    with pytest.raises(ConfigError, match=r"-skip-freq is .* for each of the 6 layers"):
        windowed_layers(config.model)


def test_model_has_a_run_of_layers_for_each_stretch() -> None:
    plain = model_shape(settings(), 256)
    every = model_shape(settings("--window-size", "7,0"), 256)
    mixed = model_shape(settings("--window-size", "7,0", "--window-attn-skip-freq", "3"), 256)
    assert (plain.reach_tokens, plain.windowed_share, plain.layers) == (None, 0, ())
    assert (every.reach_tokens, every.windowed_share, every.layers) == (8, 1, ())
    found = [
        (num, part.reach_tokens)
        for num, layer in mixed.runs
        for part in layer.parts
        if isinstance(part, Attention)
    ]
    assert found == [(2, 8), (1, None), (2, 8), (1, None)]
    assert mixed.windowed_share == pytest.approx(4 / 6)
    assert mixed.reach_tokens == 8


@pytest.mark.parametrize(
    ("given", "pattern"),
    [("1", "1111"), ("2", "1010"), ("3", "1001"), ("[0]+[1]*3", "0111"), ("([1,0])*2", "1010")],
)
def test_layers_of_experts_are_those_of_megatrons_pattern(given: str, pattern: str) -> None:
    model = ModelConfig(num_layers=4, num_experts=8, moe_layer_freq=given)
    assert "".join(str(int(has)) for has in expert_layers(model)) == pattern


@pytest.mark.parametrize("given", ["0", "-1", "[0,1]", "[2]*4", "layers", "[1]*4 if 1 else 0"])
def test_patterns_of_other_layers_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--moe-layer-freq is .*; give N"):
        expert_layers(ModelConfig(num_layers=4, num_experts=8, moe_layer_freq=given))
