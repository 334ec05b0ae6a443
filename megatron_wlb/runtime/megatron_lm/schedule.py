"""Megatron's schedules on plans: what ``get_forward_backward_func`` gives Megatron's loop.

One call runs one step: one plan from the data iterator, which for Megatron's rerun machinery is one
"micro-batch" that it can replay, fanned out into the plan's micro-batches on every stage.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_wlb.errors import CompatibilityError, PlanError
from megatron_wlb.planning.packing import numbers_by_step
from megatron_wlb.runtime.megatron_lm.session import RunningStep, Session, data_iterator_of

SPIKY_LOSS_FACTOR = 10
"""A loss so many times the largest seen is reported, as in Megatron's pretrain_gpt.py."""


def forward_backward(session: Session) -> Callable[..., list[Any]]:
    """A function with the parameters of Megatron's schedules that runs the next plan."""

    def run(
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        adjust_tensor_shapes_fn: Any = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        **options: Any,
    ) -> list[Any]:
        if collect_non_loss_data or adjust_tensor_shapes_fn is not None:
            raise CompatibilityError(
                "this script collects other data than the loss, or changes the shapes between "
                "stages, which plans do not; leave out the --wlb flags"
            )
        if p2p_communicator is not None or pg_collection is not None:
            raise CompatibilityError(
                "this script brings process groups of its own, and plans run on Megatron's; leave "
                "out the --wlb flags"
            )
        plan = next(data_iterator_of(data_iterator))
        if not forward_only and (session.step is None or session.step.plan is not plan):
            # The rerun machinery saved it before it ended the run, and gives it back now.
            now_s = time.monotonic()
            session.step = RunningStep(plan, now_s, now_s)
        own = len(plan.micro_batches[0])
        varies = plan.strategy is not None or numbers_by_step(session.config.wlb)
        if own != num_microbatches and not varies:
            raise PlanError(
                f"step {plan.step}: the plan has {own} micro-batches a rank, Megatron runs "
                f"{num_microbatches}; resume with the batch flags of the checkpoint"
            )
        reports = session.runner.run_schedule(plan, forward_only=forward_only, **options)
        session.catch_up()
        if not plan.num_targets:  # which Megatron divides by
            for report in reports:
                report[1] = 1
        if reports:
            _validate(session, torch.stack([report[0] for report in reports]))
        # Megatron's loop adds them up over micro-batches and replicas, and divides once.
        return [{"lm loss": report} for report in reports]

    return run


def skip_step(session: Session, data_iterator: Any) -> None:
    """Megatron's ``dummy_train_step`` for ``--iterations-to-skip``: the plan is taken, not run.

    No line comes after it that would tell of the step before, should the run end with it.
    """
    rerun = get_rerun_state_machine()
    while rerun.should_run_forward_backward(data_iterator):
        session.ledger.step(next(data_iterator_of(data_iterator)), skipped="--iterations-to-skip")
    session.catch_up()


def _validate(session: Session, losses: torch.Tensor) -> None:
    """Checks what Megatron checks of each micro-batch's loss, once all are queued up.

    Each check looks at the device. At a micro-batch the last stage would wait for its forward pass
    before it could queue up the backward one. The sum of losses is a finite number if they all are.
    """
    args, rerun = session.args, get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejection, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            rerun.validate_result(
                result=losses.sum(),
                rejection_func=rejection,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        rejection = functools.partial(
            rerun.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss"
        )
        for loss in losses.unbind():
            rerun.validate_result(
                result=loss,
                rejection_func=rejection,
                message="Spiky loss",
                tolerance=0.0,
                fatal=False,
            )
