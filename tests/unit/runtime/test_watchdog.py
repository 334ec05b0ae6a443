"""A rank that does not move is ended, and says where it is."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_wlb.errors import LostRankError, WLBError
from megatron_wlb.runtime.ranks import watchdog


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    before = watchdog._place, watchdog._runs_its_first_step, watchdog._peers
    watchdog._runs_its_first_step = False
    yield
    watchdog._place, watchdog._runs_its_first_step, watchdog._peers = before


def ended_after(limit_s: float, wait_s: float) -> WLBError | None:
    """What the watchdog ends with, if it does before ``wait_s``."""
    ends: queue.Queue[WLBError] = queue.Queue()
    place = watchdog._place
    watchdog.watch(limit_s, ends.put)
    watchdog._place = place
    try:
        return ends.get(timeout=wait_s)
    except queue.Empty:
        return None


def test_watchdog_names_the_place_and_what_runs_there() -> None:
    watchdog.at("step %d: forward of micro-batch %d of %d, chunk %d", 3, 2, 4, 0)
    error = ended_after(0.05, 10)
    assert isinstance(error, LostRankError)
    told = "nothing has moved for 0.05 s since step 3: forward of micro-batch 2 of 4, chunk 0, in "
    assert str(error).startswith(told)
    assert "(threading.py:" in str(error)  # where this thread waits
    assert "--wlb-hang-seconds 0.05" in str(error)
    assert "\n" not in str(error)


def test_watchdog_lets_a_run_go_on_that_moves() -> None:
    stop_s = time.monotonic() + 1.0
    moving = threading.Event()

    def move() -> None:
        while time.monotonic() < stop_s:
            watchdog.at("step %d", 1)
            time.sleep(0.01)
        moving.set()

    watchdog.at("step %d", 0)
    threading.Thread(target=move).start()
    assert ended_after(0.5, 0.9) is None
    assert moving.wait(5)


@pytest.mark.parametrize("slow", ["kind", "first step"])
def test_watchdog_gives_slow_parts_more_time(slow: str) -> None:
    watchdog._runs_its_first_step = slow == "first step"
    watchdog.at("a checkpoint", is_slow=slow == "kind")
    began_s = time.monotonic()
    error = ended_after(0.2, 10)
    assert time.monotonic() - began_s >= 0.2 * watchdog.SLOW
    assert "nothing has moved for 1.2 s since a checkpoint" in str(error)


class Clock:
    """Time as the watchdog sees it: each sleep runs the next of ``events``, then the rest pass."""

    def __init__(self, *events: Callable[[Clock], None]) -> None:
        self.now_s = 1000.0
        self.events = list(events)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.events:
            self.events.pop(0)(self)

    def stop(self) -> None:
        """All processes are stopped for 3 hours."""
        self.now_s += 3 * 3600

    def move_and_stop(self) -> None:
        watchdog.at("step %d", 1)
        self.stop()

    def stop_and_move(self) -> None:
        self.stop()
        watchdog.at("step %d", 1)


@pytest.mark.parametrize(
    ("events", "moved_for_s"),
    [
        ([], 0),
        ([Clock.stop], 3 * 3600),
        ([Clock.stop, Clock.stop], 6 * 3600),
        ([Clock.move_and_stop], 3 * 3600 + 60),
        ([Clock.stop_and_move], 3 * 3600 + 60),
    ],
    ids=["moves", "stops", "stops twice", "stops in another place", "stops before another place"],
)
def test_watchdog_does_not_count_time_in_which_the_job_is_suspended(
    events: list[Callable[[Clock], None]], moved_for_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(*events)
    monkeypatch.setattr(watchdog, "time", clock)
    watchdog.at("step %d", 0)
    ends: list[WLBError] = []
    watchdog._watch(600, ends.append)
    assert clock.now_s == pytest.approx(1000 + 600 + moved_for_s)
    assert "nothing has moved for 600 s since step" in str(ends[0])


def test_watchdog_is_off_with_0() -> None:
    before = threading.active_count()
    watchdog.watch(0, lambda error: None)
    assert threading.active_count() == before


def test_whereabouts_of_an_error_are_those_of_its_origin() -> None:
    watchdog.at("the plan of iteration %d", 5)
    try:
        int("no number")
    except ValueError as error:
        said = watchdog.whereabouts(error)
    assert said.startswith("the plan of iteration 5, in test_whereabouts_of_an_error_are_those")


def test_whereabouts_name_the_ranks_that_are_waited_for_also_after_an_error() -> None:
    with watchdog.waiting_for([3]):
        assert watchdog.whereabouts().endswith(", which waits for rank 3")
    assert "waits for" not in watchdog.whereabouts()
    with pytest.raises(RuntimeError), watchdog.waiting_for([1, 2]):
        raise RuntimeError("Broken pipe")
    assert watchdog.whereabouts().endswith(", which waits for ranks 1, 2")


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[pair.cc:537] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_lost_peer_is_known_by_what_gloo_says(error: Exception, is_lost: bool) -> None:
    assert watchdog.lost_peer(error) == is_lost
