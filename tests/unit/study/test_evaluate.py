"""Evaluations: the figures of plans that training would make, from lengths alone."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cost import DocumentCost, Parallelism, ProfiledCost
from megatron_wlb.cost.schedule.graph import graph_of
from megatron_wlb.cost.table import Row
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import sample_lengths
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.packing import PACKINGS, PackingSettings, packer
from megatron_wlb.planning.packing.metrics import measure
from megatron_wlb.planning.packing.reference import REFERENCE_COST
from megatron_wlb.planning.planner import Planner
from megatron_wlb.planning.run import Workload
from megatron_wlb.reading import MOST_TOKENS
from megatron_wlb.settings.command_line import parse
from megatron_wlb.simulator.engine import timeline
from megatron_wlb.study.evaluate import evaluate, more_us

WINDOW = 4096
COST = DocumentCost(1.0, 0.001, 1.7, 0.0029)
REFERENCE = LengthSource.of_distribution("reference")
STORED = LengthSource(
    "stored", np.random.default_rng(7).lognormal(6, 1.6, 4000).astype(np.int64).clip(1, 30000)
)


def workload(source=REFERENCE, **changes) -> Workload:
    values = {"window": WINDOW, "num_micro_batches": 4, "cost": COST, "seed": 5} | changes
    return Workload(source, **values)


def setting(text="hold", **settings) -> PackingSettings:
    return PackingSettings.parse(text, WINDOW, 2 * WINDOW, **settings)


@pytest.mark.parametrize("text", ["original", "fixed-greedy:2", "wlb:3", "hold", "hold:2"])
def test_evaluation_has_the_metrics_of_the_plans_that_training_makes(text: str) -> None:
    """Put together here from the parts that training uses, with a stream of its own."""
    name, _, number = text.partition(":")
    count = int(number or 0)
    stream = DocumentStream(
        [sample_lengths("reference", 4 * 40, seed=5, window=WINDOW)],
        window=WINDOW, step_tokens=4 * WINDOW, seed=0, shuffle=False,
    )  # fmt: skip
    packing = packer(
        name,
        num_micro_batches=4,
        window=WINDOW,
        cost=COST,
        fixed_batches=count or 1,
        queue_thresholds=[1024, 2048, 3072] if name == "wlb" else (),
        look_ahead=count if name == "hold" else 0,
    )
    planner = Planner(stream, packing, COST, dp_size=1)
    plans = [planner.next_plan() for _ in range(30)]
    expected = measure([plan for plan in plans[10:] if plan], packing.waiting)
    found = evaluate(workload(), setting(text), 20, warm_up=10)
    assert found.metrics == expected
    assert found.efficiency == pytest.approx(1 / expected.imbalance_weighted)
    assert found.ms_per_step > 0


def test_cutting_packings_get_whole_documents_and_the_others_pieces() -> None:
    """Pieces of a window would be cut again by windows, which understates the work."""
    long = LengthSource("long", np.array([3 * WINDOW] * 50))
    original = evaluate(workload(long), setting("original"), 6)
    assert original.metrics.num_tokens == original.metrics.num_documents * WINDOW
    hold = evaluate(workload(long), setting("hold"), 6)
    assert hold.metrics.num_documents >= 24 and hold.imbalance == pytest.approx(1)
    uneven = LengthSource("long", np.array([WINDOW + 100] * 50))
    pieces = evaluate(workload(uneven), setting("original"), 40).metrics
    # Whole, a document is cut where its window ends, once; cut before, it would be twice.
    assert pieces.num_documents < 2.1 * pieces.num_tokens / (WINDOW + 100)


def test_truncated_documents_end_at_the_window() -> None:
    long = LengthSource("long", np.array([3 * WINDOW, 700] * 50))
    found = evaluate(workload(long, long_documents="truncate"), setting("hold"), 20).metrics
    assert found.num_tokens / found.num_documents == pytest.approx((WINDOW + 700) / 2, rel=0.1)


def test_same_seed_gives_the_same_and_another_one_other_figures() -> None:
    first, again = (evaluate(workload(STORED), setting(), 20).metrics for _ in range(2))
    assert first == again
    assert evaluate(workload(STORED, seed=6), setting(), 20).metrics != first


def test_padding_counts_to_the_length_multiple() -> None:
    found = evaluate(workload(length_multiple=64), setting("hold"), 10).metrics
    assert 0 < found.padding_share < 64 / 1000


@pytest.mark.parametrize("vpp", [1, 2])
def test_step_time_with_a_pipeline_is_that_of_its_replay(vpp: int) -> None:
    work = replace(
        workload(), num_micro_batches=6, layout=Parallelism(dp_size=2, pp_size=3, vpp_size=vpp)
    )
    found = evaluate(work, setting("wlb"), 5, warm_up=3)
    planner = Planner(work.stream(setting("wlb"), 9), work.packer(setting("wlb")), COST, dp_size=2)
    busy = available = 0.0
    for number in range(8):
        plan = planner.next_plan()
        if number < 3 or plan is None:
            continue
        steps = []
        for rank in plan.micro_batches:
            forward, backward = (
                [sum(us(s.length) for s in m.spans) / (3 * vpp) for m in rank]
                for us in (COST.forward_us, COST.backward_us)
            )
            graph = graph_of(3, vpp, 3, sends="buffered")
            times_us = np.array([[forward] * 3 * vpp, [backward] * 3 * vpp])
            line = timeline(graph, graph.replay(times_us, np.zeros(3)))
            steps.append(line.step_us)
            busy += sum(line.busy_us)
        available += 6 * max(steps)
    assert found.efficiency == pytest.approx(busy / available)


def test_step_time_without_a_pipeline_is_that_of_the_slowest_rank() -> None:
    layout = Parallelism(dp_size=2)
    found = evaluate(workload(layout=layout), setting("original"), 8)
    assert 1 / found.efficiency == pytest.approx(
        evaluate(workload(layout=layout), setting("original"), 8).metrics.rank_imbalance_mean,
        rel=0.1,
    )
    alone = evaluate(workload(layout=Parallelism()), setting("original"), 8)
    assert alone.efficiency == pytest.approx(1)


def test_work_of_slices_is_that_of_their_documents() -> None:
    """Neither more units nor documents that several replicas run are more work."""
    cost = DocumentCost(1.0, 0.01, 1.7, 0.029, micro_batch_us=5e4)
    work = workload(STORED, num_micro_batches=2, cost=cost, layout=Parallelism(dp_size=2))
    plans = list(work.planner(PackingSettings("slim", 2 * WINDOW), 12).plans(12))
    assert any(m.replicas for plan in plans for m in plan)
    for plan in plans:
        predicted_us = sum(m.predicted_us for rank in plan.micro_batches for m in rank)
        documents_us = sum(cost.document_us(d.length) for d in plan.documents)
        work_us = predicted_us - more_us(plan, 2, cost)
        assert work_us == pytest.approx(2 * 5e4 + documents_us)


def test_row_is_json_with_every_figure() -> None:
    original = evaluate(workload(), setting("original"), 12)
    found = evaluate(workload(), setting("hold"), 12)
    row = json.loads(json.dumps(found.row(original)))
    assert row["packing"] == "hold" and row["num_micro_batches"] == 4 and row["max_windows"] == 2
    assert row["work_speedup"] == pytest.approx(original.imbalance / found.imbalance)
    assert row["imbalance_p95"] <= row["imbalance_worst"]
    assert row["documents"] == found.metrics.num_documents
    assert found.row()["work_speedup"] is None


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("fixed-greedy:4", {"fixed_batches": 4}),
        ("fixed-solver:2", {"fixed_batches": 2}),
        ("wlb", {}),
        ("wlb:1", {"queue_thresholds": (2048,)}),
        ("wlb:3", {"queue_thresholds": (1024, 2048, 3072)}),
        ("hold:4", {"look_ahead": 4}),
        ("hold:0", {}),
    ],
)
def test_setting_is_read_from_its_name_and_number(text: str, changes: dict) -> None:
    assert setting(text) == PackingSettings(text.partition(":")[0], 2 * WINDOW, **changes)


@pytest.mark.parametrize(
    "text", ["wlb:0", "wlb:-1", "wlb:x", "wlb:", "fixed-greedy:0", "hold:1.5", "wlb:4096"]
)
def test_setting_of_an_impossible_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"packing {text}: "):
        setting(text)
    with pytest.raises(ConfigError, match="original:2: it takes no number"):
        setting("original:2")


@pytest.mark.parametrize("name", PACKINGS)
def test_flags_of_a_setting_are_the_trainers(name: str) -> None:
    """What the trainer reads from them is the setting again."""
    chosen = PackingSettings(
        name, 5000, fixed_batches=3, queue_thresholds=(100, 200), tau=1.02, delay_price=0.07,
        look_ahead=2,
    )  # fmt: skip
    wlb = parse(chosen.flags()).wlb
    assert wlb.wlb_packing == name
    if name in ("wlb", "hold"):
        assert wlb.wlb_max_tokens == 5000
    if name == "wlb":
        assert wlb.wlb_queue_thresholds == (100, 200)
    if name == "hold":
        assert (wlb.wlb_hold_tau, wlb.wlb_delay_price, wlb.wlb_look_ahead) == (1.02, 0.07, 2)
    if name.startswith("fixed"):
        assert wlb.wlb_fixed_batches == 3


def test_titles_tell_settings_apart() -> None:
    texts = ["original", "fixed-greedy:1", "fixed-greedy:2", "wlb", "wlb:1", "hold", "hold:1"]
    titles = [setting(text).title for text in texts]
    assert titles[:3] == ["original", "fixed-greedy, 1 batch", "fixed-greedy, 2 batches"]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize(
    ("work", "chosen", "message"),
    [
        (workload(), replace(setting(), max_tokens=WINDOW - 1), "is below the window of 4096"),
        (workload(), setting(max_step_tokens=5), "max_step_tokens 5 is below the 16384 tokens"),
        (workload(), setting("hodl"), "unknown packing hodl; did you mean hold"),
        (workload(), replace(setting(), max_tokens=MOST_TOKENS + 1), "give at most 268435456"),
        (workload(layout=Parallelism(dp_size=3)), setting(), "do not divide over 3 data-parallel"),
        (workload(layout=Parallelism(pp_size=3, vpp_size=2)), setting(), "in groups of 3 leave 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(work, chosen, message: str) -> None:
    for refuse in (lambda: work.check([chosen]), lambda: evaluate(work, chosen, 1)):
        with pytest.raises(ConfigError, match=message):
            refuse()


def test_tables_that_end_below_s_max_are_refused_before_packing() -> None:
    rows = (Row(10, 1.0, 2.0), Row(5000, 700.0, 1500.0))
    tables = ProfiledCost({}, 1, 1, rows, rows)
    with pytest.raises(ConfigError, match="ends at 5000 tokens, but 8192"):
        workload(cost=tables).check([setting()])
    found = evaluate(workload(cost=replace(tables, extrapolate=True)), setting(), 3)
    assert found.imbalance >= 1


def test_layout_and_steps_are_at_least_one() -> None:
    with pytest.raises(ConfigError, match="pp_size is 0"):
        Parallelism(pp_size=0)
    with pytest.raises(ConfigError, match="steps is 0"):
        evaluate(workload(), setting(), 0)


def test_reference_set_up_has_the_balance_that_is_known_of_it() -> None:
    """Wide limits around what 400 steps of three seeds give; hold is bounded in a step's tokens."""
    work = Workload(REFERENCE, 131072, 4, REFERENCE_COST, 1)
    by_name = {
        name: evaluate(work, PackingSettings(name, 262144), 150)
        for name in ("original", "wlb", "hold")
    }
    free = evaluate(work, PackingSettings("hold", 262144, max_step_tokens=0), 150)
    assert 1.36 < by_name["original"].metrics.imbalance_mean < 1.50
    assert by_name["wlb"].metrics.imbalance_mean < 1.02
    assert free.metrics.imbalance_mean < 1.01
    assert free.delay < 0.30 < by_name["wlb"].delay
    assert by_name["hold"].metrics.imbalance_mean < 1.015
    assert by_name["hold"].delay < 0.8
    assert by_name["hold"].metrics.tokens_cv < 0.15 < 0.25 < free.metrics.tokens_cv
