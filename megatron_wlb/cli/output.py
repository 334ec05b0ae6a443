"""How commands show things: tables, progress on stderr, whole files or none."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich import progress as rich_progress
from rich.console import Console
from rich.text import Text

from megatron_wlb.errors import ConfigError

WIDTH = 160
"""Of tables that go to a file or a pipe."""


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, or as a table needs where there is none."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=None if terminal else WIDTH, highlight=False)


def say(out: Console, text: str, style: str = "") -> None:
    """A sentence, as it stands: one line, unless a terminal has to break it between words."""
    out.print(Text(text, style=style), soft_wrap=not out.is_terminal)


def remark(text: str) -> None:
    """One line on stderr about what was done with the user's data."""
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def progress_bar(task: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while that is a terminal; what it yields takes (done, total)."""
    stderr = Console(stderr=True)
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(
        *columns, console=stderr, transient=True, disable=not stderr.is_terminal
    ) as bars:
        bar = bars.add_task(task, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


def check_file(flag: str, path: Path | None) -> None:
    """Raises :class:`ConfigError` where :func:`save_file` could not write; makes the folder."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; add a file name")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write {flag} {path}: {error.strerror or error}; choose another place"
        ) from None


def check_picture(flag: str, path: Path | None) -> None:
    """As :func:`check_file`, and raises :class:`ConfigError` for an ending that is no picture's."""
    if path is not None and path.suffix.lower() not in ("", ".png", ".svg"):
        raise ConfigError(f"{flag} {path} is no picture; call it .png or .svg")
    check_file(flag, path)


def save_file(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    """``write`` writes to a temporary name, of the same ending, that then becomes ``path``.

    Raises :class:`ConfigError` where that fails.
    """
    handle, name = tempfile.mkstemp(
        dir=path.absolute().parent, prefix=".draft.", suffix=path.suffix[:16]
    )
    os.close(handle)
    draft = Path(name)
    try:
        write(draft)
        draft.chmod(0o666 & ~_umask())  # as a file that was opened for writing has it
        os.replace(draft, path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {flag} {path}: {error.strerror or error}; make room"
        ) from None
    finally:
        draft.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
