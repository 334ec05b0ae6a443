"""Processes that find Megatron imported: forked from this one, with a deadline.

Importing torch and Megatron takes 15 s where four processes do it on two cores. So this process
imports them once, makes neither a thread nor a process group, and forks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("fork")
TAIL_LINES = 25
_TELL_S = 2.0
"""How long before the limit a process writes where it is."""


def import_megatron(script: Path | None) -> str:
    """Imports the Megatron of a checkout's script under the CPU emulation, or else the installed
    one; its version.
    """
    if script is not None:
        sys.path.insert(0, str(script.parent))
    import torch

    from megatron_wlb.launch import STAND_IN
    from megatron_wlb.runtime.megatron_lm import cpu_loop

    torch.set_num_threads(1)
    cpu_loop.install()
    # The script's own imports; it trains only as the main module.
    if script is not None:
        runpy.run_path(str(script), run_name="imported")
    else:
        runpy.run_module(STAND_IN, run_name="imported")
    import megatron.core

    from megatron_wlb.runtime.megatron_lm import install  # noqa: F401

    return str(megatron.core.__version__)


@dataclass(frozen=True)
class Ended:
    """How the processes of one run ended."""

    why: str
    """Empty where all ended well."""
    log: Path
    """Of the first process that failed, or of rank 0."""

    @property
    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


def run_ranks(
    program: Callable[[], int],
    num_processes: int,
    folder: Path,
    *,
    limit_s: float,
    environment: Mapping[str, str],
) -> Ended:
    """Runs ``program`` in so many processes in ``folder``, each with a log of its own there.

    All are killed, with what they started, once one has failed or time is up.
    """
    logs = [folder / f"rank-{rank}.log" for rank in range(num_processes)]
    processes: list[BaseProcess] = []
    sys.stdout.flush()
    sys.stderr.flush()
    with _store() as port:
        own = {
            **environment,
            "WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        try:
            for rank, log in enumerate(logs):
                of_rank = own | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = _CONTEXT.Process(
                    target=_rank, args=(program, folder, log, of_rank, limit_s)
                )
                process.start()
                processes.append(process)
            failed = _await(processes, time.monotonic() + limit_s)
            if failed is None:
                return Ended(f"no end after {limit_s:g} s", logs[0])
            if failed >= 0:
                code = processes[failed].exitcode
                return Ended(f"rank {failed} ended with {code}", logs[failed])
            return Ended("", logs[0])
        finally:
            for process in processes:
                _kill(process)


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """The port of a store in which ranks meet.

    As torchrun's agent does, it is bound before any rank knows of it, so no other process can take
    the port. It is held by a process of its own, as it has threads.
    """
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_hold_store, args=(ours, theirs))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        _kill(process)
        ours.close()


def _hold_store(parents: Connection, pipe: Connection) -> None:
    from torch.distributed import TCPStore

    os.setpgid(0, 0)
    parents.close()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.send(store.port)
        pipe.recv()  # until the parent and all that it has forked are gone


def _await(processes: Sequence[BaseProcess], deadline_s: float) -> int | None:
    """Number of the first process that failed, -1 where none did, None where time is up."""
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        ended = wait(list(running), max(0.0, deadline_s - time.monotonic()))
        if not ended:
            return None
        for rank in sorted(running.pop(int(sentinel)) for sentinel in ended):  # type: ignore[call-overload]
            processes[rank].join()
            if processes[rank].exitcode:
                return rank
    return -1


def _kill(process: BaseProcess) -> None:
    assert process.pid is not None
    # Its group holds what it has started, such as writers of checkpoints.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    process.close()


def _rank(
    program: Callable[[], int],
    folder: Path,
    log: Path,
    environment: Mapping[str, str],
    limit_s: float,
) -> None:
    os.setpgid(0, 0)
    os.environ.update(environment)
    os.chdir(folder)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, limit_s - _TELL_S))  # where it hangs
    sys.exit(program())
