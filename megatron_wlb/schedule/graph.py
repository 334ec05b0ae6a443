"""A pipeline order as a graph in arrays: replays one step, or many alternatives at once.

A node is an action, or a transfer between ranks where those take the ranks' time. Each waits for
at most two others: the one before it on its rank, and the one that brings its input. Nodes stand by
*level*, the longest way to them, so that all of a level are replayed by a few array operations:
5 ms for PP=16, VPP=4 and 64 micro-batches, hardly more for a hundred alternatives at once.

Legend: ``S`` virtual stages (chunk ``c`` of rank ``r`` is ``c · PP + r``), ``N`` micro-batches,
``K`` alternatives. Times are in µs; only additions and maxima are made of them, so that every
machine comes to the same result to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.errors import PlanError
from megatron_wlb.schedule.order import Action, dataflow, schedule, sizes

Floats: TypeAlias = npt.NDArray[np.float64]
Sends: TypeAlias = Literal["buffered", "blocking"]
"""Whether a rank computes on while its neighbour is not ready to receive, or waits for it.

Megatron's 1F1B waits: a send is over when the neighbour has received it. Its interleaved schedule
(with ``overlap_p2p_comm``) sends while it computes.
"""


class Node(NamedTuple):
    """An action of a rank, or a transfer: then of the rank that receives it, for that action."""

    rank: int
    action: Action
    is_transfer: bool


class Wait(NamedTuple):
    """What a node waits for, by number in ``Graph.nodes`` (-1: nothing), and how long it takes."""

    first: int
    second: int
    gap_us: float
    """Between the stop of ``second`` and the arrival of its output."""
    duration_us: float


@dataclass(frozen=True)
class Replay:
    """When each node of a graph started and stopped: ``[1 + nodes]`` or ``[1 + nodes, K]``, µs.

    The first entry is the beginning of the step.
    """

    start_us: Floats
    stop_us: Floats


class Graph:
    """The actions of an order and what each waits for; immutable.

    Raises :class:`PlanError` if the order deadlocks.
    """

    def __init__(self, order: Sequence[Sequence[Action]], sends: Sends = "buffered") -> None:
        self.order = tuple(tuple(actions) for actions in order)
        self.sends = sends
        self.pp_size = len(order)
        self.vpp_size, self.num_micro_batches = sizes(order)
        self.num_stages = self.pp_size * self.vpp_size
        nodes, first, second, crosses = _nodes(self.order, sends)
        level = _levels(nodes, first, second)
        # Nodes are sorted by level; node 0 is the beginning of the step.
        by_level = sorted(range(len(nodes)), key=level.__getitem__)
        number = {old: new for new, old in enumerate(by_level, start=1)} | {-1: 0}
        self.nodes = tuple(nodes[old] for old in by_level)
        self._first = np.array([0, *(number[first[old]] for old in by_level)])
        self._second = np.array([0, *(number[second[old]] for old in by_level)])
        counts = np.bincount([level[old] for old in by_level]) if nodes else np.zeros(0, np.int64)
        stops = (1 + np.cumsum(counts)).tolist()
        self._levels = list(zip([1, *stops[:-1]], stops, strict=True)) if stops else []
        # Rows of the table of times: forwards, backwards, transfers, nothing.
        num = self.num_stages * self.num_micro_batches
        nothing = 2 * num + self.num_micro_batches

        def row(node: Node) -> int:
            action = node.action
            if node.is_transfer:
                return 2 * num + action.micro_batch
            stage = action.chunk * self.pp_size + node.rank
            kind = num if action.kind == "B" else 0
            return kind + stage * self.num_micro_batches + action.micro_batch

        self._row = np.array([nothing, *(row(nodes[old]) for old in by_level)])
        gaps = [2 * num + node.action.micro_batch for node in nodes]
        self._gap_row = np.array(
            [nothing, *(gaps[old] if crosses[old] else nothing for old in by_level)]
        )
        at = {(n.rank, n.action): i for i, n in enumerate(self.nodes, 1) if not n.is_transfer}
        self._of_rank = [
            np.array([at[rank, action] for action in actions], dtype=np.int64)
            for rank, actions in enumerate(self.order)
        ]
        self._ends = np.array([own[-1] for own in self._of_rank if len(own)], dtype=np.int64)

    def replay(self, times_us: Floats, p2p_us: Floats) -> Replay:
        """Starts every node as soon as what it waits for is done.

        Args:
            times_us: ``[2, S, N]`` or ``[2, S, N, K]``: of forwards and of backwards.
            p2p_us: ``[N]`` or ``[N, K]``: to bring a micro-batch's tensor to another rank.
        """
        durations, gaps = self._durations(times_us, p2p_us)
        start, stop = np.zeros_like(durations), np.zeros_like(durations)
        first, second = self._first, self._second
        for a, b in self._levels:
            ready = stop[second[a:b]]
            ready += gaps[a:b]
            np.maximum(ready, stop[first[a:b]], out=start[a:b])
            np.add(start[a:b], durations[a:b], out=stop[a:b])
        return Replay(start, stop)

    def step_us(self, times_us: Floats, p2p_us: Floats) -> Floats:
        """Time from the first start to the last stop of an action: ``[]`` or ``[K]``."""
        result: Floats = self.replay(times_us, p2p_us).stop_us[self._ends].max(axis=0, initial=0.0)
        return result

    def of_rank(self, values: Floats, pp_rank: int) -> Floats:
        """The part of a replay's ``start_us`` or ``stop_us`` that is a rank's, in its order."""
        result: Floats = values[self._of_rank[pp_rank]]
        return result

    def critical_path(
        self, replay: Replay, times_us: Floats, p2p_us: Floats, end: tuple[int, Action]
    ) -> list[tuple[Node, float, float]]:
        """The longest path that ends at ``end`` = (rank, action): nodes, their start and stop."""
        _, gaps = self._durations(times_us, p2p_us)
        rank, action = end
        at = int(self._of_rank[rank][self.order[rank].index(action)])
        path = []
        while at:
            path.append((self.nodes[at - 1], float(replay.start_us[at]), float(replay.stop_us[at])))
            first, second = int(self._first[at]), int(self._second[at])
            ready_us = replay.stop_us[second] + gaps[at] if second else 0.0
            at = second if second and ready_us >= replay.stop_us[first] else first
        return path[::-1]

    def waits(self, times_us: Floats, p2p_us: Floats) -> list[Wait]:
        """What each node waits for and takes, for other kinds of replay."""
        durations, gaps = self._durations(times_us, p2p_us)
        columns = (self._first - 1, self._second - 1, gaps, durations)
        return [Wait(*row) for row in zip(*(c[1:].tolist() for c in columns), strict=True)]

    def _durations(self, times_us: Floats, p2p_us: Floats) -> tuple[Floats, Floats]:
        """The time of each node, and of what passes from its second input to its start."""
        num = 2 * self.num_stages * self.num_micro_batches
        alternatives = times_us.shape[3:]
        table = np.concatenate(
            [times_us.reshape(num, *alternatives), p2p_us, np.zeros((1, *alternatives))]
        )
        return table[self._row], table[self._gap_row]


@lru_cache(maxsize=256)
def graph_of(
    pp_size: int,
    vpp_size: int,
    num_micro_batches: int,
    group_size: int | None = None,
    sends: Sends | None = None,
) -> Graph:
    """The graph of Megatron's schedule; ``sends`` as that schedule does, if not given."""
    sends = sends or ("blocking" if vpp_size == 1 else "buffered")
    return Graph(schedule(pp_size, vpp_size, num_micro_batches, group_size), sends)


