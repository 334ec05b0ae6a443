"""Checkpoints of a :class:`.Trainer` in Megatron's distributed format, with our checksums.

``FOLDER/iter_0000100/`` has weights, optimizer, schedule and random numbers after step 100, and is
loaded with the layout and settings that it was saved with. ``latest_checkpointed_iteration.txt`` is
written last: whoever dies while saving leaves the checkpoint before it in force.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from torch.distributed.checkpoint.api import CheckpointException

from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.runtime.gpt.build import transformer_impl
from megatron_wlb.runtime.ranks.transfer import from_first_rank
from megatron_wlb.runtime.saving import checksums
from megatron_wlb.runtime.saving.core import (
    FAILURES,
    lock_folder,
    reason,
    refuse_save,
    rng_state,
    set_rng_state,
    sharded_rng,
)
from megatron_wlb.runtime.saving.newest import TRACKER, damaged, folder_of, latest
from megatron_wlb.runtime.saving.resume import differences, missing_load
from megatron_wlb.runtime.saving.unpickling import check_metadata, plain_values
from megatron_wlb.runtime.trainer.trainer import Trainer
from megatron_wlb.settings.config import Config, table


def check_folders(config: Config) -> None:
    """Tries ``--load``, and locks ``--save``; called by every rank.

    Raises :class:`CheckpointError` on every rank where there is nothing to load, or ``--save``
    cannot be written, is another run's, or holds checkpoints that this one would overwrite.
    """
    save, load = config.checkpoint.save, config.checkpoint.load
    if error := missing_load(load, save):
        raise CheckpointError(error)
    if save is not None:
        lock_folder(save)
        is_resumed = load is not None and Path(save).resolve() == Path(load).resolve()
        if not is_resumed and from_first_rank((Path(save) / TRACKER).exists):
            raise CheckpointError(
                f"--save {save} holds the checkpoints of a run; add --load {save} to go on with "
                "it, or choose another folder"
            )


def save(trainer: Trainer) -> Path:
    """Saves after the present step; called by every rank. Returns the folder.

    Raises :class:`CheckpointError` where there is no room or the folder cannot be written, and the
    checkpoint before stays in force; :class:`ConfigError` without ``--save``.
    """
    root = trainer.config.checkpoint.save
    if root is None:
        raise ConfigError("there is no folder to save in; give --save FOLDER")
    folder = folder_of(root, trainer.iteration)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        state = _sharded(trainer, is_loading=False)
        state["common"] = {
            "settings": json.dumps(_settings(trainer.config)),
            "schedule": trainer.scheduler.state_dict(),
        }
        dist_checkpointing.save(state, str(folder))
        if not trainer.config.wlb.wlb_no_checksums:
            checksums.write(folder)
        tracker = Path(root) / TRACKER
        from_first_rank(partial(write_text, tracker, f"{trainer.iteration}\n"))
    except FAILURES as failure:
        refuse_save(folder, failure)
    return folder


@plain_values()
def load(trainer: Trainer) -> None:
    """Goes on from the newest checkpoint of ``--load``, if there is one; called by every rank.

    Raises :class:`CheckpointError` for other settings than those it was saved with, or damage.
    """
    root, skip = trainer.config.checkpoint.load, trainer.config.wlb.wlb_no_checksums
    iteration = None if root is None else from_first_rank(partial(latest, root))
    if root is None or iteration is None:
        return
    folder = folder_of(root, iteration)
    if not checksums.verify(folder, skip=skip):
        raise damaged(folder, f"its {checksums.NAME} is missing (--wlb-no-checksums needs none)")
    check_metadata(folder)
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))["common"]
        changed = differences(json.loads(common["settings"]), _settings(trainer.config))
        if not changed:
            asked = _sharded(trainer, is_loading=True)
            state: dict[str, Any] = dist_checkpointing.load(asked, str(folder))
    except (Exception, CheckpointException) as error:  # what is damaged raises anything
        raise damaged(folder, reason(error)) from error
    if changed:
        raise CheckpointError(
            f"{folder} was saved with other settings: {changed}; go on with those it was saved with"
        )
    for number, gpt in enumerate(trainer.model.gpts):
        gpt.load_state_dict(state[f"model{number}"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.load_state_dict(common["schedule"])
    set_rng_state(state["rng_state"][0])
    trainer.iteration = iteration


def _sharded(trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    """What is sharded over ranks, as Megatron describes it."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models = {
        f"model{number}": gpt.sharded_state_dict(metadata=metadata)
        for number, gpt in enumerate(trainer.model.gpts)
    }
    optimizer = trainer.optimizer.sharded_state_dict(
        models if len(models) > 1 else models["model0"], is_loading=is_loading, metadata=metadata
    )
    rng = sharded_rng("rng_state", rng_state(), trainer.model)
    return {**models, "optimizer": optimizer, "rng_state": rng}


def _settings(config: Config) -> dict[str, Any]:
    """What must be the same where a checkpoint is loaded, as JSON has it."""
    flat = config.flat()
    names = [n for n, known in table().items() if known.layout or known.resume == "same"]
    settings = {name: flat[name] for name in names}
    settings["transformer_impl"] = transformer_impl(config)
    settings["processes"] = torch.distributed.get_world_size()
    same: dict[str, Any] = json.loads(json.dumps(settings))
    return same
