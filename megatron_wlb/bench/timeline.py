"""When each forward and backward of a step ran, measured through Megatron's own timer calls.

The schedules call ``config.timers(name).start()`` and ``.stop()`` around every computation and
communication. Given a :class:`StepTimers` there, they say what ran when, and nothing is patched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_KINDS = {"forward-compute": "F", "backward-compute": "B"}


class _Timer:
    def __init__(self, now: Callable[[], float], record: Callable[[float, float], None]) -> None:
        self._now = now
        self._record = record
        self._start = 0.0

    def start(self, barrier: bool = False) -> None:
        self._start = self._now()

    def stop(self, barrier: bool = False) -> None:
        self._record(self._start, self._now())


class StepTimers:
    """Records the forward and backward computations of a step, in order.

    ``intervals`` holds ``(kind, start, stop)`` with kind ``F`` or ``B`` and seconds of the
    machine's monotonic clock, which processes of one machine share.

    Args:
        synchronize: called before each reading of the clock; ``torch.cuda.synchronize`` on a GPU,
            where it makes computation and communication wait for each other: for measuring only.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self.intervals: list[tuple[str, float, float]] = []
        self._synchronize = synchronize
        self._timers = {
            name: _Timer(self._now, self._recorder(kind)) for name, kind in _KINDS.items()
        }
        self._ignored = _Timer(lambda: 0.0, lambda *_: None)

    def __call__(self, name: str, log_level: int | None = None, **_: Any) -> _Timer:
        return self._timers.get(name, self._ignored)

    def take(self) -> list[tuple[str, float, float]]:
        """The intervals since the last call."""
        intervals, self.intervals = self.intervals, []
        return intervals

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.monotonic()

    def _recorder(self, kind: str) -> Callable[[float, float], None]:
        return lambda start, stop: self.intervals.append((kind, start, stop))
