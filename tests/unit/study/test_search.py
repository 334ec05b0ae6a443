from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from megatron_wlb.cost import Execution, ModelShape, Parallelism, load_hardware
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.parts import Experts
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError, WLBError
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.trial import Steps, trial
from megatron_wlb.study.search import PASSES, Search, Space, _looked_at, by_reason, search

WINDOW = 16384
SHAPE = ModelShape(
    hidden_size=1024, ffn_hidden_size=2560, num_layers=12, num_attention_heads=8,
    num_query_groups=4, kv_channels=128, vocab_size=8000, gated=True, rms_norm=True,
    linear_bias=False, tied_embeddings=False,
)  # fmt: skip
H100 = load_hardware("h100-sxm")
REFERENCE = LengthSource.of_distribution("reference")


def space(**changes: object) -> Space:
    values: dict = {
        "shape": SHAPE, "execution": Execution(), "hardware": H100, "num_devices": 4,
        "window": WINDOW,
        "num_micro_batches": (6,), "memory_gib": 6.5,
    }  # fmt: skip
    return Space(**values | changes)


def find(where: Space, steps: int = 4, **options: object) -> Search:
    settings: dict = {"num_refined": 3, "num_tuned": 1} | options
    return search(where, Steps(REFERENCE, num=steps, seeds=(1,)), **settings)


@pytest.fixture(scope="module")
def found() -> Search:
    return find(space())


