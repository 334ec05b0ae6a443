"""Multi-latent attention costs what its matrices, its pairs and its latents do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers.machines import H100

from megatron_wlb.cost import Execution, Parallelism
from megatron_wlb.cost.analytic import AnalyticModel
from megatron_wlb.cost.layers import Precisions
from megatron_wlb.cost.parts import Latent
from megatron_wlb.cost.shape import ModelShape
from megatron_wlb.cost.table import check_model, model_identity
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.settings.command_line import parse

FLAGS = (
    "--num-layers 3 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024 --swiglu "
    "--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 28 --disable-bias-linear --position-embedding-type none "
    "--untie-embeddings-and-output-weights"
)
WHOLE = model_shape(parse(FLAGS.split()), 1024)
LOW = model_shape(parse([*FLAGS.split(), "--q-lora-rank", "96"]), 1024)


def layer(shape: ModelShape, **layout: Any) -> AnalyticModel:
    return AnalyticModel(shape, Execution(Parallelism(**layout)), H100)


def test_pairs_cost_keys_and_narrower_values() -> None:
    plain = dataclasses.replace(WHOLE, latent=None)
    assert WHOLE.attention_flops(100) * 2 * 48 == plain.attention_flops(100) * (48 + 28)
    times = [layer(shape).layer().attention_us for shape in (WHOLE, plain)]
    assert times[0] / times[1] == pytest.approx((48 + 28) / (2 * 48))


def test_ranks_exchange_latents_and_project_all_of_them() -> None:
    """Sequence parallelism divides what is sent; projecting is not divided, and runs twice."""
    two, one = layer(LOW, cp_size=2).layer(), layer(LOW).layer()
    latent, plain = LOW.layer.parts[0], dataclasses.replace(LOW, latent=None)
    assert latent.sent_numbers(Parallelism(cp_size=2)) == 64 + 16
    assert latent.sent_numbers(Parallelism(cp_size=2, tp_size=4)) == 80
    spread = Parallelism(cp_size=2, tp_size=4, sequence_parallel=True)
    assert latent.sent_numbers(spread) == 20
    assert plain.layer.parts[0].sent_numbers(Parallelism(cp_size=2)) == 2 * 8 * 48
    up_us = layer(LOW)._matrix_us(64 * 8 * (32 + 28), Precisions.same(2).matrix)
    assert two.matrix_us == pytest.approx(one.matrix_us / 2 + up_us / 2)
    assert (one.again_us, two.again_us) == (0.0, pytest.approx(up_us))
    in_one = layer(plain, cp_size=2).executed(num_head_groups=1).layer()
    assert two.cp_us < in_one.cp_us


def test_costs_of_other_latents_are_refused() -> None:
    check_model(model_identity(LOW), LOW)
    assert "latent" not in model_identity(dataclasses.replace(LOW, latent=None))
    with pytest.raises(ConfigError, match="latent"):
        check_model(model_identity(LOW), WHOLE)
    with pytest.raises(ConfigError, match="v_head_dim 90 is above a key's 48"):
        Latent(64, 32, 16, 90)
