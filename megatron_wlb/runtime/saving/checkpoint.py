"""Checkpoints in Megatron's distributed format, with the packing in them: resume is exact.

``FOLDER/iter_0000100/`` holds model, optimizer, schedule, random-number streams and the planner's
state (stream position, held documents, cost model) after step 100.
``FOLDER/latest_checkpointed_iteration.txt`` is written last and atomically, when the rest is on
disk, so a process or machine that dies while saving leaves the checkpoint before it in force.
Before any of it is loaded, its files are compared with the checksums that were saved with them.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core import dist_checkpointing, parallel_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_leaves

from megatron_wlb.errors import CheckpointError
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.reading import parse_mapping
from megatron_wlb.runtime.gpt.build import Model, transformer_impl
from megatron_wlb.runtime.ranks.transfer import from_first_rank
from megatron_wlb.runtime.saving import checksums
from megatron_wlb.runtime.saving.core import (
    FAILURES,
    lock,
    opened_state,
    reason,
    refuse_save,
    rng_state,
    set_rng_state,
    sharded_rng,
)
from megatron_wlb.runtime.saving.newest import TRACKER, folder_of, latest, remedy
from megatron_wlb.runtime.saving.resume import changed_settings, missing_load
from megatron_wlb.runtime.saving.unpickling import check_metadata, plain_values
from megatron_wlb.settings.config import Config, table

_LAYOUT = tuple(name for name, known in table().items() if known.layout)
_SAME = tuple(name for name, known in table().items() if known.resume == "same")
"""What must be equal when a run resumes, with the number of processes. Megatron would take some
from the checkpoint, whatever the command line says."""


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
    state["rng_state"] = sharded_rng("rng_state", rng_state(), model)
    return state


def _settings(config: Config, padded_vocab_size: int) -> dict[str, Any]:
    """What must be equal when a run resumes, JSON-able, with defaults filled in."""
    flat = config.flat()
    settings: dict[str, Any] = {name: flat[name] for name in (*_LAYOUT, *_SAME)}
    settings["processes"] = torch.distributed.get_world_size()
    shape = model_shape(config, padded_vocab_size)
    for name in ("ffn_hidden_size", "kv_channels", "num_query_groups"):
        settings[name] = getattr(shape, name)
    settings["transformer_impl"] = transformer_impl(config)
    rows = config.model.max_position_embeddings or config.data.seq_length
    settings["max_position_embeddings"] = rows
    settings["padded_vocab_size"] = padded_vocab_size
    if config.training.lr_decay_style != "constant":
        settings["lr_decay_iters"] = config.training.lr_decay_iters or config.training.train_iters
    return settings


def check_folder(config: Config) -> None:
    """Tries ``--load``, and tries and locks ``--save``, before any work is lost.

    Called by every rank. Raises :class:`CheckpointError` on every rank where there is nothing to
    load, nothing can be written, another run writes there, or ``--save`` holds the checkpoints of a
    run that this one does not resume and would overwrite.
    """
    root, resumed = config.checkpoint.save, config.checkpoint.load

    def check() -> None:
        if error := missing_load(resumed, root):
            raise CheckpointError(error)
        if root is None:
            return
        lock(root)
        resumes = (
            resumed is not None and os.path.exists(resumed) and os.path.samefile(root, resumed)
        )
        if not resumes and (Path(root) / TRACKER).exists():
            raise CheckpointError(
                f"--save {root} holds the checkpoints of a run; add --load {root} to go on with "
                "it, or choose another folder"
            )

    from_first_rank(check)


def save(
    config: Config,
    iteration: int,
    model: Model,
    optimizer: Any,
    scheduler: Any,
    planner_state: dict[str, Any],
) -> Path:
    """Saves after ``iteration`` steps; called by every rank. Returns the folder.

    Raises :class:`CheckpointError` where there is no room or the folder cannot be written; the
    checkpoint before stays in force. Ranks may be out of step, so the processes must end.
    """
    assert config.checkpoint.save is not None
    folder = folder_of(config.checkpoint.save, iteration)
    state = _sharded_state(model, optimizer, is_loading=False)
    state["common"] = {
        "iteration": iteration,
        "settings": _settings(config, model.gpts[0].vocab_size),
        "opt_param_scheduler": scheduler.state_dict(),
        # It is text, because Megatron compares common state over ranks value by value.
        "planner": checksums.seal_state(planner_state),
        "config": json.dumps(config.flat()),
        "checksums": not config.wlb.wlb_no_checksums,
    }
    from_first_rank(partial(_prepare, folder, _num_bytes(state)))
    content_metadata = {k: v for k, v in _metadata().items() if k != "dp_cp_group"}
    try:
        dist_checkpointing.save(state, str(folder), content_metadata=content_metadata)
        if not config.wlb.wlb_no_checksums:
            checksums.write(folder)
        if torch.distributed.get_rank() == 0:
            _put_in_force(folder, iteration)
    except FAILURES as failure:
        # No collective here: a rank that fails alone leaves the others in one of Megatron's.
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        refuse_save(folder, failure)
    torch.distributed.barrier()
    return folder


def _put_in_force(folder: Path, iteration: int) -> None:
    """Points the tracker at ``folder``, all of which is on disk before."""
    for path in (*folder.iterdir(), folder):
        _sync(path)
    tracker = folder.parent / TRACKER
    partial = tracker.with_suffix(".partial")
    partial.write_text(f"{iteration}\n")
    _sync(partial)
    os.replace(partial, tracker)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """Puts a file on disk, or a folder's entries where its file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _num_bytes(state: dict[str, Any]) -> int:
    """Counts this rank's bytes × the world: more than what is written, as replicas count."""
    leaves = (getattr(leaf, "data", leaf) for leaf in tree_leaves(state))
    own = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    return own * torch.distributed.get_world_size()


