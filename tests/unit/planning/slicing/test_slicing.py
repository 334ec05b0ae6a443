"""Slim packing: every token once, in units of like work, and faster in simulation."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost import DocumentCost, Execution, Parallelism, load_hardware
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.schedule.graph import graph_of
from megatron_wlb.cost.schedule.messages import slice_graph
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.cost.slices import LAYERS, NOTHING, UnitTable
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.plan import Document, Span, Units
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.reference import REFERENCE_COST, REFERENCE_WINDOW
from megatron_wlb.planning.planner import Planner
from megatron_wlb.planning.run import Run, Workload
from megatron_wlb.planning.slicing.cut import (
    FIRST_STEPS,
    STEPS_A_SWEEP,
    Slicer,
    Way,
    numbers_of_units,
)
from megatron_wlb.planning.slicing.pipeline import Pipeline
from megatron_wlb.planning.slicing.room import MemoryLimit
from megatron_wlb.planning.slicing.units import SLICE_MULTIPLE, TOLERANCE, Cuts
from megatron_wlb.simulator.step import Simulator

COST = DocumentCost(1, 0.01, 2, 0.02)
REFERENCE = LengthSource.of_distribution("reference")


def documents(lengths):
    return [Document(0, i, 0, n, True, 0, i, 0) for i, n in enumerate(lengths)]


def slicer(
    dp_size=1, max_tokens=1 << 20, cost=COST, pp_size=4, vpp_size=1, num_units=None,
    multiple=SLICE_MULTIPLE, alike=1, merges=True,
):  # fmt: skip
    layout = Parallelism(pp_size=pp_size, vpp_size=vpp_size, dp_size=dp_size)
    return Slicer(
        Cuts(cost, max_tokens, 1, multiple, dp_size, alike),
        Pipeline(StepCosts(StageCosts.even(cost, layout.num_stages)), layout, 1, alike),
        [num_units] if num_units else numbers_of_units(4, pp_size),
        merges=merges,
    )


def test_units_are_of_like_work():
    rng = np.random.default_rng(1)
    lengths = [40_000, 25_000, 9_000, *rng.integers(10, 2000, 300).tolist()]
    made = slicer(num_units=32, multiple=16)
    (units,) = made.cut(documents(lengths), 0)
    times = [sum(COST.document_us(s.stop) - COST.document_us(s.start) for s in u)
             for u in units.spans]  # fmt: skip
    assert len(times) == 32
    assert sum(times) == pytest.approx(sum(map(COST.document_us, lengths)))
    assert max(times) * len(times) / sum(times) < 1 + TOLERANCE
    assert sum(length > 1 for length in units.chains) >= 2
    # A later slice attends to more, so it has fewer tokens.
    first = [unit[0].length for unit in units.spans[: units.chains[0] - 1]]
    assert first == sorted(first, reverse=True) and first[0] > 1.5 * first[-1]


def test_cuts_are_multiples_and_short_rests_are_not_left():
    made = slicer(num_units=10, multiple=128)
    (units,) = made.cut(documents([10_000]), 0)
    stops = [span.stop for unit in units.spans for span in unit]
    assert all(stop % 128 == 0 for stop in stops[:-1]) and stops[-1] == 10_000
    assert stops[-1] - stops[-2] >= 64


def test_slices_are_of_like_work_where_few_whole_documents_fill_up_the_last():
    def work(num_units, *others):
        (units,) = slicer(num_units=num_units, multiple=1).cut(documents([9000, 8990, *others]), 0)
        ends = [s for unit in units.spans for s in unit if s.is_slice]
        return [COST.document_us(s.stop) - COST.document_us(s.start) for s in ends]

    first, rest, *others = work(3)
    assert first == pytest.approx(rest, rel=0.01)
    assert others[0] == pytest.approx(others[1], rel=0.01)
    first, rest, *_ = work(4, *[900] * 40)
    assert rest < 0.8 * first  # and whole documents beside it


def test_units_are_chosen_by_what_slices_take_with_the_keys_before_them():
    made = slicer(num_units=8, pp_size=1)
    (units,) = made.cut(documents([9000, 300]), 0)
    assert len(units.spans) > 4
    whole_us = COST.document_us(9000) + COST.document_us(300)
    assert made.pipeline.simulated_us([units]) == pytest.approx(whole_us)


def test_units_are_chosen_by_all_steps_that_were_looked_at():
    light, heavy = documents([300] * 8), documents([9000] * 3)
    of_light, of_heavy = (slicer().settle(step, 0).num_units for step in (light, heavy))
    assert of_light != of_heavy
    heavy_first, light_first = slicer(), slicer()
    assert heavy_first.settle(heavy, 0).num_units == of_heavy
    # The light step alone would say otherwise.
    assert heavy_first.settle(light, 1).num_units == of_heavy
    assert light_first.settle(light, 0).num_units == of_light
    for step in range(1, FIRST_STEPS):
        chosen = light_first.settle(heavy, step).num_units
    assert chosen == of_heavy
    # From then on other steps are looked at now and then.
    assert light_first.state_dict()["next_sweep"] == STEPS_A_SWEEP


def test_skipped_steps_leave_the_number_of_units_as_it_would_be():
    one, other = (planner("slim", steps=STEPS_A_SWEEP + 10) for _ in range(2))
    expected = [plan.digest for plan in one.plans(STEPS_A_SWEEP + 4)]
    for at in (0, STEPS_A_SWEEP):
        other.skip()
        assert other.slicing.num_units is not None
        assert [plan.digest for plan in other.plans(3)] == expected[at + 1 : at + 4]
        while other.step < STEPS_A_SWEEP:
            other.skip()


@pytest.mark.parametrize("spent_us", [[[4, False, 0]], [[4, 1.0]], [[4, False, 0, -1.0]], 3])
def test_a_state_of_another_form_is_refused(spent_us):
    state = slicer().state_dict() | {"spent_us": spent_us}
    with pytest.raises(CheckpointError, match="not the state of a slicer"):
        slicer().load_state_dict(state)


def test_replicas_share_the_work_though_their_units_differ_in_number():
    lengths = [30_000, 500, 400, *[300] * 100]
    units = slicer(dp_size=2, num_units=8, merges=False).cut(documents(lengths), 0)
    outlier, rest = (
        sum(COST.document_us(s.stop) - COST.document_us(s.start) for u in r.spans for s in u)
        for r in units
    )
    assert outlier > 5 * rest  # one document outweighs all others, and is never divided
    assert len(units[0].spans) == 8


def test_an_outlier_runs_on_several_replicas_where_that_is_faster():
    lengths = [30_000, 500, 400, *[300] * 100]
    made = slicer(dp_size=2, num_units=8)
    units = made.cut(documents(lengths), 0)
    assert all(replica.replicas[0] == (0, 1) for replica in units)
    alone = slicer(dp_size=2, num_units=8, merges=False)
    assert slowest_us(made, units) < 0.6 * slowest_us(alone, alone.cut(documents(lengths), 0))
    # Where none outweighs a replica, none is merged.
    assert not any(any(r.replicas) for r in made.cut(documents([2000] * 8), 1))


def slowest_us(slicer, units):
    return max(slicer.pipeline.simulated_us([own]) for own in units)


def test_blocks_of_replicas_are_as_large_as_an_outlier_needs():
    lengths = [25_000, *[1000] * 600]  # the first is 3.9 times a rank's mean
    units = slicer(dp_size=8, num_units=8).cut(documents(lengths), 0)
    blocks = {ranks for replica in units for ranks in replica.replicas if ranks}
    assert blocks == {(0, 1, 2, 3)}


def planner(name, num_micro_batches=4, pp_size=4, dp_size=1, steps=200, **more) -> Planner:
    layout = Parallelism(pp_size=pp_size, dp_size=dp_size)
    workload = Workload(
        LengthSource.of_distribution("reference"), REFERENCE_WINDOW, num_micro_batches,
        REFERENCE_COST, 1, layout=layout, **more,
    )  # fmt: skip
    setting = PackingSettings.parse(name, REFERENCE_WINDOW, 2 * REFERENCE_WINDOW)
    return workload.planner(setting, steps)


def efficiency(name, num_micro_batches, steps):
    """Work ÷ time of a pipeline of 4 ranks, simulated, after 10 steps that fill queues."""
    costs = StageCosts.even(REFERENCE_COST, 4)
    plans = [*planner(name, num_micro_batches, steps=steps + 20).plans(steps + 10)][10:]
    work_us = time_us = 0.0
    for plan in plans:
        (rank,) = plan.micro_batches
        starts = UnitTable.starting([m.prefixes[0] for m in rank])
        times = costs.times_us([m.lengths for m in rank], None, starts)
        graph = slice_graph(4, plan.chains[0]) if plan.chains else graph_of(4, 1, len(rank))
        work_us += times.sum() / 4
        time_us += float(graph.step_us(times, np.zeros(len(rank))))
        assert not plan.chains or plan.delay_steps == plan.num_waiting == 0
    return work_us / time_us


@pytest.mark.parametrize(("num_micro_batches", "least"), [(4, 1.80), (16, 1.52)])
def test_slim_steps_are_faster_than_windows_in_simulation(num_micro_batches, least):
    steps = 160 // num_micro_batches
    slim, original = (efficiency(name, num_micro_batches, steps) for name in ("slim", "original"))
    assert slim / original >= least


class Steps:
    """A cost of stairs, as measured tables may have."""

    def __init__(self, width: int, bend: float) -> None:
        self.width, self.bend, self.asked = width, bend, 0

    def document_us(self, length: int) -> float:
        self.asked += 1
        return float(length // self.width) ** self.bend + length / 1e6

    def total_us(self, lengths):
        return sum(map(self.document_us, lengths))


@settings(max_examples=200)
@given(
    st.integers(1, 40_000), st.integers(1, 700), st.floats(0.5, 3), st.floats(0, 1.1),
    st.sampled_from([1, 16, 128]), st.floats(0, 1), st.integers(0, 50_000),
)  # fmt: skip
def test_a_cut_is_the_same_from_any_guess(length, width, bend, share, multiple, begin, guess):
    cost = Steps(width, bend)
    cuts = Cuts(cost, 1 << 20, multiple=multiple)
    document, start = documents([length])[0], int(begin * (length - 1))
    until_us = share * cost.document_us(length)
    numbers = range(start // multiple + 1, length // multiple + 1)
    low = [n for n in numbers if cost.document_us(n * multiple) < until_us]
    stop = (numbers.start + len(low)) * multiple
    if low and until_us - cost.document_us(stop - multiple) < cost.document_us(stop) - until_us:
        stop -= multiple
    expected = length if length - stop < multiple // 2 else stop
    assert cuts.stop(document, start, until_us, guess) == expected


def test_cuts_ask_the_cost_a_few_times_each():
    class Counted(Steps):
        def document_us(self, length):
            self.asked += 1
            return COST.document_us(length)

    cost = Counted(1, 1)
    cuts = Cuts(cost, 1 << 20, multiple=16)
    whole_us = COST.document_us(1 << 20)
    slices = cuts.slices(documents([1 << 20])[0], whole_us, whole_us / 64, 1 << 20)
    assert len(slices) == 64
    assert cost.asked < 6 * len(slices)  # 20 by bisection


@pytest.mark.parametrize("number", ["8", 0, -4, 2.5])
def test_a_number_of_units_that_is_none_is_no_state(number):
    with pytest.raises(CheckpointError, match="next_sweep"):
        slicer().load_state_dict({"num_units": 8, "next_sweep": "64"})
    with pytest.raises(CheckpointError, match="num_units"):
        slicer().load_state_dict({"num_units": number})


def test_virtual_stages_are_counted() -> None:
    """In chunks, which fill the pipeline sooner, a step of the same units is shorter."""
    lengths = [9000, 7000, 3000, *[400] * 40]
    times = []
    for vpp_size in (1, 2, 4):
        made = slicer(vpp_size=vpp_size, multiple=16, num_units=24)
        times.append(made.pipeline.simulated_us(made.cut(documents(lengths), 0)))
    assert times[0] > 1.02 * times[1] > 1.02 * times[2]


def limited(limit_gib, packing="slim", num_micro_batches=4, source=REFERENCE, **more):
    run = Run(
        padded_vocabulary(load_model("7b"), 8),
        Execution(Parallelism(tp_size=8, pp_size=4, sequence_parallel=True)),
        load_hardware("h100-sxm"),
        REFERENCE_WINDOW,
        num_micro_batches,
        memory_gib=limit_gib,
    )
    setting = PackingSettings.parse(packing, REFERENCE_WINDOW, 2 * REFERENCE_WINDOW, **more)
    return run, run.workload(source, seed=1).planner(setting, 30, costs=run.costs)


def peaks_gib(run, planner, steps=8):
    simulator = Simulator(run.costs, run.parallelism, memory=run.memory)
    plans = planner.plans(steps)
    return [simulator.plan_memory(plan)[0].peak_bytes / GIB for plan in plans]


def test_worst_steps_need_more_memory_than_real_ones() -> None:
    run, planner = limited(1000.0)
    needed = peaks_gib(run, planner, 12)
    assert max(needed) < planner.slicing.peak_bytes / GIB < 2 * max(needed)


def test_memory_of_units_is_that_of_their_padded_lengths() -> None:
    run, _ = limited(1000.0)
    limit = run.workload(REFERENCE, seed=1).memory
    assert limit is not None and limit.multiple == run.length_multiple == 8
    (long, short), (round_,) = documents([2500, 37]), documents([2560])
    ragged = Units([[Span(long, 0, 1000)], [Span(long, 1000, 2500), Span(short, 0, 37)]],
                   [(), ()], [2])  # fmt: skip
    padded = Units([[Span(round_, 0, 1024)], [Span(round_, 1024, 2560)]], [(), ()], [2])
    wider = limit._replace(multiple=512)
    assert limit.peak_bytes(ragged) < wider.peak_bytes(ragged)
    whole = [limit._replace(multiple=m).peak_bytes(padded) for m in (8, 512)]
    assert whole[0] == whole[1]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_worst_steps_have_a_document_that_ends_beyond_them(num_micro_batches: int) -> None:
    """A corpus does not fill windows: a step of one window may have nearly two."""
    stream = REFERENCE.stream(
        200, window=REFERENCE_WINDOW, longest=REFERENCE_WINDOW, windows_a_step=1, seed=1,
        long_documents="split",
    )  # fmt: skip
    drawn = np.array([d.length for _ in range(200) for d in stream.next_step()])
    corpus = LengthSource.of_lengths("corpus", drawn)
    run, planner = limited(1000.0, "slim:16", num_micro_batches, corpus)
    assert max(peaks_gib(run, planner, 30)) < planner.slicing.peak_bytes / GIB


def test_number_of_units_follows_the_memory_limit() -> None:
    """More units need less memory, so a limit leaves the larger numbers."""
    bytes_of = {number: limited(1000.0, f"slim:{number}")[1].slicing.peak_bytes
                for number in (4, 16, 64)}  # fmt: skip
    assert bytes_of[4] > bytes_of[16] > bytes_of[64]
    _, planner = limited(bytes_of[16] / GIB + 0.01, recompute="off")
    assert planner.slicing.peak_bytes <= bytes_of[16]
    planner.next_plan()
    assert planner.slicing.num_units >= 16
    # Where none fits, what needs least is taken, and tells how much that is.
    _, tight = limited(10.0, "slim", recompute="off")
    assert 10 * GIB < tight.slicing.peak_bytes <= bytes_of[64]


@pytest.mark.parametrize(("limit_gib", "tight"), [(40.0, True), (1000.0, False)])
def test_a_search_that_is_rough_tries_some_of_the_ways(limit_gib: float, tight: bool) -> None:
    """Peaks with all layers recomputed are lower, and must not hide that memory is tight."""
    run = replace(
        limited(limit_gib)[0],
        execution=Execution(Parallelism(tp_size=4, cp_size=2, pp_size=4, sequence_parallel=True)),
    )
    setting = PackingSettings.parse("slim", REFERENCE_WINDOW, 2 * REFERENCE_WINDOW)
    found = []
    for exact in (True, False):
        workload = run.workload(REFERENCE, seed=1)
        assert workload.memory is not None
        workload = replace(workload, memory=workload.memory._replace(exact=exact))
        found.append(workload.planner(setting, 30, costs=run.costs).slicing)
    numbers = numbers_of_units(4, 4)
    rough = [numbers[0], *numbers[1::3]]
    assert found[1].ways == [way for way in found[0].ways if way.num_units in rough] != []
    assert any(way.divided for way in found[0].ways) == tight
    assert (found[1].peak_bytes < found[0].peak_bytes) == tight


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_document_that_no_cut_makes_fit_is_refused_before_any_is_tried(
    cp_size: int, recomputes: bool
) -> None:
    """What is refused is less than a step of this document alone needs, by the memory in which its
    passes work.
    """
    p = Parallelism(tp_size=8 // cp_size, cp_size=cp_size, pp_size=4, sequence_parallel=True)
    run = replace(limited(1000.0)[0], execution=Execution(p))
    memory = run.memory_limit._replace(recomputes=recomputes)
    setting = PackingSettings.parse("slim", REFERENCE_WINDOW, 2 * REFERENCE_WINDOW)
    slicing = run.workload(REFERENCE, seed=1).planner(setting, 30, costs=run.costs).slicing

    def refuses(limit_bytes: float) -> bool:
        try:
            memory._replace(limit_bytes=limit_bytes).check_document(REFERENCE_WINDOW)
        except ConfigError as error:
            assert f"slices of a document of {REFERENCE_WINDOW} tokens take" in str(error)
            return True
        return False

    for number in (8, 64):
        units = slicing.alone([Document(0, 0, 0, REFERENCE_WINDOW, True, 0, 0, 0)], number)
        again = (LAYERS if recomputes else NOTHING,) * len(units.spans)
        units = units._replace(recomputed=again, divided=cp_size > 1)
        assert not refuses(memory.peak_bytes(units))
        assert refuses(0.59 * memory.peak_bytes(units))


def test_a_rough_search_gives_up_where_most_units_need_far_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = limited(10.0)[0]
    setting = PackingSettings.parse("slim", REFERENCE_WINDOW, 2 * REFERENCE_WINDOW)
    workload = run.workload(REFERENCE, seed=1)
    assert workload.memory is not None
    memory = workload.memory._replace(exact=False, recomputes=False)
    looked, peak_bytes = [], MemoryLimit.program_bytes
    monkeypatch.setattr(
        MemoryLimit, "program_bytes", lambda *args: looked.append(args) or peak_bytes(*args)
    )
    slicing = replace(workload, memory=memory).planner(setting, 30, costs=run.costs).slicing
    assert slicing.ways == [Way(numbers_of_units(4, 4)[-1])]
    assert len(looked) == 2  # steps that need most, of one way
    with pytest.raises(ConfigError, match=r"GiB, above the 10\.00 GiB"):
        slicing.check_room()


def test_a_resumed_run_keeps_to_a_lower_memory_limit() -> None:
    """What did not fit is not run again, only because the checkpoint has it."""
    needed_bytes = {number: limited(1000.0, f"slim:{number}")[1].slicing.peak_bytes
                    for number in (8, 64)}  # fmt: skip
    _, before = limited(1000.0)
    before.next_plan()
    state = json.loads(json.dumps(before.state_dict()))
    state["slicing"] |= {"num_units": 8, "next_sweep": STEPS_A_SWEEP}
    _, free = limited(1000.0)
    free.load_state_dict(state)
    free.next_plan()
    assert free.slicing.num_units == 8
    _, resumed = limited(needed_bytes[64] / GIB + 0.1, recompute="off")
    resumed.load_state_dict(state)
    resumed.next_plan()
    assert resumed.slicing.num_units > 8
    assert resumed.slicing.peak_bytes < needed_bytes[8]
