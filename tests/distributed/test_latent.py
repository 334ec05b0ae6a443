"""Multi-latent attention computes what one process does with each document alone; what it sends."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import FULL, GATHER, KEEP, SELECTIVE, Differences, Layout, further
from helpers.ranks import scatter_for, sliced_for
from helpers.workload import make_workload

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import model_shape

WORKLOAD = make_workload(
    [[37, 1, 5, 60, (33, 20), 2, 29], [8, 60, 1, (60, 1, 47), 21, 13]], vocab_size=59
)
FEW = "--num-layers 2"
FEW_KEPT = f"{FEW} {KEEP}"
CP2 = Layout("latent-yarn", 3, cp=2, sharding="per-document", extra=f"{FEW} {GATHER}")
TP2 = Layout("latent-yarn", 2, tp="2", extra=FEW)


@contextlib.contextmanager
def projecting_again(runner: Any) -> Iterator[None]:
    """As with ``--recompute-modules mla_up_proj``."""
    for gpt in runner.model.gpts:
        for layer in gpt.decoder.layers:
            layer.self_attention.recompute_up_proj = True
    yield


@pytest.mark.parametrize(
    ("case", "change", "plan_for"),
    [
        (Layout("latent-yarn", 2, tp="2", extra=f"{FEW} {FULL}"), None, scatter_for),
        (Layout("latent", 3, pp=2, extra=FEW), None, scatter_for),
        (CP2, projecting_again, scatter_for),
        (
            Layout("latent-yarn", 3, tp="2sp", cp=2, sharding="per-document", extra=FEW_KEPT),
            None,
            scatter_for,
        ),
        (
            Layout("latent", 3, tp="2", cp=2, sharding="hybrid", extra=f"{FEW} {SELECTIVE}"),
            None,
            scatter_for,
        ),
        # Slices of documents, whose buffers have keys and values.
        (Layout("latent", 1, pp=2, extra=FEW), None, sliced_for),
        (Layout("latent-yarn", 1, tp="2sp", cp=2, extra=FEW_KEPT), None, sliced_for),
        further(Layout("latent", 3, extra=FEW), projecting_again, scatter_for),
        further(Layout("latent-yarn", 2, tp="2sp", extra=f"{FEW} {SELECTIVE}"), None, scatter_for),
        further(Layout("latent", 3, cp=2, extra=FEW_KEPT), None, scatter_for),
        further(Layout("latent", 1, cp=2, sharding="per-document", extra=FEW), None, sliced_for),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_latents_compute_what_one_process_does(
    wrong: Differences, case: Layout, change: Any, plan_for: Any
) -> None:
    assert wrong(case, change or contextlib.nullcontext, plan_for, WORKLOAD) == []


# What must not pass.


def take_ranks_in_another_order(runner: Any) -> Any:
    """Each rank has the other's latents for its own."""
    from megatron_wlb.runtime.gpt.attention.latent_attention import DocumentLatentAttention

    right = DocumentLatentAttention.expand

    def wrong(self: Any, latents: Any, num_shards: int) -> Any:
        return right(self, latents.roll(len(latents) // 2, 0), num_shards)

    for gpt in runner.model.gpts:
        for layer in gpt.decoder.layers:
            attention = layer.self_attention
            attention.core_attention.expand = wrong.__get__(attention)
    return contextlib.nullcontext()


def count_positions_over_documents(runner: Any) -> Any:
    from megatron_wlb.runtime.gpt.attention.rope import DocumentRotaryEmbedding

    def rows(self: Any, *given: Any, **_: Any) -> int:
        self._positions = given[4].positions * 0
        self._positions += self._positions.new_ones(len(self._positions)).cumsum(0) - 1
        return 1024

    return mock.patch.object(DocumentRotaryEmbedding, "get_rotary_seq_len", rows)


def add_up_own_heads_alone(runner: Any) -> Any:
    """The shared key's gradient is of a tensor-parallel rank's own heads, as in Megatron."""
    from megatron_wlb.runtime.gpt.attention import latent_attention

    return mock.patch.object(
        latent_attention, "copy_to_tensor_model_parallel_region", lambda rows, group: rows
    )


def add_up_norms(runner: Any) -> Any:
    """The gradient of queries' norm is added up over tensor-parallel ranks, as in Megatron."""
    for name, parameter in runner.model.gpts[0].named_parameters():
        if "q_layernorm" in name:
            parameter.average_gradients_across_tp_domain = False
    return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (CP2, take_ranks_in_another_order),
        (CP2, count_positions_over_documents),
        (TP2, add_up_own_heads_alone),
        (TP2, add_up_norms),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fault_with_latents_differs_from_the_oracle(
    wrong: Differences, case: Layout, fault: Any
) -> None:
    found = wrong(case, fault, workload=WORKLOAD)
    assert any(line.startswith("step 0: gradient of") for line in found)
    in_the_loss = any(line.startswith("step 0: loss") for line in found)
    assert in_the_loss == (case is CP2)


# What is sent.


def sent_numbers(case: Layout) -> tuple[list[int], list[int], int]:
    """Numbers that this rank sends of a step to the forward and the backward pass of layers, and
    its tokens.
    """
    from helpers.ranks import build_runner

    from megatron_wlb.runtime.gpt.attention import context_parallel

    gathered, reduced = [], []
    gather, reduce = context_parallel._all_gather, context_parallel._reduce_scatter

    def noting_gather(rows: Any, local: Any, **named: Any) -> Any:
        gathered.append(local.numel())
        return gather(rows, local, **named)

    def noting_reduce(local: Any, rows: Any, **named: Any) -> Any:
        reduced.append(local.numel())
        return reduce(local, rows, **named)

    runner = build_runner(case.config, WORKLOAD)
    plan = scatter_for(case.config, WORKLOAD, case.world_size, 0)
    with mock.patch.multiple(
        context_parallel, _all_gather=noting_gather, _reduce_scatter=noting_reduce
    ):
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