def _prepare(folder: Path, num_bytes: int) -> None:
    """Makes the folder and looks for room. Raises :class:`CheckpointError` for either."""
    try:
        # What an interrupted save left here is not in force; it would mix with ours.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CheckpointError(
            f"cannot write --save {folder.parent}: {error.strerror}; choose another folder"
        ) from None
    if free < num_bytes:
        folder.rmdir()
        raise CheckpointError(
            f"--save {folder.parent} has {free / 1e6:.3g} MB free, but the checkpoint may take "
            f"{num_bytes / 1e6:.3g} MB; free some room there or choose another folder"
        )


@plain_values()
def load(
    config: Config, model: Model, optimizer: Any, scheduler: Any
) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    """Restores the newest checkpoint of ``--load``; called by every rank.

    Returns the iteration after which it was saved, the planner's state, and all settings by name;
    or None where the folder has no checkpoint yet.

    Raises:
        CheckpointError: other settings than those it was saved with, or a damaged checkpoint.
    """
    root = config.checkpoint.load
    iteration = latest(root) if root is not None else None
    if root is None or iteration is None:
        return None
    folder = str(folder_of(root, iteration))
    trusted = checksums.verify(folder, skip=config.wlb.wlb_no_checksums)
    check_metadata(folder)
    try:
        common = dist_checkpointing.load_common_state_dict(folder)["common"]
        required, settings = common["settings"], parse_mapping(common["config"], is_json=True)
        planner_state = opened_state(common["planner"], trusted, common)
    except (Exception, CheckpointException) as error:  # Unpickling damaged files raises anything.
        _refuse(folder, error)
    now = _settings(config, model.gpts[0].vocab_size)
    _require_same_settings(folder, required, now, settings, config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Megatron's own use of torch.
            sharded = _sharded_state(model, optimizer, is_loading=True)
            state: dict[str, Any] = dist_checkpointing.load(sharded, folder)
    except (Exception, CheckpointException) as error:
        _refuse(folder, error)
    for number, gpt in enumerate(model.gpts):
        gpt.load_state_dict(state["model" if len(model.gpts) == 1 else f"model{number}"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(common["opt_param_scheduler"])
    (rng,) = state["rng_state"]
    set_rng_state(rng)
    return iteration, planner_state, settings


def _refuse(folder: str, error: BaseException) -> NoReturn:
    raise CheckpointError(
        f"cannot load {folder}, it is damaged ({reason(error)}); {remedy(folder)}"
    ) from error


def _require_same_settings(
    folder: str, saved: dict[str, Any], now: dict[str, Any], given: dict[str, Any], config: Config
) -> None:
    # What was not yet a setting when it was saved had its default.
    defaults = Config().flat()
    changed = changed_settings(defaults | saved, now, defaults | given, config.flat())
    if changed:
        raise CheckpointError(
            f"{folder} was saved with other settings: {changed}; resume with those it was saved "
            "with"
        )
