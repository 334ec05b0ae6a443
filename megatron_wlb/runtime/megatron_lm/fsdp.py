"""torch's FSDP2 under Megatron's loop, which Megatron leaves unfinished.

- **Gradients.** The wrapper's ``scale_gradients`` does nothing, so a loss per token would train on
  gradients that nobody has divided. FSDP2 itself averages them over the ranks that share the
  weights, whatever each of them ran; that mean is taken back in the same product.
- **Saving.** Megatron knows the optimizer's tensors by the identity of weights' local parts, of
  which torch gives another view each time.
- **Loading.** Tensors are read in place, and all else of the optimizer is skipped: Adam would count
  its steps anew.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from megatron.core.distributed import TorchFullyShardedDataParallel
from torch.distributed.tensor import DTensor

from megatron_wlb.errors import ConfigError
from megatron_wlb.runtime.compat.patching import PatchSet


def install(patches: PatchSet, args: argparse.Namespace) -> None:
    """Makes checkpoints know the optimizer's tensors, where the run asks for FSDP2."""
    if getattr(args, "use_torch_fsdp2", False):
        module = "megatron.core.dist_checkpointing.optimizer"
        patches.replace(module, "to_local_if_dtensor", _local)


def is_sharded(chunk: Any) -> bool:
    return isinstance(chunk, TorchFullyShardedDataParallel)


def divide_gradients(chunk: Any) -> None:
    """Gives a chunk what the schedules ask of Megatron's own wrapper."""
    chunk.scale_gradients = MethodType(_scale_gradients, chunk)
    chunk.finish_grad_sync = MethodType(_finish_grad_sync, chunk)


def check_parts(chunk: Any) -> None:
    """Raises :class:`ConfigError` for weights of which ranks hold unequal parts.

    They train as they should, but Megatron names a part in a checkpoint by its number alone, and
    would find that out as it saves.
    """
    num_ranks = chunk.process_group.size()
    for name, weight in chunk.module.named_parameters():
        if weight.shape[0] % num_ranks:
            raise ConfigError(
                f"--use-torch-fsdp2 with --save or --load: {num_ranks} data- and context-parallel "
                f"ranks do not divide the {weight.shape[0]} rows of {name}, and Megatron saves "
                "equal parts only; use a number of ranks that does, or "
                "--use-distributed-optimizer instead"
            )


def resume(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Takes of the optimizer's part of a checkpoint what is no tensor of weights: Adam's steps.

    TransformerEngine and Apex count them by group, torch by weight; all are equal.
    """
    saved = state.get("optimizer", state)
    by_group, by_weight = saved["param_groups"][0].get("step"), saved["state"].get("common_step")
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if by_group is not None:
            for group in one.optimizer.param_groups:
                group["step"] = by_group
        if by_weight is not None:
            for values in one.optimizer.state.values():
                values["step"] = copy.deepcopy(by_weight)


def _scale_gradients(chunk: Any, scaling_factor: float) -> None:
    """Makes mean gradients sums and multiplies them."""
    factor = scaling_factor * chunk.process_group.size()
    for parameter in chunk.parameters():
        if parameter.grad is not None:
            _local(parameter.grad).mul_(factor)


def _finish_grad_sync(_chunk: Any, force_all_reduce: bool = False) -> None:
    """Takes the parameter with which Megatron calls it, which Megatron's own method lacks."""


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The local part itself, the same object each time; ``to_local`` may make a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
