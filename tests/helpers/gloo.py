"""Gloo processes for tests, started once for each world size and used for all cases of that size.

Importing Megatron costs 4 s and 350 MB a process. So a fork server imports it once, under the CPU
emulation, and the *world* of a case is forked from it in a tenth of a second and kept for the
next case. A case finds new process groups (25 ms for 2 ranks, 100 ms for 8), so nothing of the
case before can be received in it; module globals that a case changes do stay changed. Groups end
with their case: each has a thread that looks for messages a hundred times a second, and some
hundred of them took all cores.

Ranks over NCCL share the first GPU, without the emulation: what they need of their environment and
of NCCL, ``scripts/_gpu_report/sharing.py`` says. They are spawned, as no process may be forked that
has looked at a GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest import mock

from megatron_wlb.errors import WLBError

_T = TypeVar("_T")

_CONTEXT = multiprocessing.get_context("forkserver")
_SPAWNING = multiprocessing.get_context("spawn")
_PRELOAD = "helpers.preload"
_TESTS = str(Path(__file__).parents[1])
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # ranks are many, cores are few
    "CUDA_VISIBLE_DEVICES": "",  # gloo cases run on the CPU wherever they run
    "GLOO_SOCKET_IFNAME": "lo",  # needs no host name that resolves
    # Where the fork server, which takes no other path, finds this package.
    "PYTHONPATH": os.pathsep.join([_TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]),
}
_START_S = 120.0
"""How long a world may take to start; it includes the fork server's imports."""
_GRACE_S = 1.0
"""How long to listen for failures of other ranks after a first one."""
_DUMP_S = 1.0
"""How long the ranks have to write their stacks after a timeout."""


class RankError(WLBError):
    """A rank died, or raised what cannot be brought to the parent."""


class RankTimeoutError(RankError):
    """Ranks did not finish in time; the stacks of all are in the error's notes."""


@dataclass(frozen=True)
class _Answer:
    """What came back from a rank: a result or an error."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    died: bool = False


class GlooPool:
    """Runs functions on worlds of gloo ranks; at most ``max_processes`` ranks are alive.

    Worlds are kept between calls, and the least recently used ones closed to make room. Close the
    pool when done, or use it as a context manager: no rank outlives it, nor the interpreter.

    Ranks with an ``environment`` of their own are spawned, and find it from their first import on.
    """

    def __init__(
        self,
        max_processes: int = 8,
        backend: str = "gloo",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._max_processes = max_processes
        self._backend, self._environment = backend, environment
        self._worlds: dict[int, _World] = {}  # least recently used first
        atexit.register(self.close)  # before multiprocessing waits for processes to end

    def run(
        self, world_size: int, function: Callable[..., _T], *args: Any, timeout_s: float = 120.0
    ) -> list[_T]:
        """The results of ``function(*args)`` on each rank, in rank order.

        ``function`` belongs to a module; it, ``args`` and results travel pickled. It runs with one
        computing thread, with gloo under the CPU emulation, where ``torch.distributed`` is
        initialised; Megatron's groups are its own to set up. Environment variables and working
        directory are those of the pool's first use.

        Raises:
            RankTimeoutError: after ``timeout_s``; a hanging collective, mostly.
            RankError: a rank died; there are more ranks than ``max_processes``.
            BaseException: what ``function`` raised first on any rank, with the rank, its
                traceback and what other ranks raised in notes.
        """
        if not 1 <= world_size <= self._max_processes:
            raise RankError(
                f"a world of {world_size} ranks does not fit a pool of {self._max_processes} "
                "processes; use 1 to that many, or raise max_processes"
            )
        request = pickle.dumps((function, args))
        name = getattr(function, "__qualname__", repr(function))
        world = self._worlds.pop(world_size, None)
        if world is None:
            self._make_room(world_size)
            world = _World(world_size, self._backend, self._environment)
        try:
            results: list[_T] = world.run(request, name, timeout_s)
        except BaseException:
            world.kill()
            raise
        self._worlds[world_size] = world
        return results

    def close(self) -> None:
        """Ends all ranks and waits until they are gone; the pool can be used again."""
        while self._worlds:
            self._worlds.popitem()[1].kill()

    def _make_room(self, world_size: int) -> None:
        while sum(self._worlds) + world_size > self._max_processes:
            self._worlds.pop(next(iter(self._worlds))).kill()

    def __enter__(self) -> GlooPool:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class _World:
    """The parent's side of one world: its processes, and a pipe to each."""

    def __init__(self, size: int, backend: str, environment: Mapping[str, str] | None) -> None:
        self._directory = TemporaryDirectory(prefix="wlb-gloo-")
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._num_cases = 0
        try:
            context: Any = _CONTEXT if environment is None else _SPAWNING
            more = {} if environment is None else {**_ENVIRONMENT, **environment}
            if environment is None:
                _start_fork_server()
            for rank in range(size):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                process = context.Process(
                    target=_serve,
                    args=(theirs, rank, size, self._directory.name, backend),
                    name=f"{backend} rank {rank} of {size}",
                    daemon=False,  # cases start processes of their own, to save checkpoints
                )
                with mock.patch.dict(os.environ, more):
                    process.start()
                theirs.close()  # so that the pipe ends when the process does
                self._processes.append(process)
            self._collect("to start", _START_S)
        except BaseException:
            self.kill()
            raise

    def run(self, request: bytes, name: str, timeout_s: float) -> list[Any]:
        self._num_cases += 1
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # it died: noticed when it does not answer
                pipe.send((self._num_cases, sys.path, timeout_s, request))
        results = self._collect(name, timeout_s)
        for pipe in self._pipes:  # All ranks have answered, so nobody needs the groups any more.
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        return results

    def kill(self) -> None:
        for process in self._processes:
            assert process.pid is not None
            process.kill()
            # This also ends the processes that it has started, which nobody else would.
            with contextlib.suppress(ProcessLookupError):  # it had no time to make its group
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._directory.cleanup()

    def _collect(self, name: str, timeout_s: float) -> list[Any]:
        """Each rank's result; raises when one failed, and when time is up."""
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout_s + _DUMP_S
        answers: list[_Answer] = []
        failed = False
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answer = self._receive(pipe, waiting.pop(pipe))
                answers.append(answer)
                if answer.error is not None and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failed:
            raise _first_error(answers)
        if waiting:
            ranks = ", ".join(str(rank) for rank in waiting.values())
            error = RankTimeoutError(
                f"{name}: rank {ranks} of {len(self._pipes)} did not finish within {timeout_s:g} s;"
                " see the stacks, or raise timeout_s"
            )
            for rank in waiting.values():
                error.add_note(f"rank {rank} hangs at\n{self._stacks(rank)}")
            raise error
        return [answer.result for answer in sorted(answers, key=lambda answer: answer.rank)]

    def _receive(self, pipe: Connection, rank: int) -> _Answer:
        try:
            result, error = pickle.loads(pipe.recv_bytes())
            return _Answer(rank, result, error)
        except (EOFError, ConnectionError):
            process = self._processes[rank]
            process.join()
            died = RankError(f"rank {rank} of {len(self._pipes)} died: exit {process.exitcode}")
            if stacks := self._stacks(rank):
                died.add_note(stacks)
            return _Answer(rank, error=died, died=True)

    def _stacks(self, rank: int) -> str:
        return _stacks_file(self._directory.name, rank).read_text(errors="replace")


