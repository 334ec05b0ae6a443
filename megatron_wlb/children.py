"""Processes that a program starts end with it, however it ends.

Megatron's writers of checkpoints, and the manager of their queue, know nothing of a rank that was
killed: they would go on writing where a resumed run writes, or wait for ever. Nor do processes that
share a search.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess, parent_process
from typing import Any

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Mortal:
    """What a process runs, ended with the process that started it. It can be pickled if its target
    can: a process that is spawned begins with nothing else of ours.
    """

    target: Callable[..., object]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = parent_process()
        if parent is not None and os.getppid() != parent.pid:  # it ended before
            os._exit(1)
        with ending_with_us():
            self.target(*args, **kwargs)


@contextlib.contextmanager
def ending_with_us() -> Iterator[None]:
    """Processes that ``multiprocessing`` starts meanwhile, forked or spawned, end with this one.

    Those of a thread besides the main one do not: the kernel would end them with the thread.
    """
    start = BaseProcess.start

    def started(process: Any) -> None:
        target = process._target
        is_ours = threading.current_thread() is threading.main_thread()
        if is_ours and target is not None and not isinstance(target, _Mortal):
            process._target = _Mortal(target)
        start(process)

    BaseProcess.start = started  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        BaseProcess.start = start  # type: ignore[method-assign]
