"""What flags of the batch mean for plans: windows a micro-batch, and batches that grow."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_wlb.cost import DocumentCost
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import CheckpointError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.from_config import (
    make_evaluation_planner,
    make_planner,
    max_tokens,
    run_of,
)
from megatron_wlb.planning.planner import Planner
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config

COST = DocumentCost(1.0, 0.05, 2.0, 0.125, micro_batch_us=5)
WINDOW = 64


class Lengths:
    prefix = "lengths"
    targets = None
    lengths = np.clip(np.random.default_rng(5).lognormal(3, 1, 600).astype(int), 1, 300)


CORPORA = Corpora(
    [Lengths()],  # type: ignore[list-item]
    500,
    {"train": [(0, 500)], "valid": [(500, 600)]},
)
PACKINGS = {
    "original": "",
    "fixed-greedy": "",
    "fixed-greedy ahead": "--wlb-fixed-batches 3",
    "wlb": "",
    "hold": "",
    "hold ahead": "--wlb-look-ahead 2",
    "hold shaped": "--wlb-shape on --pipeline-model-parallel-size 2",
}


def settings(flags: str) -> Config:
    return parse(f"--seq-length {WINDOW} --global-batch-size 8 --num-layers 4 {flags}".split())


def planner(packing: str, flags: str = "", dp_size: int = 1) -> Planner:
    words = f"--wlb-packing {packing.split()[0]} {PACKINGS.get(packing, '')} {flags}"
    return make_planner(settings(words), CORPORA, COST, dp_size)


def pieces(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(d.arrival, d.offset, d.length) for m in plan for d, _, _ in m.spans]


def test_original_puts_consecutive_windows_in_a_row() -> None:
    """Cut and ordered as single windows are, over data-parallel ranks too."""
    single, double = planner("original"), planner("original", "--micro-batch-size 2", dp_size=2)
    for one, other in zip(single.plans(20), double.plans(20), strict=True):
        rows = [pieces_of for rank in one.micro_batches for pieces_of in rank]
        pairs = [a.spans + b.spans for a, b in zip(rows[::2], rows[1::2], strict=True)]
        assert [len(rank) for rank in other.micro_batches] == [2, 2]
        assert [m.spans for m in other.micro_batches[0]] == pairs[::2]
        assert [m.spans for m in other.micro_batches[1]] == pairs[1::2]
        assert one.num_targets == other.num_targets


def test_s_max_and_evaluations_follow_the_windows_of_a_micro_batch() -> None:
    config = settings("--micro-batch-size 2")
    assert max_tokens(config, run_of(config, 500, 1)) == 4 * WINDOW
    plan = make_evaluation_planner(config, CORPORA, COST, 2).next_plan()
    assert plan is not None
    assert [len(rank) for rank in plan.micro_batches] == [2, 2]


SCHEDULE = f"0:2,{10 * WINDOW}:4,{20 * WINDOW}:6,{30 * WINDOW}:8"
RAMP = f"--step-batch-size-schedule {SCHEDULE}"


def test_growing_batches_are_those_of_one_checkpoint_only() -> None:
    saved = planner("hold", RAMP).state_dict()
    for flags in ("", "--step-batch-size-schedule 0:4,1M:8"):
        with pytest.raises(CheckpointError, match=r"batch size ramps up 2 from 0 .* there"):
            planner("hold", flags).load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"into 8 .*into 4; .*--micro-batch-size"):
        planner("hold", "--micro-batch-size 2").load_state_dict(planner("hold").state_dict())


def test_evaluations_do_not_grow() -> None:
    planner = make_evaluation_planner(settings(RAMP), CORPORA, COST, 1)
    plan = planner.next_plan()
    assert plan is not None
    assert len(plan.micro_batches[0]) == 8
