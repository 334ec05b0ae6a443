"""Multi-latent attention: every layout computes what one process computes with each document alone."""

from __future__ import annotations

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import FULL, KEEP, SELECTIVE, SHARDED, WORKLOAD, Layout, Oracle
from helpers.ranks import train
from helpers.shards import differences

CASES = [
    Layout("latent", 4),
    Layout("latent-yarn", 3, tp="2", extra=FULL),
    Layout("latent-yarn", 3, tp="2sp", extra=SELECTIVE),
    Layout("latent", 4, pp=2),
    Layout("latent", 4, cp=2, extra=KEEP),
    Layout("latent-yarn", 4, cp=2, sharding="per-document", extra=SHARDED),
    Layout("latent-yarn", 3, tp="2sp", cp=2, sharding="per-document"),
    Layout("latent", 3, tp="2", cp=2, sharding="hybrid", extra=SELECTIVE),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_latents_compute_what_one_process_does(
    gloo: GlooPool, oracle: Oracle, case: Layout
) -> None:
    expected = oracle(case)
    runs = gloo.run(case.world_size, train, case.config, WORKLOAD, expected.initial)
    found = differences(expected, runs)
    assert not found, "\n".join(found[:40])
