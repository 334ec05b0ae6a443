"""What is said of a schedule that is not the checkpoint's: flags, both values, how to go on."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.megatron_lm.lr_schedule import require_same_schedule

GIVEN: dict[str, Any] = {
    "load": "ck", "no_load_optim": False, "override_opt_param_scheduler": False,
    "use_checkpoint_opt_param_scheduler": False, "global_batch_size": 8, "train_iters": 12,
    "train_samples": None, "lr": 1e-3, "min_lr": 0.0, "lr_decay_iters": 12,
    "weight_decay": 0.01, "start_weight_decay": 0.01, "end_weight_decay": 0.01,
}  # fmt: skip


class Scheduler:
    """As Megatron's: it counts samples."""

    def __init__(self, args: Namespace, num_steps: int = 0) -> None:
        self.args, self.num_steps = args, num_steps

    def state_dict(self) -> dict[str, Any]:
        args = self.args
        return {
            "max_lr": args.lr,
            "lr_decay_steps": args.lr_decay_iters * args.global_batch_size,
            "wd_incr_steps": args.train_iters * args.global_batch_size,
            "end_wd": args.end_weight_decay,
            "num_steps": self.num_steps,
        }


def resume(saved: dict[str, Any], now: dict[str, Any]) -> None:
    then, here = Namespace(**GIVEN | saved), Namespace(**GIVEN | now)
    state = {"args": then, "opt_param_scheduler": Scheduler(then, num_steps=48).state_dict()}
    require_same_schedule(here, Scheduler(here), state)


def test_how_far_it_has_come_is_no_difference() -> None:
    resume({}, {})


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        # What was not given follows another setting, and is not said again.
        ({}, {"train_iters": 14, "lr_decay_iters": 14}, ": --train-iters 12 there, 14 here; give"),
        ({}, {"lr": 0.5}, ": --lr 0.001 there, 0.5 here; give --override-opt-param-scheduler to"),
        ({}, {"lr_decay_iters": 20}, ": --lr-decay-iters None there, 20 here; give"),
        ({"lr_decay_iters": 20}, {}, ": --lr-decay-iters 20 there, None here; give"),
        (
            {"weight_decay": 0.1, "start_weight_decay": 0.1, "end_weight_decay": 0.1}, {},
            ": --weight-decay 0.1 there, 0.01 here; give",
        ),
        (
            {"global_batch_size": 4}, {"lr": 0.5},
            ": --global-batch-size 4 there, 8 here; --lr 0.001 there, 0.5 here; resume with the",
        ),
    ],
)  # fmt: skip
def test_difference_is_said_in_flags(saved: dict[str, Any], now: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resume(saved, now)
    assert said in str(caught.value)
    assert "in --load ck" in str(caught.value)


@pytest.mark.parametrize(
    "flag",
    ["no_load_optim", "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"],
)
def test_nothing_is_said_where_megatron_decides(flag: str) -> None:
    resume({}, {"lr": 0.5, flag: True})


def test_nothing_is_said_without_a_schedule() -> None:
    here = Namespace(**GIVEN)
    require_same_schedule(here, None, {"opt_param_scheduler": {"max_lr": 1.0}})
    require_same_schedule(here, Scheduler(here), {})
