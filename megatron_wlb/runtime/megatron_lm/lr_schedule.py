"""Whether a run goes on with the schedule of learning rate and weight decay that it was saved with.

Megatron asserts that it does, in numbers of samples, once it has read the whole checkpoint; here
flags say it.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving.resume import differences

_SCHEDULE = (
    "global_batch_size", "train_iters", "train_samples", "lr", "min_lr", "lr_decay_style",
    "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples",
    "lr_warmup_fraction", "weight_decay", "start_weight_decay", "end_weight_decay",
    "weight_decay_incr_style",
)  # fmt: skip
"""Arguments that Megatron makes the schedule of learning rate and weight decay of."""
_DEFAULTS = {
    "lr_decay_iters": "train_iters",
    "lr_decay_samples": "train_samples",
    "start_weight_decay": "weight_decay",
    "end_weight_decay": "weight_decay",
}
"""The arguments that take another's value if they are not given."""


def require_same_schedule(args: argparse.Namespace, scheduler: Any, state: dict[str, Any]) -> None:
    """Compares Megatron's ``scheduler`` with that of the checkpoint's ``state``.

    Only where Megatron would: it loads none with ``--no-load-optim``, and with two flags it takes
    one of both. Raises :class:`CheckpointError` where they differ; says in which flags, and how to
    go on.
    """
    saved = state.get("opt_param_scheduler")
    if (
        saved is None
        or scheduler is None
        or args.no_load_optim
        or args.override_opt_param_scheduler
        or args.use_checkpoint_opt_param_scheduler
    ):
        return
    now = scheduler.state_dict()
    del now["num_steps"]  # how far it has come
    changed = differences(saved, now)
    if not changed:
        return
    then, here = _given(state.get("args")), _given(args)
    if then["global_batch_size"] == here["global_batch_size"]:
        remedy = (
            "give --override-opt-param-scheduler to go on by this run's, or "
            "--use-checkpoint-opt-param-scheduler by the checkpoint's"
        )
    else:
        remedy = (
            "resume with the same --global-batch-size, because it decides how documents are packed"
        )
    raise CheckpointError(
        f"the checkpoint in --load {args.load} has another schedule of learning rate and weight "
        f"decay: {differences(then, here) or changed}; {remedy}"
    )


def _given(args: Any) -> dict[str, Any]:
    """What a schedule is made of; None where it only repeats another setting."""
    values = {name: getattr(args, name, None) for name in _SCHEDULE}
    repeated = [name for name, other in _DEFAULTS.items() if values[name] == values[other]]
    return values | dict.fromkeys(repeated)
