"""Processes that a program starts end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from megatron_wlb.children import ending_with_us

PROGRAM = """
import multiprocessing, sys, time
from concurrent.futures import ProcessPoolExecutor

from megatron_wlb.children import ending_with_us

if __name__ == "__main__":
    with ending_with_us():
        context = multiprocessing.get_context(sys.argv[1])
        context.Process(target=time.sleep, args=(60,)).start()
        manager = context.Manager()  # a process that Megatron's writers have too
        manager.Queue()
        pool = ProcessPoolExecutor(1, context)
        pool.submit(time.sleep, 60)
        print("ready", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_end_with_a_rank_that_is_killed(method: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        children = psutil.Process(rank.pid).children(recursive=True)
        assert len(children) >= 3
        rank.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=10)
    for process in alive:
        process.kill()
    assert not alive


def test_multiprocessing_is_left_as_it_was() -> None:
    start = BaseProcess.start
    with ending_with_us():
        assert BaseProcess.start is not start
    assert BaseProcess.start is start
