"""Plans of a 7B in slices, and what they take: of windows of 128K on modelled H100s."""

from __future__ import annotations

from typing import Any

from helpers.machines import H100
from megatron_wlb.cost import Execution, Hardware, Parallelism
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.planner import Planner
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.step import Simulator

WINDOW = 131072
REFERENCE = LengthSource.of_distribution("reference")


def run_in(
    limit_gib: float | None, layout: Parallelism, each: int = 4, *, model: str = "7b",
    machine: Hardware = H100, **how: Any,
) -> Run:  # fmt: skip
    """A run whose devices have so much memory, with ``each`` micro-batches a replica."""
    execution = Execution(layout, **how)
    shape = padded_vocabulary(load_model(model), 8)
    return Run(shape, execution, machine, WINDOW, each * layout.dp_size, memory_gib=limit_gib)


def planner_of(
    run: Run, packing: str, num_steps: int, source: LengthSource = REFERENCE, **settings: Any
) -> Planner:
    setting = PackingSettings.parse(packing, WINDOW, 2 * WINDOW, **settings)
    return run.workload(source, seed=1).planner(setting, num_steps, costs=run.costs)


def peak_gib(run: Run, plans: list[StepPlan]) -> float:
    simulator = Simulator(run.costs, run.parallelism, memory=run.memory)
    return max(held.peak_bytes for plan in plans for held in simulator.plan_memory(plan)) / GIB


def total_us(run: Run, plans: list[StepPlan]) -> float:
    return sum(Simulator(run.costs, run.parallelism).step(plan).step_us for plan in plans)
