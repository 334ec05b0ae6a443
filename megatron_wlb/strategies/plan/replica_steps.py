"""A step of unlike replicas, simulated: each replica's pipeline, and the exchange of parameters.

A step pulls weights from the parameter store, runs forwards and backwards, pushes gradients and
updates the shards (Hydraulis §5.2). Exchange is either all before and behind the passes, or beside
them layer by layer (§5.3): then the first forward waits for its layers' weights, and what the last
backward leaves is pushed while it runs. Everything here is *simulated*, in µs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts, Scheme
from megatron_wlb.simulator.engine import Timeline
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.simulator.step_timeline import StepTimeline
from megatron_wlb.strategies.plan.store_costs import ExchangeTimes
from megatron_wlb.strategies.plan.strategy import Replica, Strategy


@dataclass(frozen=True)
class StrategyTimeline:
    """What every replica did in a step, and what was between."""

    strategy: Strategy
    replicas: tuple[StepTimeline | None, ...]
    """Each replica's forwards and backwards from 0 on; None for one that rests."""
    exchange_us: float
    """Time in which parameters are exchanged and the slowest replica has no passes beside that."""
    update_us: float

    @property
    def propagation_us(self) -> float:
        """Time of all forwards and backwards: that of the slowest replica."""
        return max((line.pipeline_us for line in self.replicas if line), default=0.0)

    @property
    def step_us(self) -> float:
        return self.propagation_us + self.exchange_us + self.update_us


class StrategySimulator:
    """Simulates steps of plans with strategies.

    Args:
        costs: of each kind of replica.
        exchange: what a strategy's exchange takes; None leaves it out.
        overlap: whether it runs beside the passes.
    """

    def __init__(
        self,
        costs: Mapping[tuple[Scheme, int], ReplicaCosts],
        exchange: Callable[[Strategy], ExchangeTimes] | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        self.costs = costs
        self.exchange = exchange
        self.overlap = overlap
        self._simulators = {
            kind: Simulator(own.costs, own.scheme.parallelism) for kind, own in costs.items()
        }

    def step(self, plan: StepPlan) -> StrategyTimeline:
        """One step. Raises :class:`PlanError` for a plan without a strategy."""
        if not isinstance(plan.strategy, Strategy):
            raise PlanError(
                f"step {plan.step} has no strategy; simulate equal layouts with a Simulator"
            )
        lines = tuple(self._replica(plan, number) for number in range(len(plan.micro_batches)))
        done = StrategyTimeline(plan.strategy, lines, 0.0, 0.0)
        if self.exchange is None:
            return done
        times = self.exchange(plan.strategy)
        if not self.overlap:
            exchange_us = float(times.pull_us.max() + times.push_us.max())
        else:
            end_us = done.propagation_us
            for line, replica in zip(lines, plan.strategy.replicas, strict=True):
                if line is not None:
                    num = self.costs[replica.kind].num_parts
                    wait_us = _waits_us(line.timeline, replica, times, num)
                    stop_us = _pushed_us(line.timeline, replica, times, num)
                    end_us = max(end_us, wait_us + stop_us)
            exchange_us = end_us - done.propagation_us
        exchange_us += times.apart_us
        return replace(done, exchange_us=exchange_us, update_us=times.update_us)

    def _replica(self, plan: StepPlan, number: int) -> StepTimeline | None:
        assert plan.strategy is not None
        alone, kind = plan.alone(number), plan.strategy.replicas[number].kind
        return self._simulators[kind].step(alone) if any(alone.micro_batches) else None


def _waits_us(line: Timeline, replica: Replica, times: ExchangeTimes, num_layers: int) -> float:
    """By how much the passes start later, so that each layer of the first forward has its weights.

    They come evenly. The first forward needs the first layer's when it starts, and the last one's
    when only that is left to run.
    """
    wait_us = 0.0
    for ranks, intervals in zip(replica.stages, line.intervals, strict=True):
        pull_us, first = float(times.pull_us[ranks].max()), intervals[0]
        each_us = (first.stop_us - first.start_us) / num_layers
        wait_us = max(
            wait_us,
            pull_us / num_layers - first.start_us,
            pull_us + each_us - first.stop_us,
        )
    return wait_us


def _pushed_us(line: Timeline, replica: Replica, times: ExchangeTimes, num_layers: int) -> float:
    """When the last gradients are pushed: they come evenly over each rank's last backward."""
    stop_us = 0.0
    for ranks, intervals in zip(replica.stages, line.intervals, strict=True):
        push_us, last = float(times.push_us[ranks].max()), intervals[-1]
        first_us = last.start_us + (last.stop_us - last.start_us) / num_layers
        stop_us = max(stop_us, first_us + push_us, last.stop_us + push_us / num_layers)
    return stop_us
