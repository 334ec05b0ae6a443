"""Dropout of attention: in training only, drawn again alike, and unlike on each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.gloo import GlooPool
from helpers.layouts import FULL, HEAD_GROUPS, SELECTIVE, WORKLOAD, Layout, Oracle
from helpers.plans import scatter_for, sliced_for
from helpers.ranks import train
from helpers.shards import RankRun

from megatron_wlb.settings.command_line import parse

SDPA = "--wlb-attention-kernel sdpa"
DROPOUT = f"--attention-dropout 0.2 {SDPA}"
ONE = Layout("llama", 2)


CP2 = Layout("llama", 2, cp=2, sharding="hybrid", extra=HEAD_GROUPS)
CASES = {
    "pp1": (ONE, scatter_for, (FULL, SELECTIVE)),
    "pp2": (Layout("llama", 2, pp=2), scatter_for, (FULL, SELECTIVE)),
    "cp2": (CP2, scatter_for, (SELECTIVE,)),
    "slices": (ONE, sliced_for, (FULL,)),
}


def runs_of(
    gloo: GlooPool, oracle: Oracle, case: Layout, extra: str, plan_for: Any = scatter_for
) -> list[RankRun]:
    initial = oracle(case).initial
    case = replace(case, extra=f"{case.extra} {extra}")
    given = case.config, WORKLOAD, initial, contextlib.nullcontext, plan_for
    return gloo.run(case.world_size, train, *given)


@pytest.mark.parametrize("name", CASES)
def test_dropout_is_drawn_again_alike(gloo: GlooPool, oracle: Oracle, name: str) -> None:
    """Losses and gradients of a run that computes activations again are those of one that keeps
    them, to the bit.
    """
    case, plan_for, recomputations = CASES[name]
    kept = runs_of(gloo, oracle, case, DROPOUT, plan_for)
    for recompute in recomputations:
        again = runs_of(gloo, oracle, case, f"{DROPOUT} {recompute}", plan_for)
        for ours, theirs in zip(again, kept, strict=True):
            assert ours.losses == theirs.losses
            for pair in zip(ours.gradients, theirs.gradients, strict=True):
                assert all(np.array_equal(a, b) for a, b in zip(*pair, strict=True))


def test_dropout_is_for_training_alone(gloo: GlooPool, oracle: Oracle) -> None:
    """Evaluated before the first update, the model is the same with and without."""
    (with_it,), (without,) = (runs_of(gloo, oracle, ONE, extra) for extra in (DROPOUT, SDPA))
    assert with_it.losses[0] != without.losses[0]
    assert with_it.evaluated[0] == without.evaluated[0]


def set_up(config: Any) -> None:
    from megatron_wlb.runtime.trainer import distributed

    distributed.initialize_groups(config)


def drawn_in_attention(shared: bool) -> list[float]:
    """What a kernel with dropout draws on this rank, in two calls; ``shared`` is by Megatron's
    stream.
    """
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_wlb.plan.sharding import Sharding
    from megatron_wlb.runtime.gpt.attention import document_attention
    from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen
    from megatron_wlb.runtime.stepping.batch import local_params

    set_up(parse(["--context-parallel-size", "2", "--tensor-model-parallel-size", "2"]))
    drawn: list[float] = []

    def kernel(*inputs: Any) -> torch.Tensor:
        drawn.append(torch.rand(1, device="cuda").item())
        return sdpa_varlen(*inputs)

    attention = document_attention.DocumentAttention(
        TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.1,
            context_parallel_size=2, tensor_model_parallel_size=2, cuda_graph_modules=[],
        ),
        1,
        AttnMaskType.causal,
        "self",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        options=document_attention.AttentionOptions(sdpa_varlen, dropping=kernel),
    )  # fmt: skip
    rank = parallel_state.get_context_parallel_rank()
    _, params = local_params([8], np.arange(8), "cpu", cp_rank=rank, cp_size=2, sharding=Sharding())
    qkv = [torch.randn(4, 1, 1, 4) for _ in range(3)]

    @contextlib.contextmanager
    def of_megatron(seed: int) -> Iterator[None]:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            yield

    before = torch.get_rng_state()
    with mock.patch.object(
        document_attention, "own_numbers", of_megatron if shared else document_attention.own_numbers
    ):
        for _ in range(2):
            attention(*qkv, None, packed_seq_params=params)
    attention.eval()
    attention(*qkv, None, packed_seq_params=params)
    assert len(drawn) == 2 and torch.equal(torch.get_rng_state(), before)
    return drawn


def test_ranks_of_other_heads_or_queries_drop_other_parts(gloo: GlooPool) -> None:
    """And each call others. Megatron's own stream is equal on context-parallel ranks."""
    drawn = gloo.run(4, drawn_in_attention, False)
    assert len({number for of_rank in drawn for number in of_rank}) == 8
    megatrons = gloo.run(4, drawn_in_attention, True)
    assert megatrons[0] == megatrons[2] != megatrons[1] == megatrons[3]


def lost_and_found() -> tuple[list[float], ...]:
    """Numbers at the start, after a load without this rank's stream, and after one with it."""
    import torch
    from megatron.core import tensor_parallel

    from megatron_wlb.runtime.gpt.attention.dropout import own_numbers
    from megatron_wlb.runtime.saving.core import rng_state, set_rng_state

    set_up(parse([]))
    without = tensor_parallel.get_cuda_rng_tracker().get_states()

    def draw() -> list[float]:
        with own_numbers(7):
            return torch.rand(3, device="cuda").tolist()

    first, saved = draw(), rng_state()
    second = draw()
    set_rng_state(saved)
    again = draw()
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(without))
    return first, second, again, draw()


def test_checkpoint_without_the_rank_s_stream_starts_it_anew(gloo: GlooPool) -> None:
    for first, second, again, anew in gloo.run(2, lost_and_found):
        assert first == anew != second == again
