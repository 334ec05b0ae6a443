"""Steps of documents in slices: times by hand, replicas that are unlike, what the pictures say."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from PIL import Image

from megatron_wlb.cost import DocumentCost, Execution, MemoryModel, ModelShape, Parallelism
from megatron_wlb.cost.schedule.order import sliced
from megatron_wlb.cost.slices import UnitTable
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.errors import PlanError
from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan
from megatron_wlb.simulator.step import Simulator, slowest_us
from megatron_wlb.simulator.trace import program, trace
from megatron_wlb.study import page
from megatron_wlb.study.plot import plot_timelines

SHAPE = ModelShape(64, 192, 4, 4, 2, 16, 512, True, rms_norm=True, linear_bias=False)
COST = DocumentCost(2.0, 0.0, 4.0, 0.0)  # of the whole model; half on each of two stages
QUADRATIC = DocumentCost(0.0, 0.5, 0.0, 1.0)


def costs(cost=COST, num_stages=2, **others):
    return StepCosts(StageCosts.even(cost, num_stages), **others)


def plan_of(lengths, prefixes, chains):
    """The first segments of a chain's micro-batches are the slices of one document."""
    rows, others = [], count(100)
    for own, before, sizes in zip(lengths, prefixes, chains, strict=True):
        row = []
        for number, num in enumerate(sizes):
            places = range(len(row), len(row) + num)
            cut = Document(0, 0, 0, sum(own[at][0] for at in places), True, 0, number, 3)
            for at in places:
                spans = [Span(cut, before[at][0], before[at][0] + own[at][0])]
                for length, n in zip(own[at][1:], others, strict=False):
                    spans.append(Span(Document(0, n, 0, length, True, 0, n, 3), 0, length))
                row.append(MicroBatchPlan(at, tuple(spans), sum(own[at]), 1.0))
        rows.append(tuple(row))
    return StepPlan(3, "slim", tuple(rows), 0, 0, chains=tuple(map(tuple, chains)))


def starts(line, dp_rank, pp_rank):
    return {str(i.action): i.start_us for i in line.replicas[dp_rank].intervals[pp_rank]}


def test_document_in_two_slices_beside_others_is_simulated_by_hand():
    """Forwards take 1 µs a token on a stage, backwards 2; a token takes 0.5 µs to the next."""
    # A document of 3 tokens whole, one of 4 + 2 with a whole one of 1 behind, one of 1.
    lengths = [[[3], [4], [2, 1], [1]]]
    line = Simulator(costs(p2p_us_per_token=0.5), Parallelism(pp_size=2)).step(
        plan_of(lengths, [[[0], [0], [4, 0], [0]]], [(1, 2, 1)])
    )
    # Rank 0: F0 0-3, F1 3-7, F2 7-10. Rank 1: F0 4.5-7.5, F1 9-13, B0 13-19.
    first, last = starts(line, 0, 0), starts(line, 0, 1)
    assert (first["F0.0"], first["F0.1"], first["F0.2"]) == (0, 3, 7)
    assert (last["F0.0"], last["F0.1"], last["B0.0"]) == (4.5, 9, 13)
    # Both slices run forward before the second goes back. Rank 1: F2 19-22, B2 22-28.
    assert (last["F0.2"], last["B0.2"]) == (19, 22)
    # Rank 0: B0 20.5-26.5, F3 26.5-27.5. Rank 1: F3 28-29, between the two, B1 29-37, B3 37-39.
    assert (first["B0.0"], first["F0.3"]) == (20.5, 26.5)
    assert (last["F0.3"], last["B0.1"], last["B0.3"]) == (28, 29, 37)
    # On rank 0 B2 29.5-35.5, B1 39-47, B3 47-49.
    assert (first["B0.2"], first["B0.1"], first["B0.3"]) == (29.5, 39, 47)
    assert line.step_us == line.pipeline_us == 49
    assert line.busy_us == ((33.0, 33.0),) and line.num_tokens == 11
    path = line.critical_path
    assert path[0].start_us == 0 and path[-1].stop_us == 49


def test_slice_takes_the_attention_of_the_keys_before_it():
    stage = Simulator(costs(QUADRATIC, 1), Parallelism())
    line = stage.step(plan_of([[[40], [60], [20, 30]]], [[[0], [40], [100, 0]]], [(3,)]))
    ((_, *backward),) = ((0, *line.times_us[0][1, 0].tolist()),)
    assert backward == [40**2, 100**2 - 40**2, 120**2 - 100**2 + 30**2]
    assert line.step_us == 1.5 * (120**2 + 30**2)
    whole = stage.step([[[120], [30]]])
    assert line.step_us == whole.step_us