def test_every_layout_can_run_or_has_its_reason(found: Search) -> None:
    seen = {c.scenario.parallelism for c in found.candidates}
    seen |= {r.parallelism for r in found.rejected}
    sizes = {
        (tp, cp, pp, vpp, 4 // (tp * cp * pp))
        for tp in (1, 2, 4) for cp in (1, 2, 4) for pp in (1, 2, 4)
        for vpp in range(1, 9 if pp > 1 else 2)
        if tp * cp * pp <= 4
    }  # fmt: skip
    assert {(p.tp_size, p.cp_size, p.pp_size, p.vpp_size, p.dp_size) for p in seen} == sizes
    reasons = {r.why: r.reason for r in found.rejected}
    assert set(reasons) == {"divisibility", "batch and schedule", "memory"}
    assert all(reason and "\n" not in reason for reason in reasons.values())
    assert sum(by_reason(found.rejected).values()) == len(found.rejected)


def test_processes_find_what_one_does(found: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_wlb.study.workers.ALONE_S", 0.0)
    shared = find(space(), workers=2)
    assert shared.candidates == found.candidates and shared.rejected == found.rejected
    both = [[c.candidate for c in one.ranked] for one in (shared, found)]
    assert both[0] == both[1]
    times = [[c.outcome.step_us for c in one.ranked] for one in (shared, found)]
    assert times[0] == times[1]


def test_candidates_fit_and_what_memory_rejects_does_not(found: Search) -> None:
    for candidate in found.candidates:
        scenario = candidate.scenario
        if candidate.slices:
            continue
        assert candidate.max_tokens >= WINDOW
        num = scenario.num_micro_batches // scenario.parallelism.dp_size
        lengths = [candidate.max_tokens] * num
        for rank in range(scenario.parallelism.pp_size):
            assert scenario.memory.peak_bytes(rank, lengths) <= 6.5 * GIB
    roomy = find(space(memory_gib=60.0), num_refined=1)
    assert "memory" not in by_reason(roomy.rejected)
    assert all(c.scenario.recompute.granularity is None for c in roomy.candidates)
    assert any(c.scenario.recompute.granularity for c in found.candidates)


def test_memory_limits_are_what_a_flag_says() -> None:
    """Given ones stay, also where floats are a little below their hundredth."""
    for gib, headroom, expected in ((32.3, 0.0, 32.3), (32.3, 0.05, 30.68), (0.004, 0.0, 0.004)):
        where = space(memory_gib=gib, headroom=headroom)
        assert where.limit_gib(Parallelism()) == expected
    free = space(memory_gib=None, headroom=0.05).limit_gib(Parallelism(pp_size=2), slices=True)
    assert free == float(f"{free:.2f}")


def test_ranking_is_by_simulated_work_a_second(found: Search) -> None:
    assert found.original is not None
    original = found.original.outcome
    kept = [c.outcome for c in found.ranked if c.fits and c.outcome.delay_steps <= 1.0]
    assert list(found.ranked[: len(kept)]) == [c for c in found.ranked if c.outcome in kept]
    speeds = [round(outcome.speedup(original), 3) for outcome in kept]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) > 3
    for first, second in pairwise(kept):
        if round(first.speedup(original), 3) == round(second.speedup(original), 3):
            assert first.delay_steps <= second.delay_steps
    assert found.best.outcome.speedup(found.original.outcome) > 1
    coarse = [candidate.mfu for candidate in found.candidates]
    assert coarse == sorted(coarse, reverse=True)


def test_more_delay_is_ranked_first_only_where_it_is_allowed() -> None:
    strict, free = (find(space(), max_delay=limit) for limit in (0.0, 9.0))
    assert strict.best.outcome.delay_steps == 0
    assert free.best.outcome.delay_steps > 0
    assert free.best.outcome.mfu > strict.best.outcome.mfu


def test_coarse_pass_predicts_the_refined_order_of_unlike_layouts() -> None:
    all_of_them = find(space(), num_refined=40, num_tuned=0, steps=2)
    coarse = [choice.candidate.mfu for choice in all_of_them.ranked]
    refined = [choice.outcome.mfu for choice in all_of_them.ranked]
    assert len(coarse) > 10 and max(refined) > 1.2 * min(refined)
    pairs = [
        (coarse[i] > coarse[j]) == (refined[i] > refined[j])
        for i in range(len(coarse)) for j in range(i)
        if abs(refined[i] / refined[j] - 1) > 0.1
    ]  # fmt: skip
    assert sum(pairs) > 0.9 * len(pairs)


def test_s_max_and_packings_are_searched(found: Search) -> None:
    best = found.best.candidate.scenario
    tuned = [c.outcome for c in found.ranked if c.candidate.scenario == best]
    p = best.parallelism
    slices = {"slim"} if p.pp_size > 1 else set()
    assert {o.setting.name for o in tuned} == {"original", "wlb", "hold"} | slices
    # Of the windows that are tried, 1.5 is too near to the most that fits.
    most = found.best.candidate.max_tokens
    assert {o.setting.max_tokens for o in tuned} == {WINDOW * 5 // 4, most}


def test_experts_are_divided_in_each_way_that_fits() -> None:
    experts = SHAPE.with_experts(Experts(4, 2, 256, True), [True] * SHAPE.num_layers)
    found = find(space(shape=experts, num_devices=8), num_refined=1, num_tuned=1, steps=2)
    layouts = [c.scenario.parallelism for c in found.candidates]
    layouts += [one.parallelism for one in found.rejected]
    assert {p.ep_size for p in layouts} == {1, 2, 4}
    for p in layouts:
        assert p.tp_size * p.cp_size * p.dp_size % p.ep_size == 0 and p.expert_tp_size == 1
    tuned = {(c.candidate.scenario.parallelism, c.outcome.setting.name) for c in found.ranked}
    assert {p.expert_replicas for p, name in tuned if name == "slim"} == {1}
    some = find(space(shape=experts, num_devices=8, fixed={"ep_size": 4}), num_refined=1)
    assert {c.scenario.parallelism.ep_size for c in some.candidates} == {4}


def test_given_sizes_are_kept() -> None:
    found = find(space(fixed={"tp_size": 2, "pp_size": 2}), num_refined=1)
    layouts = {c.scenario.parallelism for c in found.candidates}
    assert {(p.tp_size, p.pp_size) for p in layouts} == {(2, 2)}
    assert {p.cp_size * p.dp_size for p in layouts} == {1}


def test_shaping_is_left_off_where_there_is_one_stage() -> None:
    for pp_size, shaped in ((1, {False}), (2, {False, True})):
        found = find(space(fixed={"pp_size": pp_size}), num_refined=1)
        assert {c.outcome.setting.shaped for c in found.ranked} == shaped


def test_tensor_parallelism_stays_in_a_node_unless_allowed() -> None:
    found = find(space(max_tp=2), num_refined=1, num_tuned=0, steps=1)
    assert {r.parallelism.tp_size for r in found.rejected if r.why == "topology"} == {4}
    assert max(c.scenario.parallelism.tp_size for c in found.candidates) == 2
    node_of_2 = replace(H100, devices_per_node=2)
    narrow = find(space(hardware=node_of_2), num_refined=1, num_tuned=0, steps=1)
    assert by_reason(narrow.rejected)["topology"] == by_reason(found.rejected)["topology"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"memory_gib": 0.1}, "no layout of 4 devices can run .*memory.*GiB"),
        ({"fixed": {"tp_size": 3}}, "no layout of 4 devices has tp_size 3; leave a size out"),
        ({"num_micro_batches": (3,), "fixed": {"dp_size": 2}}, "batch and schedule"),
    ],
)
def test_nothing_that_can_run_is_an_error_that_says_why(changes: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        find(space(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes", [{"num_devices": 0}, {"window": 0}, {"num_micro_batches": ()}])
def test_empty_space_is_an_error(changes: dict) -> None:
    with pytest.raises(ConfigError, match="give at least 1 of each"):
        space(**changes)


def test_progress_comes_to_the_end_of_each_pass() -> None:
    said: dict[str, tuple[int, int]] = {}
    find(space(), num_refined=2, steps=1, progress=lambda what, n, of: said.update({what: (n, of)}))
    assert tuple(said) == PASSES
    assert all(done == total for done, total in said.values())


def test_coarse_pass_is_of_whole_windows_however_few_or_long_the_documents() -> None:
    few = np.array([900, 3000, 5000, 12000])
    long = np.array([3 * WINDOW, 5 * WINDOW])

    def mfu(lengths: np.ndarray) -> list[float]:
        found = search(
            space(), Steps(LengthSource("stored", lengths), num=1), num_refined=1, num_tuned=0
        )
        by_layout = {repr(c.scenario.parallelism): c.mfu for c in found.candidates if not c.slices}
        return [by_layout[layout] for layout in sorted(by_layout)]

    assert mfu(few) == pytest.approx(mfu(np.tile(few, 300)), rel=0.05)
    # Long documents are cut into windows.
    assert mfu(long) == pytest.approx(mfu(np.full(80, WINDOW)), rel=1e-9)


def test_layouts_that_no_packing_can_run_are_rejected() -> None:
    found = find(space(packings=("slim",), num_devices=2, fixed={"cp_size": 1}), num_refined=4)
    layouts = {c.scenario.parallelism for c in found.candidates}
    assert {p.pp_size for p in layouts} == {2} and {p.vpp_size for p in layouts} >= {1, 2}
    reasons = {one.reason for one in found.rejected if one.parallelism.pp_size == 1}
    assert any("slices need pipeline stages" in reason for reason in reasons)


def test_slices_are_searched_as_well_as_by_trying_all_that_training_takes() -> None:
    """Each layout and recomputation simulated with slices, against what the search finds."""
    where = space(memory_gib=3.5, packings=("slim",), fixed={"vpp_size": 1})
    found = find(where, num_refined=4, steps=8)
    best = found.best
    assert best.outcome.setting.name == "slim" and best.fits
    assert found.of_each[0].outcome.setting.name == "slim"
    every = []
    for tp, cp, pp in ((1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2)):
        for recompute in where.recomputes:
            layout = Parallelism(tp, cp, pp, 1, 4 // (tp * cp * pp), sequence_parallel=tp > 1)
            run = Run(
                padded_vocabulary(SHAPE, tp), Execution(layout, recompute), H100, WINDOW, 6,
                memory_gib=where.limit_gib(layout),
            )  # fmt: skip
            slim = PackingSettings("slim", 2 * WINDOW)
            try:
                every.append(trial(run, slim, Steps(REFERENCE, num=8, seeds=(1,))))
            except WLBError:
                continue
    fitting = [outcome for outcome in every if not outcome.out_of_memory]
    assert len(fitting) > 2
    assert best.outcome.mfu >= max(outcome.mfu for outcome in fitting)
    # What training refuses, as the longest documents do not fit, is not advised.
    assert all(choice.fits for choice in found.ranked)
    for choice in found.ranked:
        run = choice.candidate.scenario
        planner = run.workload(REFERENCE, seed=1).planner(choice.outcome.setting, 8)
        assert planner.slicing.peak_bytes <= where.limit_gib(run.parallelism) * GIB  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "left"), [({}, {3, 6}), ({"num_devices": 8, "fixed": {"pp_size": 2}}, set())]
)
def test_slices_are_looked_at_only_where_they_could_be_among_the_best(
    changes: dict, left: set
) -> None:
    """Which are the fastest does not change by what is left out: layouts that cannot reach these,
    and more virtual stages where few are far from them.
    """
    slow = replace(H100, node_link_gb_s=20)  # TP and CP cost much
    where = space(packings=("slim",), hardware=slow, **changes)
    steps = Steps(REFERENCE, num=1, seeds=(1,))
    few, every = (find(where, num_refined=num, num_tuned=0, steps=1) for num in (2, 40))
    assert 2 <= len(few.candidates) < len(every.candidates)
    assert few.candidates[:2] == every.candidates[:2]
    could_reach = set()
    for one in every.candidates:
        most_mfu, _ = _looked_at(one.scenario.parallelism, where, steps, [])
        assert one.mfu < most_mfu
        if one not in few.candidates and most_mfu > few.candidates[1].mfu:
            could_reach.add(one.scenario.parallelism.vpp_size)
    assert could_reach == left


def test_other_packings_stand_beside_slices_that_are_the_best() -> None:
    small, packings = replace(H100, memory_gib=8), ("original", "hold", "slim")
    layouts = {"vpp_size": 1, "pp_size": 2}
    where = space(memory_gib=None, hardware=small, packings=packings, fixed=layouts)
    found = find(where, num_refined=3, steps=2)  # all that slices fit in
    assert found.best.outcome.title == "slim"
    assert {choice.outcome.title for choice in found.packings} == {"original", "hold"}
    places = [choice.candidate.layout for choice in found.layouts]
    assert len(set(places)) == len(places) == found.num_simulated
