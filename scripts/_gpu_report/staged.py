"""The launcher, timing passes by the GPU's clock: ``python -m _gpu_report.staged [SCRIPT] …``.

Megatron's timers wait for the device at both ends of what they time. That would keep the host from
running ahead, and slow what is measured. Events in the stream that computes need no waiting. Of
other timers only those run that Megatron has at any level.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from megatron_wlb import launch

PASSES = ("forward-compute", "backward-compute")


def with_events(timer: type[Any], make_event: Any) -> type[Any]:
    """Megatron's ``Timer``, of passes by events; others stay as they are."""

    class EventTimer(timer):  # type: ignore[misc, valid-type]
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self._pairs: list[tuple[Any, Any]] | None = [] if name in PASSES else None

        def start(self, barrier: bool = False) -> None:
            if self._pairs is None:
                super().start(barrier)
            else:
                self._pairs.append((self._now(), None))

        def stop(self, barrier: bool = False) -> None:
            if self._pairs is None:
                super().stop(barrier)
            else:
                self._pairs[-1] = (self._pairs[-1][0], self._now())

        def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
            if self._pairs is None:
                return float(super().elapsed(reset, barrier))
            for _, stop in self._pairs[-1:]:
                stop.synchronize()  # and with it all before
            seconds = sum(start.elapsed_time(stop) for start, stop in self._pairs) / 1e3
            if reset:
                self._pairs.clear()
            return seconds

        def reset(self) -> None:
            if self._pairs is None:
                super().reset()
            else:
                self._pairs.clear()

        def _now(self) -> Any:
            event = make_event()
            event.record()
            return event

    return EventTimer


def install(timers: Any, make_event: Any) -> None:
    """Changes Megatron's module of timers; without ``make_event`` passes are timed as before."""
    call = timers.Timers.__call__

    def known(self: Any, name: str, log_level: int | None = None) -> Any:
        is_wanted = name in PASSES or name in self._timers or log_level == 0
        return call(self, name, log_level) if is_wanted else self._dummy_timer

    timers.Timers.__call__ = known
    timers.Timers.waits = False  # So slices may be timed, too.
    if make_event is not None:
        timers.Timer = with_events(timers.Timer, make_event)


def main() -> int:
    run_script = launch.run_script

    def run(script: str | None, flags: Any) -> None:
        from megatron.core import timers

        from megatron_wlb.runtime.emulation import cpu

        event = partial(torch.cuda.Event, enable_timing=True)
        install(timers, None if cpu.installed() else event)
        run_script(script, flags)

    launch.run_script = run
    return launch.main()


if __name__ == "__main__":
    sys.exit(main())
