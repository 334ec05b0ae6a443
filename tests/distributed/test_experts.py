"""Experts over ranks compute what one process computes with each document alone.

Loss, auxiliary losses, every gradient (of experts, routers and all else), biases, and the weights
after several steps, against :mod:`helpers.oracle`, whose losses are made by their definitions.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import FULL, OVERLAP, SHARDED, WORKLOAD, Layout
from helpers.oracle import run_oracle
from helpers.ranks import scatter_for, train
from helpers.shards import differences

ETP1 = "--expert-tensor-parallel-size 1"
CASES = [
    Layout("moe-seq", 3, dp=2, ep=2),
    Layout("moe-aux", 3, dp=4, ep=4, extra=f"{SHARDED} {OVERLAP}"),
    Layout("moe-seq", 4, pp=2, dp=2, ep=2, extra=FULL),
    Layout("moe-aux", 3, pp=2, dp=2, ep=2),
    Layout("moe-seq", 3, cp=2, ep=2, sharding="per-document", extra=SHARDED),
    Layout("moe-seq", 3, tp="2sp", dp=2, ep=2),
    Layout("moe-aux", 3, tp="2sp", dp=2, ep=2, extra=ETP1),
    Layout("moe-aux", 2, tp="2sp", cp=2, ep=4, extra=ETP1),
]


def compared(gloo: GlooPool, case: Layout, *fault: Any) -> list[str]:
    plans = [
        scatter_for(case.config, WORKLOAD, case.world_size, step)
        for step in range(len(WORKLOAD.steps))
    ]
    (expected,) = gloo.run(1, run_oracle, case.config, WORKLOAD, plans)
    runs = gloo.run(case.world_size, train, case.config, WORKLOAD, expected.initial, *fault)
    return differences(expected, runs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_compute_what_one_process_does(gloo: GlooPool, case: Layout) -> None:
    assert compared(gloo, case) == []
