"""Layers of experts: what they compute, send and hold, and how ranks share them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.machines import H100

from megatron_wlb.cost import AnalyticModel, MemoryModel, ModelShape, Parallelism, Recompute
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.cost.layers import Layer, Precision, Precisions
from megatron_wlb.cost.parts import Experts
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.models import load_model

DENSE = ModelShape(
    512, 1408, 4, 8, 4, 64, 8192, True, rms_norm=True, linear_bias=False, tied_embeddings=False
)
EXPERTS = Experts(16, 4, 256, True, shared_hidden_size=128)
SHAPE = DENSE.with_experts(EXPERTS, [False, True, True, True])
ALONE = Parallelism()
NONE, FULL = Recompute(), Recompute("full", "uniform", 1)


def model(
    shape: ModelShape, layout: Parallelism = ALONE, recompute: Recompute = NONE
) -> AnalyticModel:
    return AnalyticModel(shape, Execution(layout, recompute), H100)


def layer_of(shape: ModelShape) -> Layer:
    return shape.runs[-1][1]


def test_parameters_are_those_of_the_models() -> None:
    assert MemoryModel(
        load_model("mixtral-8x7b"), Execution()
    ).total_parameters / 1e9 == pytest.approx(46.70, abs=0.01)
    deepseek = load_model("deepseek-v3")
    plain = MemoryModel(replace(deepseek, predictors=()), Execution()).total_parameters
    assert plain / 1e9 == pytest.approx(671.03, abs=0.01)
    # A layer of 11.5, and what joins two hidden states: embedding and LM head are the model's.
    ahead = MemoryModel(deepseek, Execution()).total_parameters - plain
    assert ahead / 1e9 == pytest.approx(11.6, abs=0.02)


@pytest.mark.parametrize(
    "layout",
    [
        Parallelism(),
        Parallelism(2, sequence_parallel=True, dp_size=4, ep_size=8, etp_size=1),
        Parallelism(2, sequence_parallel=True, dp_size=4, ep_size=4),
        Parallelism(1, 2, 2, 2, dp_size=4, ep_size=8),
        Parallelism(pp_size=2, stage_layers=(3, 1), dp_size=2, ep_size=2),
    ],
)
def test_all_ranks_together_hold_each_parameter(layout: Parallelism) -> None:
    h, each = 512, 512 * 3 * 256
    memory = MemoryModel(SHAPE, Execution(layout))
    experts = [memory.expert_parameters(stage) for stage in range(layout.num_stages)]
    assert sum(experts) * layout.expert_ranks == 3 * 16 * each
    norms = (2 * 4 + 1) * h
    dense = MemoryModel(DENSE.with_experts(EXPERTS, [False] * 4), Execution()).total_parameters
    shared = 3 * (h * (16 + 3 * 128) - 3 * h * 1408)
    whole = dense + shared + 3 * 16 * each
    repeated = (layout.tp_size - 1) * (norms + 3 * h * 16)  # norms and routers, on each TP rank
    held = map(memory.stage_parameters, range(layout.num_stages))
    assert sum(held) * layout.tp_size + 3 * 16 * each == whole + repeated
    assert memory.total_parameters == whole  # copies do not count


@pytest.mark.parametrize(
    ("layout", "replicas", "expert_dp"),
    [
        (Parallelism(2, 2, dp_size=4), 1, 8),
        (Parallelism(2, 2, dp_size=4, ep_size=4, etp_size=1), 1, 4),
        (Parallelism(2, 2, dp_size=4, ep_size=8, etp_size=1), 2, 2),
        (Parallelism(2, 2, dp_size=4, ep_size=8), 4, 1),
        (Parallelism(1, 3, dp_size=4, ep_size=2), 2, 6),  # groups that begin in one and end in two
        (Parallelism(dp_size=8, ep_size=8), 8, 1),
        (Parallelism(2, dp_size=4, etp_size=4), 2, 2),  # one expert over two replicas
    ],
)
def test_replicas_that_share_experts_are_those_of_megatrons_groups(
    layout: Parallelism, replicas: int, expert_dp: int
) -> None:
    assert (layout.expert_replicas, layout.expert_dp_size) == (replicas, expert_dp)
    num_ranks = layout.tp_size * layout.cp_size * layout.dp_size
    if replicas > 1:  # each group of ranks in a row lies in one group of replicas
        size = layout.tp_size * layout.cp_size * replicas
        for first in range(0, num_ranks, layout.expert_ranks):
            assert first // size == (first + layout.expert_ranks - 1) // size


def test_experts_that_do_not_divide_are_refused() -> None:
    for layout, said in (
        (Parallelism(dp_size=3, ep_size=3), "num_experts 16 does not divide over EP 3"),
        (Parallelism(ep_size=2, etp_size=3), "expert_hidden_size 256 does not divide over expert"),
    ):
        with pytest.raises(ConfigError, match=said):
            layout.layers_of_stages(SHAPE)
    with pytest.raises(ConfigError, match="EP 8 × expert TP 1 does not divide the 4 ranks"):
        Parallelism(dp_size=4, ep_size=8).check_experts(SHAPE)
    with pytest.raises(ConfigError, match="EP is 2, but the model has no experts"):
        Parallelism(dp_size=4, ep_size=2).check_experts(DENSE)


def test_tokens_go_to_a_node_once() -> None:
    """Of 8 copies for 16 ranks in two nodes nearly one goes to the other node, and not four."""
    other = H100.network_gb_s * H100.link_share * 1e3
    assert H100.all_to_all_us(8e6, 16) == pytest.approx(4e6 / other)
    assert H100.all_to_all_us(8e6, 16, copies=8) == pytest.approx(1e6 * (1 - 0.5**8) / other)
    # A single copy goes where it would go anyhow.
    assert H100.all_to_all_us(8e6, 16, copies=1) == pytest.approx(H100.all_to_all_us(8e6, 16))
    # In a node, a rank with two of a token's experts gets it once.
    inside = H100.node_link_gb_s * H100.link_share * 1e3
    expected = 1e6 * 8 * (1 - (7 / 8) ** 8) * 7 / 8 / inside
    assert H100.all_to_all_us(8e6, 8, copies=8) == pytest.approx(expected)
    layout = Parallelism(dp_size=16, ep_size=16)
    plain = model(SHAPE, layout)
    once = plain.executed(sends_once=True)
    assert 0 < once.layer(layer_of(SHAPE)).ep_us < plain.layer(layer_of(SHAPE)).ep_us


@pytest.mark.parametrize("kernels", ["fused", "torch"])
def test_memory_grows_with_copies_and_with_uneven_routing(kernels: str) -> None:
    def kept(experts: Experts, imbalance: float = 1.0, recompute: Recompute = NONE) -> float:
        shape = DENSE.with_experts(experts, [True] * 4)
        run = Execution(recompute=recompute, kernels=kernels, expert_imbalance=imbalance)
        return MemoryModel(shape, run).tapes[0][0].saved_per_token

    one = kept(replace(EXPERTS, topk=1))
    copy = kept(replace(EXPERTS, topk=2)) - one
    # The copy that came, both products' inputs, its weight: in bf16 but for the last.
    least = 4 * (2 * 512 + 2 * 3 * 256 + 4)
    assert least <= copy <= 1.6 * least
    assert kept(replace(EXPERTS, topk=4)) == pytest.approx(one + 3 * copy)
    # Twice the tokens are as many more copies, but nothing of the router's.
    assert copy < kept(EXPERTS, 2.0) - kept(EXPERTS, 1.0) < 4 * copy
    assert kept(EXPERTS, 2.0, FULL) == kept(EXPERTS, 1.0, FULL) < one


def test_experts_in_fp8_are_faster_and_keep_less() -> None:
    eight = replace(
        Precisions.same(2), matrix=Precision(1, "fp8_peak_tflops", "fp8_linear_share", 3)
    )
    layers = tuple((num, replace(layer, precisions=eight)) for num, layer in SHAPE.runs)
    shape = replace(SHAPE, layers=layers)
    fast, slow = (model(one).layer(layer_of(one)) for one in (shape, SHAPE))
    assert fast.routed_us < slow.routed_us
    kept, before = (
        MemoryModel(one, Execution()).tapes[0][0].saved_per_token for one in (shape, SHAPE)
    )
    assert kept < before
    memory = MemoryModel(shape, Execution())
    products = 4 * 512 * (8 * 64 * 2 + 2 * 4 * 64) + 512 * (3 * 1408 + 3 * 3 * 128)
    products += memory.expert_parameters(0)
    weights = 2 * memory.num_parameters(0) + products  # one byte more, of what is a product's
    assert memory.state_bytes(0).weights == weights


def test_replica_waits_for_the_one_with_more_work_of_its_own() -> None:
    groups = ExpertGroups(2, ((1.0, 2.0), (0.0, 0.0)))
    assert groups.exchanges == (True, False)
    times = [np.full((2, 2, 1), us) for us in (100.0, 70.0, 50.0, 50.0)]
    busy, waits = groups.share(times, [[40], [20], [10], [10]])
    # Forward: own work 60 and 50; experts do 40 and 20, which is 30 each.
    assert [float(own[0, 0, 0]) for own in busy] == [90, 80, 50, 50]
    assert [float(own[0, 0, 0]) for own in waits] == [0, 10, 0, 0]
    # Backward: 20 and 30 of their own; 60 each of experts.
    assert [float(own[1, 0, 0]) for own in waits[:2]] == [10, 0]
    # A stage of dense layers waits for nobody.
    assert [float(own[0, 1, 0]) for own in busy] == [100, 70, 50, 50]
    assert not any(own[:, 1].any() for own in waits)
    assert groups.own_us(200.0, 10) == 200 - 10 * 3


def test_groups_are_of_replicas_that_lack_experts_only() -> None:
    layout = Parallelism(2, 2, 2, dp_size=2, sequence_parallel=True, ep_size=4, etp_size=1)
    assert ExpertGroups.of(model(SHAPE, layout)) is None
    assert ExpertGroups.of(model(DENSE, Parallelism(dp_size=2))) is None
    shared = ExpertGroups.of(model(SHAPE, replace(layout, ep_size=8), FULL))
    assert shared is not None and shared.num_replicas == 2
    (first, once), (second, twice) = shared.routed_us
    assert second == pytest.approx(2 * first) and twice == pytest.approx(2 * once)
    assert once == pytest.approx(3 * first)  # two of backward, one that is run again
