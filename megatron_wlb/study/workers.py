"""Processes that share work which takes long; results are those of one process, in order."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from megatron_wlb.children import ending_with_us

T = TypeVar("T")
R = TypeVar("R")

ALONE_S = 1.0
"""Seconds of work before others help: processes take one or two to start."""
MOST = 16
"""The most processes where nobody says how many."""
AHEAD = 16
"""Items a process that are given out before the first of them is done: some take far longer than
others."""
BETWEEN_COLLECTIONS = 100_000
"""Containers that are made before cycles are looked for: Python's few hundred take a sixth of the
time of simulations, which make many and hardly a cycle."""


def usual_number() -> int:
    """The processors that this process may use, :data:`MOST` at most."""
    return min(MOST, len(os.sched_getaffinity(0)))


class Workers(AbstractContextManager["Workers"]):
    """So many processes, which start once work has taken :data:`ALONE_S`; with 1 none does. Each
    has ``given`` once.

    A program that has them begins under ``if __name__ == "__main__"``.
    """

    def __init__(self, number: int, *given: Any) -> None:
        self._number, self._given, self._began_s = number, given, time.monotonic()
        self._pool: ProcessPoolExecutor | None = None
        self._threshold = gc.get_threshold()

    def __enter__(self) -> Workers:
        gc.set_threshold(BETWEEN_COLLECTIONS)
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._threshold)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(
        self,
        function: Callable[..., R],
        items: Sequence[T],
        told: Callable[[int, int], object],
        wanted: Callable[[T], bool] = lambda _: True,
    ) -> Iterator[tuple[T, R]]:
        """Each item with ``function(item, *given)``, in order, but for those that are not
        ``wanted`` once all before them have been taken.

        ``function`` stands in a module. ``told`` is called with how many of how many are done.
        """
        if items:
            told(0, len(items))
        ahead: deque[tuple[T, Future[R] | None]] = deque()
        done = 0
        for number, item in enumerate(items, start=1):
            ahead.append((item, self._submit(function, item) if wanted(item) else None))
            few = self._pool is not None and number < len(items)
            while len(ahead) > (AHEAD * self._number if few else 0):
                first, future = ahead.popleft()
                if wanted(first):
                    yield first, future.result() if future else function(first, *self._given)
                elif future:
                    future.cancel()
                done += 1
                told(done, len(items))

    def _submit(self, function: Callable[..., R], item: T) -> Future[R] | None:
        """What a process will have computed; None where this one is to do it."""
        if self._pool is None:
            if self._number == 1 or time.monotonic() - self._began_s < ALONE_S:
                return None
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._number, context, _have, self._given)
        with ending_with_us():  # it starts them one by one
            return self._pool.submit(_call, function, item)


_given: tuple[Any, ...] = ()
"""What this process was given, if it is one of a :class:`Workers`."""


def _have(*given: Any) -> None:
    global _given
    _given = given
    gc.set_threshold(BETWEEN_COLLECTIONS)


def _call(function: Callable[..., R], item: Any) -> R:
    return function(item, *_given)
