"""A step's loss is read when it is there; lines come in order and none is lost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_wlb.errors import TrainingError
from megatron_wlb.plan import StepPlan


class Number:
    """Stands for a :class:`HostCopy` of a device that is done when it is told so."""

    def __init__(self, value: float, is_done: bool) -> None:
        self.value, self.is_done, self.num_waits = value, is_done, 0

    def is_here(self) -> bool:
        return self.is_done

    def item(self) -> float:
        self.num_waits += not self.is_done
        return self.value


def step(loss: float, *, asked_s: float = 1.0, is_done: bool = False) -> Any:
    from megatron_wlb.runtime.stepping.step import StepLoss
    from megatron_wlb.runtime.trainer.loop import Noted

    number: Any = Number(loss, is_done)
    norm: Any = Number(0.5, is_done)
    plan = StepPlan(0, "hold", (), 0, 0)
    return Noted(plan, asked_s, asked_s + 0.25, StepLoss(number, 1), norm, 1e-3)


@pytest.fixture
def log(tmp_path: Path) -> Any:
    from megatron_wlb.runtime.trainer import loop

    config: Any = SimpleNamespace(
        logging=SimpleNamespace(log_interval=100, tensorboard_dir=None),
        training=SimpleNamespace(train_iters=100),
        wlb=SimpleNamespace(wlb_metrics=str(tmp_path / "metrics")),
    )
    with mock.patch.object(loop.torch.distributed, "get_rank", lambda: 0):
        return loop.RunLog(config)


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]


@pytest.fixture(autouse=True)
def imbalance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepPlan, "imbalance", 1.0)


def test_a_step_is_told_of_behind_the_next_one(log: Any, tmp_path: Path) -> None:
    first, second = step(3.0), step(2.0)
    with log:
        log.note(1, first)
        assert lines(tmp_path) == [] and first.loss.total.num_waits == 0
        log.tell()
        log.note(2, second)
        assert [line["loss"] for line in lines(tmp_path)] == [3.0]
        log.tell()
        log.tell()
    assert [(line["iteration"], line["loss"]) for line in lines(tmp_path)] == [(1, 3.0), (2, 2.0)]
    assert list(lines(tmp_path)[0])[:4] == ["iteration", "loss", "grad_norm", "lr"]


def test_a_step_that_is_done_is_told_of_at_once(log: Any, tmp_path: Path) -> None:
    with log:
        log.note(1, step(3.0, is_done=True))
        assert len(lines(tmp_path)) == 1


def test_times_of_steps_add_up_to_that_of_the_run(log: Any, tmp_path: Path) -> None:
    from megatron_wlb.runtime.trainer import loop

    with log, mock.patch.object(loop.time, "monotonic", side_effect=[4.0, 6.5, 11.0]):
        for number, asked_s in enumerate((1.0, 1.5, 8.0), 1):  # before the third: a checkpoint
            log.note(number, step(1.0, asked_s=asked_s))
            log.tell()
    assert [line["step_ms"] for line in lines(tmp_path)] == [3000.0, 2500.0, 3000.0]
    assert {line["plan_wait_ms"] for line in lines(tmp_path)} == {250.0}


@pytest.mark.parametrize(("is_done", "told"), [(True, [1]), (False, [])])
def test_a_run_that_fails_tells_of_the_step_before_without_waiting(
    log: Any, tmp_path: Path, is_done: bool, told: list[int]
) -> None:
    noted = step(3.0)
    with pytest.raises(ZeroDivisionError), log:
        log.note(1, noted)
        noted.loss.total.is_done = noted.grad_norm.is_done = is_done
        _ = 1 / 0
    assert [line["iteration"] for line in lines(tmp_path)] == told
    assert noted.loss.total.num_waits == 0


def test_a_loss_that_is_no_number_ends_the_run_with_its_iteration(log: Any) -> None:
    with pytest.raises(TrainingError, match="iteration 7: the loss is nan"), log:
        log.note(7, step(float("nan")))
        log.tell()
