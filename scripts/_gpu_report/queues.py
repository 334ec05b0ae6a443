"""Whether streams of one GPU hold each other up, as JSON: ``python -m _gpu_report.queues``.

With one hardware queue, which is what ``CUDA_DEVICE_MAX_CONNECTIONS=1`` asks for, a kernel that may
not start yet should hold up all that is queued behind it, in any stream. And for some calls the
host may wait until all kernels have ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

LONG, SHORT = 1_000_000_000, 1_000
"""Cycles of kernels that only count: half a second, and next to nothing."""
PINNED_BYTES, DEVICE_BYTES = 2**26, 2**30


def measure() -> dict[str, dict[str, float]]:
    first, second, third = (torch.cuda.Stream() for _ in range(3))
    torch.empty(8, pin_memory=True)
    for stream in (first, second, third):
        _spin(stream, SHORT)

    def behind_it() -> None:
        _spin(first, SHORT)

    def waiting_for_it() -> None:
        third.wait_stream(first)
        _spin(third, SHORT)

    held_up = {}
    for name, between in {
        "nothing": lambda: None,
        "a kernel of the same stream": behind_it,
        "a kernel of a third stream that waits for it": waiting_for_it,
    }.items():
        start_s = _begin(first)
        between()
        _spin(second, SHORT)
        second.synchronize()
        held_up[name] = _share(start_s)
    waits = {name: _waited(first, call) for name, call in {
        "pinning memory": lambda: torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True),
        "cudaMalloc": lambda: torch.empty(DEVICE_BYTES, dtype=torch.uint8, device="cuda"),
        "empty_cache": torch.cuda.empty_cache,  # of what the line above has left
    }.items()}  # fmt: skip
    return {"held up": held_up, "waits": waits}


def _spin(stream: torch.cuda.Stream, cycles: int) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def _begin(stream: torch.cuda.Stream) -> float:
    """Lets a long kernel run; when it began."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    _spin(stream, LONG)
    return start_s


def _share(start_s: float) -> float:
    """What has passed by now, as a share of all until the GPU has nothing to do."""
    passed_s = time.perf_counter() - start_s
    torch.cuda.synchronize()
    return passed_s / (time.perf_counter() - start_s)


def _waited(stream: torch.cuda.Stream, call: Callable[[], object]) -> float:
    start_s = _begin(stream)
    call()
    return _share(start_s)


if __name__ == "__main__":
    print(json.dumps(measure()))
