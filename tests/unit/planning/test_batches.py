"""What flags of the batch mean for plans: windows a micro-batch, and batches that grow."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_wlb.cost import DocumentCost
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.ramp import Ramp
from megatron_wlb.errors import CheckpointError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.from_config import make_evaluation_planner, make_planner, max_tokens
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


@pytest.mark.parametrize("packing", PACKINGS)
def test_packings_fill_micro_batches_of_several_windows(packing: str) -> None:
    """N is the batch ÷ b; rows have b windows in the mean, documents none above a window."""
    plans = list(planner(packing, "--micro-batch-size 4").plans(40))
    lengths = [m.length for plan in plans for m in plan]
    assert all(len(plan.micro_batches[0]) == 2 for plan in plans)
    assert np.mean(lengths) == pytest.approx(4 * WINDOW, rel=0.03)
    assert max(d.length for plan in plans for d in plan.documents) <= WINDOW
    most = 4 * WINDOW if packing.startswith(("original", "fixed")) else 8 * WINDOW
    assert 3 * WINDOW < max(lengths) <= most
    balanced = np.mean([plan.imbalance for plan in plans[5:]])
    assert packing == "original" or "shaped" in packing or balanced < 1.1


def test_s_max_and_evaluations_follow_the_windows_of_a_micro_batch() -> None:
    config = settings("--micro-batch-size 2")
    assert max_tokens(config, 500, 1) == 4 * WINDOW
    plan = make_evaluation_planner(config, CORPORA, COST, 2).next_plan()
    assert plan is not None
    assert [len(rank) for rank in plan.micro_batches] == [2, 2]


def test_slices_take_the_windows_of_a_step() -> None:
    pp2 = "--pipeline-model-parallel-size 2"
    plans = planner("slim", f"{pp2} --micro-batch-size 4").plans(30)
    assert np.mean([plan.num_tokens for plan in plans]) == pytest.approx(8 * WINDOW, rel=0.05)


SCHEDULE = f"0:2,{10 * WINDOW}:4,{20 * WINDOW}:6,{30 * WINDOW}:8"
RAMP = f"--step-batch-size-schedule {SCHEDULE}"


@pytest.mark.parametrize("packing", PACKINGS)
def test_growing_batches_have_their_micro_batches_and_lose_nothing(packing: str) -> None:
    """Also when it is read from its state before each step, as after a kill."""
    ramp, size = Ramp.schedule(SCHEDULE, WINDOW), 2 if packing == "hold" else 1
    flags, dp_size = f"{RAMP} --micro-batch-size {size}", 2 // size
    whole, resumed = planner(packing, flags, dp_size), planner(packing, flags, dp_size)
    run: list[tuple[int, int, int]] = []
    for step in range(24):
        state = json.loads(json.dumps(resumed.state_dict()))
        resumed = planner(packing, flags, dp_size)
        resumed.load_state_dict(state)
        plan, again = whole.next_plan(), resumed.next_plan()
        assert plan is not None and again is not None
        assert plan.digest == again.digest
        number = ramp.windows(step) // size
        assert [len(rank) for rank in plan.micro_batches] == [number // dp_size] * dp_size
        run += pieces(plan)
    assert len(set(run)) == len(run)
    tokens = sum(length for *_, length in run) + sum(d.length for d in whole.packer.waiting)
    given = WINDOW * ramp.before(24 + whole.packer.look_ahead)
    assert 0 <= tokens - given < max(Lengths.lengths)


@pytest.mark.parametrize("packing", ["original", "hold"])
def test_numbers_by_step_keep_the_documents_of_growing_batches(packing: str) -> None:
    pp2 = f"{RAMP} --pipeline-model-parallel-size 2 --wlb-max-step-tokens 0"
    fixed, chosen = (planner(packing, flags) for flags in (pp2, f"{pp2} --wlb-micro-batches auto"))
    numbers = set()
    for one, other in zip(fixed.plans(24), chosen.plans(24), strict=True):
        assert sorted(pieces(one)) == sorted(pieces(other))
        assert max(m.length for m in other) <= 2 * WINDOW
        numbers.add(len(other.micro_batches[0]) - len(one.micro_batches[0]))
    assert len(numbers) > 1


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
