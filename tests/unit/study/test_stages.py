"""Stages balanced by time: against all ways to divide the layers, and in a search."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_wlb.cost import AnalyticModel, ModelShape, Parallelism, Recompute, load_hardware
from megatron_wlb.cost.execution import Execution
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.planning.layer_patterns import with_windows
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.megatron import ModelConfig
from megatron_wlb.simulator.trial import Steps, trial
from megatron_wlb.study import search as search_module
from megatron_wlb.study.search import Search, Space, search
from megatron_wlb.study.stages import balanced_layers

H100 = load_hardware("h100-sxm")
SHAPE = ModelShape(
    hidden_size=1024, ffn_hidden_size=2560, num_layers=8, num_attention_heads=8,
    num_query_groups=4, kv_channels=128, vocab_size=64000, gated=True, rms_norm=True,
    linear_bias=False, tied_embeddings=False,
)  # fmt: skip
"""Its LM head takes as long as several layers."""
LENGTHS = [900, 300, 2000]


def slowest_us(layout: Parallelism, layers: tuple[int, ...]) -> float:
    unlike = replace(layout, stage_layers=layers)
    costs = AnalyticModel(SHAPE, Execution(unlike), H100).stage_costs()
    us = [cost.total_us(LENGTHS) for cost in costs]
    return max(sum(us[rank :: layout.pp_size]) for rank in range(layout.pp_size))


@pytest.mark.parametrize(
    "layout", [Parallelism(pp_size=2), Parallelism(pp_size=4), Parallelism(pp_size=2, vpp_size=2)]
)
def test_no_other_division_has_a_faster_slowest_rank(layout: Parallelism) -> None:
    found = balanced_layers(SHAPE, H100, layout, Recompute(), LENGTHS)
    all_of_them = [
        layers
        for layers in itertools.product(range(9), repeat=layout.num_stages)
        if sum(layers) == SHAPE.num_layers
    ]
    assert found in all_of_them
    best_us = min(slowest_us(layout, layers) for layers in all_of_them)
    assert slowest_us(layout, found) == pytest.approx(best_us)
    even = (SHAPE.num_layers // layout.num_stages,) * layout.num_stages
    assert slowest_us(layout, even) > 1.1 * best_us
    assert found[-1] == min(found) < max(found)


def test_stages_of_a_hybrid_are_cut_by_what_each_layer_takes() -> None:
    """No other cut has a faster slowest stage."""
    flags = "--hidden-size 256 --num-attention-heads 4 --hybrid-layer-pattern"
    shape = model_shape(parse([*flags.split(), "M-*-G*M--*"]), 2000)
    layout = Parallelism(pp_size=3)
    found = balanced_layers(shape, H100, layout, Recompute(), [50_000, 700])
    cuts = itertools.combinations(range(1, shape.num_layers), 2)

    def slowest(layers: tuple[int, ...]) -> float:
        unlike = replace(layout, stage_layers=layers)
        costs = AnalyticModel(shape, Execution(unlike), H100).stage_costs()
        return max(cost.total_us([50_000, 700]) for cost in costs)

    best = min(slowest((a, b - a, shape.num_layers - b)) for a, b in cuts)
    assert slowest(found) == pytest.approx(best, rel=1e-6)


def test_ranks_between_the_ends_have_a_layer() -> None:
    few = replace(SHAPE, num_layers=3, vocab_size=128)
    layout = Parallelism(pp_size=4)
    layers = balanced_layers(few, H100, layout, Recompute(), LENGTHS)
    assert sum(layers) == 3
    assert min(layers[1:3]) == 1


def test_unlike_layers_count_as_their_mean() -> None:
    settings = ModelConfig(num_layers=8, window_size=(99, 0), window_attn_skip_freq="2")
    slides = with_windows(SHAPE, settings)
    assert len(slides.layers) == 8
    layout = Parallelism(pp_size=2)
    found = balanced_layers(slides, H100, layout, Recompute(), [30_000])
    plain = balanced_layers(SHAPE, H100, layout, Recompute(), [30_000])
    assert found[-1] < plain[-1]  # as layers take less, the LM head is more of them


STEPS = Steps(LengthSource.of_distribution("reference"), num=2)


def find(shape: ModelShape, packing: str = "hold", **fixed: int) -> Search:
    space = Space(
        shape=shape, execution=Execution(), hardware=H100, num_devices=4, memory_gib=60.0,
        window=4096, num_micro_batches=(8,), packings=("original", packing),
        fixed={"tp_size": 1, "cp_size": 1, "pp_size": 4} | fixed,
    )  # fmt: skip
    return search(space, STEPS, num_refined=2, num_tuned=1)


@pytest.mark.parametrize("packing", ["hold", "slim"])
def test_unlike_stages_are_ranked_where_they_gain(packing: str) -> None:
    found = find(SHAPE, packing, vpp_size=1)
    one = found.best.candidate
    best = one.scenario.parallelism.stage_layers
    assert best is not None and best[-1] < 2 and one.slices == (packing == "slim")
    of_kind = [c.scenario for c in found.candidates if c.slices == one.slices]
    (alike,) = [run for run in of_kind if run.parallelism.stage_layers is None]
    assert found.best.outcome.mfu > 1.1 * trial(alike, found.best.outcome.setting, STEPS).mfu
    stages = [c.candidate.scenario.parallelism.stage_layers for c in found.ranked]
    assert stages.count(None) == 1 < stages.count(best)  # Tuned once, though both were tried.


def test_slices_in_unlike_stages_are_compared_with_windows_there(monkeypatch) -> None:
    real = search_module._evened
    monkeypatch.setattr(
        search_module, "_evened", lambda one, *given: real(one, *given) if one.slices else []
    )
    found = find(SHAPE, "slim", vpp_size=1)
    assert found.best.candidate.scenario.parallelism.stage_layers is not None
    assert [choice.outcome.title for choice in found.packings] == ["original"]


@pytest.mark.parametrize("packing", ["hold", "slim"])
def test_stages_stay_alike_where_a_layer_less_gains_nothing(packing: str) -> None:
    """Negative control: a head that takes less than half a layer."""
    found = find(replace(SHAPE, num_layers=16, vocab_size=1024), packing, vpp_size=1)
    assert {c.scenario.parallelism.stage_layers for c in found.candidates} == {None}


@pytest.mark.parametrize(
    "flags", ["", "--fp8-format hybrid", "--window-size 99 0 --window-attn-skip-freq 2"]
)
def test_layers_that_do_not_divide_have_unlike_stages(flags: str) -> None:
    """As of models that leave room for embedding and loss: 14 layers, and one at each end."""
    sizes = f"--num-layers 14 --hidden-size 1024 --num-attention-heads 8 --bf16 {flags}"
    shape = model_shape(parse(sizes.split()), 1024)
    found = {c.scenario.parallelism for c in find(shape).candidates}
    stages = {p.vpp_size: p.stage_layers for p in found}
    assert stages.keys() == {1, 2, 4}
    assert stages[1] is not None
    assert sorted(stages[1]) == [3, 3, 4, 4]
    assert all(sum(layers or ()) == 14 for layers in stages.values())