def test_replicas_run_orders_of_their_own_and_meet_at_the_reduction():
    layout = Parallelism(pp_size=2, dp_size=2)
    lengths = [[[5], [6], [7]], [[9], [8]]]
    prefixes = [[[0], [5], [11]], [[0], [0]]]
    chains = [(3,), (1, 1)]
    given = {"reduce_us": (50.0, 70.0), "update_us": (11.0, 7.0)}
    memory = MemoryModel(SHAPE, Execution(layout))
    simulator = Simulator(costs(**given), layout, memory=memory)
    line = simulator.step(plan_of(lengths, prefixes, chains))
    alone = Simulator(costs(), Parallelism(pp_size=2))
    ends = []
    for dp_rank in (0, 1):
        own = alone.step(plan_of([lengths[dp_rank]], [prefixes[dp_rank]], [chains[dp_rank]]))
        assert line.replicas[dp_rank] == own.replicas[0]
        ends.append([rank[-1].stop_us for rank in own.replicas[0].intervals])
    # Each stage's reduction begins where the later of its two ranks is done.
    for rank, parts in enumerate(line.collectives):
        assert parts[0].start_us == max(end[rank] for end in ends)
    update_us = max(max(end[r] for end in ends) + us for r, us in ((0, 50), (1, 70)))
    assert line.step_us == update_us + 11
    assert [len(rank) for rank in line.micro_batch_us] == [3, 2]
    assert [len(held.ranks[0].actions) for held in line.memory] == [6, 4]
    for held, units in zip(line.memory, line.units, strict=True):
        for rank, found in enumerate(held.ranks):
            alone_bytes = memory.program_bytes(rank, found.actions, UnitTable.of(units))
            assert found.activations == alone_bytes
    with pytest.raises(PlanError, match="2 data-parallel ranks run 2 different orders"):
        _ = line.graph
    assert (line.pp_size, line.vpp_size, line.dp_size) == (2, 1, 2)
    assert line.critical_path[-1].stop_us == line.step_us
    # Overlapped, each stage's begins within the later of the last backwards.
    overlapped = Simulator(costs(overlap_reduce=True, **given), layout).step(
        plan_of(lengths, prefixes, chains)
    )
    for rank, (reduction, _) in enumerate(overlapped.collectives):
        assert reduction.start_us == max(end[rank] for end in ends)  # one bucket: at its end


def test_chains_of_whole_documents_wait_for_nobody_to_receive():
    """The order of 1F1B, sent without waiting: with no transfers it takes the same time."""
    lengths = [[[5], [9], [7], [3]]]
    layout = Parallelism(pp_size=2)
    ours = Simulator(costs(), layout).step(plan_of(lengths, [[[0]] * 4], [(1,) * 4]))
    theirs = Simulator(costs(), layout).step(lengths)
    assert ours.graph.order == theirs.graph.order and ours.graph.sends == "buffered"
    assert ours.step_us <= theirs.step_us


def plan():
    long = Document(0, 7, 0, 12, True, 0, 41, 3)
    short = [Document(0, n, 0, 3, True, 0, n, 3) for n in range(2)]
    spans = [
        (Span(long, 0, 5),),
        (Span(long, 5, 12), Span(short[0], 0, 3)),
        (Span(short[1], 0, 3),),
    ]
    micro_batches = tuple(
        MicroBatchPlan(index, own, sum(s.length for s in own) + (index == 1), 1.0)
        for index, own in enumerate(spans)
    )
    return StepPlan(3, "slim", (micro_batches,), 0, 0, chains=((2, 1),))


@pytest.fixture(scope="module")
def line():
    layout = Parallelism(pp_size=2)
    return Simulator(
        costs(),
        layout,
        memory=MemoryModel(SHAPE, Execution(layout)),
    ).step(plan())


def test_plan_of_slices_counts_tokens_without_padding_and_holds_slices(line):
    layout = Parallelism(pp_size=2)
    same = Simulator(costs(), layout).step(
        plan_of([[[5], [7, 3, 1], [3]]], [[[0], [5, 0, 0], [0]]], [(2, 1)])
    )
    assert line.step_us == same.step_us
    assert (line.num_tokens, same.num_tokens) == (18, 19)
    # Whole, all of the document's activations would be there at once.
    assert line.memory[0].ranks[1].activation_peak_bytes > 0
    assert line.memory[0].ranks[0].activations.kept[-1] == pytest.approx(0, abs=1)


