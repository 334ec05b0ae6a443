"""A trial: the figures of plans that training would make, from lengths alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.machines import H100

from megatron_wlb.cost import DocumentCost, Hardware, ModelShape, Parallelism, Recompute
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.memory import GIB
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import Lengths
from megatron_wlb.errors import ConfigError, WLBError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.metrics import measure
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.baseline import baseline, fitting, row
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.simulator.trial import Outcome, Steps, by_part, trial, trials

SHAPE = ModelShape(
    hidden_size=512, ffn_hidden_size=1280, num_layers=8, num_attention_heads=8, num_query_groups=8,
    kv_channels=64, vocab_size=1024, gated=True, rms_norm=True, linear_bias=False,
    tied_embeddings=False,
)  # fmt: skip
WINDOW, STEPS = 32768, 8
REFERENCE = LengthSource.of_distribution("reference")


def scenario(hardware: Hardware | None = None, **changes: object) -> Run:
    values: dict = {
        "shape": SHAPE, "hardware": hardware or H100,
        "execution": Execution(Parallelism(cp_size=2, pp_size=2, dp_size=2)),
        "window": WINDOW, "num_micro_batches": 8,
    }  # fmt: skip
    return Run(**values | changes)


def run(
    base: Run,
    *packings: str,
    shardings: tuple[str, ...] = ("per-sequence",),
    source: LengthSource = REFERENCE,
    **options: object,
) -> dict[tuple[str, str], Outcome]:
    given: dict = {"num": STEPS, "seeds": (1, 2), "warm_up": 6} | options
    steps = Steps(source, **given)
    outcomes = [
        outcome
        for packing in packings
        for outcome in trials(
            base, PackingSettings.parse(packing, WINDOW, 2 * WINDOW), steps, shardings
        )  # type: ignore[arg-type]
    ]
    keys = [(packing, sharding) for packing in packings for sharding in shardings]
    return dict(zip(keys, outcomes, strict=True))


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Outcome]:
    return run(
        scenario(), "original", "wlb", "hold", "hold+shape", shardings=("per-sequence", "adaptive")
    )


def test_balanced_packings_are_faster_and_balanced_at_each_level(
    found: dict[tuple[str, str], Outcome],
) -> None:
    original, hold = found["original", "per-sequence"], found["hold", "adaptive"]
    assert hold.speedup(original) > 1.1
    assert hold.bubble_share < original.bubble_share
    assert original.pp_imbalance > 1.2 > 1.1 > hold.pp_imbalance > 1
    assert original.dp_imbalance > 1.05 > hold.dp_imbalance >= 1
    assert original.cp_imbalance > 1.1 > 1.01 > hold.cp_imbalance >= 1
    assert hold.delay_steps > original.delay_steps == 0


def test_shaped_steps_are_no_slower_and_less_even(found: dict[tuple[str, str], Outcome]) -> None:
    plain, shaped = found["hold", "adaptive"], found["hold+shape", "adaptive"]
    assert shaped.mfu > plain.mfu
    assert shaped.pp_imbalance > plain.pp_imbalance
    assert shaped.metrics.num_tokens == plain.metrics.num_tokens  # the same documents
    assert shaped.title == "hold, shaped"
    assert shaped.flags[-2:] == ("--wlb-shape", "on")


def test_sharding_changes_neither_micro_batches_nor_memory(
    found: dict[tuple[str, str], Outcome],
) -> None:
    for packing in ("original", "wlb", "hold"):
        one, other = found[packing, "per-sequence"], found[packing, "adaptive"]
        assert one.peak_bytes == other.peak_bytes > 0
        assert one.metrics == other.metrics
        assert other.step_us < one.step_us


def test_rates_follow_from_times(found: dict[tuple[str, str], Outcome]) -> None:
    for outcome in found.values():
        assert outcome.metrics.num_steps == 2 * STEPS
        tokens = outcome.metrics.num_tokens / outcome.metrics.num_steps
        assert outcome.tokens_per_s == pytest.approx(tokens / outcome.step_us * 1e6)
        assert min(outcome.mfu_by_seed) < outcome.mfu < max(outcome.mfu_by_seed) < 1
        lowest, highest = outcome.speedup_by_seed(found["original", "per-sequence"])
        assert lowest <= outcome.speedup(found["original", "per-sequence"]) <= highest


def test_mfu_is_flops_over_the_peak_of_all_devices() -> None:
    base = scenario()
    (one,) = run(base, "original", num=1, seeds=(3,), warm_up=0).values()
    lengths = [d.length for d in one.example.plan.documents]
    flops = base.flops(lengths)
    peak = 8 * base.hardware.peak_tflops * 1e6 * one.example.timeline.step_us
    assert one.mfu == pytest.approx(flops / peak)
    assert one.step_us == one.example.timeline.step_us


def test_more_steps_have_more_flops_not_another_rate() -> None:
    one = run(scenario(), "original", num=1, seeds=(1,))["original", "per-sequence"]
    many = run(scenario(), "original", num=8, seeds=(1,))["original", "per-sequence"]
    assert 0.6 < many.mfu / one.mfu < 1.7


def test_every_packing_runs_the_same_tokens_in_the_long_run() -> None:
    source = LengthSource("lengths", stored=_lengths())
    found = run(scenario(), "original", "wlb", "hold", source=source, num=40, seeds=(1,))
    tokens = [outcome.metrics.num_tokens / 40 for outcome in found.values()]
    assert tokens[0] == pytest.approx(8 * WINDOW, rel=0.01)
    assert max(tokens) < 1.1 * min(tokens)


def test_out_of_memory_names_rank_and_action_and_is_no_failure() -> None:
    base = scenario(memory_gib=1.0)
    outcome = run(base, "hold", num=2, seeds=(1,))["hold", "per-sequence"]
    assert outcome.peak_bytes > GIB
    assert "out of memory: pipeline rank" in outcome.out_of_memory
    assert "data-parallel rank" in outcome.out_of_memory
    roomy = run(scenario(), "hold", num=2, seeds=(1,))["hold", "per-sequence"]
    assert roomy.out_of_memory == "" and roomy.peak_bytes == outcome.peak_bytes


def test_measured_cost_takes_the_place_of_the_modelled_one() -> None:
    slow = DocumentCost(1.0, 1e-4, 2.0, 2.5e-4)
    modelled = run(scenario(), "original", num=3)["original", "per-sequence"]
    measured = run(scenario(measured=slow), "original", num=3)["original", "per-sequence"]
    assert measured.step_us > 5 * modelled.step_us


@pytest.mark.parametrize(
    ("options", "says"),
    [({"num": 0}, "0 steps"), ({"seeds": ()}, "0 seeds"), ({"warm_up": -1}, "after -1")],
)
def test_nothing_to_simulate_is_an_error(options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(scenario(), "original", **options)


class Counted(LengthSource):
    """Counts how often documents are drawn of it."""

    times = 0

    def stream(self, *args: Any, **options: Any) -> Any:
        type(self).times += 1
        return super().stream(*args, **options)


def test_documents_are_drawn_once_for_all_that_is_tried_on_them() -> None:
    base, settings = scenario(), [PackingSettings(n, 2 * WINDOW) for n in ("slim", "wlb", "hold")]
    steps = Steps(Counted("lengths", stored=_lengths()), num=3, warm_up=2, seeds=(1, 2))
    baseline(base, steps)
    found = [trial(base, setting, replace(steps, tell=lambda: None)) for setting in settings]
    assert Counted.times == len(steps.seeds)
    anew = replace(steps, source=LengthSource("lengths", stored=_lengths()))
    for setting, one in zip(settings, found, strict=True):
        assert trial(base, setting, anew).mfu == one.mfu


def test_what_cannot_be_packed_is_found_before_any_step() -> None:
    def tell() -> None:
        raise AssertionError("a step was planned")

    for packing, says in (
        ("hodl", "did you mean hold"),
        ("original+shape", "cannot be shaped"),
        ("fixed-greedy:4+shape", "cannot be shaped"),
    ):
        with pytest.raises(WLBError, match=says):
            run(scenario(), packing, tell=tell)
    with pytest.raises(ConfigError, match="is below the window"):
        trial(scenario(), PackingSettings("hold", WINDOW - 1), Steps(REFERENCE, tell=tell))


def test_trial_is_of_the_plans_that_training_makes() -> None:
    """Put together here from the parts that training uses; each step's time is its simulation."""
    base = scenario(execution=Execution(Parallelism(tp_size=2, pp_size=2, dp_size=2)))
    simulator = Simulator(base.costs, base.parallelism)
    choose = base.chooser("per-sequence")

    def step_us(plan: StepPlan) -> float:
        scales = [
            [base.attention_scale(m.lengths, choose(m.lengths)) for m in rank]
            for rank in plan.micro_batches
        ]
        return simulator.step(plan, scales).step_us

    for name in ("original", "wlb", "hold", "slim"):
        setting = PackingSettings(name, 2 * WINDOW)
        found = trial(base, setting, Steps(REFERENCE, num=5, warm_up=3, seeds=(7,)))
        planner = base.workload(REFERENCE, seed=7).planner(
            setting, 8, costs=base.planning_costs(True)
        )
        plans = list(planner.plans(8))[3:]
        assert found.metrics == measure(plans, planner.packer.waiting)
        assert found.step_us == pytest.approx(sum(map(step_us, plans)) / 5, rel=1e-12)
        assert found.planning_ms > 0 and (found.units is None) == (name != "slim")


