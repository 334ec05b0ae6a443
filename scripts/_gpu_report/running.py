"""Runs a part in a process of its own, and kills it at its limit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from _gpu_report import results
from _gpu_report.parts import Part

GRACE_S = 5.0
"""What processes have to end after a polite signal: torchrun ends its workers by then."""

EXACT = {
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",  # NVIDIA's images turn TF32 on, fp32 is compared
    "NVIDIA_TF32_OVERRIDE": "0",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # it builds a graph for each length
}


def run_within(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Runs a command with its output in ``log``: its exit code, or None if it overran its limit.

    It ends with all processes that it started, those in sessions of their own too.
    """
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ, **EXACT},
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
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
