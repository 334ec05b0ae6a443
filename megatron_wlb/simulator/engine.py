"""Replay of a pipeline order: when each action starts and stops, given what each one takes.

This is a simulation even when the times were measured. Times are in µs and start at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from megatron_wlb.errors import PlanError
from megatron_wlb.schedule.graph import Floats, Graph, Replay, Sends
from megatron_wlb.schedule.order import Action, sizes

StageTimes: TypeAlias = Sequence[Sequence[Sequence[float]]]
"""Time of one action of each kind: ``[pp_size][vpp_size][num_micro_batches]``, µs."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One action that ran on a rank in ``[start_us, stop_us)``."""

    start_us: float
    stop_us: float
    action: Action


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


def replay(
    order: Sequence[Sequence[Action]],
    forward_us: StageTimes,
    backward_us: StageTimes,
    p2p_us: float = 0.0,
    sends: Sends = "buffered",
) -> Timeline:
    """Starts every action as soon as its rank is free and its input is there.

    ``p2p_us`` passes between the stop of an action and the arrival of its output on another rank;
    with blocking ``sends`` it is the time of both ranks, and begins when both have come to it.

    Raises :class:`PlanError` if the order deadlocks, or the times do not cover it exactly or are
    negative or not finite. A search builds the :class:`~megatron_wlb.schedule.graph.Graph` once.
    """
    graph = Graph(order, sends)
    times_us = np.zeros((2, graph.num_stages, graph.num_micro_batches))
    for kind, (name, times) in enumerate(
        (("forward_us", forward_us), ("backward_us", backward_us))
    ):
        _check_times(name, times, order)
        for rank, chunks in enumerate(times):
            times_us[kind, rank :: graph.pp_size] = chunks
    p2p = np.full(graph.num_micro_batches, p2p_us)
    check_times("times", times_us)
    check_times("p2p_us", p2p)
    return timeline(graph, graph.replay(times_us, p2p))


def timeline(graph: Graph, replayed: Replay) -> Timeline:
    """Makes a timeline of a replay of one alternative, rank by rank."""
    return Timeline(
        tuple(
            tuple(
                Interval(start_us, stop_us, action)
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
            f"{name}: {wrong.flat[0]} µs is no duration; give times that are finite and not "
            "negative"
        )


def _check_times(name: str, times: StageTimes, order: Sequence[Sequence[Action]]) -> None:
    vpp_size, num_micro_batches = sizes(order)
    expected = f"[{len(order)}][{vpp_size}][{num_micro_batches}]"
    if (
        len(times) != len(order)
        or any(len(rank) != vpp_size for rank in times)
        or any(len(chunk) != num_micro_batches for rank in times for chunk in rank)
    ):
        raise PlanError(
            f"{name} does not fit the order; give one time per rank, chunk and micro-batch: "
            f"{expected}"
        )