def test_figures_have_one_name_each_and_gains_a_frame() -> None:
    base = scenario()
    steps = Steps(REFERENCE, num=3, warm_up=2)
    frame = baseline(base, steps)
    found = trial(base, PackingSettings("hold", 2 * WINDOW), steps)
    figures = json.loads(json.dumps(row(found, frame)))
    assert figures["speedup"] == found.mfu / frame.original.mfu
    assert figures["net_speedup"] == figures["speedup"] and frame.stock is None
    assert figures["tokens"] == found.metrics.num_tokens and figures["max_windows"] == 2
    assert row(found)["speedup"] is None
    spread = Parallelism(tp_size=2, sequence_parallel=True)
    overlapped = baseline(scenario(execution=Execution(spread)), steps)
    assert overlapped.stock is not None and overlapped.stock.mfu > overlapped.original.mfu
    assert "net ones are over it with --tp-comm-overlap" in overlapped.said
    plain = replace(spread, sequence_parallel=False)  # with which Megatron refuses the flag
    assert baseline(scenario(execution=Execution(plain)), steps).stock is None


@pytest.mark.parametrize(
    ("layout", "recompute", "bf16", "overlaps"),
    [
        ({"dp_size": 2}, (None,), True, True),
        ({"dp_size": 2}, ("selective",), True, True),
        ({"dp_size": 2, "pp_size": 2, "vpp_size": 2}, (None,), True, True),
        ({"dp_size": 2, "pp_size": 2}, (None,), True, False),
        ({"dp_size": 2}, ("full", "block", 1), True, False),
        ({"dp_size": 2}, (None,), False, False),
    ],
)
def test_stock_overlaps_experts_where_megatron_does(
    layout: dict, recompute: tuple, bf16: bool, overlaps: bool
) -> None:
    """As ``TransformerConfig`` says of ``--overlap-moe-expert-parallel-comm``."""
    execution = Execution(Parallelism(ep_size=2, **layout), Recompute(*recompute), bf16=bf16)
    run = scenario(shape=load_model("mixtral-8x7b"), execution=execution)
    assert ("--overlap-moe-expert-parallel-comm" in run.more_overlap) == overlaps


