"""Settings of experts: which layers have them, and what Megatron would not divide."""

from __future__ import annotations

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning import guards
from megatron_wlb.planning.expert_rules import expert_layers
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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--expert-model-parallel-size 2", "there are no experts; give --num-experts"),
        ("--moe-ffn-hidden-size 32", "there are no experts; give --num-experts"),
        (f"{EXPERTS} --expert-model-parallel-size 3", "--num-experts is 8, which"),
        (f"{EXPERTS} --expert-model-parallel-size 8", "8 processes|start a multiple of 8"),
        (f"{EXPERTS} --expert-model-parallel-size 2 --expert-tensor-parallel-size 4", "multiple"),
        (f"{EXPERTS} --tensor-model-parallel-size 2", "--sequence-parallel in Megatron"),
        ("--num-experts 8 --expert-tensor-parallel-size 2", "is 2 and TP 1, but experts with a b"),
        (
            "--num-experts 8 --expert-tensor-parallel-size 1 --sequence-parallel "
            "--tensor-model-parallel-size 2",
            "is 1 and TP 2, but experts with a bias",
        ),
        ("--num-experts 8", "adds them in place, which autograd refuses; add --disable-bias"),
        (f"{EXPERTS} --moe-router-topk 9", "--moe-router-topk is 9, but there are 8"),
        (f"{EXPERTS} --moe-router-topk 1", "add --moe-router-pre-softmax"),
        (f"{EXPERTS} --moe-router-group-topk 2", "give --moe-router-num-groups too"),
        (f"{EXPERTS} --moe-router-num-groups 3", "--moe-router-num-groups 3 does not"),
        (
            f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 3",
            "but the 1 groups of --moe-router-group-topk have 2 experts; use at most that",
        ),
        (f"{EXPERTS} --moe-router-enable-expert-bias", "--moe-router-score-function sigmoid"),
        (f"{EXPERTS} --moe-aux-loss-coeff 0.1 0.2", "has 2 numbers for the 1 kinds"),
        (f"{EXPERTS} --moe-layer-freq [0,1]", "--moe-layer-freq is"),
        (f"{EXPERTS} --moe-ffn-hidden-size 33 --expert-tensor-parallel-size 4", "33, which the 4"),
        (f"{EXPERTS} --wlb-expert-imbalance 0.5", "--wlb-expert-imbalance is 0.5; it must be in"),
    ],
)
def test_experts_that_cannot_run_are_refused(flags: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        guards.check(settings(flags), 4)


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
