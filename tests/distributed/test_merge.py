"""Documents that several data-parallel ranks run together compute what one process does.

Loss, every element of every gradient and the weights after some steps, as in ``test_executor.py``,
whose plans run beside them. And faults that must not pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise
from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import (
    FULL,
    HEAD_GROUPS,
    KEEP,
    OVERLAP,
    SELECTIVE,
    SHARDED,
    WORKLOAD,
    Differences,
    Layout,
    further,
)
from helpers.ranks import build_runner, half_recomputed, num_alike
from helpers.workload import Workload, run_alike, slice_up
from test_oracle import dividing_by

from megatron_wlb.cost.slices import HOST
from megatron_wlb.errors import PlanError
from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan
from megatron_wlb.plan.sharding import length_multiple
from megatron_wlb.runtime.stepping.step import check_chains
from megatron_wlb.settings.config import Config

DP2 = Layout("gpt2", 1, dp=2, extra=f"{OVERLAP} {SHARDED}")
MERGES = "--wlb-packing slim"  # whose settings of attention over ranks count without CP, too
DP4 = Layout("gpt2", 1, dp=4, extra=f"{SELECTIVE} {OVERLAP} {MERGES} {HEAD_GROUPS} {KEEP}")
CASES = [
    DP2,
    DP4,
    Layout("gpt2", 1, dp=2, pp=2, extra=f"{OVERLAP} {SHARDED} {FULL}"),
    Layout("llama", 1, dp=2, cp=2, extra=HEAD_GROUPS),
    # In step 1 the first replica runs nothing else.
    Layout("gpt2", 2, dp=2, pp=2, vpp=2, extra=OVERLAP),
]
FURTHER = [Layout("llama", 1, dp=2, tp="2sp"), Layout("latent-yarn", 1, dp=2, tp="2sp")]
BLOCKS = [((0, 1, 2, 3), 3), ((0, 1), 1), ((2, 3), 2), ((2, 3), 1)]
"""Which of four data-parallel ranks run the longest documents, in how many slices."""


def merged_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    """The longest documents on several ranks, and then :func:`slice_up` of the others; ranks that
    meet in each pass run it alike.

    In step 1 the last rank has all others.
    """
    from megatron_wlb.planning import guards

    p = config.parallel
    dp_size = guards.data_parallel_size(config, world_size)
    multiple = length_multiple(
        p.tensor_model_parallel_size, p.context_parallel_size, p.sequence_parallel
    )
    alike, every = num_alike(config, dp_size), tuple(range(dp_size))
    blocks = BLOCKS if alike < dp_size > 2 else [(every, 3), (every, 1), (every, 2)]
    longest = sorted(workload.steps[step], key=lambda d: (-d.length, d.key))[: len(blocks)]
    rest = [d for d in workload.steps[step] if d not in longest]
    others = slice_up(step, rest, 1 if step == 1 else dp_size, multiple)
    none = ((),) * (dp_size - len(others.chains))
    first: list[MicroBatchPlan] = []
    for document, (block, num_slices) in zip(longest, blocks, strict=True):
        for span in slices(document, num_slices):
            own = 2 * len(block) * multiple
            padded = -(-span.length // own) * own + own * (len(first) % 2)
            first.append(MicroBatchPlan(len(first), (span,), padded, 1.0, replicas=block))
    ranks, chains = [], []
    for rank, (micro_batches, numbers) in enumerate(
        zip(none + others.micro_batches, none + others.chains, strict=True)
    ):
        merged = [m for m in first if rank in m.replicas]
        later = [dataclasses.replace(m, index=m.index + len(first)) for m in micro_batches]
        ranks.append((*merged, *later))
        chains.append((len(merged), *numbers))
    plan = dataclasses.replace(others, micro_batches=tuple(ranks), chains=tuple(chains))
    return run_alike(plan, alike, multiple)


def slices(document: Document, num: int) -> list[Span]:
    """The whole, or slices of which one has a single token."""
    length = document.length
    cuts = {1: [], 2: [length - 1], 3: [1, length // 3 * 2]}[num]
    return [Span(document, *edge) for edge in pairwise([0, *cuts, length])]


def test_merged_plans_are_awkward() -> None:
    """That the cases are what they seem."""
    for case in CASES:
        for step, documents in enumerate(WORKLOAD.steps):
            plan = merged_for(case.config, WORKLOAD, case.world_size, step)
            check_chains(plan)
            assert sorted(d.key for d in documents) == sorted(d.key for d in plan.documents)
            assert plan.num_targets == sum(d.num_targets for d in documents)
            merged = [m for m in plan if m.replicas]
            assert any(m.slice is None for m in merged)  # a whole document
            assert any(m.slice and m.length == 1 for m in merged)
            assert any(m.padded_length > m.length + 2 * len(m.replicas) for m in merged)
            assert len({own[0] for own in plan.chains}) == (2 if case.dp == 4 else 1)
            others = [len(own) - 1 for own in plan.chains]
            assert others[-1] and (all(others) or (step == 1 and not any(others[:-1])))
    plans = [merged_for(DP4.config, WORKLOAD, 4, step) for step in range(len(WORKLOAD.steps))]
    assert any(len({len(own) for own in plan.micro_batches}) > 2 for plan in plans)


def recomputed_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    return half_recomputed(merged_for(config, workload, world_size, step))


def hosted_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    return half_recomputed(merged_for(config, workload, world_size, step), HOST)


@pytest.mark.parametrize("case", [*CASES, *map(further, FURTHER)], ids=str)
def test_ranks_together_compute_what_one_process_does(wrong: Differences, case: Layout) -> None:
    assert wrong(case, plan_for=merged_for) == []


@pytest.mark.long
@pytest.mark.parametrize("plan_for", [recomputed_for, hosted_for])
def test_ranks_together_keep_little_of_some_micro_batches(
    wrong: Differences, plan_for: Callable[..., StepPlan]
) -> None:
    assert wrong(DP4, plan_for=plan_for) == []


# What must not pass. Each breaks the run of a layout that is equal to the oracle above.


@contextlib.contextmanager
def take_the_shard_of_another_rank(runner) -> Iterator[None]:
    from megatron_wlb.runtime.stepping import batch

    right = batch.local_params

    def wrong(*args, group, cp_rank, cp_size, **options):
        cp_rank = (cp_rank + 1) % cp_size if group else cp_rank
        return right(*args, group=group, cp_rank=cp_rank, cp_size=cp_size, **options)

    with mock.patch.object(batch, "local_params", wrong):
        yield


class Done:
    """A collective that has nothing to wait for."""

    def wait(self) -> None:
        pass


@contextlib.contextmanager
def gather_nothing(runner) -> Iterator[None]:
    """Each rank takes its own keys for those of all others."""
    from megatron_wlb.runtime.gpt.attention import context_parallel

    def own_only(out, given, group, async_op):
        out.copy_(given.repeat(group.size(), *[1] * (given.dim() - 1)))
        return Done()

    with mock.patch.object(context_parallel, "_all_gather", own_only):
        yield


@contextlib.contextmanager
def reduce_nothing(runner) -> Iterator[None]:
    """Each rank's keys get the gradients of its own queries only."""
    from megatron_wlb.runtime.gpt.attention import context_parallel

    def own_only(out, given, group, async_op):
        out.copy_(given.chunk(group.size())[group.rank()])
        return Done()

    with mock.patch.object(context_parallel, "_reduce_scatter", own_only):
        yield


