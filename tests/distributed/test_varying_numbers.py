"""Steps of unlike numbers of micro-batches compute what one process does."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.layouts import GROUP, OVERLAP, SHARDED, WORKLOAD, Differences, Layout
from helpers.ranks import scatter_for
from helpers.workload import Workload

from megatron_wlb.plan import StepPlan
from megatron_wlb.settings.config import Config

CASES = [
    Layout("llama", 3, pp=2),
    Layout("gpt2", 4, pp=2, vpp=2, dp=2, extra=f"{SHARDED} {OVERLAP}"),
    Layout("mixed", 6, pp=2, vpp=2, extra=f"{GROUP} 3"),
    Layout("mixed", 2, pp=4, tp="2sp"),
]


def varying_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    """The step's documents in 2, 1, 3, … times the micro-batches of the batch size."""
    factor = (2, 1, 3)[step % 3]
    training = dataclasses.replace(
        config.training, global_batch_size=factor * config.training.global_batch_size
    )
    return scatter_for(dataclasses.replace(config, training=training), workload, world_size, step)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_by_step_compute_what_one_process_does(wrong: Differences, case: Layout) -> None:
    plans = [
        varying_for(case.config, WORKLOAD, case.world_size, n) for n in range(len(WORKLOAD.steps))
    ]
    assert len({len(plan.micro_batches[0]) for plan in plans}) > 1
    assert wrong(case, plan_for=varying_for) == []
