"""Checkpoints in Megatron's distributed format, with the packing in them: resume is exact.

``FOLDER/iter_0000100/`` holds model, optimizer, schedule, random-number streams and the planner's
state (stream position, held documents, cost model) after step 100.
``FOLDER/latest_checkpointed_iteration.txt`` is written last and atomically, so a process killed
while saving leaves the checkpoint before it in force.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_wlb.config import Config
from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.model import Model

TRACKER = "latest_checkpointed_iteration.txt"

LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "context_parallel_size",
    "use_distributed_optimizer",
)
"""Settings that must be equal when a run resumes, with the number of processes."""


def folder_of(root: str, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def latest(root: str) -> int | None:
    """The newest whole checkpoint's iteration; None where there is none yet.

    Raises:
        CheckpointError: the tracker names a checkpoint that is not there, or holds no number.
    """
    tracker = Path(root) / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise CheckpointError(
            f"{tracker} holds {text!r}, not an iteration; write the number of one of the iter_* "
            "folders beside it"
        )
    if not folder_of(root, int(text)).is_dir():
        raise CheckpointError(
            f"{tracker} names iteration {text}, but {folder_of(root, int(text))} does not exist; "
            "write the number of one of the iter_* folders beside it"
        )
    return int(text)


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded_state(model: Model, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """What is sharded over ranks, as Megatron describes it."""
    state: dict[str, Any] = {}
    for number, gpt in enumerate(model.gpts):
        key = "model" if len(model.gpts) == 1 else f"model{number}"
        state[key] = gpt.sharded_state_dict(metadata=_metadata())
    state["optimizer"] = optimizer.sharded_state_dict(
        state if len(model.gpts) > 1 else state["model"],
        is_loading=is_loading,
        metadata=_metadata(),
    )
    rng = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    groups = model.groups
    state["rng_state"] = ShardedObject(
        "rng_state",
        [rng],
        (groups.pp.size(), groups.tp.size()),
        (groups.pp.rank(), groups.tp.rank()),
        replica_id=groups.dp_cp.rank(),
    )
    return state


def _layout(config: Config) -> dict[str, Any]:
    layout = {name: getattr(config.parallel, name) for name in LAYOUT}
    layout["processes"] = torch.distributed.get_world_size()
    layout["global_batch_size"] = config.training.global_batch_size
    return layout


def save(
    config: Config,
    iteration: int,
    model: Model,
    optimizer: Any,
    scheduler: Any,
    planner_state: dict[str, Any],
) -> Path:
    """Saves after ``iteration`` steps; called by every rank. Returns the folder.

    Raises:
        CheckpointError: on every rank, if there is no room or the folder cannot be written;
            training state is untouched and the checkpoint before stays in force.
    """
    assert config.checkpoint.save is not None
    folder = folder_of(config.checkpoint.save, iteration)
    state = _sharded_state(model, optimizer, is_loading=False)
    state["common"] = {
        "iteration": iteration,
        "layout": _layout(config),
        "opt_param_scheduler": scheduler.state_dict(),
        # As text: Megatron compares common state over ranks value by value.
        "planner": json.dumps(planner_state),
        "config": json.dumps(config.flat()),
    }
    error = _prepare(folder, _num_bytes(state)) if torch.distributed.get_rank() == 0 else ""
    _raise_everywhere(error)
    try:
        dist_checkpointing.save(state, str(folder), content_metadata=_content_metadata())
        error = ""
    except (OSError, RuntimeError, dist_checkpointing.core.CheckpointingException) as failure:
        error = f"cannot save {folder}: {' '.join(str(failure).split())}; free some room there"
    _raise_everywhere(error)
    if torch.distributed.get_rank() == 0:
        tracker = Path(config.checkpoint.save) / TRACKER
        partial = tracker.with_suffix(".partial")
        partial.write_text(f"{iteration}\n")
        os.replace(partial, tracker)
    torch.distributed.barrier()
    return folder


def _content_metadata() -> dict[str, Any]:
    return {k: v for k, v in _metadata().items() if k != "dp_cp_group"}


def _num_bytes(state: dict[str, Any]) -> int:
    """Bytes of this rank's tensors × the world: more than what is written (replicas count)."""
    total = 0
    stack: list[Any] = [state]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
        else:
            data = getattr(value, "data", value)
            if isinstance(data, torch.Tensor):
                total += data.numel() * data.element_size()
    return total * int(torch.distributed.get_world_size())


def _prepare(folder: Path, num_bytes: int) -> str:
    """Makes the folder and looks for room; returns what is wrong, or nothing."""
    try:
        # What an interrupted save left here is not in force; it would mix with ours.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot write --save {folder.parent}: {error.strerror}; choose another folder"
    if free < num_bytes:
        return (
            f"--save {folder.parent} has {free / 1e6:.0f} MB free, but the checkpoint may take "
            f"{num_bytes / 1e6:.0f} MB; free some room there or choose another folder"
        )
    return ""


def _raise_everywhere(error: str) -> None:
    """Raises on all ranks if any has an error, so that none waits for the others for ever."""
    errors: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(errors, error)
    for message in errors:
        if message:
            raise CheckpointError(message)


def load(
    config: Config, model: Model, optimizer: Any, scheduler: Any
) -> tuple[int, dict[str, Any]] | None:
    """Restores the newest checkpoint of ``--load``; called by every rank.

    Returns:
        The iteration after which it was saved and the planner's state, or None where the folder
        has no checkpoint yet.

    Raises:
        CheckpointError: another layout or batch size, or a damaged checkpoint.
    """
    root = config.checkpoint.load
    iteration = latest(root) if root is not None else None
    if root is None or iteration is None:
        return None
    folder = str(folder_of(root, iteration))
    try:
        common = dist_checkpointing.load_common_state_dict(folder)["common"]
        _require_same_layout(folder, common["layout"], _layout(config))
        state = dist_checkpointing.load(_sharded_state(model, optimizer, is_loading=True), folder)
    except (OSError, RuntimeError, KeyError, dist_checkpointing.core.CheckpointingException) as e:
        raise CheckpointError(
            f"cannot load {folder}: {' '.join(str(e).split())[:300]}; an earlier checkpoint can be "
            f"chosen by its number in {Path(root) / TRACKER}"
        ) from e
    for number, gpt in enumerate(model.gpts):
        gpt.load_state_dict(state["model" if len(model.gpts) == 1 else f"model{number}"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(common["opt_param_scheduler"])
    (rng,) = state["rng_state"]
    torch.set_rng_state(rng["torch"])
    torch.cuda.set_rng_state(rng["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(rng["tracker"])
    return iteration, json.loads(common["planner"])


def _require_same_layout(folder: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if saved.get(name) != value:
            raise CheckpointError(
                f"{folder} was saved with {name.replace('_', '-')} {saved.get(name)}, this run has "
                f"{value}; resume with the same layout (resharding is not supported yet)"
            )
