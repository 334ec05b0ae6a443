"""What the tests against one process share."""

from __future__ import annotations

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import WORKLOAD, Layout, Oracle
from helpers.oracle import OracleRun, run_oracle

from megatron_wlb.settings.config import ModelConfig


@pytest.fixture(scope="session")
def oracle(gloo: GlooPool) -> Oracle:
    """The oracle's run for a case; one for all layouts of a model."""
    runs: dict[ModelConfig, OracleRun] = {}

    def run(case: Layout) -> OracleRun:
        key = case.config.model
        if key not in runs:
            (runs[key],) = gloo.run(1, run_oracle, case.config, WORKLOAD)
        return runs[key]

    return run
