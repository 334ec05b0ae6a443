"""Greedy placement: each thing in turn goes where least is, of the bins that have room for it.

In descending order of work this is the LPT rule. Ties go to the first name, so that all ranks come
to the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

Name = TypeVar("Name")
T = TypeVar("T")


class Bins(Generic[Name]):
    """Bins by their load; those without room for what comes are set aside until it is enough.

    ``O(log N)`` a thing. Names are unlike, and have an order.

    Args:
        loads: of each bin, with its name.
        room: what each has room for.
        places: the most things in one.
    """

    def __init__(
        self,
        loads: Iterable[tuple[float, Name]] = (),
        room: int = sys.maxsize,
        places: int = sys.maxsize,
    ) -> None:
        self._places = places
        self._open: list[Any] = [(load, name, room, places) for load, name in loads]
        heapify(self._open)
        self._full: list[Any] = []  # by most room, which is minus the first number
        self._most_room = -1  # of these

    def add(self, load: float, name: Name, room: int) -> None:
        heappush(self._open, (load, name, room, self._places))

    def place(self, load: float, size: int = 0) -> Name | None:
        """The bin that takes it; None where none has room."""
        while self._most_room >= size:
            heappush(self._open, heappop(self._full)[1])
            self._most_room = -self._full[0][0] if self._full else -1
        while self._open:
            before, name, room, places = first = self._open[0]
            if room >= size and places:
                heapreplace(self._open, (before + load, name, room - size, places - 1))
                found: Name = name
                return found
            heappop(self._open)
            # Without a place there is no room for anything.
            heappush(self._full, (-room if places else 1, first))
            self._most_room = -self._full[0][0]
        return None

    def __iter__(self) -> Iterator[tuple[Name, float, int]]:
        """Name, load and room of each, in the order of names."""
        every = (*self._open, *(entry for _, entry in self._full))
        yield from sorted((name, load, room) for load, name, room, _ in every)


def small_at_ends(ascending: Sequence[T]) -> list[T]:
    """The smallest first and last, the largest in the middle: so a pipeline fills and drains while
    other stages wait for little.
    """
    return [*ascending[::2], *ascending[1::2][::-1]]
