"""What ranks with multi-latent attention send, and what is measured of them."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import GATHER, Layout
from helpers.layouts import LATENT_WORKLOAD as WORKLOAD
from helpers.plans import scatter_for

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import model_shape

FEW = "--num-layers 2"
CP2 = Layout("latent-yarn", 3, cp=2, sharding="per-document", extra=f"{FEW} {GATHER}")


# What is sent.


def sent_numbers(case: Layout) -> tuple[list[int], list[int], int]:
    """Numbers that this rank sends of a step to the forward and the backward pass of layers, and
    its tokens.
    """
    from helpers.ranks import build_runner

    from megatron_wlb.runtime.gpt.attention import key_exchange

    gathered, reduced = [], []
    gather, reduce = key_exchange.all_gather, key_exchange.reduce_scatter

    def noting_gather(rows: Any, local: Any, **named: Any) -> Any:
        gathered.append(local.numel())
        return gather(rows, local, **named)

    def noting_reduce(local: Any, rows: Any, **named: Any) -> Any:
        reduced.append(local.numel())
        return reduce(local, rows, **named)

    runner = build_runner(case.config, WORKLOAD)
    plan = scatter_for(case.config, WORKLOAD, case.world_size, 0)
    with mock.patch.multiple(key_exchange, all_gather=noting_gather, reduce_scatter=noting_reduce):
        runner.run(plan)
    return gathered, reduced, sum(m.padded_length for m in plan)


@pytest.mark.parametrize("tp", ["1", "2sp"])
def test_ranks_send_one_latent_a_token(gloo: GlooPool, tp: str) -> None:
    case = Layout("latent", 3, tp=tp, cp=2, extra=FEW)
    m = case.config.model
    of_latent = m.kv_lora_rank + m.qk_pos_emb_head_dim
    of_pair = m.num_attention_heads * (m.qk_head_dim + m.qk_pos_emb_head_dim + m.v_head_dim)
    for gathered, reduced, num_tokens in gloo.run(case.world_size, sent_numbers, case):
        own = num_tokens // case.cp // int(tp[0])  # each rank's share of the tokens, or all of them
        assert sum(reduced) == m.num_layers * own * of_latent
        assert sum(gathered) == 2 * sum(reduced)  # again in the backward pass
        assert sum(reduced) * 4 < m.num_layers * own * of_pair


# What is measured.


def measured_tables(case: Layout) -> Any:
    from helpers.ranks import build_runner

    from megatron_wlb.planning.from_config import model_shape
    from megatron_wlb.runtime.measuring.measure import measure_tables

    model = build_runner(case.config, WORKLOAD).model
    return measure_tables(model, model_shape(case.config, 64), 60, 59, "here")


def test_measured_costs_serve_the_model_with_its_latents(gloo: GlooPool) -> None:
    tables, same = gloo.run(2, measured_tables, CP2)
    assert tables == same
    shape = model_shape(CP2.config, 64)
    tables.check(shape, 1, 2)
    work = tables.work([60])
    assert min(work.forward_linear_us, work.backward_attention_us) > 0
    with pytest.raises(ConfigError, match="latent"):
        tables.check(dataclasses.replace(shape, latent=None), 1, 2)
