"""Which checkpoint a run goes on from: as the tracker in a folder of ``--save`` names it, and which
one if that is damaged.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.reading import read_text, shown

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "wlb_checksums.txt"
_MAX_DIGITS = 15
_REMEDY = "write the number of one of the iter_* folders beside it"


def folder_of(root: str | os.PathLike[str], iteration: int) -> Path:
    """The folder of a checkpoint."""
    return Path(root) / f"iter_{iteration:07d}"


def tracked(root: str | os.PathLike[str]) -> str | None:
    """What the tracker says; None where there is none.

    Raises :class:`CheckpointError` where it cannot be read.
    """
    tracker = Path(root) / TRACKER
    if not os.path.lexists(tracker):
        return None
    try:
        return read_text(tracker).strip()
    except ConfigError as error:
        raise CheckpointError(f"cannot read {tracker} ({error}); {_REMEDY}") from None


def newest_step(root: str | os.PathLike[str]) -> int | None:
    """The step of the newest checkpoint; None where there is none, or one without a number."""
    text = tracked(root) or ""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number else None


def latest(root: str | os.PathLike[str]) -> int | None:
    """The newest whole checkpoint's iteration; None where there is none yet.

    Raises :class:`CheckpointError` where the folder is a file, or the tracker cannot be read, holds
    no number, or names a checkpoint that is not there.
    """
    if Path(root).exists() and not Path(root).is_dir():
        raise CheckpointError(f"--load {root} is not a folder; give the folder of a --save")
    if (text := tracked(root)) is None:
        return None
    tracker = Path(root) / TRACKER
    if (step := newest_step(root)) is None:
        raise CheckpointError(f"{tracker} holds {shown(text)}, not an iteration; {_REMEDY}")
    if not (folder := folder_of(root, step)).is_dir():
        raise CheckpointError(
            f"{tracker} names iteration {text}, but {folder} does not exist; {_REMEDY}"
        )
    return step


def damaged(folder: str | os.PathLike[str], said: object) -> CheckpointError:
    """The error of a checkpoint that is not as it was saved."""
    return CheckpointError(f"{folder} is damaged: {said}; {remedy(folder)}")


def remedy(folder: str | os.PathLike[str]) -> str:
    """Says how to go on without the checkpoint in ``folder``: from the newest one before it.

    Those with checksums come first: they are whole, where others may be of interrupted saves.
    """
    folder = Path(folder)
    own = iteration_of(folder)
    before = [
        ((other / CHECKSUMS).exists(), iteration)
        for other in folder.parent.glob("iter_*")
        if (iteration := iteration_of(other)) is not None and (own is None or iteration < own)
    ]
    if not before:
        return f"there is no checkpoint before it in {folder.parent}"
    tracker = folder.parent / TRACKER
    return f"to go on from the checkpoint before it, write {max(before)[1]} into {tracker}"


def iteration_of(folder: str | os.PathLike[str]) -> int | None:
    """The number in ``iter_0000012``: from 10⁷ on names are longer, so text has another order."""
    number = Path(folder).name.removeprefix("iter_")
    return int(number) if number.isascii() and number.isdigit() else None
