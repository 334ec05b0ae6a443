"""Plans whose chains do not fit their slices are refused before anything runs."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.workload import make_workload

from megatron_wlb.cost.slices import NOTHING
from megatron_wlb.errors import PlanError
from megatron_wlb.plan import MicroBatchPlan, RowRun, Sharing, Span, StepPlan, TreePart
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.runtime.stepping.step import StepRunner, check_chains

LONG, SHORT, OTHER = make_workload([[10, 4, 9]], 50).steps[0]
HEAD, MIDDLE, TAIL = Span(LONG, 0, 1), Span(LONG, 1, 7), Span(LONG, 7, 10)
WHOLE = Span(SHORT, 0, 4)
OTHER_HEAD, OTHER_TAIL = Span(OTHER, 0, 1), Span(OTHER, 1, 9)


def plan_of(chains, *units, step: int = 5) -> StepPlan:
    micro_batches = tuple(MicroBatchPlan(m, spans, 16, 1.0) for m, spans in enumerate(units))
    return StepPlan(step, "by hand", (micro_batches,), 0, 0, chains)


GOOD = plan_of(((1, 3, 1, 2),), (WHOLE,), (HEAD,), (MIDDLE,), (TAIL, WHOLE), (), (OTHER_HEAD,),
               (OTHER_TAIL,))  # fmt: skip


# Two documents in one chain, beside micro-batches without a slice.
SHARED = plan_of(
    ((8,),), (), (HEAD,), (MIDDLE,), (TAIL,), (WHOLE,), (OTHER_HEAD,), (OTHER_TAIL,), ()
)


@pytest.mark.parametrize(
    "plan",
    [GOOD, SHARED, plan_of((), (WHOLE,), ()), plan_of(((1,),), ()), plan_of(((2,),), (WHOLE,), ())],
)
def test_chains_that_fit_pass(plan: StepPlan) -> None:
    check_chains(plan)


def tree_of(*parts: tuple[int, int, int]) -> tuple[MicroBatchPlan, ...]:
    """Micro-batches of trees: a name, the first row, and how many."""
    sizes = {1: 10, 2: 9}
    return tuple(
        MicroBatchPlan(
            n, (Span({1: LONG, 2: OTHER}[name], start, start + rows),), 16, 1.0,
            sharing=Sharing(((RowRun(0, start),) if start else (),), (),
                            TreePart(name, start, sizes[name])),
        )
        for n, (name, start, rows) in enumerate(parts)
    )  # fmt: skip


GOOD_TREES = tree_of((1, 0, 4), (1, 4, 6), (2, 0, 3), (2, 3, 6))


def test_trees_that_are_whole_pass() -> None:
    check_chains(StepPlan(5, "by hand", (GOOD_TREES,), 0, 0, ((4,),)))
    check_chains(StepPlan(5, "by hand", (GOOD_TREES,), 0, 0, ((2, 2),)))


@pytest.mark.parametrize(
    ("units", "chains", "said"),
    [
        (GOOD_TREES, (1, 3), "ends at row 4 of tree 1"),
        (GOOD_TREES[:3], (3,), "ends at row 3 of tree 2"),
        (tree_of((1, 0, 4), (1, 5, 5)), (2,), "come to row 4 of tree 1"),
        (tree_of((1, 4, 6), (1, 0, 4)), (2,), "come to row 0 of tree -1"),
        (tree_of((1, 0, 4), (2, 4, 5)), (2,), "come to row 4 of tree 1"),
        ((GOOD_TREES[0], dataclasses.replace(GOOD_TREES[1], divided=True)), (2,), "which no"),
    ],
)
def test_trees_in_parts_are_refused(
    units: tuple[MicroBatchPlan, ...], chains: tuple[int, ...], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        check_chains(StepPlan(5, "by hand", (units,), 0, 0, (chains,)))


REFUSED = {
    "slices without chains": (
        plan_of((), (HEAD,), (MIDDLE,), (TAIL,)), "ends at token 1 of document 0 of corpus 0"
    ),
    "too few": (plan_of(((2,),), (HEAD,), (MIDDLE,), (TAIL,)), "do not divide its 3 micro-batches"),
    "none": (plan_of(((0, 1),), (WHOLE,)), "each at least 1"),
    "no micro-batch": (plan_of(((),)), "do not divide its 0"),
    "other ranks": (
        dataclasses.replace(GOOD, chains=GOOD.chains * 2), "chains for 2 data-parallel ranks"
    ),
    "a slice behind a document": (
        plan_of(((2, 1),), (HEAD,), (Span(LONG, 1, 10),), (WHOLE, OTHER_TAIL)),
        "micro-batch 2 runs tokens 1 to 9 of document 2",
    ),
    "unfinished": (plan_of(((2,),), (HEAD,), (MIDDLE,)), "ends at token 7 .* which has 10"),
    "begun late": (plan_of(((2,),), (MIDDLE,), (TAIL,)), "has tokens from 1 .* all of a document"),
    "a gap": (plan_of(((2,),), (HEAD,), (TAIL,)), "tokens from 7 .* come to token 1"),
    "out of order": (plan_of(((3,),), (HEAD,), (TAIL,), (MIDDLE,)), "come to token 1"),
    "two documents": (
        plan_of(((2,),), (HEAD,), (OTHER_TAIL,)), "from 1 of document 2 .* token 1 of document 0"
    ),
    "whole among slices": (
        plan_of(((3,),), (HEAD,), (WHOLE,), (Span(LONG, 1, 10),)), "micro-batch 1 has no slice"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_chains_that_do_not_fit_are_refused(case: str) -> None:
    plan, message = REFUSED[case]
    with pytest.raises(PlanError, match=f"^step 5.*{message}") as caught:
        check_chains(plan)
    assert "\n" not in str(caught.value)


@dataclasses.dataclass
class Sequences:
    ahead: None = None


class Chunk(torch.nn.Linear):
    def forward(self, **_: object) -> torch.Tensor:
        return super().forward(torch.ones(1))


def test_passes_say_where_the_step_is() -> None:
    """By micro-batch and chunk: the forward as it begins, the backward as its gradient comes."""
    chunks = [Chunk(1, 1), Chunk(1, 1)]
    model = SimpleNamespace(chunks=chunks, config=SimpleNamespace(timers=None))
    batch = SimpleNamespace(
        tokens=None, position_ids=None, labels=None, ahead=None, packed_seq_params=Sequences()
    )
    runner: Any = SimpleNamespace(model=model)
    step = StepRunner._forward_step(runner, [NOTHING] * 3, "step 7")
    run = partial(step, repeat(batch))
    before = watchdog._place
    try:
        run(chunks[1])
        assert str(watchdog._place) == "step 7: forward of micro-batch 0 of 3, chunk 1"
        run(chunks[0])
        output, _ = run(chunks[1])
        assert str(watchdog._place) == "step 7: forward of micro-batch 1 of 3, chunk 1"
        run(chunks[0])
        output.backward()
        assert str(watchdog._place) == "step 7: backward of micro-batch 1 of 3, chunk 1"
    finally:
        watchdog._place = before
