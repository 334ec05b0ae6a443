"""Errors that a user can act on: each names the value, the limit and the remedy in one line.

Command-line programs print ``error: <message>`` and exit with the class's ``exit_code``; the
traceback is shown only with ``WLB_TRACEBACK=1``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

MAX_LINE = 2000
"""Characters of a line of an error."""
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class WLBError(Exception):
    """Base of all errors raised at the project's boundaries."""

    exit_code = 1

    def __str__(self) -> str:
        """What is wrong. Values in it come from files: no line is endless or steers a terminal."""
        text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", super().__str__())
        cut = (
            line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…" for line in text.split("\n")
        )
        return "\n".join(cut)

    def report(self, where: str = "") -> str:
        """What a program says of it: ``error: …``, a line for each thing that is wrong."""
        return "".join(f"error{where}: {line}\n" for line in str(self).splitlines())


class ConfigError(WLBError):
    """A flag or a combination of flags that cannot run."""

    exit_code = 2


class CorpusError(WLBError):
    """A corpus that is missing, empty, corrupt, or does not fit the run."""

    exit_code = 3


class PackingError(WLBError):
    """Documents that the packing cannot place under its limits."""

    exit_code = 4


class PlanError(WLBError):
    """Ranks that disagree, or a plan that does not fit what runs."""

    exit_code = 5


class CheckpointError(WLBError):
    """A checkpoint that cannot be written, or one that does not fit this run."""

    exit_code = 6


class TrainingError(WLBError):
    """Training that came to nothing, such as a loss that is not a number."""

    exit_code = 8


class LostRankError(WLBError):
    """A rank that waits for another one, which ended or stopped."""

    exit_code = 9


class CompatibilityError(WLBError):
    """A Megatron or torch that lacks what the plugin hooks, or has it in another form."""

    exit_code = 7


def refuse_all(messages: Iterable[str]) -> None:
    """Raises :class:`ConfigError` of all that cannot run, a line each; nothing if all can."""
    if lines := list(messages):
        raise ConfigError("\n".join(lines))


def interrupted() -> int:
    """Says that Ctrl-C ended the program; returns the exit code that shells have for it."""
    sys.stderr.write("error: interrupted\n")
    return 128 + signal.SIGINT


@contextlib.contextmanager
def _ending_children() -> Iterator[None]:
    """Makes SIGTERM end what the program has started too, and then the program as Ctrl-C does."""

    def end(*_: object) -> None:
        import psutil

        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        sys.exit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield  # others cannot take signals
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_program(program: Callable[[], int], *, place_flag: str = "") -> int:
    """Runs a command to its end; the exit code: its own, an error's, or 128 + signal.

    A file that cannot be used is an error too where ``place_flag`` names the flag that says where
    files go.
    """
    try:
        with _ending_children():
            code = program()
        sys.stdout.flush()  # So that a closed pipe is met here.
        return code
    except WLBError as error:
        if os.environ.get("WLB_TRACEBACK") == "1":
            raise
        sys.stderr.write(error.report())
        return error.exit_code
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:
        # The reader has enough (as in `wlb … | head`). Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if not place_flag or os.environ.get("WLB_TRACEBACK") == "1":
            raise
        where = error.filename or "a file"
        told = WLBError(f"{where}: {error.strerror or error}; choose another {place_flag}")
        sys.stderr.write(told.report())
        return told.exit_code
