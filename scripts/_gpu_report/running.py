"""Runs a part in a process of its own, and kills it at its limit; ranks of a world, one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from _gpu_report import results
from _gpu_report.parts import Part
from megatron_wlb.errors import WLBError

GRACE_S = 5.0
"""What processes have to end after a polite signal: torchrun ends its workers by then."""

EXACT = {
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",  # NVIDIA's images turn TF32 on, fp32 is compared
    "NVIDIA_TF32_OVERRIDE": "0",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # it builds a graph for each length
}
STACKS_S, LAST_LINES = 1.0, 12
"""How long ranks that hang have to write their stacks; lines of a log that an error shows."""


class StartedError(WLBError):
    """Processes that were started together did not all end well."""


def run_within(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Runs a command with its output in ``log``: its exit code, or None if it overran its limit.

    It ends with all processes that it started, those in sessions of their own too.
    """
    with log.open("w", encoding="utf-8") as output:
        told = os.dup(sys.__stdout__.fileno() if sys.__stdout__ else 1)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ, **EXACT, results.TOLD: str(told)},
            pass_fds=[told],
        )  # fmt: skip
        os.close(told)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                end(process)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def world(num_ranks: int) -> list[dict[str, str]]:
    """The environment of each rank of a new world, all on the first device of this machine."""
    port = str(free_port())
    return [
        {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks),
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(num_ranks)
    ]  # fmt: skip


def run_together(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    limit_s: float,
) -> list[str]:
    """Runs a command in ``folder``, once with each environment, all at once; what each printed.

    Raises :class:`StartedError` with the last lines of the first that failed, and after
    ``limit_s`` with those of each that hangs, which are its stacks. Then none is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"{number}.log" for number in range(len(environments))]
    processes = []
    try:
        for log, environment in zip(logs, environments, strict=True):
            with log.open("w", encoding="utf-8") as output:
                processes.append(subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment}, cwd=folder,
                ))  # fmt: skip
        deadline = time.monotonic() + limit_s
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if time.monotonic() > deadline:
                hanging = [number for number, code in enumerate(codes) if code is None]
                for number in hanging:
                    processes[number].send_signal(signal.SIGABRT)
                time.sleep(STACKS_S)
                raise StartedError(
                    f"{hanging} of {len(codes)} did not end within {limit_s:g} s:\n"
                    + "\n".join(_end_of(logs[number]) for number in hanging)
                )
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                end(process)
    for number, code in enumerate(codes):
        if code:
            raise StartedError(
                f"{number} of {len(codes)} ended with {code}:\n{_end_of(logs[number])}"
            )
    return [log.read_text(errors="replace") for log in logs]


def _end_of(log: Path) -> str:
    return "\n".join([f"{log}:", *log.read_text(errors="replace").splitlines()[-LAST_LINES:]])


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its descendants: politely, and those that stay for sure."""
    try:
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                stop(one)
        _, family = psutil.wait_procs(family, timeout=GRACE_S)
    process.wait()


def run_part(part: Part, out: Path, *, tiny: bool, limit_s: float) -> str:
    """Measures a part into its file; in a few words how it ended."""
    form = "tiny" if tiny else "full"
    command = [sys.executable, "-m", "_gpu_report.child", part.name, str(out), form]
    path, log = out / f"{part.name}.json", out / f"{part.name}.log"
    start_s = time.monotonic()
    code = run_within(command, log, limit_s)
    took = f"{time.monotonic() - start_s:.0f} s"
    found = results.read(path)
    if found is None or found["status"] == "running":
        why = f"killed at its limit of {limit_s:g} s" if code is None else f"ended with {code}"
        found = found or {"part": part.name, "tiny": tiny, "seconds": 0.0, "figures": {}}
        found |= {"status": "cut off", "why": f"{why}; its output is in {log.name}"}
        results.write(path, found)
    why = f": {found['why']}" if found["why"] else ""
    return f"{found['status']} after {took}{why}"
