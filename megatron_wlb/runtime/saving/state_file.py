"""The planner's state in a checkpoint: ``wlb_state.json``, beside Megatron's own files.

It is JSON, with the checksum of all other lines in the first one. So it is read without torch, and
verified with ``--wlb-no-checksums`` too.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.reading import one_line, parse_mapping, shown
from megatron_wlb.runtime.saving import sealed
from megatron_wlb.runtime.saving.newest import damaged, folder_of, iteration_of, latest

NAME = "wlb_state.json"
VERSION = 1
_FIRST_LINE = '{{"crc32": "{}",'
_FIELDS = ("iteration", "planner", "cost", "kernel", "totals", "settings", "layout")
_OF_BEFORE = "megatron_wlb"
"""The entry of Megatron's own files that had the state before there was this file."""

logger = logging.getLogger(__name__)


def write(folder: str | os.PathLike[str], iteration: int, state: dict[str, Any]) -> str:
    """Writes the state into a checkpoint's folder, which is made if it is not there.

    Returns its checksum, which :func:`state_of` has as ``crc32``.

    Raises :class:`CheckpointError` where it cannot be written.
    """
    text = json.dumps({"version": VERSION, "iteration": iteration, **state})
    return sealed.write(folder, NAME, text.removeprefix("{"), _FIRST_LINE)


def newest_state(root: Path) -> tuple[int, dict[str, Any]] | None:
    """The step of the newest checkpoint in a folder of ``--save`` and its planner's state.

    None where there is no checkpoint. Raises :class:`CheckpointError` as :func:`latest` does,
    and as :func:`state_of`.
    """
    if (step := latest(root)) is None:
        return None
    return step, dict(state_of(folder_of(root, step))["planner"])


def state_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What this package has saved in the folder of a checkpoint.

    Raises :class:`CheckpointError` for one that has no such state, or another one than it was
    saved with.
    """
    try:
        text = sealed.read(folder, NAME, _FIRST_LINE)
        state = None
        if text is not None:
            state = parse_mapping("{" + text, is_json=True) | {"crc32": sealed.crc32(text)}
    except (CheckpointError, ConfigError) as error:
        raise damaged(folder, error) from None
    iteration = iteration_of(folder)
    if state is None and (state := _of_before(folder)) is not None:
        state["iteration"] = iteration
    if state is None:
        raise CheckpointError(
            f"{folder} has no packing state ({NAME}): which documents were trained is not known; "
            "go on without the --wlb flags, or start a run from its weights with --finetune"
        )
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"{folder}/{NAME} is of version {shown(state.get('version'))}, not {VERSION}; go on "
            "with the release of megatron-wlb that saved it"
        )
    if missing := [name for name in _FIELDS if name not in state]:
        raise damaged(folder, f"{NAME} lacks {', '.join(missing)}")
    if state["iteration"] != iteration:
        raise damaged(folder, f"{NAME} is of iteration {shown(state['iteration'])}")
    return state


def _of_before(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The state in Megatron's own files, where it was before; None where they have none."""
    import torch
    from megatron.core import dist_checkpointing  # which tells torch what may be unpickled

    from megatron_wlb.runtime.saving.unpickling import plain_values

    files = sorted(Path(folder).glob("mp_rank_*/model_optim_rng.pt"))  # of the format torch
    try:
        if files:
            found = torch.load(files[0], map_location="cpu", mmap=True, weights_only=True)
        else:
            with plain_values(), warnings.catch_warnings(action="ignore"):  # of a single process
                found = dist_checkpointing.load_common_state_dict(str(folder))
        text = found.get(_OF_BEFORE)
        state = None if text is None else parse_mapping(sealed.unseal(text, "it"), is_json=True)
    except Exception as error:  # what is damaged raises anything
        raise damaged(folder, f"its planner's state cannot be read ({one_line(error)})") from None
    if state is not None:
        _tell_of_before(str(folder))
    return state


@functools.cache
def _tell_of_before(folder: str) -> None:
    logger.warning(
        "%s has the planner's state inside Megatron's own files, where the next release does not "
        "look: save the run once with this release, which writes %s", folder, NAME,
    )  # fmt: skip
