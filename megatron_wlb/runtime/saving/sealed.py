"""Text files that are whole or refused: the first line has the checksum of what follows.

They are on disk before they get their names, so no reader finds half of one.
"""

from __future__ import annotations

import importlib
import os
import zlib
from pathlib import Path
from typing import Any

from megatron_wlb.errors import CheckpointError
from megatron_wlb.reading import MAX_RECORD_BYTES, one_line, read_text

LINE = "crc32 {}"
"""The first line, unless a caller has another form."""


def write(folder: str | os.PathLike[str], name: str, text: str, line: str = LINE) -> str:
    """Writes a file of a folder, which is made if it is not there; returns the checksum.

    Raises :class:`CheckpointError` where it cannot be written.
    """
    checksum = crc32(text)
    sealed = f"{line.format(checksum)}\n{text}"
    try:
        if is_store(folder):  # which has an object only when it is whole
            with _client().open(f"{folder}/{name}", "w") as stream:
                stream.write(sealed)
        else:
            _write_file(Path(folder, name), sealed)
    except Exception as failure:  # each store has errors of its own
        said = getattr(failure, "strerror", None) or one_line(failure)
        raise CheckpointError(
            f"cannot write {folder}/{name}: {said}; free some room there, or choose another folder"
        ) from failure
    return checksum


def _write_file(path: Path, content: str) -> None:
    draft = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)


def read(folder: str | os.PathLike[str], name: str, line: str = LINE) -> str | None:
    """The text of a file; None where there is none.

    Raises :class:`CheckpointError` where it was changed, or cannot be read.
    """
    try:
        if is_store(folder):
            with _client().open(f"{folder}/{name}", "r") as stream:
                sealed = stream.read()
        elif not os.path.lexists(Path(folder, name)):
            return None
        else:
            sealed = read_text(Path(folder, name), MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    except Exception as error:  # each store has errors of its own
        raise CheckpointError(f"{name} cannot be read ({one_line(error)})") from error
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


def crc32(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
