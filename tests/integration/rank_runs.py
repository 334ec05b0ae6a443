"""Runs of whole commands: under torchrun, or by processes forked with Megatron imported already.

Importing Megatron costs each process of torchrun 4 s. :func:`start` forks the same ranks from
the fork server of :mod:`helpers.gloo` instead and treats them as torchrun does: it
sets what torchrun sets, hosts the rendezvous, and ends all ranks when one fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch.distributed
from helpers import gloo

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0
"""A run here takes seconds, or two minutes on slow cores: one that takes this long hangs."""
LAUNCHER = "megatron_wlb.launch"
TRACKER = "latest_checkpointed_iteration.txt"

Flags = dict[str, Any]
"""Flag names without dashes in front, with ``_`` or ``-``; True is a switch, None leaves out."""


def command_line(flags: Flags) -> list[str]:
    """``{"num_layers": 4, "bf16": True}`` -> ``["--num-layers", "4", "--bf16"]``.

    What has a flag of ours packs by `hold` unless it says how: so small a model gains nothing by
    packing, and all its layouts must have the same documents.
    """
    words: list[str] = []
    names = {name for name, value in flags.items() if value is not None}
    asks = any(name.startswith("wlb_") for name in names - {"wlb_device", "wlb_config"})
    if asks and not names & {"wlb_packing", "wlb_strategies", "wlb_config"}:
        flags = {"wlb_packing": "hold"} | flags
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += map(str, value if isinstance(value, list | tuple) else [value])
    return words


RUNS: list[Run] = []
"""All that were started; a fixture ends those that a failed test leaves behind."""


@dataclass
class Run:
    """Processes of one command and what they print."""

    log: Path
    """stdout and stderr of all processes."""
    roots: list[int]
    """Process ids; killing them and their children kills all."""
    poll: Callable[[], int | None]
    """The exit code, once all is over."""
    deadline: float = field(default_factory=lambda: time.monotonic() + TIMEOUT_S)

    def __post_init__(self) -> None:
        RUNS.append(self)

    def wait(self) -> Finished:
        """The end of the run; a hang is a failure, with what was printed."""
        while (code := self.poll()) is None:
            self.sleep(0.02)
        return Finished(code, self.log.read_text(errors="replace"))

    def wait_until(self, happened: Callable[[], bool], interval_s: float = 0.001) -> None:
        """Returns as soon as ``happened``; a run that ends or hangs before is a failure."""
        while not happened():
            assert self.poll() is None, f"ended early:\n{self.log.read_text()}"
            self.sleep(interval_s)

    def sleep(self, seconds: float) -> None:
        if time.monotonic() > self.deadline:
            self.kill()
            raise AssertionError(f"hung for {TIMEOUT_S} s:\n{self.log.read_text()}")
        time.sleep(seconds)

    def kill(self) -> None:
        """SIGKILL to everything at once, as when the machine dies."""
        for pid in self.roots:  # at once: finding the children takes a while
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        processes = []
        for pid in self.roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                processes += [root, *root.children(recursive=True)]
        for stop in (psutil.Process.suspend, psutil.Process.kill):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    stop(process)
        psutil.wait_procs(processes, timeout=10)
        while self.poll() is None:
            time.sleep(0.01)


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    code: int
    output: str

    @property
    def errors(self) -> list[str]:
        """The error lines of our own processes."""
        return [line for line in self.output.splitlines() if line.startswith("error")]


def assert_refused(finished: Finished, exit_code: int | None, *fragments: str) -> None:
    """One error line that holds all fragments; ``exit_code`` None is any but 0."""
    assert finished.code == exit_code if exit_code else finished.code, finished.output
    assert len(finished.errors) == 1, finished.output
    (line,) = finished.errors
    for fragment in fragments:
        assert fragment in line, line
    assert "Traceback" not in finished.output, finished.output


def finish(run: Run) -> Finished:
    """The end of a run that must end well."""
    finished = run.wait()
    assert finished.code == 0, finished.output
    return finished


def torchrun(folder: Path, num_processes: int, flags: Flags, *, module: str = LAUNCHER) -> Run:
    """Starts a module under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_processes), "-m", module]
    command += command_line(flags)
    return spawn(folder, command)


def spawn(folder: Path, command: Sequence[str]) -> Run:
    """Starts any command with one computing thread a process."""
    log = _new_log(folder)
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/scripts"},
        )
    return Run(log, [process.pid], process.poll)


def start(
    folder: Path,
    num_processes: int,
    flags: Flags,
    *,
    program: Callable[[list[str]], int],
    fault: Callable[[], None] | None = None,
) -> Run:
    """Starts ranks of ``program``, forked; ``fault`` runs in each of them first."""
    gloo._start_fork_server()
    log = _new_log(folder)
    log.touch()
    # As torchrun's agent does: it holds the store and no port has to be guessed.
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    words = command_line(flags)
    processes: list[BaseProcess] = []
    for rank in range(num_processes):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        process = gloo._CONTEXT.Process(
            target=_rank,
            args=(environment, str(log), str(folder), words, fault, program),
        )
        process.start()
        processes.append(process)

    def poll(held: Any = store) -> int | None:
        codes = [process.exitcode for process in processes]
        failed = [code for code in codes if code]
        if failed:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(5)
                process.kill()
            return failed[0]
        return None if None in codes else 0

    return Run(log, [process.pid for process in processes if process.pid], poll)


def _rank(
    environment: dict[str, str],
    log: str,
    folder: str,
    argv: list[str],
    fault: Callable[[], None] | None,
    program: Callable[[list[str]], int],
) -> None:
    # Megatron's first save spawns a process, which would import the main module, pytest, again.
    vars(sys.modules["__main__"]).update(__spec__=None, __file__=None)
    os.environ.update(environment)
    os.chdir(folder)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    if fault is not None:
        fault()
    code = program(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _new_log(folder: Path) -> Path:
    descriptor, name = tempfile.mkstemp(".log", "run-", folder)
    os.close(descriptor)
    return Path(name)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that steps wrote, in order; none of a last one without its end."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def losses(path: Path) -> dict[int, float]:
    """Loss of each iteration; of those that ran more than once, the last time."""
    return {line["iteration"]: line["loss"] for line in read_metrics(path) if "loss" in line}


def num_lines(path: Path) -> int:
    """How many lines of a file are whole; 0 of one that is not there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def tracked(folder: Path) -> int:
    """The iteration of the newest checkpoint in a folder of ``--save``; 0 if there is none yet, and
    while Megatron writes it.
    """
    tracker = folder / TRACKER
    return int(tracker.read_text() or 0) if tracker.exists() else 0
