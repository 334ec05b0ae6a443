"""A folder of `--save` has one run at a time; runs leave it by SIGTERM and after a kill."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from megatron_lm_runs import BOTH, MEGATRON_LM, launch
from rank_runs import (
    Flags,
    assert_refused,
    finish,
    losses,
    num_lines,
    read_metrics,
    torchrun,
    tracked,
)

from megatron_wlb.runtime.saving import lock as save_lock

pytestmark = pytest.mark.launcher

ENDLESS: Flags = {"train_iters": 100_000, "wlb_packing": "hold"}
SAVING: Flags = {"save": "run", "load": "run", "exit_signal_handler": True}


def slow() -> None:
    """Leaves processor time to the runs beside this one."""
    from megatron_wlb.runtime.megatron_lm.metrics_file import MetricsFile

    write = MetricsFile.write

    def write_later(self: Any, values: Any) -> None:
        time.sleep(0.2)
        write(self, values)

    MetricsFile.write = write_later  # type: ignore[method-assign]


def impatient() -> None:
    save_lock.PATIENCE_S = 0.0


def test_second_run_is_refused_and_sigterm_saves_the_first(tmp_path: Path, corpus: Path) -> None:
    """SIGTERM reaches one of two ranks, in a step of its own choice."""
    flags = BOTH | ENDLESS | SAVING | {"data_path": corpus, "save_interval": 50_000}
    mine = flags | {"wlb_metrics": tmp_path / "metrics"}
    run = launch(tmp_path, 2, mine, fault=slow)
    run.wait_until(lambda: num_lines(tmp_path / "metrics") >= 2)
    second = launch(tmp_path, 2, flags, fault=impatient).wait()
    assert_refused(second, 6, f"--save run is in use by process {run.roots[0]} on ", "end that run")

    os.kill(run.roots[1], signal.SIGTERM)
    finish(run)
    reached = max(losses(tmp_path / "metrics"))
    assert tracked(tmp_path / "run") == reached
    assert not (tmp_path / "run" / save_lock.NAME).exists()

    third = finish(launch(tmp_path, 2, mine | {"exit_interval": reached + 2}))
    assert "left by process" not in third.output
    steps = [line["iteration"] for line in read_metrics(tmp_path / "metrics")]
    assert steps == list(range(1, steps[-1] + 1)) and steps[-1] > reached


def test_workers_end_when_torchrun_is_killed(tmp_path: Path, corpus: Path) -> None:
    flags = MEGATRON_LM | BOTH | ENDLESS | SAVING
    flags |= {"data_path": corpus, "wlb_metrics": tmp_path / "metrics"}
    run = torchrun(tmp_path, 2, flags | {"save_interval": 2})
    run.wait_until(lambda: num_lines(tmp_path / "metrics") >= 3)
    workers = psutil.Process(run.roots[0]).children(recursive=True)
    assert len(workers) >= 2
    os.kill(run.roots[0], signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=20)
    for process in alive:
        process.kill()
    assert not alive
    # Of the other rank the end may be that it lost this one.
    assert f"torchrun (process {run.roots[0]}) is gone, so this ends too" in run.log.read_text()

    lines = num_lines(tmp_path / "metrics")
    time.sleep(0.2)
    assert num_lines(tmp_path / "metrics") == lines
    save_lock.take(tmp_path / "run")
    save_lock.release_all()
