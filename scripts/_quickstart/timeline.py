"""When each forward and backward of a step ran, measured through Megatron's own timer calls.

The schedules call ``config.timers(name).start()`` and ``.stop()`` around every computation and
communication. Given a :class:`StepTimers` there, they say what ran when, and nothing is patched.
"""

from __future__ import annotations

import time
from typing import Any, TypeAlias

Interval: TypeAlias = tuple[str, float, float, float]
"""``F`` or ``B``; start and stop in µs of the machine's monotonic clock, which its processes share;
µs of CPU time of the thread that computes."""

_KINDS = {"forward-compute": "F", "backward-compute": "B"}


class _Timer:
    """One of Megatron's timers; all but those in :data:`_KINDS` note nothing."""

    def __init__(self, timers: StepTimers, name: str) -> None:
        self._timers = timers
        self._kind = _KINDS.get(name)
        self._start = (0.0, 0.0)

    def start(self, barrier: bool = False) -> None:
        if self._kind:
            self._start = self._timers.now_us()

    def stop(self, barrier: bool = False) -> None:
        if self._kind:
            (start_us, cpu_us), (stop_us, last_cpu_us) = self._start, self._timers.now_us()
            interval = (self._kind, start_us, stop_us, last_cpu_us - cpu_us)
            self._timers.intervals.append(interval)


class StepTimers:
    """Records the forward and backward computations of a step, in order."""

    waits = False
    """Not for the whole device: then slices cannot be timed."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str, log_level: int | None = None, **_: Any) -> _Timer:
        return self._timers.setdefault(name, _Timer(self, name))

    def take(self) -> list[Interval]:
        taken, self.intervals = self.intervals, []
        return taken

    def now_us(self) -> tuple[float, float]:
        return time.monotonic() * 1e6, time.thread_time() * 1e6
