"""One description of a run: what follows from model, machine, layout and batch."""

from __future__ import annotations

import ast
import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import megatron_wlb
from megatron_wlb.cost import (
    AnalyticModel,
    DocumentCost,
    ModelShape,
    Parallelism,
    ProfiledCost,
    Recompute,
    load_hardware,
)
from megatron_wlb.cost.attention_latency import AttentionProfile
from megatron_wlb.cost.cost_files import read_cost
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.layers import Precisions
from megatron_wlb.cost.memory import GIB, overhead_gib
from megatron_wlb.cost.parts import Experts, Latent
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.cost.table import Row, model_identity
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError, WLBError
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import MEMORY_SHARE, Run, Workload, title
from megatron_wlb.simulator.step import slowest_us

SHAPE = ModelShape(
    hidden_size=256, ffn_hidden_size=640, num_layers=8, num_attention_heads=8, num_query_groups=4,
    kv_channels=32, vocab_size=1024, gated=True, rms_norm=True, linear_bias=False,
    tied_embeddings=False,
)  # fmt: skip
LATENT = replace(SHAPE, latent=Latent(64, 32, 16, 24), kv_channels=48, num_query_groups=8)
IN_FP8 = ((8, replace(LATENT.layer, precisions=Precisions.same(2))),)
H100 = load_hardware("h100-sxm")
LENGTHS = (5000, 130, 2000, 62, 1000)  # 8192 in all


def scenario(**changes: object) -> Run:
    values: dict = {
        "shape": SHAPE, "execution": Execution(Parallelism(pp_size=2)), "hardware": H100,
        "window": 4096, "num_micro_batches": 4,
    }  # fmt: skip
    how = {f.name: changes.pop(f.name) for f in fields(Execution) if f.name in changes}
    values["execution"] = replace(values["execution"], **how)
    return Run(**values | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallelism": Parallelism(pp_size=3)}, "8 layers do not divide over 3"),
        ({"parallelism": Parallelism(tp_size=16)}, "num_attention_heads 8 does not divide"),
        ({"parallelism": Parallelism(dp_size=3)}, "4 micro-batches a step do not divide over 3"),
        ({"parallelism": Parallelism(pp_size=4, vpp_size=2, dp_size=2)}, "group_size 4"),
        ({"window": 0}, "window is 0; give at least 1"),
        (
            {"shape": replace(LATENT, reach_tokens=9), "parallelism": Parallelism(cp_size=2)},
            "CP is 2, but multi-latent attention with sliding windows runs without",
        ),
        (
            {"shape": replace(LATENT, layers=IN_FP8), "parallelism": Parallelism(cp_size=2)},
            "CP is 2, but multi-latent attention with FP8 runs without",
        ),
        ({"num_micro_batches": -4}, "num_micro_batches is -4; give at least 1"),
        ({"memory_gib": -1.0}, "memory limit in GiB is -1.0; give at least"),
        ({"memory_gib": float("nan")}, "memory limit in GiB is nan"),
    ],
)
def test_impossible_scenario_is_an_error_of_one_line(changes: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        scenario(**changes)
    assert "\n" not in str(error.value)


def test_negative_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="forward_linear_us is -1"):
        scenario(measured=DocumentCost(-1.0, 0.1, 1.0, 1.0))


def test_experts_have_their_share_of_a_measured_cost() -> None:
    layout = Parallelism(pp_size=2, dp_size=2, ep_size=2)
    shape = SHAPE.with_experts(Experts(8, 2, 96, gated=True), [True] * 8)
    modelled = scenario(shape=shape, parallelism=layout)
    again = replace(modelled, measured=modelled.cost)
    slower = replace(modelled, measured=modelled.cost.scaled(3, 1, 4, 1, 1, 1, 1))  # type: ignore[attr-defined]
    assert again.costs.experts == modelled.costs.experts is not None
    assert slower.costs.experts is not None
    for ours, theirs in zip(
        slower.costs.experts.routed_us, modelled.costs.experts.routed_us, strict=True
    ):
        assert ours == pytest.approx((3 * theirs[0], 4 * theirs[1]))
    source = LengthSource.of_distribution("reference")
    assert slower.workload(source, seed=1).experts == slower.costs.experts


def test_flops_are_three_forwards_of_linear_and_causal_attention() -> None:
    h, f, kv = 256, 640, 4 * 32
    weights = 8 * (h * h + 2 * h * kv + h * h + 3 * h * f) + h * 1024
    # Half of all pairs, QKᵀ and PV, a multiplication and an addition each.
    attention = 8 * 8 * 32 * 2 * 2 * sum(n * n / 2 for n in LENGTHS)
    assert scenario().flops(LENGTHS) == pytest.approx(3 * (2 * weights * 8192 + attention))