def test_baseline_recomputes_what_it_must_to_fit_memory() -> None:
    base, steps = scenario(), Steps(REFERENCE, num=2, warm_up=0)
    assert fitting(base) == base and baseline(base, steps).name == "original"
    needs = {
        again: max(base.executed(recompute=Recompute(*again)).memory.peak_bytes(rank, [WINDOW] * 4)
                   for rank in (0, 1)) / GIB
        for again in ((None,), ("full", "uniform", 1))
    }  # fmt: skip
    between = sum(needs.values()) / 2
    frame = baseline(replace(base, memory_gib=between), steps)
    assert frame.fits and frame.original.run.recompute.granularity
    assert "recomputation" in frame.name and not frame.original.out_of_memory
    never = baseline(replace(base, memory_gib=0.5 * min(needs.values())), steps)
    assert not never.fits and never.name == "original, which does not fit memory"
    assert never.as_dict()["original_fits"] is False
    assert "does not fit memory even with full recomputation" in never.said


def test_baseline_recomputes_all_layers_where_some_are_too_few() -> None:
    some = scenario(execution=Execution(Parallelism(pp_size=2), Recompute("full", "block", 1)))
    all_layers = some.executed(recompute=Recompute("full", "uniform", 1))
    for run, again in ((some, "full (block 1)"), (all_layers, "full")):
        least_gib = max(run.memory.peak_bytes(rank, [WINDOW] * 8) for rank in (0, 1)) / GIB
        frame = baseline(replace(some, memory_gib=1.01 * least_gib), Steps(REFERENCE, 1, 0))
        assert frame.fits and frame.as_dict()["over_recompute"] == again
        said = "original" if run is some else "original, full recomputation"
        assert frame.name == said == frame.as_dict()["over"]


def test_s_max_is_two_windows_or_what_fits() -> None:
    base = scenario()
    assert base.s_max("hold") == base.s_max("slim") == 2 * WINDOW
    assert base.s_max("hold", 40000) == 40000
    most = base.max_tokens()
    assert replace(base, memory_gib=base.limit_gib).s_max("hold") == min(most, base.step_tokens)
    tight = replace(base, hardware=replace(base.hardware, memory_gib=7))
    assert WINDOW < tight.s_max("hold") == tight.max_tokens() < 2 * WINDOW
    none = replace(base, hardware=replace(base.hardware, memory_gib=1))
    assert none.s_max("hold") == WINDOW and none.s_max("slim") == 2 * WINDOW


def test_parts_of_the_steps_hold_each_step_once() -> None:
    assert by_part([1, 2, 3, 4, 5], [1, 1, 1, 1, 1]) == (1.0, 2.0, 3.0, 4.5)
    assert by_part([6.0], [2.0]) == (3.0,)


def _lengths() -> Lengths:
    return np.random.default_rng(3).lognormal(8, 1.2, 3000).astype(np.int64).clip(1, WINDOW)


def test_documents_of_several_replicas_choose_no_sharding() -> None:
    """Each of their micro-batches is one that all replicas have; there is nothing to choose."""
    outliers = LengthSource.of_lengths("outliers", np.array([8 * WINDOW] * 5))
    steps = Steps(outliers, num=3, warm_up=0, long_documents="slice")
    found = trial(scenario(), PackingSettings("slim", 2 * WINDOW, units=8), steps)
    assert all(m.replicas for m in found.example.plan)
    assert (found.sharding_shares, found.cp_imbalance) == ({}, 1.0)
