"""When each forward and backward of a step ran, measured through Megatron's own timer calls.

The schedules call ``config.timers(name).start()`` and ``.stop()`` around every computation and
communication. Given a :class:`StepTimers` there, they say what ran when, and nothing is patched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

Interval: TypeAlias = tuple[str, float, float, float]
"""``F`` or ``B``; start and stop in µs of the machine's monotonic clock, which its processes share;
µs of CPU time of the thread that computes."""

_KINDS = {"forward-compute": "F", "backward-compute": "B"}


class _Ignored:
    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


class _Timer(_Ignored):
    def __init__(
        self, now: Callable[[], tuple[float, float]], intervals: list[Interval], kind: str
    ):
        self._now = now
        self._intervals = intervals
        self._kind = kind
        self._start = (0.0, 0.0)

    def start(self, barrier: bool = False) -> None:
        self._start = self._now()

    def stop(self, barrier: bool = False) -> None:
        (start_us, cpu_us), (stop_us, last_cpu_us) = self._start, self._now()
        self._intervals.append((self._kind, start_us, stop_us, last_cpu_us - cpu_us))


class StepTimers:
    """Records the forward and backward computations of a step, in order.

    Args:
        synchronize: called before each reading of the clock; ``torch.cuda.synchronize`` on a GPU,
            where it makes computation and communication wait for each other: for measuring only.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._intervals: list[Interval] = []
        self._timers = {
            name: _Timer(self._now, self._intervals, kind) for name, kind in _KINDS.items()
        }
        self._ignored = _Ignored()

    def __call__(self, name: str, log_level: int | None = None, **_: Any) -> _Ignored:
        return self._timers.get(name, self._ignored)

    def take(self) -> list[Interval]:
        """The intervals since the last call."""
        intervals = self._intervals.copy()
        self._intervals.clear()
        return intervals

    def _now(self) -> tuple[float, float]:
        if self._synchronize is not None:
            self._synchronize()
        return time.monotonic() * 1e6, time.thread_time() * 1e6
