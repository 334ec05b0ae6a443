from __future__ import annotations

import numpy as np
import pytest
from helpers.machines import H100

from megatron_wlb.cost import DocumentCost, Hardware, ModelShape, Parallelism
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.memory import GIB
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import Lengths
from megatron_wlb.errors import ConfigError, WLBError
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.study.compare import Outcome, compare

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
    variants = [PackingSettings.parse(packing, WINDOW, 2 * WINDOW) for packing in packings]
    settings: dict = {"steps": STEPS, "seeds": (1, 2), "warm_up": 6} | options
    outcomes = compare(base, source, variants, shardings, **settings)  # type: ignore[arg-type]
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
    assert shaped.step_tokens == plain.step_tokens  # the same documents
    assert shaped.title == "hold, shaped"
    assert shaped.row(plain)["flags"][-2:] == ["--wlb-shape", "on"]


def test_sharding_changes_neither_micro_batches_nor_memory(
    found: dict[tuple[str, str], Outcome],
) -> None:
    for packing in ("original", "wlb", "hold"):
        one, other = found[packing, "per-sequence"], found[packing, "adaptive"]
        assert one.peak_bytes == other.peak_bytes > 0
        assert one.step_tokens == other.step_tokens
        assert one.packing_imbalance == other.packing_imbalance
        assert other.step_us < one.step_us


def test_rates_follow_from_times(found: dict[tuple[str, str], Outcome]) -> None:
    for outcome in found.values():
        assert outcome.num_steps == 2 * STEPS
        assert outcome.tokens_per_s == pytest.approx(outcome.step_tokens / outcome.step_us * 1e6)
        assert min(outcome.mfu_by_seed) < outcome.mfu < max(outcome.mfu_by_seed) < 1
        lowest, highest = outcome.speedup_by_seed(found["original", "per-sequence"])
        assert lowest <= outcome.speedup(found["original", "per-sequence"]) <= highest


def test_mfu_is_flops_over_the_peak_of_all_devices() -> None:
    base = scenario()
    (one,) = run(base, "original", steps=1, seeds=(3,), warm_up=0).values()
    lengths = [d.length for d in one.example.plan.documents]
    flops = base.flops(lengths)
    peak = 8 * base.hardware.peak_tflops * 1e6 * one.example.timeline.step_us
    assert one.mfu == pytest.approx(flops / peak)
    assert one.step_us == one.example.timeline.step_us


def test_more_steps_have_more_flops_not_another_rate() -> None:
    one = run(scenario(), "original", steps=1, seeds=(1,))["original", "per-sequence"]
    many = run(scenario(), "original", steps=8, seeds=(1,))["original", "per-sequence"]
    assert 0.6 < many.mfu / one.mfu < 1.7


def test_the_same_arguments_give_the_same_figures() -> None:
    rows = []
    for _ in range(2):
        found = run(scenario(), "original", "hold", shardings=("adaptive",), steps=4, seeds=(5,))
        rows.append([o.row(o) for o in found.values()])
    assert rows[0] == rows[1]
    other = run(scenario(), "original", steps=4, seeds=(6,))["original", "per-sequence"]
    assert other.mfu != rows[0][0]["mfu"]


def test_every_packing_runs_the_same_tokens_in_the_long_run() -> None:
    source = LengthSource("lengths", stored=_lengths())
    found = run(scenario(), "original", "wlb", "hold", source=source, steps=40, seeds=(1,))
    tokens = [outcome.step_tokens for outcome in found.values()]
    assert tokens[0] == pytest.approx(8 * WINDOW, rel=0.01)
    assert max(tokens) < 1.1 * min(tokens)


def test_out_of_memory_names_rank_and_action_and_is_no_failure() -> None:
    base = scenario(memory_gib=1.0)
    outcome = run(base, "hold", steps=2, seeds=(1,))["hold", "per-sequence"]
    assert outcome.peak_bytes > GIB
    assert "out of memory: pipeline rank" in outcome.out_of_memory
    assert "data-parallel rank" in outcome.out_of_memory
    assert outcome.row(outcome)["out_of_memory"] == outcome.out_of_memory
    roomy = run(scenario(), "hold", steps=2, seeds=(1,))["hold", "per-sequence"]
    assert roomy.out_of_memory == "" and roomy.peak_bytes == outcome.peak_bytes


def test_measured_cost_takes_the_place_of_the_modelled_one() -> None:
    slow = DocumentCost(1.0, 1e-4, 2.0, 2.5e-4)
    modelled = run(scenario(), "original", steps=3)["original", "per-sequence"]
    measured = run(scenario(measured=slow), "original", steps=3)["original", "per-sequence"]
    assert measured.step_us > 5 * modelled.step_us


@pytest.mark.parametrize(
    ("options", "says"),
    [({"steps": 0}, "0 steps"), ({"seeds": ()}, "0 seeds"), ({"warm_up": -1}, "after -1")],
)
def test_nothing_to_simulate_is_an_error(options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(scenario(), "original", **options)


def test_what_cannot_be_packed_is_found_before_any_step() -> None:
    def on_step() -> None:
        raise AssertionError("a step was simulated")

    for packing, says in (
        ("hodl", "did you mean hold"),
        ("hodl+shape", "did you mean hold"),
        ("original+shape", "cannot be shaped"),
        ("fixed-greedy:4+shape", "cannot be shaped"),
        ("fixed-solver+shape", "cannot be shaped"),
    ):
        with pytest.raises(WLBError, match=says):
            run(scenario(), "hold", packing, on_step=on_step)


def _lengths() -> Lengths:
    return np.random.default_rng(3).lognormal(8, 1.2, 3000).astype(np.int64).clip(1, WINDOW)


def test_documents_of_several_replicas_choose_no_sharding() -> None:
    """Each of their micro-batches is one that all replicas have; there is nothing to choose."""
    outliers = LengthSource.of_lengths("outliers", np.array([8 * WINDOW] * 5))
    (found,) = compare(
        scenario(), outliers, [PackingSettings("slim", 2 * WINDOW, units=8)], ["adaptive"],
        steps=3, seeds=[1], warm_up=0, long_documents="slice",
    )  # fmt: skip
    assert all(m.replicas for m in found.example.plan)
    assert (found.sharding_shares, found.cp_imbalance) == ({}, 1.0)
