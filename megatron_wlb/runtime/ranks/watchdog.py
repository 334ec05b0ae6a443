"""Where this rank is in its run, and an end for a rank that stays there: no peer is waited for
for ever.

The run says by :func:`at` what it begins: a plan, a micro-batch's pass, a checkpoint. A thread ends
the process once nothing new has begun for the time given. Who knows the ranks at the other end of a
message says them by :func:`waiting_for`. The thread needs Python's lock: torch gives it back while
it waits in a collective.

On a GPU the host runs ahead of the device. The place named is that of the host.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_wlb.errors import LostRankError, WLBError

SLOW = 6
"""So many times as long may take what is more than a pass: the start, the first step, a plan, a
checkpoint."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What the run began last."""

    since_s: float
    text: str
    numbers: tuple[int, ...] = ()
    is_slow: bool = False

    def __str__(self) -> str:
        return self.text % self.numbers


_place = _Place(0.0, "the start", is_slow=True)
_peers: list[int] = []
"""Ranks that are waited for."""
_runs_its_first_step = True


def at(text: str, *numbers: int, is_slow: bool = False) -> None:
    """Notes that the run begins this; ``text`` has a ``%d`` for each number."""
    global _place
    _place = _Place(time.monotonic(), text, numbers, is_slow or _runs_its_first_step)


@contextlib.contextmanager
def waiting_for(peers: Iterable[int]) -> Iterator[None]:
    """Notes these ranks as waited for inside; they stay noted where an error ends the block."""
    global _peers
    _peers = list(peers)
    yield
    _peers = []


def first_step_is_over() -> None:
    """Passes are no longer slow: memory is taken, kernels are chosen and compiled."""
    global _runs_its_first_step
    _runs_its_first_step = False


def whereabouts(error: BaseException | None = None) -> str:
    """Where the run is, what it does there and whom it waits for, or did when the error came."""
    if error is None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    else:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    text = str(_place)
    if frame is not None:
        code = frame.f_code
        text += f", in {code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"
    peers = ", ".join(map(str, _peers))
    return text + f", which waits for rank{'s' * bool(_peers[1:])} {peers}" * bool(_peers)


def lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because a process at its other end is gone, or silent."""
    signs = (
        "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting"
    )  # fmt: skip
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def watch(limit_s: float, end: Callable[[WLBError], object]) -> None:
    """Starts the thread, which calls ``end`` once; 0 is never."""
    if limit_s:
        at("the start", is_slow=True)
        threading.Thread(target=_watch, args=(limit_s, end), name="watchdog", daemon=True).start()


def _watch(limit_s: float, end: Callable[[WLBError], object]) -> None:
    place, stopped_s = _place, 0.0
    while True:
        bound_s = limit_s * (SLOW if place.is_slow else 1)
        began_s = time.monotonic()
        left_s = place.since_s + stopped_s + bound_s - began_s
        if left_s <= 0:
            break
        asked_s = min(left_s, max(limit_s / 10, 0.01))
        time.sleep(asked_s)
        # Who sleeps longer than asked was stopped, as a job is that Slurm suspends; nothing moved.
        woke_s = time.monotonic()
        if _place is not place:
            place, stopped_s = _place, 0.0
        stopped_s += max(min(woke_s - began_s - asked_s, woke_s - place.since_s), 0.0)
    end(
        LostRankError(
            f"nothing has moved for {bound_s:g} s since {whereabouts()}; look at the machine of "
            "the rank without such a line, and start the run again (--wlb-hang-seconds "
            f"{limit_s:g} is the limit, {SLOW} times that for more than a pass)"
        )
    )
