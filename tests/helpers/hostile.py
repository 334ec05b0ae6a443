"""Checkpoints that name code in the two places that torch unpickles whole."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

OWNED = "owned"
"""A folder that the code makes where it runs."""


class _Hostile:
    def __init__(self, instead_of: Any) -> None:
        self.value = instead_of

    def __reduce__(self) -> Any:
        return os.makedirs, (OWNED, 0o777, True)


def make_hostile(folder: Path, place: str) -> None:
    """Has a checkpoint run code as its ``.metadata`` is read, or an object in ``.distcp``."""
    metadata = FileSystemReader(folder).read_metadata()
    if place == ".metadata":
        metadata.planner_data = _Hostile(metadata.planner_data)
    else:
        key, at = next((k, v) for k, v in metadata.storage_data.items() if "rng" in k.fqn)
        content, path = io.BytesIO(), folder / at.relative_path
        torch.save(_Hostile(None), content)
        metadata.storage_data[key] = replace(
            at, offset=path.stat().st_size, length=len(content.getvalue())
        )
        with path.open("ab") as stream:
            stream.write(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