def _nodes(
    order: Sequence[Sequence[Action]], sends: Sends
) -> tuple[list[Node], list[int], list[int], list[bool]]:
    """Nodes, the two that each waits for (-1: none), and whether the second's output crosses."""
    tasks = dataflow(order)
    nodes = [Node(task.rank, task.action, False) for task in tasks]
    first, second = [-1] * len(nodes), [task.source for task in tasks]
    crosses = [task.source >= 0 and tasks[task.source].rank != task.rank for task in tasks]
    last = [-1] * len(order)
    for number, task in enumerate(tasks):
        first[number] = last[task.rank]
        last[task.rank] = number
    if sends == "buffered":
        return nodes, first, second, crosses

    # A transfer starts when both ranks have come to it. Between a forward and a backward, Megatron
    # sends and receives at once; between two of a kind it sends first.
    transfer_of: dict[int, int] = {}  # by the action that produces it
    brings: dict[int, int] = {}  # by the action that consumes it
    for number in range(len(tasks)):
        if crosses[number]:
            transfer_of[second[number]] = brings[number] = len(nodes)
            nodes.append(Node(tasks[number].rank, tasks[number].action, True))
            first.append(-1)
            second.append(-1)
            crosses.append(False)
    by_rank: list[list[int]] = [[] for _ in order]
    for number, task in enumerate(tasks):
        by_rank[task.rank].append(number)
    for numbers in by_rank:
        before = -1
        for number in numbers:
            ready = before
            sent, received = transfer_of.get(before), brings.get(number)
            if sent is not None:
                first[sent] = ready  # the sender's way; the receiver's is the second
                if tasks[before].action.kind == tasks[number].action.kind:
                    ready = sent
            if received is not None:
                second[received] = ready
            first[number] = before if sent is None else sent
            if received is not None:
                second[number] = received
                crosses[number] = False
            before = number
        if numbers and before in transfer_of:
            first[transfer_of[before]] = before
    return nodes, first, second, crosses


def _levels(nodes: Sequence[Any], first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The longest way to each node. Raises :class:`PlanError` for a circle."""
    followers: list[list[int]] = [[] for _ in nodes]
    waits = [0] * len(nodes)
    for number, pair in enumerate(zip(first, second, strict=True)):
        for other in pair:
            if other >= 0:
                followers[other].append(number)
                waits[number] += 1
    level = [0] * len(nodes)
    free = [number for number, count in enumerate(waits) if not count]
    for number in free:
        for other in followers[number]:
            level[other] = max(level[other], level[number] + 1)
            waits[other] -= 1
            if not waits[other]:
                free.append(other)
    if len(free) < len(nodes):
        stuck = next(node for node, count in zip(nodes, waits, strict=True) if count)
        raise PlanError(
            f"the order deadlocks with blocking sends: rank {stuck.rank} at {stuck.action} waits "
            "for a rank that waits for it; let sends be buffered or reorder it"
        )
    return level
