"""Plans whose replicas could not run a micro-batch together are refused before anything runs."""

from __future__ import annotations

import pytest
from helpers.workload import make_workload

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import MicroBatchPlan, Span, StepPlan
from megatron_wlb.runtime.stepping.step import check_chains

A, B, C, D = make_workload([[10, 40, 9, 7]], 50).steps[0]
ALL, LOW, HIGH = (0, 1, 2, 3), (0, 1), (2, 3)


def unit(index: int, span: Span, replicas: tuple[int, ...] = ()) -> MicroBatchPlan:
    return MicroBatchPlan(index, (span,), 64, 1.0, replicas=replicas)


def whole(index, document, replicas=()):
    return unit(index, Span(document, 0, document.length), replicas)


A0, A1 = unit(0, Span(A, 0, 3), ALL), unit(1, Span(A, 3, 10), ALL)
B0, B1 = unit(2, Span(B, 0, 17), LOW), unit(3, Span(B, 17, 40), LOW)
C0 = whole(4, C, HIGH)
OWN = [whole(5 + rank, D) for rank in range(4)]


def plan_of(chains, *ranks) -> StepPlan:
    return StepPlan(5, "by hand", tuple(map(tuple, ranks)), 0, 0, chains)


LOW_RANK, HIGH_RANK = [A0, A1, B0, B1], [A0, A1, C0]
GOOD = plan_of(
    ((4, 1), (4,), (3, 1, 1), (3, 1)),
    [*LOW_RANK, OWN[0]], LOW_RANK, [*HIGH_RANK, OWN[1], OWN[2]], [*HIGH_RANK, OWN[3]],
)  # fmt: skip


def test_documents_of_several_replicas_pass() -> None:
    check_chains(GOOD)
    assert GOOD.num_tokens == 10 + 40 + 9 + 4 * 7
    assert [m.index for m in GOOD] == [0, 1, 2, 3, 5, 4, 6, 7, 8]


REFUSED = {
    "without chains": (
        plan_of((), [C0], [C0]), "rank 0: micro-batch 4 runs on .* but not on this one"
    ),
    "no chains": (
        plan_of((), *[[whole(0, A, LOW)]] * 2), "micro-batch 0 .* which has 0 micro-batches"
    ),
    "behind others": (
        plan_of(((1, 2), (2, 1)), [OWN[0], B0, B1], [B0, B1, OWN[1]]),
        "rank 0: micro-batch 2 .* the 2 of this kind come first and are the first chain",
    ),
    "a chain with others": (
        plan_of(((2,), (1,)), [whole(0, A, LOW), OWN[0]], [whole(0, A, LOW)]),
        "the 1 of this kind come first and are the first chain, which has 2",
    ),
    "several chains": (
        plan_of(((1, 1),) * 2, *[[whole(0, A, LOW), whole(1, C, LOW)]] * 2),
        "the 2 of this kind come first and are the first chain, which has 1",
    ),
    "not on a member": (
        plan_of(((2,), (1,)), [B0, B1], [OWN[1]]),
        "rank 1: micro-batch 2 runs on replicas .* but this one has none in its place",
    ),
    "not the first member": (
        plan_of(((1,), (2,)), [OWN[1]], [B0, B1]), "rank 0: micro-batch 2 .* has none in its place"
    ),
    "members in other orders": (
        plan_of(((2,),) * 2, [whole(0, A, LOW), whole(1, C, LOW)],
                [whole(1, C, LOW), whole(0, A, LOW)]),
        "rank 1: micro-batch 0 .* has micro-batch 1, or another in its place",
    ),
    "members that differ": (
        plan_of(((1,),) * 2, [whole(0, A, LOW)], [whole(0, C, LOW)]),
        "rank 1: micro-batch 0 .* has micro-batch 0, or another in its place",
    ),
    "on another rank": (
        plan_of(((1,), (1,), (1,), (1,)), [whole(0, A, LOW)], [whole(0, A, LOW)],
                [whole(0, A, LOW)], [OWN[0]]),
        "rank 2: micro-batch 0 runs on replicas .0, 1. together, but not on this one",
    ),
    "not aligned": (
        plan_of(((1,),) * 4, [OWN[0]], *[[whole(0, A, (1, 2))]] * 2, [OWN[1]]),
        r"replicas \[1, 2\] together; give n of them, from a multiple of n on",
    ),
    "no block": (
        plan_of(((1,),) * 4, [whole(0, A, (0, 2))], [OWN[0]], [whole(0, A, (0, 2))], [OWN[1]]),
        r"replicas \[0, 2\] together; give n of them",
    ),
    "too many": (
        plan_of(((1,),) * 3, *[[whole(0, A, LOW)]] * 2, [OWN[0]]), "at least 2 and divides 3"
    ),
    "one alone": (plan_of(((1,),) * 2, [whole(0, A, (0,))], [OWN[0]]), "n is at least 2"),
    "small blocks first": (
        plan_of(((3,), (3,), (1,), (1,)), *[[B0, B1, whole(0, A, ALL)]] * 2,
                *[[whole(0, A, ALL)]] * 2),
        "rank 0: micro-batch 0 .* behind one of 2",
    ),
    "unfinished": (
        plan_of(((2,),) * 2, *[[B0, whole(0, A, LOW)]] * 2),
        "up to micro-batch 2 ends at token 17 of document 1",
    ),
    "finished elsewhere": (
        plan_of(((3,), (3,), (1,), (1,)),
                *[[whole(0, C, ALL), B0, unit(3, Span(B, 17, 40), HIGH)]] * 2,
                *[[whole(0, C, ALL)]] * 2),
        "up to micro-batch 2 ends at token 17 of document 1",
    ),
    "two documents in turn": (
        plan_of(((4,),) * 2, *[[unit(0, Span(A, 0, 3), LOW), B0, unit(1, Span(A, 3, 10), LOW),
                                B1]] * 2),
        "up to micro-batch 0 ends at token 3 of document 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_replicas_that_cannot_run_together_are_refused(case: str) -> None:
    plan, message = REFUSED[case]
    with pytest.raises(PlanError, match=f"^step 5.*{message}") as caught:
        check_chains(plan)
    assert "\n" not in str(caught.value)
