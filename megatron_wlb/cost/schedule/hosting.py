"""Activations that wait in the host's memory: what of them is on the device, and when copies end.

A *hosted* micro-batch keeps nothing on the device between its forward and its backward through a
chunk, but what came from another rank. It goes to the host while the next passes run, and comes
back before its backward, each in the order of the passes. There is one link, which copies both ways
at once. Two windows of the device's memory are for what is on its way, one for each. Where the
first is full, the next pass waits until enough has gone. What comes back is begun as soon as the
other one has room for it. What has not gone when it is to come stays; its copy must only end.

All of that depends on the order of passes and on bytes, and not on time. So what a device holds is
known before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.schedule.order import Action, Pass

Floats: TypeAlias = npt.NDArray[np.float64]


SLAB_BYTES = 1 << 23
"""What a pass has of the host's memory is a number of slabs of so many bytes."""


class Moves(NamedTuple):
    """What happens before an action."""

    gone: list[Pass]
    """Whose copies to the host must be over; the device then has their memory back."""
    comes: list[Pass]
    """Whose copies to the device begin."""


class Window:
    """Follows the hosted passes of one rank through its actions.

    Args:
        backwards: the hosted passes, in the order of their backwards.
        most: of each window, in bytes or whatever amounts are.
    """

    def __init__(self, backwards: Iterable[Pass], most: float) -> None:
        self._next, self._most = deque(backwards), most
        self._ran: dict[Pass, float] = {}
        self._going: deque[Pass] = deque()
        self._come: set[Pass] = set()
        self._num_going = self._num_come = 0.0

    @property
    def held(self) -> float:
        """How much of both windows is used."""
        return self._num_going + self._num_come

    def before(self, action: Action) -> Moves:
        """Makes room for an action, and has come what fits."""
        gone, comes = [], list[Pass]()
        while self._going and self._num_going > self._most:
            gone.append(self._going.popleft())
            self._num_going -= self._ran[gone[-1]]
        while self._next and (amount := self._ran.get(self._next[0])) is not None:
            is_full = self._come and self._num_come + amount > self._most
            if is_full and (action.kind, *self._next[0]) != ("B", action.chunk, action.micro_batch):
                break
            one = self._next.popleft()
            if one in self._going:
                self._going.remove(one)
                self._num_going -= amount
            else:
                comes.append(one)
            self._come.add(one)
            self._num_come += amount
        return Moves(gone, comes)

    def behind(self, action: Action, amount: float) -> None:
        """Follows a hosted pass, which keeps so much, once it has run."""
        one = action.chunk, action.micro_batch
        if action.kind == "F":
            self._ran[one] = amount
            self._going.append(one)
            self._num_going += amount
        elif one in self._come:
            self._come.remove(one)
            self._num_come -= self._ran.pop(one)


def hosted_passes(actions: Iterable[Action], hosted: Sequence[bool]) -> list[Pass]:
    """The passes of hosted micro-batches, in the order of their backwards."""
    return [(a.chunk, a.micro_batch) for a in actions if a.kind == "B" and hosted[a.micro_batch]]


def held_amounts(
    actions: Sequence[Action], hosted: Sequence[bool], amounts: Floats, most: float
) -> Floats:
    """How much of both windows is used while each action runs, without its own, ``[actions]``.

    ``amounts`` ``[chunks, micro-batches]`` are what passes keep.
    """
    window, held = Window(hosted_passes(actions, hosted), most), []
    for action in actions:
        window.before(action)
        own = hosted[action.micro_batch]
        amount = float(amounts[action.chunk, action.micro_batch]) if own else 0.0
        held.append(window.held - (amount if action.kind == "B" else 0.0))
        if own:
            window.behind(action, amount)
    return np.array(held)


class _CopyPoint(NamedTuple):
    """An action before or behind which something is copied."""

    rank: int
    moves: Moves
    action: Action
    is_hosted: bool


class Copies:
    """The copies of one replica's step, for :meth:`.Graph.replay`.

    Args:
        order: of the step, ``[pp_size][actions]``.
        numbers: of each action, which node it is.
        times_us: ``[S, N]``: of each copy, one way.
        hosted: ``[N]``
        window_us: the time in which a window's bytes are copied.
    """

    def __init__(
        self,
        order: Sequence[Sequence[Action]],
        numbers: Sequence[Sequence[int]],
        times_us: Floats,
        hosted: Sequence[bool],
        window_us: float,
    ) -> None:
        self.steps: dict[int, _CopyPoint] = {}
        """By node."""
        self._pp_size, self._times_us = len(order), times_us
        for rank, (actions, own) in enumerate(zip(order, numbers, strict=True)):
            window = Window(hosted_passes(actions, hosted), window_us)
            for node, action in zip(own, actions, strict=True):
                moves, is_hosted = window.before(action), hosted[action.micro_batch]
                if is_hosted:
                    window.behind(action, self.time_us(rank, (action.chunk, action.micro_batch)))
                if is_hosted or any(moves):
                    self.steps[node] = _CopyPoint(rank, moves, action, is_hosted)

    def time_us(self, rank: int, one: Pass) -> float:
        chunk, micro_batch = one
        return float(self._times_us[chunk * self._pp_size + rank, micro_batch])


class CopyClock:
    """When copies end, as a step is replayed action by action, each rank's in its order."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._free_us: dict[tuple[str, int], float] = {}  # by direction and rank
        self._done_us: dict[tuple[str, int, Pass], float] = {}

    def start_us(self, node: int, free_us: float, ready_us: float) -> float:
        """When an action starts that could at ``ready_us``, on a rank that is free from ``free_us``
        on.
        """
        rank, moves, action, is_hosted = self.copies.steps[node]
        for one in moves.gone:
            free_us = max(free_us, self._done_us["F", rank, one])
        for one in moves.comes:
            self._copy("B", rank, one, max(free_us, self._done_us["F", rank, one]))
        start_us = max(ready_us, free_us)
        if is_hosted and action.kind == "B":
            one = action.chunk, action.micro_batch
            gone_us = self._done_us["F", rank, one]  # of what stayed, too
            start_us = max(start_us, self._done_us.get(("B", rank, one), gone_us))
        return start_us

    def stop(self, node: int, stop_us: float) -> None:
        """Follows an action to its end."""
        rank, _, action, is_hosted = self.copies.steps[node]
        if is_hosted and action.kind == "F":
            self._copy("F", rank, (action.chunk, action.micro_batch), stop_us)

    def _copy(self, kind: str, rank: int, one: Pass, from_us: float) -> None:
        begin_us = max(self._free_us.get((kind, rank), 0.0), from_us)
        done_us = begin_us + self.copies.time_us(rank, one)
        self._free_us[kind, rank] = self._done_us[kind, rank, one] = done_us
