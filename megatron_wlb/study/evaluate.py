"""What a packing makes of documents: planned as training would plan them, but nothing is run.

Times are *modelled*: they are the cost's. Only what packing itself takes is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from megatron_wlb.cost import CostModel
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.packing import Packer, PackingSettings
from megatron_wlb.planning.packing.metrics import Meter, PackingMetrics
from megatron_wlb.planning.planner import Slicing
from megatron_wlb.planning.run import Workload
from megatron_wlb.simulator.step import Simulator, slowest_us
from megatron_wlb.study.advice import Option, by_part

WARM_UP_STEPS = 50
"""Steps that do not count: queues and pools fill."""


@dataclass(frozen=True)
class Evaluation:
    """How a setting did."""

    setting: PackingSettings
    num_micro_batches: int
    window: int
    metrics: PackingMetrics
    ms_per_step: float
    """Measured CPU time of packing a step."""
    efficiency: float
    """Modelled work ÷ (modelled time of the steps × what shares it): 1 keeps all devices busy."""
    tokens_rate: float
    """Tokens ÷ modelled time of the steps, in a unit that only compares."""
    efficiency_by_part: tuple[float, ...]
    """``efficiency`` of each part of the steps."""
    flags: tuple[str, ...]
    """What the training command needs to pack like this."""
    micro_batch_size: int = 1

    @property
    def option(self) -> Option[Evaluation]:
        cuts = self.setting.kind.windows and self.setting.micro_batches == "fixed"
        longest = self.micro_batch_size * self.window if cuts else self.setting.max_tokens
        rates = self.efficiency, self.efficiency_by_part
        sliced = self.setting.kind.slices
        return Option(self, *rates, self.delay, self.imbalance, longest, sliced)

    @property
    def imbalance(self) -> float:
        """Time-weighted."""
        return self.metrics.imbalance_weighted

    @property
    def delay(self) -> float:
        return self.metrics.delay_mean_steps

    def row(self, original: Evaluation | None = None) -> dict[str, Any]:
        """JSON-able; speed-ups over ``original`` where it is given."""
        m, s = self.metrics, self.setting
        return {
            "packing": s.name,
            "title": s.title,
            "num_micro_batches": self.num_micro_batches,
            "micro_batch_size": self.micro_batch_size,
            "window": self.window,
            "max_windows": s.max_tokens / self.window,
            "max_tokens": s.max_tokens,
            "fixed_batches": s.fixed_batches,
            "queue_thresholds": list(s.queue_thresholds),
            "tau": s.tau,
            "delay_price": s.delay_price,
            "look_ahead": s.look_ahead,
            "steps": m.num_steps,
            "imbalance_mean": m.imbalance_mean,
            "imbalance_time_weighted": m.imbalance_weighted,
            "imbalance_p95": m.imbalance_p95,
            "imbalance_worst": m.imbalance_worst,
            "delay_mean": m.delay_mean_steps,
            "delay_p99": m.delay_p99_steps,
            "delay_max": m.delay_max_steps,
            "waiting_tokens": m.waiting_tokens,
            "tokens_cv": m.tokens_cv,
            "padding": m.padding_share,
            "ms_per_step": self.ms_per_step,
            "documents": m.num_documents,
            "tokens": m.num_tokens,
            "efficiency": self.efficiency,
            "work_speedup": original and self.efficiency / original.efficiency,
            "tokens_speedup": original and self.tokens_rate / original.tokens_rate,
            "flags": list(self.flags),
        }


class _Timed:
    """A packer or slicer whose ``method`` is timed; all else is its own."""

    def __init__(self, timed: object, method: str) -> None:
        self._timed = timed
        self.seconds = 0.0
        setattr(self, method, self._timing(getattr(timed, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timed, name)

    def _timing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            start_s = time.process_time()
            result = call(*given)
            self.seconds += time.process_time() - start_s
            return result

        return run


def evaluate(
    workload: Workload,
    setting: PackingSettings,
    steps: int,
    *,
    warm_up: int = WARM_UP_STEPS,
    costs: StepCosts | None = None,
    on_step: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Plans ``warm_up`` steps and then ``steps`` that count; ``on_step`` is called after each.

    ``costs`` are those of all parts of a step where its layout is known: whole steps are simulated.

    Raises what :meth:`Workload.check` does, and what packing does.
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}; give at least 1")
    workload.check([setting])
    planner = workload.planner(setting, warm_up + steps, costs=costs)
    timed = _Timed(planner.packer, "pack")
    if planner.slicing is None:
        planner.packer = cast(Packer, timed)
    else:
        timed = _Timed(planner.slicing, "cut")
        planner.slicing = cast(Slicing, timed)
    for _ in range(warm_up):
        planner.skip()
        on_step()
    timed.seconds = 0.0
    meter, clock = Meter(), _Clock(workload, costs)
    works_us, devices_us = list[float](), list[float]()
    for plan in planner.plans(steps):
        meter.add(plan)
        times_us = [m.predicted_us for rank in plan.micro_batches for m in rank]
        more = more_us(plan, workload.num_micro_batches, workload.cost)
        works_us.append(sum(times_us) - more)
        devices_us.append(clock.devices_us(plan))
        on_step()
    metrics, device_us = meter.metrics(planner.packer.waiting), sum(devices_us)
    return Evaluation(
        setting,
        workload.num_micro_batches,
        workload.window,
        metrics,
        timed.seconds / steps * 1e3,
        sum(works_us) / device_us if device_us else 1.0,
        metrics.num_tokens / device_us if device_us else 0.0,
        by_part(works_us, devices_us),
        workload.flags(setting),
        workload.micro_batch_size,
    )


def more_us(plan: StepPlan, num_micro_batches: int, cost: CostModel) -> float:
    """What a step's micro-batches beyond N take besides their documents, which is no work."""
    return (sum(1 for _ in plan) - num_micro_batches) * cost.total_us([])


class _Clock:
    """Tells the time of all that shares a step's work."""

    def __init__(self, workload: Workload, costs: StepCosts | None) -> None:
        self._cost, self._layout = workload.cost, workload.layout
        self._experts, self._simulator = workload.experts, None
        if costs is not None and self._layout is not None:
            self._simulator = Simulator(costs, self._layout)
        elif self._layout is not None:
            self._stages = StageCosts.by_layers(self._cost, self._layout)

    def devices_us(self, plan: StepPlan) -> float:
        p, ranks = self._layout, plan.micro_batches
        if p is not None and self._simulator is not None:
            return p.dp_size * p.pp_size * self._simulator.step(plan).step_us
        if p is None:
            if plan.chains:  # their units run one after another on a replica's devices
                return len(ranks) * max(sum(m.predicted_us for m in rank) for rank in ranks)
            times_us = [micro_batch.predicted_us for micro_batch in plan]
            return len(times_us) * max(times_us)
        if p.pp_size == 1 and self._experts is None:
            slowest = max(sum(m.predicted_us for m in rank) for rank in ranks)
        else:
            slowest = slowest_us(plan, self._stages, p, self._experts)
        return p.dp_size * p.pp_size * slowest
