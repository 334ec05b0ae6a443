"""Replay of a pipeline order: when each action starts and stops, given what each one takes.

This is a simulation even when the times were measured. Times are in µs and start at 0. An order of
one's own is replayed by its :class:`~megatron_wlb.cost.schedule.graph.Graph`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_wlb.cost.schedule.graph import Floats, Graph, Replay
from megatron_wlb.cost.schedule.order import Action
from megatron_wlb.cost.slices import Slice, Unit
from megatron_wlb.errors import PlanError


@dataclass(frozen=True, slots=True)
class Interval:
    """One action that ran on a rank in ``[start_us, stop_us)``."""

    start_us: float
    stop_us: float
    action: Action
    unit: Unit | None = None
    """Its micro-batch, where some run slices."""

    @property
    def slice(self) -> Slice | None:
        """The part of a document that its micro-batch runs, if it runs one."""
        return self.unit.slice if self.unit else None


@dataclass(frozen=True)
class Timeline:
    """What every pipeline rank did during one step, replayed or recorded."""

    intervals: tuple[tuple[Interval, ...], ...]
    """Intervals of each rank, in the order in which they ran, without overlap."""

    @cached_property
    def start_us(self) -> float:
        """Time at which the first rank starts."""
        return min((rank[0].start_us for rank in self.intervals if rank), default=0.0)

    @cached_property
    def step_us(self) -> float:
        """Time from the first start to the last stop over all ranks."""
        stop_us = max((rank[-1].stop_us for rank in self.intervals if rank), default=0.0)
        return stop_us - self.start_us

    @cached_property
    def busy_us(self) -> tuple[float, ...]:
        """Time in which each rank runs an action."""
        return tuple(sum(i.stop_us - i.start_us for i in rank) for rank in self.intervals)

    @cached_property
    def bubble_share(self) -> float:
        """Share of the ranks' time in which they wait: ``1 - Σ busy / (pp_size · step)``."""
        available_us = len(self.intervals) * self.step_us
        return 1.0 - sum(self.busy_us) / available_us if available_us else 0.0


def timeline(graph: Graph, replayed: Replay, units: Sequence[Unit] = ()) -> Timeline:
    """Makes a timeline of a replay of one alternative, rank by rank.

    ``units`` are its micro-batches, where some run slices.
    """
    return Timeline(
        tuple(
            tuple(
                Interval(start_us, stop_us, action, units[action.micro_batch] if units else None)
                for start_us, stop_us, action in zip(
                    graph.of_rank(replayed.start_us, rank).tolist(),
                    graph.of_rank(replayed.stop_us, rank).tolist(),
                    actions,
                    strict=True,
                )
            )
            for rank, actions in enumerate(graph.order)
        )
    )


def check_times(name: str, times_us: Floats) -> None:
    """Raises :class:`PlanError` for a time that is negative or not finite."""
    wrong = times_us[~(np.isfinite(times_us) & (times_us >= 0))]
    if wrong.size:
        raise PlanError(
            f"{name}: {wrong.flat[0]} µs is not a duration; give times that are finite and not "
            "negative"
        )
