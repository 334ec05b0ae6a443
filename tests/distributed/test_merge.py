"""Documents that several data-parallel ranks run together compute what one process does.

Loss, every element of every gradient and the weights after some steps, as in ``test_executor.py``,
whose plans run beside them. And faults that must not pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import FULL, HEAD_GROUPS, OVERLAP, SELECTIVE, SHARDED, WORKLOAD, Layout
from helpers.oracle import OracleRun, run_oracle
from helpers.ranks import build_runner, train
from helpers.shards import differences
from helpers.workload import Workload, slice_up

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan
from megatron_wlb.settings.config import Config
from megatron_wlb.sharding import length_multiple

DP2 = Layout("gpt2", 1, dp=2, extra=f"{OVERLAP} {SHARDED}")
DP4 = Layout("gpt2", 1, dp=4, extra=SELECTIVE)
CASES = [
    DP2,
    DP4,
    Layout("gpt2", 1, dp=2, pp=2, extra=f"{OVERLAP} {SHARDED} {FULL}"),
    Layout("llama", 1, dp=2, cp=2, extra=HEAD_GROUPS),
    Layout("llama", 1, dp=2, tp="2sp"),
]
BLOCKS = {
    2: [((0, 1), 3), ((0, 1), 1), ((0, 1), 2)],
    4: [((0, 1, 2, 3), 3), ((0, 1), 1), ((2, 3), 2), ((2, 3), 1)],
}
"""For each number of data-parallel ranks: which run the longest documents, in how many slices."""


def merged_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    """The longest documents on several ranks, and then :func:`slice_up` of the others."""
    from megatron_wlb.planning import guards

    p = config.parallel
    dp_size = guards.data_parallel_size(config, world_size)
    multiple = length_multiple(
        p.tensor_model_parallel_size, p.context_parallel_size, p.sequence_parallel
    )
    blocks = BLOCKS[dp_size]
    longest = sorted(workload.steps[step], key=lambda d: (-d.length, d.key))[: len(blocks)]
    others = slice_up(step, [d for d in workload.steps[step] if d not in longest], dp_size, multiple)
    first: list[MicroBatchPlan] = []
    for document, (block, num_slices) in zip(longest, blocks, strict=True):
        for span in slices(document, num_slices):
            own = 2 * len(block) * multiple
            padded = -(-span.length // own) * own + own * (len(first) % 2)
            first.append(MicroBatchPlan(len(first), (span,), padded, 1.0, replicas=block))
    ranks, chains = [], []
    for rank, (micro_batches, numbers) in enumerate(
        zip(others.micro_batches, others.chains, strict=True)
    ):
        merged = [m for m in first if rank in m.replicas]
        later = [dataclasses.replace(m, index=m.index + len(first)) for m in micro_batches]
        ranks.append((*merged, *later))
        chains.append((len(merged), *numbers))
    return dataclasses.replace(others, micro_batches=tuple(ranks), chains=tuple(chains))


def slices(document: Document, num: int) -> list[Span]:
    """The whole, or slices of which one has a single token."""
    length = document.length
    cuts = {1: [], 2: [length - 1], 3: [1, length // 3 * 2]}[num]
    return [Span(document, *edge) for edge in pairwise([0, *cuts, length])]


Oracle = Callable[[Layout], OracleRun]


@pytest.fixture(scope="module")
def oracle(gloo: GlooPool) -> Oracle:
    runs: dict[str, OracleRun] = {}

    def run(case: Layout) -> OracleRun:
        if case.model not in runs:
            (runs[case.model],) = gloo.run(1, run_oracle, case.config, WORKLOAD)
        return runs[case.model]

    return run


def runs_of(gloo, case: Layout, initial, fault=nullcontext):
    return gloo.run(case.world_size, train, case.config, WORKLOAD, initial, fault, merged_for)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_together_compute_what_one_process_does(
    gloo: GlooPool, oracle: Oracle, case: Layout
) -> None:
    expected = oracle(case)
    assert differences(expected, runs_of(gloo, case, expected.initial)) == []
