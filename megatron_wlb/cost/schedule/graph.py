"""A pipeline order as a graph in arrays: replays one step, or many alternatives at once.

A node is an action, or a transfer between ranks where those take the ranks' time. Each waits for
at most two others: the one before it on its rank, and the one that brings its input. Nodes stand by
*level*, the longest way to them, so that all of a level are replayed by a few array operations:
5 ms for PP=16, VPP=4 and 64 micro-batches, hardly more for a hundred alternatives at once. One
alternative on a few ranks, whose levels are short, is replayed node by node.

Legend: ``S`` virtual stages (chunk ``c`` of rank ``r`` is ``c · PP + r``), ``N`` micro-batches,
``K`` alternatives. Times are in µs; only additions and maxima are made of them, so that every
machine comes to the same result to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.schedule.hosting import Copies, CopyClock
from megatron_wlb.cost.schedule.order import Action, dataflow, schedule, sizes
from megatron_wlb.errors import PlanError

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Sends: TypeAlias = Literal["buffered", "blocking"]
"""Whether a rank computes on while its neighbour is not ready to receive, or waits for it.

Megatron's 1F1B waits: a send is over when the neighbour has received it. Its interleaved schedule
(with ``overlap_p2p_comm``) sends while it computes.
"""

SHORT_LEVEL = 20
"""Nodes a level, of all alternatives, below which replaying them is faster without arrays."""


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

    def __init__(
        self,
        order: Sequence[Sequence[Action]],
        sends: Sends = "buffered",
        behind: Ints | None = None,
    ) -> None:
        self.order = tuple(map(tuple, order))
        self.sends = sends
        self._behind = behind
        self.pp_size = len(order)
        self.vpp_size, self.num_micro_batches = sizes(order)
        self.num_stages = self.pp_size * self.vpp_size
        layout = self._layout()
        # Nodes stand by level; node 0 is the beginning of the step.
        by_level, self._levels = _levels(layout)
        if len(by_level) < len(layout.first):
            self._refuse(layout, by_level)
        number = np.zeros(len(by_level) + 1, dtype=np.int64)
        number[by_level] = np.arange(1, len(by_level) + 1)  # the last one is that of nothing, -1
        num = 2 * self.num_stages * self.num_micro_batches
        nothing = num + self.num_micro_batches
        micro_batch = layout.row % max(self.num_micro_batches, 1)

        def stand(values: Ints, first: int) -> Ints:
            return np.concatenate([[first], values[by_level]])

        self._first = stand(number[layout.first], 0)
        self._second = stand(number[layout.second], 0)
        # Rows of the table of times: forwards, backwards, transfers, nothing.
        self._row = stand(np.where(layout.is_transfer, num + micro_batch, layout.row), nothing)
        self._gap_row = stand(np.where(layout.crosses, num + micro_batch, nothing), nothing)
        stops = np.cumsum([len(actions) for actions in self.order], dtype=np.int64)[:-1]
        num_actions = sum(map(len, self.order))
        self._of_rank = np.split(number[:num_actions], stops) if self.order else []
        self._ends = np.array([own[-1] for own in self._of_rank if len(own)], dtype=np.int64)

    def placed(self, behind: Ints) -> Graph:
        """The same order, whose :meth:`inputs` leave their ranks behind these passes."""
        return Graph(self.order, self.sends, behind)

    def inputs(self) -> tuple[Ints, Ints]:
        """The passes whose outputs go to another rank, and the passes that need these.

        Passes are numbered rank by rank; those that need something are in this order.
        """
        layout = self._layout()
        needed = np.flatnonzero(layout.crosses)
        return layout.second[needed], needed

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes by level, without the beginning of the step."""
        actions = {
            int(at): Node(rank, action, False)
            for rank, own in enumerate(self.order)
            for at, action in zip(self._of_rank[rank], own, strict=True)
        }
        brought = {  # transfers, of the action behind them
            int(second): actions[at]._replace(is_transfer=True)
            for at, second in enumerate(self._second.tolist())
            if at in actions and second and second not in actions
        }
        every = actions | brought
        return tuple(every[at] for at in range(1, len(self._row)))

    @cached_property
    def _steps(self) -> list[tuple[int, int]]:
        """What each node waits for, for a replay node by node."""
        return list(zip(self._first[1:].tolist(), self._second[1:].tolist(), strict=True))

    def _layout(self) -> _Layout:
        """The nodes, rank by rank, and behind them the transfers.

        Raises :class:`PlanError` where an action never gets its input.
        """
        num, stages = self.num_micro_batches, self.num_stages
        offset = {"F": 0, "B": stages * num}
        chunk = self.pp_size * num
        row = np.array(
            [
                offset[a.kind] + a.chunk * chunk + a.micro_batch + rank * num
                for rank, actions in enumerate(self.order)
                for a in actions
            ],
            dtype=np.int64,
        )
        first = np.arange(-1, len(row) - 1)
        counts = np.array([0, *map(len, self.order)])
        begins = counts.cumsum()[:-1][counts[1:] > 0]
        first[begins] = -1
        of_row = np.full(2 * stages * num + 1, -1)
        of_row[row] = np.arange(len(row))
        backward = row >= stages * num
        stage = row // max(num, 1) - stages * backward
        own = np.where(backward, stage == stages - 1, stage == 0)  # no other stage before it
        source = np.where(backward, np.where(own, row - stages * num, row + num), row - num)
        second = of_row[np.where(own & ~backward, -1, source)]
        second[own & ~backward] = -1
        if (second[~own | backward] < 0).any():
            dataflow(self.order)  # says what is missing
        crosses = ~own & (self.pp_size > 1)
        is_transfer = np.zeros(len(row), dtype=bool)
        if self._behind is not None:
            second[crosses] = self._behind
        if self.sends == "buffered":
            return _Layout(row, first, second, crosses, is_transfer)

        # A transfer starts when both ranks have come to it. Between a forward and a backward,
        # Megatron sends and receives at once; between two of a kind it sends first.
        to = np.flatnonzero(crosses)
        brings, sent = np.full(len(row) + 1, -1), np.full(len(row) + 1, -1)  # -1: of nothing
        brings[to] = sent[second[to]] = len(row) + np.arange(len(to))
        own_sent = sent[first]  # what the rank sent just before
        first_of_kind = (own_sent >= 0) & (backward[first] == backward)
        ready = np.where(first_of_kind, own_sent, first)
        return _Layout(
            np.concatenate([row, row[to]]),
            # The sender's way first; the receiver's is the second.
            np.concatenate([np.where(own_sent >= 0, own_sent, first), second[to]]),
            np.concatenate([np.where(brings[:-1] >= 0, brings[:-1], second), ready[to]]),
            np.zeros(len(row) + len(to), dtype=bool),
            np.concatenate([is_transfer, np.ones(len(to), dtype=bool)]),
        )

    def _refuse(self, layout: _Layout, free: Ints) -> NoReturn:
        """Raises :class:`PlanError` for nodes that wait for each other."""
        dataflow(self.order)  # says what is the matter where sends do not matter
        stuck = np.setdiff1d(np.arange(len(layout.first)), free)[0]
        stage, micro_batch = divmod(int(layout.row[stuck]), self.num_micro_batches)
        kind: Literal["F", "B"] = "F" if stage < self.num_stages else "B"
        chunk, rank = divmod(stage % self.num_stages, self.pp_size)
        raise PlanError(
            f"the order deadlocks with blocking sends: rank {rank} at "
            f"{Action(kind, chunk, micro_batch)} waits for a rank that waits for it; let sends be "
            "buffered or reorder it"
        )

    def replay(
        self,
        times_us: Floats,
        p2p_us: Floats,
        *,
        together: int = 1,
        stages: Sequence[bool] = (),
        copies: Sequence[Copies | None] = (),
    ) -> Replay:
        """Starts every node as soon as what it waits for is done.

        Args:
            times_us: ``[2, S, N]`` or ``[2, S, N, K]``: of forwards and of backwards.
            p2p_us: ``[N]`` or ``[N, K]``: to bring a micro-batch's tensor to another rank.
            together: of so many alternatives in a row none starts an action before all can.
            stages: ``[S]``: in which virtual stages that is so.
            copies: of each alternative, those of what waits in the host's memory.
        """
        durations, gaps = self._durations(times_us, p2p_us)
        alone = durations.ndim == 1 or together == 1
        given = copies or [None] * (1 if durations.ndim == 1 else durations.shape[1])
        if alone and (any(given) or 0 < durations.size < SHORT_LEVEL * len(self._levels)):
            if durations.ndim == 1:
                return Replay(*self._replayed(durations, gaps, given[0]))
            each = map(self._replayed, durations.T, gaps.T, given)
            return Replay(*np.moveaxis(np.array([*each]), 0, 2))
        start, stop = np.zeros_like(durations), np.zeros_like(durations)
        first, second = self._first, self._second
        meets = self._actions_of(stages) if together > 1 else None
        clocks = [(at, CopyClock(own)) for at, own in enumerate(given) if own]
        for a, b in self._levels:
            ready = stop[second[a:b]]
            ready += gaps[a:b]
            np.maximum(ready, stop[first[a:b]], out=start[a:b])
            copied = [
                (node, at, clock)
                for at, clock in clocks
                for node in range(a, b)
                if node in clock.copies.steps
            ]
            for node, at, clock in copied:
                start[node, at] = clock.start_us(node, stop[first[node], at], start[node, at])
            if meets is not None:
                own = start[a:b][meets[a:b]]
                groups = own.reshape(len(own), own.shape[1] // together, together)
                last = np.repeat(groups.max(axis=2), together, axis=1)
                start[a:b][meets[a:b]] = last
            np.add(start[a:b], durations[a:b], out=stop[a:b])
            for node, at, clock in copied:
                clock.stop(node, stop[node, at])
        return Replay(start, stop)

    def _replayed(
        self, durations: Floats, gaps: Floats, copies: Copies | None
    ) -> tuple[Floats, Floats]:
        """Starts and stops of one alternative."""
        stops, late = [0.0], {0: 0.0}  # when copies let a node start
        clock, copied = (CopyClock(copies), copies.steps) if copies else (None, {})
        timed = zip(self._steps, gaps[1:].tolist(), durations[1:].tolist(), strict=True)
        for node, ((one, other), gap, duration) in enumerate(timed, 1):
            start_us, ready_us = stops[one], stops[other] + gap
            if ready_us > start_us:
                start_us = ready_us
            if clock and node in copied:
                start_us = late[node] = clock.start_us(node, stops[one], start_us)
                clock.stop(node, start_us + duration)
            stops.append(start_us + duration)
        stop = np.array(stops)
        start = np.maximum(stop[self._first], stop[self._second] + gaps)
        start[[*late]] = [*late.values()]
        return start, stop

    def _actions_of(self, stages: Sequence[bool]) -> Bools:
        """Which nodes are actions of these virtual stages."""
        each = np.repeat(np.array(stages, dtype=bool), self.num_micro_batches)
        table = np.concatenate([each, each, np.zeros(self.num_micro_batches + 1, dtype=bool)])
        meets: Bools = table[self._row]
        return meets

    def step_us(
        self, times_us: Floats, p2p_us: Floats, copies: Sequence[Copies | None] = ()
    ) -> Floats:
        """Time from the first start to the last stop of an action: ``[]`` or ``[K]``."""
        replayed = self.replay(times_us, p2p_us, copies=copies)
        result: Floats = replayed.stop_us[self._ends].max(axis=0, initial=0.0)
        return result

    def copies(self, times_us: Floats, hosted: Sequence[bool], window_us: float) -> Copies:
        """The copies of ``hosted`` micro-batches, as :class:`.Copies` takes them."""
        numbers = [own.tolist() for own in self._of_rank]
        return Copies(self.order, numbers, times_us, hosted, window_us)

    def of_rank(self, values: Floats, pp_rank: int) -> Floats:
        """The part of a replay's ``start_us`` or ``stop_us`` that is a rank's, in its order."""
        result: Floats = values[self._of_rank[pp_rank]]
        return result

    def by_action(self, values: Floats) -> Floats:
        """A replay's ``start_us`` or ``stop_us`` as ``times_us`` stand, ``[2, S, N]``."""
        table = np.full(2 * self.num_stages * self.num_micro_batches, np.nan)
        nodes = np.concatenate(self._of_rank)
        table[self._row[nodes]] = values[nodes]
        return table.reshape(2, self.num_stages, self.num_micro_batches)

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
        """The time of each node, and the time of the message from its second input to its start."""
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


@dataclass(frozen=True)
class _Layout:
    """Nodes in arrays, in any order."""

    row: Ints
    """The row, in the times, of its action or of the one that a transfer brings something to."""
    first: Ints
    second: Ints
    """The two that each waits for; -1: none."""
    crosses: Bools
    """Whether the output of the second takes time to arrive."""
    is_transfer: Bools


def _levels(layout: _Layout) -> tuple[Ints, list[tuple[int, int]]]:
    """The nodes by level, the longest way to them, and where each level stands from 1 on.

    Nodes that wait for each other are left out.
    """
    num = len(layout.first)
    before = np.concatenate([layout.first, layout.second])
    behind = np.tile(np.arange(num), 2)[before >= 0]
    before = before[before >= 0]
    behind = behind[np.argsort(before, kind="stable")].tolist()
    ends = np.bincount(before + 1, minlength=num + 1).cumsum().tolist()
    waits = ((layout.first >= 0).astype(np.int64) + (layout.second >= 0)).tolist()
    free = [node for node, count in enumerate(waits) if not count]
    levels, begin = [], 0
    while begin < len(free):
        end = len(free)
        levels.append((begin + 1, end + 1))
        for node in free[begin:end]:
            for other in behind[ends[node] : ends[node + 1]]:
                waits[other] -= 1
                if not waits[other]:
                    free.append(other)
        begin = end
    return np.array(free, dtype=np.int64), levels