def _first_error(answers: list[_Answer]) -> BaseException:
    """The error most likely to be the cause; the others are named in its notes.

    That is the first to arrive, but for a rank that died: its peers' connections break with it,
    and they may tell so sooner.
    """
    failures = [answer for answer in answers if answer.error is not None]
    failures.sort(key=lambda answer: not answer.died)  # stable
    first = failures[0].error
    assert first is not None
    for other in failures[1:]:
        first.add_note(f"then rank {other.rank} failed: {other.error!r}")
    return first


def _start_fork_server() -> None:
    """Starts the fork server where none runs, with the environment that all ranks inherit."""
    _CONTEXT.set_forkserver_preload([_PRELOAD])
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        forkserver.ensure_running()


# What follows runs in the ranks.


def _stacks_file(directory: str, rank: int) -> Path:
    return Path(directory, f"stacks-{rank}")


def _serve(pipe: Connection, rank: int, size: int, directory: str, backend: str) -> None:
    """Answers requests until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.setpgid(0, 0)
    with _stacks_file(directory, rank).open("a") as stacks, contextlib.suppress(EOFError):
        faulthandler.enable(stacks)
        pipe.send_bytes(_answer(rank, size, _warm_up, backend))
        while True:
            if (given := pipe.recv()) is None:
                _end_groups()
                continue
            case, path, timeout_s, request = given
            sys.path[:] = path  # where the parent's tests come from
            stacks.truncate(0)
            faulthandler.dump_traceback_later(timeout_s, file=stacks)
            place = f"{directory}/{case}"
            answer = _answer(rank, size, _run_case, backend, rank, size, place, request)
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(answer)


def _warm_up(backend: str) -> None:
    import torch

    if backend == "gloo":
        import helpers.preload  # noqa: F401  # loud, should the fork server have failed
    else:
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")  # loud where there is no GPU, or no room on it
        import megatron_wlb.runtime.gpt.build  # noqa: F401  # else in the time of the first case

    torch.set_num_threads(1)
    gc.freeze()  # what is imported, which no collection need look at


def _end_groups() -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    parallel_state.destroy_model_parallel()
    for name, value in [*vars(parallel_state).items()]:
        if isinstance(value, dist.ProcessGroup):  # that it does not forget
            setattr(parallel_state, name, None)
    if dist.is_initialized():
        dist.destroy_process_group()
    for one in gc.get_objects():  # Hooks on gradients hold what they belong to, unseen by gc.
        if isinstance(one, DistributedDataParallel):
            vars(one).clear()
        elif isinstance(one, torch.Tensor) and one._post_accumulate_grad_hooks:
            one._post_accumulate_grad_hooks.clear()
    gc.collect()  # What holds a group in a cycle.


def _run_case(backend: str, rank: int, size: int, rendezvous: str, request: bytes) -> Any:
    import torch.distributed as dist

    store = dist.FileStore(rendezvous, size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    function, args = pickle.loads(request)
    return function(*args)


def _answer(rank: int, size: int, function: Callable[..., Any], *args: Any) -> bytes:
    """Pickled ``(result, error)``: whatever ``function`` raises is the error."""
    try:
        return pickle.dumps((function(*args), None))
    except BaseException as error:
        note = f"on rank {rank} of {size}:\n{traceback.format_exc()}"
        try:
            error.add_note(note)
            answer = pickle.dumps((None, error))
            pickle.loads(answer)  # constructors with arguments of their own fail only here
        except Exception:
            portable = RankError(f"{type(error).__name__}: {error}")
            portable.add_note(note)
            answer = pickle.dumps((None, portable))
        return answer
