"""Text files that are whole or refused: the first line has the checksum of what follows.

They are on disk before they get their names, so no reader finds half of one.
"""

from __future__ import annotations

import importlib
import os
import zlib
from pathlib import Path
from typing import Any

from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.reading import MAX_RECORD_BYTES, one_line, read_text

LINE = "crc32 {}"
"""The first line, unless a caller has another form."""


def write(folder: str | os.PathLike[str], name: str, text: str, line: str = LINE) -> str:
    """Writes a file of a folder, which is made if it is not there; returns the checksum.

    Raises :class:`CheckpointError` where it cannot be written.
    """
    checksum = crc32(text)
    sealed = f"{line.format(checksum)}\n{text}"
    if is_store(folder):  # which has an object only when it is whole
        try:
            with _client().open(f"{folder}/{name}", "w") as stream:
                stream.write(sealed)
        except Exception as failure:  # each store has errors of its own
            raise CheckpointError(
                f"cannot write {folder}/{name}: {one_line(failure)}; look at its address and what "
                "you may do there, or choose another folder"
            ) from failure
        return checksum
    path = Path(folder, name)
    draft = path.with_name(f"{name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as stream:
            stream.write(sealed)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError as failure:
        raise CheckpointError(
            f"cannot write {path}: {failure.strerror or failure}; free some room there, or choose "
            "another folder"
        ) from None
    return checksum


def read(folder: str | os.PathLike[str], name: str, line: str = LINE) -> str | None:
    """The text of a file; None where there is none.

    Raises :class:`CheckpointError` where it was changed, or cannot be read.
    """
    try:
        if is_store(folder):
            sealed = _read_object(f"{folder}/{name}")
        elif not os.path.lexists(Path(folder, name)):
            return None
        else:
            sealed = read_text(Path(folder, name), MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    except ConfigError as error:
        raise CheckpointError(f"{name} cannot be read ({error})") from None
    return unseal(sealed, name, line)


def unseal(sealed: str, what: str, line: str = LINE) -> str:
    """The text below the line of its checksum. Raises :class:`CheckpointError` where it was
    changed.
    """
    first, _, text = sealed.partition("\n")
    if first != line.format(crc32(text)) or not text:
        raise CheckpointError(f"{what} has crc32 {crc32(text)}, expected {first[:30]!r}")
    return text


def is_store(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder is behind Megatron's multi-storage client."""
    return "://" in str(folder)


def _client() -> Any:
    return importlib.import_module("multistorageclient")


def _read_object(path: str) -> str:
    try:
        with _client().open(path, "r") as stream:
            return str(stream.read())
    except FileNotFoundError:
        raise
    except Exception as failure:  # each store has errors of its own
        raise CheckpointError(f"cannot read {path}: {one_line(failure)}") from failure


def crc32(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
