"""Slices of replicas that meet in each pass: chains in common, every token once, little waiting."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.machines import H100

from megatron_wlb.cost import DocumentCost, Execution, Parallelism
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.plan import Document, Units
from megatron_wlb.planning.from_config import execution, run_of
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.planning.slicing.cut import Slicer
from megatron_wlb.planning.slicing.pipeline import Pipeline
from megatron_wlb.planning.slicing.units import Cuts
from megatron_wlb.runtime.stepping.step import check_chains
from megatron_wlb.settings.command_line import parse

COST = DocumentCost(1, 0.01, 2, 0.02)


def documents(lengths: list[int]) -> list[Document]:
    return [Document(0, i, 0, n, True, 0, i, 0) for i, n in enumerate(lengths)]


def cut(
    lengths: list[int], dp_size: int, alike: int, num_units: int, merges: bool = True
) -> list[Units]:
    costs = StepCosts(StageCosts.even(COST, 4))
    made = Slicer(
        Cuts(COST, 1 << 20, 1, 1, dp_size, alike),
        Pipeline(costs, Parallelism(pp_size=4, dp_size=dp_size), 1, alike),
        [num_units],
        merges=merges,
    )
    return made.cut(documents(lengths), 0)


def work_us(unit: list) -> float:
    return sum(COST.document_us(s.stop) - COST.document_us(s.start) for s in unit)


def own_us(units: Units) -> float:
    pairs = zip(units.spans, units.replicas, strict=True)
    return sum(work_us(unit) / (len(ranks) or 1) for unit, ranks in pairs)


def test_a_replica_runs_documents_one_behind_another_in_a_chain_of_another() -> None:
    one, other = cut([8000, 5000, 4900, *[400] * 40], 2, 2, num_units=16, merges=False)
    assert one.chains == other.chains == [17]
    assert {unit[0].document.number for unit in one.spans} == {0}
    sliced = [unit[0].document.number for unit in other.spans if unit and unit[0].is_slice]
    assert sliced == [1] * 7 + [2] * 7 and len(other.spans) == 17


def test_replicas_share_documents_that_meet_in_each_pass() -> None:
    rng = np.random.default_rng(1)
    lengths = [12_000, 9_000, 8_000, 7_500, 6_000, *rng.integers(10, 2000, 600).tolist()]
    units = cut(lengths, 4, 4, num_units=32)
    each = np.array([[work_us(unit) for unit in own.spans] for own in units])
    assert units[0].chains[0] > 10
    assert each.max() / each.mean() < 1.01


def test_groups_have_chains_of_their_own() -> None:
    units = cut([12_000, 9_000, 7_500, 5_000, 900, *[300] * 80], 4, 2, num_units=8)
    assert [own.chains for own in units] == [[15], [15], [8, 3], [8, 3]]


@pytest.mark.parametrize(("alike", "sizes"), [(1, {8, 2}), (2, {8, 2}), (4, {8, 4}), (8, {8})])
def test_replicas_that_run_alike_all_run_a_document_that_outweighs_one(
    alike: int, sizes: set[int]
) -> None:
    lengths = [11_000, 7_000, 500, 400, *[300] * 340]
    units = cut(lengths, 8, alike, num_units=16)
    assert {len(ranks) for own in units for ranks in own.replicas if ranks} == sizes
    apart = cut(lengths, 8, alike, num_units=16, merges=False)
    assert not any(any(own.replicas) for own in apart)
    assert max(map(own_us, units)) < max(map(own_us, apart)) / 2


def test_replicas_that_run_a_document_together_have_like_work() -> None:
    """Half of it counts on each of the two that run it: others fill up all four."""
    units = cut([4000, *[300] * 240], 4, 1, num_units=16)
    assert {len(ranks) for own in units for ranks in own.replicas if ranks} == {2}
    each_us = [*map(own_us, units)]
    assert max(each_us) < 1.02 * sum(each_us) / 4


@pytest.mark.parametrize(
    ("flags", "alike"),
    [
        ("", 1),
        ("--use-torch-fsdp2", 4),
        ("--fp8-format hybrid --fp8-recipe delayed", 4),
        ("--fp8-format hybrid --fp8-recipe tensorwise", 1),
        ("--num-experts 4 --expert-model-parallel-size 1", 1),
        ("--num-experts 4 --expert-model-parallel-size 2", 2),
        (
            "--num-experts 4 --moe-router-load-balancing-type global_aux_loss "
            "--moe-aux-loss-coeff 0.1",
            4,
        ),
        ("--num-experts 4 --moe-router-load-balancing-type global_aux_loss", 1),
    ],
)
def test_settings_say_which_replicas_meet(flags: str, alike: int) -> None:
    words = "--pipeline-model-parallel-size 2 --seq-length 512 --global-batch-size 16 --bf16"
    config = parse([*words.split(), "--disable-bias-linear", *flags.split()])
    run = run_of(config, 64, 4)
    assert run.alike == alike and execution(config, 4).replicas_meet == (alike == 4)
    work = run.workload(
        LengthSource.of_lengths("lengths", np.arange(20, 3000, 70)), seed=1, long_documents="slice"
    )
    plan = work.planner(PackingSettings("slim", 1024), 2, costs=run.costs).next_plan()
    assert plan is not None
    check_chains(plan)
    groups = [set(plan.chains[at : at + alike]) for at in range(0, 4, alike)]
    assert all(len(group) == 1 for group in groups)
    assert len(set(plan.chains)) > 1 or alike == 4


def test_memory_of_replicas_that_run_alike_is_counted_of_the_longest_documents() -> None:
    run = Run(
        padded_vocabulary(load_model("7b"), 8),
        Execution(Parallelism(tp_size=8, pp_size=4, dp_size=2, sequence_parallel=True)),
        H100,
        131072,
        8,
        memory_gib=1000.0,
    )
    source, packing = LengthSource.of_distribution("reference"), PackingSettings("slim", 262144)
    peaks = []
    for meets in (False, True):
        own = run.executed(replicas_meet=meets)
        planner = own.workload(source, seed=1).planner(packing, 8, costs=own.costs)
        planner.next_plan()
        peaks.append(planner.slicing.peak_bytes)  # type: ignore[union-attr]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.2)
