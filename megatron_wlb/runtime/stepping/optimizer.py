"""Settings -> Megatron's optimizer and learning-rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import (
    OptimizerConfig,
    distrib_optimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.gpt.build import Model
from megatron_wlb.settings.config import Config


def build_optimizer(config: Config, model: Model) -> Any:
    """Megatron's optimizer over the model's chunks.

    Raises :class:`CompatibilityError` where checkpoints of it could be saved but not loaded.
    """
    check_checkpoints(
        config.parallel.use_distributed_optimizer, config.checkpoint.save, config.checkpoint.load
    )
    optimizer = get_megatron_optimizer(
        optimizer_config(config, model.config.params_dtype),
        model.chunks,
        use_gloo_process_groups=False,
    )
    make_loadable(optimizer)
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def optimizer_config(config: Config, dtype: torch.dtype) -> OptimizerConfig:
    """Megatron's settings of the optimizer; ``dtype`` is that of the weights of passes."""
    training = config.training
    return OptimizerConfig(
        optimizer=training.optimizer,
        lr=training.lr,
        min_lr=training.min_lr,
        weight_decay=training.weight_decay,
        bf16=training.bf16,
        params_dtype=dtype,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        sgd_momentum=training.sgd_momentum,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
        clip_grad=training.clip_grad,
    )


def build_scheduler(config: Config, optimizer: Any) -> OptimizerParamScheduler:
    """Megatron's learning-rate schedule, for the groups of an optimizer, counted in samples.

    A sample is a window, of which ``global_batch_size`` arrive a step; so a schedule keeps its
    meaning whatever the number of tokens that a balanced step runs.
    """
    training = config.training
    batch = training.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=training.lr,
        min_lr=training.min_lr,
        lr_warmup_steps=training.lr_warmup_iters * batch,
        lr_decay_steps=(training.lr_decay_iters or training.train_iters) * batch,
        lr_decay_style=training.lr_decay_style,
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=training.train_iters * batch,
        wd_incr_style="constant",
    )


def check_checkpoints(use_distributed_optimizer: bool, save: str | None, load: str | None) -> None:
    """Raises :class:`CompatibilityError` if checkpoints could not be loaded again."""
    has_fused_adam = distrib_optimizer.HAVE_APEX_OR_TE  # or ours, under the CPU emulation
    if use_distributed_optimizer and (save or load) and not has_fused_adam:
        raise CompatibilityError(
            "--use-distributed-optimizer with --save or --load, but neither TransformerEngine nor "
            "Apex can be imported: with torch's Adam, Megatron cannot load what it saves; install "
            "one of them (pip install 'megatron-wlb[gpu]'), or leave --use-distributed-optimizer "
            "out"
        )


def make_loadable(optimizer: Any) -> None:
    """Gives SGD what makes its state: Megatron has none for it, and calls it all the same when a
    checkpoint is loaded.
    """
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner.init_state_fn = inner.init_state_fn or _init_momentum


def _init_momentum(optimizer: torch.optim.Optimizer, _config: Any = None) -> None:
    """Gives SGD the state that a checkpoint is loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
