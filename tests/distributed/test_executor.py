"""Documents in slices compute what one process computes with each document alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from megatron_wlb.testing.gloo import GlooPool
from megatron_wlb.testing.layouts import OVERLAP, WORKLOAD, Layout
from megatron_wlb.testing.oracle import OracleRun, run_oracle
from megatron_wlb.testing.ranks import sliced_for, train
from megatron_wlb.testing.shards import differences

CASES = [
    Layout("llama", 1),
    Layout("gpt2", 1, pp=2, dp=2, extra=OVERLAP),
    Layout("llama", 1, pp=4),
]

Oracle = Callable[[Layout], OracleRun]


@pytest.fixture(scope="module")
def oracle(gloo: GlooPool) -> Oracle:
    """The oracle's run for a case; one for all layouts of a model."""
    runs: dict[str, OracleRun] = {}

    def run(case: Layout) -> OracleRun:
        if case.model not in runs:
            (runs[case.model],) = gloo.run(1, run_oracle, case.config, WORKLOAD)
        return runs[case.model]

    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_slices_compute_what_one_process_does(gloo: GlooPool, oracle: Oracle, case: Layout) -> None:
    expected = oracle(case)
    runs = gloo.run(
        case.world_size, train, case.config, WORKLOAD, expected.initial, nullcontext, sliced_for
    )
    assert differences(expected, runs) == []
