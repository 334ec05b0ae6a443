"""How long a device computes: by events on a GPU, by the clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

CYCLES_A_MS = 2_000_000
"""About as many as a GPU's clock has in a millisecond."""
LEAST_WAIT_MS, MOST_WAIT_MS = 1.0, 200.0


class Clock:
    """Times a function on a device, in µs: by the processor time of one CPU thread, so that what
    else the machine runs counts less; on several, and on a GPU, by the time that passes.

    A GPU is given a wait first, in which the host queues up what is timed: twice as long as that
    took of the call before, so calls that take turns with others have a clock of their own. In
    training the host is ahead, too; without it times would be those of the host.
    """

    def __init__(self, device: torch.device, *, of_processor: bool = True) -> None:
        self._device, self._cuda, self._host_ms = device, device.type == "cuda", 0.0
        of_processor &= torch.get_num_threads() == 1
        self._now_s = time.process_time if of_processor else time.perf_counter
        self.name = "GPU events" if self._cuda else "processor time" if of_processor else "time"

    def begun(self, wait_ms: float) -> Any:
        """A moment at which the device is idle, and from which on it runs what is queued up next.

        A GPU waits before it, for ``wait_ms`` within its limits.
        """
        if self._cuda:
            torch.cuda.synchronize(self._device)
            wait_ms = min(max(wait_ms, LEAST_WAIT_MS), MOST_WAIT_MS)
            torch.cuda._sleep(round(wait_ms * CYCLES_A_MS))  # type: ignore[no-untyped-call]
        return self.now()

    def now(self) -> Any:
        """The moment at which the device comes to what is queued up next."""
        if not self._cuda:
            return self._now_s()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return torch.cuda.current_stream(self._device).record_event(event)

    def between_us(self, start: Any, stop: Any) -> float:
        if not self._cuda:
            return float(stop - start) * 1e6
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3

    def __call__(self, run: Callable[[], object]) -> float:
        start, queued_s = self.begun(2 * self._host_ms), time.perf_counter()
        run()
        self._host_ms = (time.perf_counter() - queued_s) * 1e3
        return self.between_us(start, self.now())
