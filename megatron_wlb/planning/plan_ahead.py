"""Plans made ahead in a thread, so that a training step finds its plan ready."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_wlb.plan import StepPlan


class Plans(Protocol):
    """Plans steps one after another, as :class:`~megatron_wlb.planning.planner.Planner` does."""

    def next_plan(self) -> StepPlan | None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan and the planner's state after it, or the error in its place."""

    plan: StepPlan | None
    state: dict[str, Any]
    error: BaseException | None = None


class PlanAhead:
    """Hands out what ``planner.next_plan()`` returns, made up to ``depth`` steps before.

    An error of the planner is raised by the :meth:`next_plan` whose plan it belongs to, and by
    every later one. The planner belongs to the thread until :meth:`close`, after which it goes on
    from the last plan handed out; use this as a context manager.
    """

    def __init__(self, planner: Plans, depth: int = 2) -> None:
        assert depth >= 1, depth
        self._planner = planner
        self._state = planner.state_dict()
        self._last: _Made | None = None
        self._made: queue.Queue[_Made] = queue.Queue(depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wlb-plan-ahead", daemon=True)
        self._thread.start()

    def __enter__(self) -> PlanAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_plan(self) -> StepPlan | None:
        """Does what :meth:`Plans.next_plan` does; waits for the thread if it is behind."""
        # After the end or an error there is nothing more to come, however often one asks.
        if self._last is None or (self._last.plan is not None and self._last.error is None):
            self._last = self._made.get()
        if self._last.error is not None:
            raise self._last.error
        self._state = self._last.state
        return self._last.plan

    def state_dict(self) -> dict[str, Any]:
        """The planner's state after the last plan handed out."""
        return self._state

    def close(self) -> None:
        """Ends the thread; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        while self._thread.is_alive():
            try:
                self._made.get_nowait()  # makes room for a thread that waits for it
            except queue.Empty:
                self._thread.join(0.01)
        self._planner.load_state_dict(self._state)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                plan = self._planner.next_plan()
                made = _Made(plan, self._planner.state_dict())
            except BaseException as error:
                made = _Made(None, {}, error)
            self._made.put(made)
            if made.plan is None:
                return
