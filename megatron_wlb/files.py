"""Files that are written whole or not at all, and read only where they are files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from megatron_wlb.errors import ConfigError


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside ``path`` to write to; it becomes ``path`` at the end, and vanishes on an error.

    So a reader never finds half a file, and an old file stays until the new one is complete.

    Raises :class:`ConfigError` where it cannot be written.
    """
    path = Path(path)
    # Its name is short, so that any name that a file may have can be written.
    draft = path.with_name(f".{path.stem[:40]}.{os.getpid()}.partial{path.suffix[:16]}")
    try:
        yield draft
        draft.replace(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; make room or choose another place"
        ) from None
    finally:
        with contextlib.suppress(OSError):  # a name that is too long was told above
            draft.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """A text file, UTF-8. Raises :class:`ConfigError` where it cannot be written."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def open_file(path: str | os.PathLike[str], *, or_pipe: bool = False) -> io.BufferedReader:
    """Opens a file to read its bytes, without waiting; with ``or_pipe`` also a pipe, and waits for
    who writes to it.

    Raises ``OSError`` for what else has no end that is known: a folder, a pipe, a device.
    """
    # Not opened to look what it is: who writes to a pipe would take that for its reader.
    waits = or_pipe and stat.S_ISFIFO(os.stat(path).st_mode)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if waits else os.O_NONBLOCK))
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode) or (waits and stat.S_ISFIFO(mode)):
        os.set_blocking(file, True)  # storage may hold a file elsewhere, and fetch it when read
        return os.fdopen(file, "rb")
    os.close(file)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    reason = "it is a pipe or a device; write what it gives into a file"
    raise OSError(errno.EINVAL, reason, str(path))
