"""Steps that Megatron's loop does not run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock


def test_skipped_step_takes_its_plan_and_tells_of_the_step_before() -> None:
    from megatron_wlb.runtime.megatron_lm import schedule
    from megatron_wlb.runtime.megatron_lm.session import Session

    told: list[int] = []
    session: Any = SimpleNamespace(behind=[lambda: told.append(7)])
    session.catch_up = lambda: Session.catch_up(session)
    answers, plans = iter([True, False]), iter(["skipped", "next"])
    rerun = SimpleNamespace(should_run_forward_backward=lambda _: next(answers))
    with mock.patch.object(schedule, "get_rerun_state_machine", lambda: rerun):
        schedule.skip_step(session, plans)
    assert next(plans) == "next"
    assert told == [7]
