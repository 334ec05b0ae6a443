"""Faults that strike a process of a run: what they do, and where in the program.

A fault strikes one rank, at a call of a function of the program.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import resource
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FULL_BYTES = 60_000
"""No file grows beyond that on a full disk: more than a run's log has, less than a checkpoint's."""

POINTS = {
    # Where a fault strikes: functions of the program, of which a run calls one.
    "planning": (
        "megatron_wlb.planning.planner:Planner.next_plan",
        "megatron_wlb.strategies.plan.assigner:StrategyPlanner.next_plan",
    ),
    "forward": ("megatron_wlb.runtime.stepping.step:forward_step",),
    "backward": ("megatron.core.pipeline_parallel.schedules:backward_step",),
    "optimizer": (
        "megatron.core.optimizer.optimizer:ChainedOptimizer.step_with_ready_grads",
        "megatron.core.optimizer.optimizer:FP32Optimizer.step",  # of the store of strategies
    ),
    "write": (
        "megatron.core.dist_checkpointing.strategies.filesystem_async"
        ":FileSystemWriterAsync.prepare_write_data",
    ),
    "saved": ("megatron_wlb.runtime.saving.checksums:write",),
    "read": ("megatron.core.datasets.indexed_dataset:IndexedDataset.get",),
}


def strike(kind: str) -> Any:
    """What a fault does to the process that it strikes."""
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "usr2":
            os.kill(os.getpid(), signal.SIGUSR2)
        case "full":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, resource.RLIM_INFINITY))
        case "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        case "clock":
            jumped = time.time
            time.time = lambda: jumped() - 86_400.0
        case "sleep":
            time.sleep(20)
    return None


_step = [-1]
"""The newest step of this process."""


def prepare(ledger: str, fault: Fault | None) -> None:
    """Runs first in each rank: notes what it trains in ``ledger``, and lays the fault."""
    from megatron_wlb.runtime import rank_main
    from megatron_wlb.runtime.stepping.step import StepRunner
    from megatron_wlb.strategies.run.runner import StrategyRunner

    rank_main.LOST_PEER_S = 5.0  # nothing here has to wait for other machines
    # With strategies the outer one ends last, with the documents of all replicas.
    for owner in (StepRunner, StrategyRunner):
        owner.run_schedule = _noted(owner.run_schedule, ledger)  # type: ignore[method-assign]
    if fault is not None and os.environ["RANK"] == str(fault.rank):
        _lay(fault)


def _noted(original: Any, ledger: str) -> Any:
    """``original``, which runs a plan, with a line in ``ledger`` of what it ran."""

    def noted(self: Any, plan: Any, *args: Any, forward_only: bool = False, **kwargs: Any) -> Any:
        _step[0] = plan.step
        result = original(self, plan, *args, forward_only=forward_only, **kwargs)
        if os.environ["RANK"] == "0" and not forward_only:
            documents = [[d.corpus, d.epoch, d.number, d.offset, d.length] for d in plan.documents]
            with Path(ledger).open("a") as stream:
                stream.write(json.dumps([plan.step, plan.digest, documents]) + "\n")
        return result

    return noted


def _lay(fault: Fault) -> None:
    """Replaces the functions of the fault's point by ones that strike at a call of them."""
    calls = [0], threading.Lock()
    for point in POINTS[fault.point]:
        module, _, path = point.partition(":")
        *outer, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, name, _striking(getattr(owner, name), fault, *calls))


def _striking(original: Any, fault: Fault, calls: list[int], lock: threading.Lock) -> Any:
    def struck(*args: Any, **kwargs: Any) -> Any:
        with lock:
            calls[0] += _step[0] >= fault.step
            is_due = calls[0] == fault.call and not Path(fault.struck).exists()
        if is_due:
            Path(fault.struck).touch()
            strike(fault.kind)
        return original(*args, **kwargs)

    return struck


@dataclass(frozen=True)
class Fault:
    """What strikes which rank, at which call of a point from the beginning of a step on."""

    kind: str
    point: str
    rank: int
    step: int
    call: int
    struck: str
    """A file that is there once it has struck."""
