"""What the tests against one process share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import WORKLOAD, Differences, Layout, Oracle
from helpers.oracle import OracleRun, run_oracle
from helpers.plans import scatter_for
from helpers.ranks import train
from helpers.shards import differences
from helpers.workload import Workload

from megatron_wlb.settings.megatron import ModelConfig


@pytest.fixture(scope="session")
def oracle(gloo: GlooPool) -> Oracle:
    """The oracle's run for a case; one for all layouts of a model."""
    runs: dict[tuple[ModelConfig, int, Any], OracleRun] = {}

    def run(case: Layout, plan_for: Any = scatter_for, workload: Workload = WORKLOAD) -> OracleRun:
        # Losses of documents do not depend on the packing, but those of whole micro-batches do.
        packing = (case, plan_for) if case.model == "moe-aux" else None
        key = case.config.model, id(workload), packing
        if key not in runs:
            plans = [
                plan_for(case.config, workload, case.world_size, step)
                for step in range(len(workload.steps))
            ]
            (runs[key],) = gloo.run(1, run_oracle, case.config, workload, plans)
        return runs[key]

    return run


@pytest.fixture
def wrong(gloo: GlooPool, oracle: Oracle) -> Differences:
    """What differs from the oracle where ranks train a case, with a fault, on plans."""

    def run(
        case: Layout,
        fault: Any = nullcontext,
        plan_for: Any = scatter_for,
        workload: Workload = WORKLOAD,
        train: Any = train,
    ) -> list[str]:
        expected = oracle(case, plan_for, workload)
        given = case.config, workload, expected.initial, fault, plan_for
        # Megatron's norm in Mamba-2 has an epsilon of its own, so small that tokens whose output
        # is next to nothing are mostly rounding.
        times = 4.0 if case.model == "mamba" else 1.0
        return differences(expected, gloo.run(case.world_size, train, *given), times)

    return run
