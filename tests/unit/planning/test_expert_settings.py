"""Settings of experts: which layers have them, and what Megatron would not divide."""

from __future__ import annotations

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning import guards
from megatron_wlb.planning.layer_patterns import expert_layers
from megatron_wlb.settings.command_line import parse, parse_known
from megatron_wlb.settings.config import Config
from megatron_wlb.settings.megatron import ModelConfig

EXPERTS = "--num-experts 8 --disable-bias-linear"


def settings(flags: str) -> Config:
    return parse(f"--mock-data --vocab-size 100 --num-layers 4 {flags}".split())


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


def test_experts_over_data_parallel_ranks_are_accepted() -> None:
    lines = [
        *guards.refusals(settings(f"{EXPERTS} --expert-model-parallel-size 4"), 4),
        *guards.refusals(settings(f"{EXPERTS} --moe-layer-freq [0]+[1]*3"), 4),
    ]
    assert lines == []


def test_flags_of_experts_are_read_with_several_kinds_of_balance() -> None:
    config, rest = parse_known(
        f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss global_aux_loss "
        "--moe-aux-loss-coeff 1e-3 1e-2 --moe-router-dtype fp32 --moe-permute-fusion".split()
    )
    assert config.model.moe_router_load_balancing_type == ("seq_aux_loss", "global_aux_loss")
    assert config.model.moe_aux_loss_coeff == (1e-3, 1e-2)
    assert config.model.moe_router_dtype == "fp32" and rest == ["--moe-permute-fusion"]
