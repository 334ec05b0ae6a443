"""Checkpoints of the store, in the form that runs without strategies save and load.

The tensors of the whole model are dealt out to ranks. Each gathers its own from the shards and
saves them undivided; Megatron's distributed format loads any part of them. So a checkpoint knows no
strategy, nor the number of ranks that saved it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_wlb.planning.strategy_run import StrategyRun
from megatron_wlb.runtime.saving import checkpoint
from megatron_wlb.runtime.strategy.pieces import Piece, WholeTensor
from megatron_wlb.runtime.strategy.routes import Pull, Routes
from megatron_wlb.runtime.strategy.runner import StrategyRunner
from megatron_wlb.runtime.strategy.store import MOMENTS

_MASTER = "fp32_param"
_STATE = "optimizer.state."
"""Megatron's keys of moments begin with this and a name, and in bf16 those of the fp32 weights.
Those of the weights that passes run with are the model's own."""


def save(
    run: StrategyRun,
    iteration: int,
    runner: StrategyRunner,
    scheduler: Any,
    planner_state: dict[str, Any],
) -> Path:
    """Saves after ``iteration`` steps; called by every rank. Returns the folder.

    A rank needs room for its share of the model's weights and moments, not more. Raises
    :class:`CheckpointError` as :func:`megatron_wlb.runtime.saving.checkpoint.write` does.
    """
    pieces, routes = dealt(runner)
    # Megatron warns where one rank has a key that another has not, also of nothing.
    state: dict[str, Any] = {"objects": objects} if (objects := _objects(runner)) else {}
    for name in (_MASTER, *MOMENTS):
        tensors = empty(pieces, runner)
        shards = [_shard(runner, name, bucket) for bucket in range(len(runner.buckets.sizes))]
        Pull(routes, shards, tensors).finish()
        if name == _MASTER and run.config.training.bf16:
            state["model"] = _sharded("", pieces, [tensor.bfloat16() for tensor in tensors])
        state[f"store {name}"] = _sharded(_prefix(run, name), pieces, tensors)
    return checkpoint.write(
        run.config,
        iteration,
        state,
        run.padded_vocab_size,
        scheduler,
        planner_state,
        num_updates=iteration,
    )


def find(run: StrategyRun) -> checkpoint.Found | None:
    """Finds the newest checkpoint of ``--load``, of any strategies or none; called by every rank.
    None where the folder has none yet.

    Raises :class:`CheckpointError` for other settings than those it was saved with, or a damaged
    checkpoint.
    """
    return checkpoint.find(run.config, run.padded_vocab_size, any_layout=True)


def load(run: StrategyRun, found: checkpoint.Found, runner: StrategyRunner, scheduler: Any) -> None:
    """Restores a checkpoint; called by every rank.

    Raises :class:`CheckpointError` for a damaged one.
    """
    pieces, routes = dealt(runner)
    tensors = {name: empty(pieces, runner) for name in (_MASTER, *MOMENTS)}
    found.read(
        {
            f"store {name}": _sharded(_prefix(run, name), pieces, own)
            for name, own in tensors.items()
        }
    )
    for name, own in tensors.items():
        shards = [torch.empty_like(shard) for shard in runner.store.gradients]
        runner.give(routes, own, shards)
        for bucket, shard in enumerate(shards):
            if name == _MASTER:
                runner.store.weights[bucket].copy_(shard)
            else:
                runner.store.set_moments(name, bucket, shard)
    runner.store.set_num_updates(found.iteration)
    scheduler.load_state_dict(found.common["opt_param_scheduler"])


def _objects(runner: StrategyRunner) -> dict[str, ShardedObject]:
    """What the first rank saves for layers that ask for more than tensors."""
    objects = runner.objects if dist.get_rank() == 0 else []
    return {
        f"{one.key} {one.offset}": ShardedObject(one.key, None, one.shape, one.offset)
        for one in objects
    }


def dealt(runner: StrategyRunner) -> tuple[list[Piece], Routes]:
    """The tensors that this rank saves, so that ranks have about equally many elements."""
    dealt: list[list[Piece]] = [[] for _ in range(dist.get_world_size())]
    loads = [0] * len(dealt)
    for piece in sorted(runner.wholes, key=lambda p: -p.whole.num_elements):
        rank = loads.index(min(loads))
        loads[rank] += piece.whole.num_elements
        dealt[rank].append(piece)
    return dealt[dist.get_rank()], Routes(runner.buckets, dealt, dist.get_rank())


def empty(pieces: list[Piece], runner: StrategyRunner) -> list[torch.Tensor]:
    device = runner.store.weights[0].device
    return [torch.zeros(piece.whole.shape, device=device) for piece in pieces]


def _shard(runner: StrategyRunner, name: str, bucket: int) -> torch.Tensor:
    return runner.store.weights[bucket] if name == _MASTER else runner.store.moments(name, bucket)


def _prefix(run: StrategyRun, name: str) -> str:
    """How Megatron's keys begin; in fp32 the model's own weights are the only ones."""
    is_alone = name == _MASTER and not run.config.training.bf16
    return "" if is_alone else f"{_STATE}{name}."


def _sharded(prefix: str, pieces: list[Piece], tensors: list[torch.Tensor]) -> dict[str, Any]:
    pairs = zip(pieces, tensors, strict=True)
    return {
        f"{piece.whole.key} {piece.whole.stack}": _sharded_tensor(
            prefix + piece.whole.key, piece.whole, tensor
        )
        for piece, tensor in pairs
    }


def _sharded_tensor(key: str, whole: WholeTensor, tensor: torch.Tensor) -> ShardedTensor:
    stacks = zip(whole.stack, whole.stack_shape, strict=True)
    return ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *((axis, at, size) for axis, (at, size) in enumerate(stacks)),
        prepend_axis_num=len(whole.stack),
        allow_shape_mismatch=whole.any_size,
    )