def count_targets_on_each_rank(runner):
    """Targets count on both ranks that run them together."""
    return dividing_by(lambda num_targets: 2 * num_targets)


@pytest.mark.parametrize(
    ("fault", "same_loss"),
    [
        (take_the_shard_of_another_rank, False),
        (gather_nothing, False),
        (reduce_nothing, True),
        (count_targets_on_each_rank, True),
    ],
)
def test_faults_of_ranks_together_differ_from_the_oracle(
    wrong: Differences, fault: Callable[..., object], same_loss: bool
) -> None:
    found = wrong(DP2, fault, merged_for)
    assert any("step 0: gradient of" in line for line in found)
    assert any(line.startswith("step 0: loss") for line in found) is not same_loss


def lacking_on_the_last_rank(plan: StepPlan) -> StepPlan:
    own = tuple(m for m in plan.micro_batches[1] if not m.replicas)
    chains = (plan.chains[0], plan.chains[1][1:])
    return dataclasses.replace(plan, micro_batches=(plan.micro_batches[0], own), chains=chains)


def padded_for_one_rank(plan: StepPlan) -> StepPlan:
    first = dataclasses.replace(plan.micro_batches[0][0], padded_length=6)
    ranks = tuple((first, *own[1:]) for own in plan.micro_batches)
    return dataclasses.replace(plan, micro_batches=ranks)


def run_broken(case: Layout, broken: Callable[[StepPlan], StepPlan]) -> None:
    """Runs a plan that ranks agree on, and that would keep the first waiting for the last."""
    runner = build_runner(case.config, WORKLOAD)
    runner.run(broken(merged_for(case.config, WORKLOAD, case.world_size, 0)))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lacking_on_the_last_rank, "data-parallel rank 1: micro-batch 0 .* this one has none"),
        (padded_for_one_rank, "micro-batch 0 is 6 tokens long; pad it to a positive multiple of 4"),
    ],
)
def test_plans_that_members_cannot_run_are_refused_before_anybody_waits(
    gloo: GlooPool, broken: Callable[[StepPlan], StepPlan], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        gloo.run(2, run_broken, DP2, broken)
