"""What the tests against one process share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import WORKLOAD, Differences, Layout, Oracle
from helpers.oracle import OracleRun, run_oracle
from helpers.ranks import scatter_for, train
from helpers.shards import differences

from megatron_wlb.settings.megatron import ModelConfig


@pytest.fixture(scope="session")
def oracle(gloo: GlooPool) -> Oracle:
    """The oracle's run for a case; one for all layouts of a model."""
    runs: dict[ModelConfig, OracleRun] = {}

    def run(case: Layout) -> OracleRun:
        key = case.config.model
        if key not in runs:
            plans = [
                scatter_for(case.config, WORKLOAD, case.world_size, step)
                for step in range(len(WORKLOAD.steps))
            ]
            (runs[key],) = gloo.run(1, run_oracle, case.config, WORKLOAD, plans)
        return runs[key]

    return run


@pytest.fixture
def wrong(gloo: GlooPool, oracle: Oracle) -> Differences:
    """What differs from the oracle where ranks train a case, with a fault, on plans."""

    def run(case: Layout, fault: Any = nullcontext, plan_for: Any = scatter_for) -> list[str]:
        expected = oracle(case)
        given = case.config, WORKLOAD, expected.initial, fault, plan_for
        return differences(expected, gloo.run(case.world_size, train, *given))

    return run
