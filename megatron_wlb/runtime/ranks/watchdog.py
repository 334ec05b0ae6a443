"""Where this rank is in its run, and an end for a rank that stays there: no peer is waited for
for ever.

The run says by :func:`at` what it begins: a plan, a micro-batch's pass, a checkpoint. A thread ends
the process once nothing new has begun for the time given. Whom the rank waits for is read from its
stack, so that looking costs nothing until then. The thread needs Python's lock: torch gives it back
while it waits in a collective.

On a GPU the host runs ahead of the device. The place named is that of the host.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

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
_runs_its_first_step = True


def at(text: str, *numbers: int, is_slow: bool = False) -> None:
    """Notes that the run begins this; ``text`` has a ``%d`` for each number."""
    global _place
    _place = _Place(time.monotonic(), text, numbers, is_slow or _runs_its_first_step)


def first_step_is_over() -> None:
    """Passes are no longer slow: memory is taken, kernels are chosen and compiled."""
    global _runs_its_first_step
    _runs_its_first_step = False


def whereabouts(error: BaseException | None = None) -> str:
    """Where the run is, and what it waits for there, or waited for when the error came."""
    if error is None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    else:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return f"{_place}, {_wait(frame)}" if frame else str(_place)


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
            "the rank that says no such thing, and start the run again (--wlb-hang-seconds "
            f"{limit_s:g} is the limit, {SLOW} times that where more than a pass is waited for)"
        )
    )


def _wait(frame: FrameType) -> str:
    """What the innermost frame does, and the ranks at the other end of its communicator."""
    code = frame.f_code
    text = f"in {code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"
    outer: FrameType | None = frame
    while outer is not None:
        peers = _peers(outer.f_locals)
        if peers:
            return f"{text}, which waits for rank{'s' * bool(peers[1:])} {', '.join(peers)}"
        outer = outer.f_back
    return text


def _peers(names: Mapping[str, Any]) -> list[str]:
    """The other ranks that a function's locals speak of: of its message, else of its group."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return []
    own = getattr(names.get("self"), "__dict__", {})
    if isinstance(peer := own.get("_peer"), int):  # of the executor's messages
        return [str(peer)]
    group = next(
        (
            value
            for value in (*names.values(), *own.values())
            if isinstance(value, dist.ProcessGroup) and value.size() > 1
        ),
        None,
    )
    if group is None:
        return []
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    if "recv_prev" in names and "recv_next" in names:  # of Megatron's messages between stages
        before = names["recv_prev"] or names.get("tensor_send_prev") is not None
        behind = names["recv_next"] or names.get("tensor_send_next") is not None
        places = [rank - 1] * bool(before) + [(rank + 1) % len(ranks)] * bool(behind)
        return [str(ranks[place]) for place in dict.fromkeys(places)]
    for name in ("src", "dst"):
        if isinstance(peer := names.get(name), int) and peer != dist.get_rank():
            return [str(peer)]
    return [str(other) for other in ranks if other != dist.get_rank()]
