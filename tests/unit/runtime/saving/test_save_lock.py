"""A folder of `--save` has one run at a time, which a later one knows by name."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving import lock as save_lock
from megatron_wlb.runtime.saving.lock import NAME, Holder, SaveLock

HOLDING = """
import pathlib, sys, time
from megatron_wlb.runtime.saving import lock as save_lock
save_lock.take(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(save_lock, "PATIENCE_S", 0.0)
    yield
    save_lock.release_all()


@pytest.fixture(params=["flock", "no flock"])
def flocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that has locks, and on one that has none."""
    if request.param == "no flock":

        def none(_file: int, _operation: int) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(fcntl, "flock", none)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock of the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def written(folder: Path) -> Holder:
    return Holder(**json.loads((folder / NAME).read_text()))


def leave_lock(folder: Path, silent_s: float, **changes: Any) -> Holder:
    """A lock that another process wrote, and last touched so long ago."""
    elsewhere = {"host": "elsewhere", "boot": "another", "pid": 77}
    holder = dataclasses.replace(Holder.this(), **(elsewhere | changes))
    (folder / NAME).write_text(json.dumps(dataclasses.asdict(holder)))
    touched = time.time() - silent_s
    os.utime(folder / NAME, (touched, touched))
    return holder


@pytest.mark.usefixtures("flocks")
def test_lock_of_a_running_process_is_refused_and_names_it(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with pytest.raises(CheckpointError) as raised:
        SaveLock(tmp_path)
    message = str(raised.value)
    assert f"--save {tmp_path} is in use by process {other.pid} on {os.uname().nodename}" in message
    assert written(tmp_path).since in message
    assert "end that run or choose another folder" in message
    assert written(tmp_path).pid == other.pid


@pytest.mark.usefixtures("flocks")
def test_lock_of_a_killed_process_is_taken_over(
    tmp_path: Path, other: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    other.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it stays in the table of processes
    lock = SaveLock(tmp_path)
    assert written(tmp_path) == dataclasses.replace(Holder.this(), since=written(tmp_path).since)
    assert f"left by process {other.pid}" in caplog.text
    lock.release()
    assert not (tmp_path / NAME).exists()
    caplog.clear()
    SaveLock(tmp_path).release()
    assert caplog.text == ""


def test_lock_waits_for_a_run_that_is_ending(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_lock, "PATIENCE_S", 10.0)
    with subprocess.Popen(["sh", "-c", f"sleep 0.3; kill {other.pid}"]):
        SaveLock(tmp_path).release()


def test_process_number_of_a_later_process_is_no_holder(tmp_path: Path) -> None:
    this = Holder.this()
    leave_lock(tmp_path, 5, boot=this.boot, host=this.host, pid=this.pid, start_ticks="1")
    SaveLock(tmp_path).release()


@pytest.mark.usefixtures("flocks")
def test_lock_of_another_machine_is_refused_as_long_as_it_may_run(tmp_path: Path) -> None:
    leave_lock(tmp_path, 20)
    with pytest.raises(CheckpointError, match=r"process 77 on elsewhere.* try again in (39|40) s$"):
        SaveLock(tmp_path)
    leave_lock(tmp_path, 3600)
    with pytest.raises(CheckpointError) as raised:
        SaveLock(tmp_path)
    assert "no sign of life for 36" in str(raised.value)
    assert str(raised.value).endswith(f"make sure that it is gone, then delete {tmp_path / NAME}")
    (tmp_path / NAME).unlink()
    SaveLock(tmp_path).release()


def test_lock_of_a_machine_started_anew_is_taken_over(tmp_path: Path) -> None:
    host = Holder.this().host
    leave_lock(tmp_path, 20, host=host)
    with pytest.raises(CheckpointError, match="sign of life 20 s ago"):
        SaveLock(tmp_path)  # two machines may have one name
    leave_lock(tmp_path, 3600, host=host)
    SaveLock(tmp_path).release()


def test_lock_of_an_earlier_attempt_of_the_job_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for same in ({"job": "4711", "attempt": "1.0"}, {"job": "4710", "attempt": "0.0"}):
        leave_lock(tmp_path, 5, **same)
        with pytest.raises(CheckpointError, match="sign of life"):
            SaveLock(tmp_path)
    leave_lock(tmp_path, 5, job="4711", attempt="0.0")
    SaveLock(tmp_path).release()


def test_lock_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lock, "BEAT_S", 0.05)
    lock = SaveLock(tmp_path)
    os.utime(tmp_path / NAME, (0, 0))
    deadline = time.monotonic() + 10
    while (tmp_path / NAME).stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert abs((tmp_path / NAME).stat().st_mtime - time.time()) < 10
    lock.release()


def test_a_process_takes_a_folder_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    save_lock.take(tmp_path)
    save_lock.take(tmp_path / "link")
    save_lock.release_all()
    save_lock.release_all()
    SaveLock(tmp_path).release()


def test_release_leaves_the_lock_of_another_run(tmp_path: Path) -> None:
    lock = SaveLock(tmp_path)
    (tmp_path / NAME).unlink()  # by hand
    leave_lock(tmp_path, 0)
    lock.release()
    assert written(tmp_path).pid == 77


def test_lock_file_deleted_while_it_is_opened_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run opens the file that the run before it deletes."""
    monkeypatch.setattr(save_lock, "PATIENCE_S", 10.0)
    before, flock = SaveLock(tmp_path), fcntl.flock

    def late(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        before.release()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = SaveLock(tmp_path)
    assert written(tmp_path).pid == os.getpid()
    lock.release()


def test_a_damaged_lock_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"host": "cut o')
    SaveLock(tmp_path).release()