def test_trace_names_the_replicas_that_run_a_document_together():
    """The first slice runs on both replicas, what is left on one of them."""
    (own,) = plan().micro_batches
    shared = replace(own[0], padded_length=8, replicas=(0, 1))
    step = replace(
        plan(), micro_batches=((shared, own[1]), (shared, own[2])), chains=((2,), (1, 1))
    )
    layout = Parallelism(pp_size=2, dp_size=2)
    events = trace({"slim": Simulator(costs(), layout).step(step)})["traceEvents"]
    told = [e["args"] for e in events if e["ph"] == "X" and e["name"] in ("F0.0", "F0.1")]
    assert len(told) == 8
    for args in told:
        together = "0, 1" if args["micro_batch"] == 0 else None
        assert args.get("data_parallel_ranks") == together


def test_trace_and_timeline_name_the_documents_of_slices(line):
    events = [e for e in trace({"slim": line})["traceEvents"] if e["ph"] == "X"]
    told = {e["name"]: e["args"] for e in events if e["tid"] == 1 and "micro_batch" in e["args"]}
    assert told["F0.0"]["document"] == told["B0.1"]["document"] == 41
    assert told["B0.1"]["tokens"] == "5-12 of 12" and "document" not in told["F0.2"]
    colours = {e["name"]: e["cname"] for e in events if e["tid"] == 1 and "cname" in e}
    assert colours["F0.0"] == colours["B0.1"] != colours["F0.2"]
    (cut,) = {
        i.slice for rank in line.replicas[0].intervals for i in rank if str(i.action) == "F0.1"
    }
    assert (cut.document, cut.start, cut.stop, cut.length) == (41, 5, 12, 12)


def test_picture_has_the_documents_own_colour(line, tmp_path):
    plot_timelines({"slim": line.replicas[0]}, tmp_path / "a.png", "PP=2", measured=False)
    image = Image.open(tmp_path / "a.png").convert("RGB")
    found = {colour for _, colour in image.getcolors(1 << 20)}
    assert (0xCC, 0x79, 0xA7) in found  # document 41: the second of five


def test_slices_run_in_virtual_stages():
    layout = Parallelism(pp_size=2, vpp_size=2)
    plan = plan_of([[[5], [6]]], [[[0], [0]]], [(1, 1)])
    line = Simulator(costs(num_stages=4), layout).step(plan)
    assert (line.pp_size, line.vpp_size) == (2, 2)
    assert line.graphs[0].order == tuple(map(tuple, sliced(2, (1, 1), 2)))


def test_what_plans_of_slices_hold_and_take_is_told_without_a_step(line):
    layout = Parallelism(pp_size=2)
    simulator = Simulator(
        costs(),
        layout,
        memory=MemoryModel(SHAPE, Execution(layout)),
    )
    assert simulator.plan_memory(plan()) == line.memory
    assert slowest_us(plan(), StageCosts.even(COST, 2), layout) == line.pipeline_us


def test_program_has_every_action_in_its_rank_s_order():
    lengths, prefixes = [[[3], [4], [2, 1], [1]]], [[[0], [0], [4, 0], [0]]]
    line = Simulator(costs(), Parallelism(pp_size=2)).step(plan_of(lengths, prefixes, [(1, 2, 1)]))
    rows = [row.split(",") for row in program({"slim": line}).splitlines()]
    assert rows[0][:4] == ["name", "dp_rank", "pp_rank", "action"] and len(rows) == 1 + 2 * 8
    assert [row[3] for row in rows[1:9]] == [str(action) for action in line.graph.order[0]]
    (second,) = [row for row in rows if row[2:4] == ["1", "F0.2"]]
    assert second[7:] == ["4", "6", "6"] and float(second[4]) < float(second[5])
    assert [row[6:] for row in rows if row[3] == "F0.0"] == [[""] * 4] * 2


def test_page_knows_the_document_and_the_tokens_of_a_slice():
    lengths, prefixes = [[[3], [4], [2, 1], [1]]], [[[0], [0], [4, 0], [0]]]
    line = Simulator(costs(), Parallelism(pp_size=2)).step(plan_of(lengths, prefixes, [(1, 2, 1)]))
    rank = page._timeline("slim", line)["ranks"][0]
    told = {tuple(action[:3]): action[5:] for action in rank}
    document, tokens = told["B", 0, 2]
    assert tokens == "4-6" and told["F", 0, 1] == [document, "0-4"]
    assert told["F", 0, 0] == told["B", 0, 3] == []
