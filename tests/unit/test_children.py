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

SEARCH = """
import time
from megatron_wlb.study import workers

if __name__ == "__main__":
    workers.ALONE_S = 0.0
    def told(done, _):
        if done:  # a process has done an item: they have all started by then
            print("ready", flush=True)

    list(workers.Workers(2).map(time.sleep, [0, 60, 60, 60, 60, 60], told))
"""
PROGRAM = """
import multiprocessing, sys, time
from megatron_wlb.children import ending_with_us

if __name__ == "__main__":
    with ending_with_us():
        context = multiprocessing.get_context(sys.argv[1])
        context.Process(target=time.sleep, args=(60,)).start()
        manager = context.Manager()  # a process that Megatron's writers have too
        manager.Queue()
        print("ready", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("program", "method"), [(PROGRAM, "fork"), (PROGRAM, "spawn"), (SEARCH, "")]
)
def test_children_end_with_a_program_that_is_killed(
    program: str, method: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py"), method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        children = psutil.Process(rank.pid).children(recursive=True)
        assert len(children) >= 2
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
