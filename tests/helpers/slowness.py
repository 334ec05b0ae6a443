"""How slow this machine is now, so that limits of time fail for what they are about."""

from __future__ import annotations

import time

_USUAL_S = 4e-3
"""What the loop below takes where limits were set."""


def slowness() -> float:
    """How many times as long Python takes as usual: 1 at least, and 4 at most.

    Cores that others share are two or three times as slow for minutes.
    """
    best_s = min(_loop_s() for _ in range(5))
    return min(4.0, max(1.0, best_s / _USUAL_S))


def _loop_s() -> float:
    start_s, total = time.process_time(), 0
    for number in range(100_000):
        total += number
    return time.process_time() - start_s
