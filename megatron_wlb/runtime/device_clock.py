"""How long a device computes: by events on a GPU, by the clock elsewhere.

A GPU is given a wait first, in which the host queues up what is timed. In training the host is
ahead, too; without it times would be those of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

CYCLES_A_MS = 2_000_000
"""About as many as a GPU's clock has in a millisecond."""
LEAST_WAIT_MS, MOST_WAIT_MS = 1.0, 200.0


class DeviceClock:
    """Times calls on a device, in seconds. A GPU waits twice as long as the host took to queue up
    the call before, so calls that take turns with others have a clock of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_ms = 0.0

    def __call__(self, run: Callable[[], object]) -> float:
        start = begun(self._device, 2 * self._host_ms)
        queued_s = time.perf_counter()
        run()
        self._host_ms = (time.perf_counter() - queued_s) * 1e3
        return seconds(start, moment(self._device))


def begun(device: torch.device, wait_ms: float) -> Any:
    """A moment at which the device is idle, and from which on it runs what is queued up next.

    A GPU waits before it, for ``wait_ms`` within its limits.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        wait_ms = min(max(wait_ms, LEAST_WAIT_MS), MOST_WAIT_MS)
        torch.cuda._sleep(round(wait_ms * CYCLES_A_MS))  # type: ignore[no-untyped-call]
    return moment(device)


def moment(device: torch.device) -> Any:
    """The moment at which the device comes to what is queued up next."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream(device).record_event(event)


def seconds(start: Any, stop: Any) -> float:
    """Between two moments. Waits until the device has come to the second."""
    if isinstance(start, float):
        return float(stop - start)
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
