"""Reads the planner's state out of a checkpoint without torch's or Megatron's own readers.

Of its pickled values only plain ones are made: text, numbers, lists and dicts. Everything else,
weights too, becomes an empty stand-in, so no code of a checkpoint runs and no tensor is read.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving.checksums import unseal_state

_TRACKER = "latest_checkpointed_iteration.txt"
_FILES = ("common.pt", "mp_rank_00/model_optim_rng.pt", "mp_rank_00_000/model_optim_rng.pt")
"""Files by format: ``torch_dist``, then ``torch`` without and with pipeline stages."""


def newest_state(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """The step of the newest checkpoint in a folder of ``--save`` and its planner's state.

    None where there is no checkpoint. Raises :class:`CheckpointError` for one that is damaged or
    has no such state.
    """
    text = _newest(folder)
    if text is None:
        return None
    if (step := newest_step(folder)) is None:
        raise CheckpointError(f"{folder / _TRACKER} holds {text!r}, not a step's number")
    checkpoint = folder / f"iter_{step:07d}"
    for name in _FILES:
        if (checkpoint / name).exists():
            return step, _state(checkpoint / name)
    raise CheckpointError(f"{checkpoint} has none of {', '.join(_FILES)}; use an intact checkpoint")


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint; None where there is none, or one without a number."""
    text = _newest(folder) or ""
    return int(text) if text.isascii() and text.isdigit() else None


def _newest(folder: Path) -> str | None:
    try:
        return (folder / _TRACKER).read_text().strip()
    except FileNotFoundError:
        return None


def _state(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            values = _PlainUnpickler(io.BytesIO(archive.read(name))).load()
        text = values["megatron_wlb"] if "megatron_wlb" in values else values["common"]["planner"]
        return dict(unseal_state(text)["planner"])
    except Exception as error:  # unpickling damaged files raises anything
        raise CheckpointError(
            f"{path} has no planner's state that can be read ({error!r}); use an intact checkpoint"
        ) from None


class _StandIn:
    """Takes whatever pickle does with an object."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> _StandIn:
        return self

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...

    def add(self, _: Any) -> None: ...


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, _: str, __: str) -> Any:
        return _StandIn

    def persistent_load(self, _: Any) -> Any:
        return _StandIn()
