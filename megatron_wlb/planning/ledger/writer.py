"""Writes a ledger: one rank, a line a step, nothing of a line lost once it is written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_wlb.errors import CheckpointError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.ledger.lines import (
    NAME,
    VERSION,
    encode,
    pieces_of,
    pieces_of_plan,
    seal,
)
from megatron_wlb.planning.ledger.standing import Standing

_BLOCK_BYTES = 1 << 16


class StepLedger:
    """Appends to ``FOLDER/wlb_ledger.txt``; without a folder nothing is written.

    Lines outlive the process as soon as they are written, and the machine from :meth:`sync` on,
    which is to come before a checkpoint: what ran after it runs again.

    Raises :class:`CheckpointError` here and in each method where the file cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.iteration = 0
        """The last step that was written."""
        self.plan: StepPlan | None = None
        """The plan of that step, if this process wrote it."""
        self._path = None if folder is None else Path(folder) / NAME
        self._file = -1
        if self._path is not None:
            with _telling(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
                _drop_torn_line(self._file)

    def start(self, iteration: int, planner: Any, **about: Any) -> None:
        """Notes that the run goes on after ``iteration``, with what ``planner`` is about to plan.

        Steps after it that the file has will run again. ``about`` is noted as it is.
        """
        self.iteration = iteration
        if self._path is None:
            return
        stream = planner.stream
        standing = Standing.of(planner.state_dict(), stream.contents)
        values = {
            "version": VERSION,
            "start": iteration,
            "contents": {corpus: vars(epoch) for corpus, epoch in stream.contents.items()},
            "arrived": standing.arrived,
            "waiting": encode(pieces_of(standing.waiting)),
            **about,
        }
        self._append(values)

    def step(self, plan: StepPlan, iteration: int | None = None, skipped: str = "") -> None:
        """Notes a step that ran, by default the next; ``skipped`` says why it trained nothing."""
        self.iteration = self.iteration + 1 if iteration is None else iteration
        self.plan = plan
        if self._path is None:
            return
        values: dict[str, Any] = {
            "iteration": self.iteration,
            "step": plan.step,
            "digest": plan.digest[:16],
            "tokens": plan.num_tokens,
            "documents": encode(pieces_of_plan(plan)),
        }
        self._append(values | ({"skipped": skipped} if skipped else {}))

    def under_way(self, plan: StepPlan | None) -> dict[str, str]:
        """What a state says of a plan that was taken last, if it is saved before its step has run,
        as Megatron's rerun machinery does.
        """
        if plan is None or plan is self.plan:
            return {}
        return {"under_way": encode(pieces_of_plan(plan))}

    def sync(self) -> None:
        """Puts all lines on disk."""
        if self._path is not None:
            with _telling(self._path):
                os.fsync(self._file)

    def close(self) -> None:
        """Ends writing; a second call does nothing."""
        if self._path is not None:
            self._path = None
            os.close(self._file)

    def _append(self, values: dict[str, Any]) -> None:
        assert self._path is not None
        left = memoryview(seal(values))
        with _telling(self._path):
            while left:
                left = left[os.write(self._file, left) :]


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Makes one line of what a full disk raises."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror}; make room, choose another --save, "
            "or give --wlb-no-ledger"
        ) from None


def _drop_torn_line(file: int) -> None:
    """Cuts off what stands behind the last end of a line, which a crash has left."""
    stop = os.fstat(file).st_size
    while stop:
        start = max(0, stop - _BLOCK_BYTES)
        at = os.pread(file, stop - start, start).rfind(b"\n")
        if at >= 0:
            stop = start + at + 1
            break
        stop = start
    os.ftruncate(file, stop)
