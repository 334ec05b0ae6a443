"""The store in the form in which Megatron saves a model and its optimizer undivided.

The tensors of the whole model are dealt out to ranks. Each gathers its own from the shards, and
Megatron's distributed format loads any part of them. So a checkpoint knows no strategy, nor the
number of ranks that saved it; and what a plain run saved is read likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)

from megatron_wlb.errors import CheckpointError
from megatron_wlb.strategies.run.pieces import Piece, WholeTensor
from megatron_wlb.strategies.run.routes import Pull, Routes
from megatron_wlb.strategies.run.runner import StrategyRunner

_MAIN = "fp32_param"
"""Megatron's name of the fp32 weights of a model that runs in fewer bits."""
_TENSORS = "store"
"""Where the tensors of the optimizer are in its state, as Megatron finds each by its own key."""


def model_state(runner: StrategyRunner) -> dict[str, Any]:
    """The weights that passes run with; every rank has some. All call it together.

    A rank needs room for its share of the whole model.
    """
    state: dict[str, Any] = _sharded(runner, "", _shards(runner, _MAIN), runner.dtype)
    for one in runner.objects if dist.get_rank() == 0 else ():
        state[f"{one.key} {one.offset}"] = ShardedObject(one.key, None, one.shape, one.offset)
    return state


def set_model(runner: StrategyRunner, state: Mapping[str, Any]) -> None:
    """Takes weights that were loaded into what :func:`model_state` gave."""
    _set(runner, _MAIN, state)


def optimizer_state(runner: StrategyRunner, *, is_loading: bool = False) -> dict[str, Any]:
    """The optimizer as a plain run of Megatron's without its distributed optimizer saves it.

    That has a part for experts, if there are any, and in fp32 no weights besides the model's.
    """
    optimizer = runner.store.optimizer
    names = (*runner.store.moments, *((_MAIN,) if _is_mixed(runner) else ()))
    tensors = {
        name: _sharded(runner, f"optimizer.state.{name}.", _shards(runner, name)) for name in names
    }
    state: dict[Any, Any] = {_TENSORS: tensors}
    if is_loading:
        return state
    steps = [group["step"] for group in optimizer.param_groups if "step" in group]
    parts = []
    for of_experts in (False, True):
        groups = [g for g in optimizer.param_groups if bool(g["is_expert_parallel"]) is of_experts]
        inner: dict[str, Any] = {"state": {}, "param_groups": []}
        for group in groups:
            kept = {name: value for name, value in group.items() if name != "params"}
            if steps:  # a rank that has nothing of a group has not counted its updates
                kept["step"] = max(steps)
            inner["param_groups"].append(kept | {"params": LocalNonpersistentObject([])})
        if runner.store.counts_each and steps:
            inner["state"]["common_step"] = torch.tensor(float(max(steps)))
        part: dict[str, Any] = {"optimizer": inner} if _is_mixed(runner) else inner
        if getattr(optimizer, "grad_scaler", None):
            part["grad_scaler"] = optimizer.grad_scaler.state_dict()
        if groups:
            parts.append(part)
    return state | (parts[0] if len(parts) == 1 else dict(enumerate(parts)))


def set_optimizer(runner: StrategyRunner, state: Mapping[Any, Any]) -> None:
    """Takes what was loaded into :func:`optimizer_state`.

    Raises :class:`CheckpointError` for another optimizer's.
    """
    for name, tensors in state[_TENSORS].items():
        _set(runner, name, tensors)
    optimizer = runner.store.optimizer
    parts = [state[number] for number in (0, 1) if number in state] or [state]
    inner = [part.get("optimizer", part) for part in parts]
    saved = [group for one in inner for group in one["param_groups"]]
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved)} groups of parameters, this run's has "
            f"{len(optimizer.param_groups)}; resume with the same optimizer and learning rates, or "
            "with --no-load-optim"
        )
    for group, loaded in zip(optimizer.param_groups, saved, strict=True):
        group.update({name: value for name, value in loaded.items() if name != "params"})
    counted = [one.get("state", {}).get("common_step") for one in inner]
    counted += [group.get("step") for group in saved]
    steps = [int(step) for step in counted if step is not None]
    if steps:
        runner.store.set_num_updates(max(steps))
    if "grad_scaler" in parts[0] and getattr(optimizer, "grad_scaler", None):
        optimizer.grad_scaler.load_state_dict(parts[0]["grad_scaler"])


def dealt(runner: StrategyRunner) -> tuple[list[Piece], Routes]:
    """The tensors that this rank saves, so that ranks have about equally many elements."""
    dealt: list[list[Piece]] = [[] for _ in range(dist.get_world_size())]
    loads = [0] * len(dealt)
    for piece in sorted(runner.wholes, key=lambda p: -p.whole.num_elements):
        rank = loads.index(min(loads))
        loads[rank] += piece.whole.num_elements
        dealt[rank].append(piece)
    return dealt[dist.get_rank()], Routes(runner.buckets, dealt, dist.get_rank())


def gathered(
    runner: StrategyRunner, shards: Sequence[torch.Tensor]
) -> tuple[list[Piece], list[torch.Tensor]]:
    """The whole tensors that this rank saves, of ``[buckets]`` shards."""
    pieces, routes = dealt(runner)
    device = runner.store.weights[0].device
    tensors = [torch.zeros(piece.whole.shape, device=device) for piece in pieces]
    Pull(routes, shards, tensors).finish()
    return pieces, tensors


def _is_mixed(runner: StrategyRunner) -> bool:
    return runner.dtype != torch.float32


def _shards(runner: StrategyRunner, name: str) -> list[torch.Tensor]:
    store = runner.store
    if name == _MAIN:
        return store.weights
    return [store.moment(name, bucket) for bucket in range(len(store.weights))]


def _set(runner: StrategyRunner, name: str, state: Mapping[str, Any]) -> None:
    pieces, routes = dealt(runner)
    tensors = [state[_name(piece.whole)].float() for piece in pieces]
    shards = [torch.empty_like(shard) for shard in runner.store.weights]
    runner.give(routes, tensors, shards)
    for bucket, shard in enumerate(shards):
        if name == _MAIN:
            runner.store.weights[bucket].copy_(shard)
        else:
            runner.store.set_moment(name, bucket, shard)


def _name(whole: WholeTensor) -> str:
    return f"{whole.key} {whole.stack}"


def _sharded(
    runner: StrategyRunner,
    prefix: str,
    shards: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    pairs = zip(*gathered(runner, shards), strict=True)
    return {
        _name(piece.whole): _sharded_tensor(prefix, piece.whole, t.to(dtype)) for piece, t in pairs
    }


def _sharded_tensor(prefix: str, whole: WholeTensor, tensor: torch.Tensor) -> ShardedTensor:
    stacks = zip(whole.stack, whole.stack_shape, strict=True)
    return ShardedTensor.from_rank_offsets(
        prefix + whole.key,
        tensor,
        *((axis, at, size) for axis, (at, size) in enumerate(stacks)),
        prepend_axis_num=len(whole.stack),
        allow_shape_mismatch=whole.any_size,
    )
