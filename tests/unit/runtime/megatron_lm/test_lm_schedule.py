"""Steps that Megatron's loop does not run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron_wlb.settings.config import Config, WlbConfig


def test_skipped_step_takes_its_plan_and_tells_of_the_step_before() -> None:
    from megatron_wlb.runtime.megatron_lm import schedule
    from megatron_wlb.runtime.megatron_lm.session import Session

    told: list[int] = []
    ledger = mock.Mock()
    session: Any = SimpleNamespace(behind=[lambda: told.append(7)], ledger=ledger)
    session.catch_up = lambda: Session.catch_up(session)
    answers, plans = iter([True, False]), iter(["skipped", "next"])
    rerun = SimpleNamespace(should_run_forward_backward=lambda _: next(answers))
    with mock.patch.object(schedule, "get_rerun_state_machine", lambda: rerun):
        schedule.skip_step(session, plans)
    assert next(plans) == "next"
    assert told == [7]
    ledger.step.assert_called_once_with("skipped", skipped="--iterations-to-skip")


def test_plan_that_the_rerun_machinery_gives_back_is_the_step_that_ran() -> None:
    """In a run that goes on from its checkpoint no plan was made for that step."""
    from megatron_wlb.plan import StepPlan
    from megatron_wlb.runtime.megatron_lm import schedule

    session: Any = SimpleNamespace(
        step=None,
        catch_up=lambda: None,
        runner=SimpleNamespace(run_schedule=lambda *_, **__: []),
        config=Config(wlb=WlbConfig(wlb_packing="slim")),
    )
    first, second = (StepPlan(number, "hold", ((),), 0, 0) for number in range(2))
    run = schedule.forward_backward(session)
    sizes = {"num_microbatches": 1, "seq_length": 8, "micro_batch_size": 1}
    iterator = iter([first, second])
    for plan, forward_only, expected in ((first, False, first), (second, True, first)):
        run(
            forward_step_func=None, data_iterator=iterator, model=None,
            forward_only=forward_only, **sizes,
        )  # fmt: skip
        assert session.step.plan is expected, plan