def test_attention_scale_of_one_document_is_its_tiles() -> None:
    base = scenario(parallelism=Parallelism())
    lengths = (100 * 128,)
    prediction = base.chooser("per-sequence")(lengths)
    # 100 rows of tiles: half a tile more on the diagonal of each, and one for its overhead.
    assert base.attention_scale(lengths, prediction) == pytest.approx(1 + 3 / 100)


def test_attention_scale_has_the_imbalance_of_the_slowest_rank() -> None:
    base = scenario(parallelism=Parallelism(cp_size=4))
    scale = {
        kind: base.attention_scale(LENGTHS, base.chooser(kind)(LENGTHS))
        for kind in ("per-sequence", "per-document", "adaptive", "hybrid")
    }
    assert scale["per-sequence"] > 1.2 * scale["per-document"] > 1
    assert scale["adaptive"] == min(scale["per-sequence"], scale["per-document"])
    assert scale["hybrid"] <= scale["adaptive"]


def test_measured_cost_is_scaled_by_imbalance_alone() -> None:
    cost = DocumentCost(1e-3, 2e-6, 2e-3, 5e-6)
    base = scenario(parallelism=Parallelism(cp_size=4), measured=cost)
    prediction = base.chooser("per-sequence")(LENGTHS)
    assert base.attention_scale(LENGTHS, prediction) == prediction.forward_imbalance > 1
    assert base.cost is cost


def test_measured_cost_adds_up_over_the_stages() -> None:
    cost = DocumentCost(1e-3, 2e-6, 2e-3, 5e-6, micro_batch_us=7.0)
    layout = Parallelism(pp_size=2, vpp_size=2)
    times = scenario(parallelism=layout, measured=cost).costs.stages.times_us([LENGTHS, (9,)])
    assert times.sum(axis=(0, 1)) == pytest.approx([cost.total_us(LENGTHS), cost.total_us([9])])


def test_measured_attention_of_the_hardware_is_used_and_has_to_reach_the_window() -> None:
    row = (3.0, 9000.0)
    profile = AttentionProfile(
        kernel="some", machine="here", dtype="bfloat16", num_heads=8, num_groups=4, head_dim=32,
        tile_queries=1, tile_keys=1, lengths=(1, 4096), forward_us=(row, (9000.0,)),
        backward_us=(row, (9000.0,)), whole_forward_us=row, whole_backward_us=row,
    )  # fmt: skip
    machine = replace(H100, attention=(profile,))
    base = scenario(hardware=machine)
    base.check_reach()
    lengths = (4096,)
    measured = base.attention_scale(lengths, base.chooser("per-sequence")(lengths))
    assumed = scenario().attention_scale(lengths, scenario().chooser("per-sequence")(lengths))
    assert measured > 5 * assumed
    beyond = scenario(hardware=machine, window=8192)
    with pytest.raises(ConfigError, match="ends at 4096 tokens, but 8192"):
        beyond.check_reach()
    replace(beyond, extrapolate=True).check_reach()


def test_attention_has_to_reach_the_longest_slice() -> None:
    """Slices of documents over the window are up to S_max long, and only those."""
    source = LengthSource.of_lengths("lengths", np.array([50_000, 100]))
    for long_documents, packing, longest in (
        ("slice", "slim", 8192), ("split", "slim", 4096), ("slice", "hold", 4096)
    ):  # fmt: skip
        base = scenario()
        workload = base.workload(source, seed=1, long_documents=long_documents)
        setting = PackingSettings(packing, 2 * base.window)
        assert workload.longest_segment(setting) == longest


def test_unknown_sharding_is_an_error() -> None:
    with pytest.raises(WLBError, match="unknown sharding per-token"):
        scenario().chooser("per-token")  # type: ignore[arg-type]


def test_memory_limit_leaves_room_unless_it_is_given() -> None:
    base = scenario()
    left_gib = H100.memory_gib - overhead_gib(H100, base.parallelism)
    assert base.limit_gib == pytest.approx(MEMORY_SHARE * left_gib)
    assert left_gib < H100.memory_gib
    assert scenario(memory_gib=3.5).limit_gib == 3.5


def test_most_tokens_fit_and_more_do_not() -> None:
    base = scenario(memory_gib=0.5)
    tokens = base.max_tokens()
    peak = [
        max(base.memory.peak_bytes(rank, [n] * 4) for rank in range(2))
        for n in (tokens, tokens + base.length_multiple)
    ]
    assert peak[0] <= 0.5 * GIB < peak[1]


def test_optimizer_state_is_spread_over_context_parallel_ranks_too() -> None:
    def optimizer(**sizes: int) -> int:
        return scenario(parallelism=Parallelism(**sizes)).memory.state_bytes(0).optimizer

    alone = optimizer()
    assert optimizer(dp_size=2) == pytest.approx(alone / 2, abs=1)
    assert optimizer(dp_size=2, cp_size=2) == pytest.approx(alone / 4, abs=1)


def test_recomputation_takes_time_and_saves_memory() -> None:
    plain, full = scenario(), scenario(recompute=Recompute("full", "uniform", 1))
    assert full.cost.total_us(LENGTHS) > 1.2 * plain.cost.total_us(LENGTHS)
    assert full.max_tokens() > 1.2 * plain.max_tokens()


def test_lengths_are_padded_for_tp_and_cp() -> None:
    layout = Parallelism(tp_size=2, cp_size=4, sequence_parallel=True)
    assert scenario(parallelism=layout).length_multiple == 16
    assert scenario(parallelism=replace(layout, cp_size=1)).length_multiple == 2
    assert scenario(parallelism=replace(layout, sequence_parallel=False)).length_multiple == 8


def test_analytic_cost_is_the_layouts_own() -> None:
    layout = Parallelism(tp_size=2, pp_size=2, sequence_parallel=True)
    base = scenario(parallelism=layout)
    assert base.cost == AnalyticModel(SHAPE, Execution(layout), H100).cost()


def test_title_names_only_what_is_divided() -> None:
    assert title(Parallelism(tp_size=8, pp_size=4, vpp_size=2)) == "TP 8 × PP 4 × VPP 2"
    assert title(Parallelism()) == "one device"


COST = DocumentCost(1e-3, 2e-6, 2e-3, 5e-6)


def test_cost_file_is_refused_for_another_model_and_layout(tmp_path: Path) -> None:
    """Whether it holds tables, which know their layout, or a fit beside its model."""
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"cost": COST.as_dict(), "model": model_identity(SHAPE)}))
    other = replace(SHAPE, num_layers=12)
    assert read_cost(path, "--cost") == read_cost(path, "--cost", SHAPE) == COST
    with pytest.raises(ConfigError, match=rf"--cost {path}: measured for a model with num_layers"):
        read_cost(path, "--cost", other)
    rows = (Row(64, 1.0, 2.0), Row(4096, 70.0, 140.0))
    tables = ProfiledCost(model_identity(SHAPE), 2, 1, rows, rows)
    path.write_text(json.dumps(tables.as_dict()))
    assert read_cost(path, "--cost", SHAPE) == tables
    assert read_cost(path, "--cost", SHAPE, Parallelism(tp_size=2)) == tables
    with pytest.raises(ConfigError, match="measured with TP 2 and CP 1, but this run has TP 1"):
        read_cost(path, "--cost", SHAPE, Parallelism())
    with pytest.raises(ConfigError, match="measured for a model with num_layers"):
        read_cost(path, "--cost", other, Parallelism(tp_size=2))


def test_planner_is_made_in_one_place() -> None:
    """Everything else asks :class:`Workload`, so that all plan by the same rules."""
    package = Path(megatron_wlb.__file__).parent
    makers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Planner"
    }
    assert makers == {"planning/run.py"}


def test_shaped_steps_need_a_pipeline_and_are_no_slower() -> None:
    packing = PackingSettings("hold", 8192)
    source = LengthSource("made up", np.random.default_rng(7).integers(40, 4096, 900))
    for layout in (Parallelism(pp_size=4), Parallelism(dp_size=2), None):
        workload = Workload(source, 4096, 8, COST, 5, layout=layout)
        plain, shaped = (
            [*workload.planner(replace(packing, shaped=on), 6).plans(6)] for on in (False, True)
        )
        lengths = [[m.lengths for plan in plans for m in plan] for plans in (plain, shaped)]
        pipeline = layout is not None and layout.pp_size > 1
        assert (lengths[0] != lengths[1]) == pipeline
        if pipeline:
            stages = StageCosts.by_layers(COST, layout)
            times_us = [
                sum(slowest_us(plan, stages, layout) for plan in plans) for plans in (plain, shaped)
            ]
            assert times_us[0] > 1.01 * times_us[1]
