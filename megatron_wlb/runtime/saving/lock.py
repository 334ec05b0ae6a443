"""The lock file in a folder of ``--save``: it lets one run at a time write there.

``FOLDER/wlb_run.lock`` names host, process, start and Slurm job of the run, is held by ``flock``
where the file system has it, and is touched every :data:`BEAT_S` seconds. ``flock`` ends with its
process, but on some shared file systems it does not reach other machines; there the touches tell.

A lock is taken over from a process that is known to be gone: one of this machine, of a machine of
this name that was started anew, or of an earlier attempt of this Slurm job. Another machine's lock
stays until a person deletes it, and the error says so.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.reading import parse_mapping, record, shown

NAME = "wlb_run.lock"
BEAT_S = 10.0
SILENT_S = 60.0
"""Silence after which a process of another machine is taken for gone or cut off. NFS may
show a touch late, by a few seconds where the file is opened anew as here."""
PATIENCE_S = 5.0
"""How long a start waits for a run that is ending."""
_SETTLE_S = 0.5
"""How long two that start at once without ``flock`` need to see each other's record."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The process that a lock names."""

    host: str
    boot: str
    """The machine's boot: another one after a restart, and on another machine."""
    pid: int
    start_ticks: str
    """When the process started, from the boot: a later process of its number differs."""
    since: str
    job: str
    """The number that Slurm gives the job; empty outside Slurm."""
    attempt: str
    """How often this job was restarted, as Slurm and torchrun count."""

    @classmethod
    def this(cls) -> Holder:
        environment = os.environ
        counts = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
        return cls(
            socket.gethostname(),
            _boot(),
            os.getpid(),
            _start_ticks(os.getpid()),
            datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
            environment.get("SLURM_JOB_ID", ""),
            ".".join(environment.get(name, "0") for name in counts),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {shown(self.host)[1:-1]}, since {shown(self.since)[1:-1]}"


class SaveLock:
    """The lock of one folder, held from the start to :meth:`release`.

    Raises:
        CheckpointError: another process has it; names that process and what to do.
        OSError: the lock file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._take()
                break
            except BaseException as error:
                os.close(self._file)
                if not isinstance(error, CheckpointError) or time.monotonic() > deadline:
                    raise
            time.sleep(0.1)
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="save-lock", daemon=True).start()

    def release(self) -> None:
        """Deletes the lock file. Whoever opened it meanwhile sees that and makes a new one."""
        self._released.set()
        with contextlib.suppress(OSError):
            if self._is_in_place():
                self.path.unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also what forked children hold
        os.close(self._file)

    def _take(self) -> None:
        granted = _flock(self._file)
        if not self._is_in_place():
            raise CheckpointError(self._in_use("a run that has just ended"))
        holder = self._read()
        if granted is False:
            who = holder or "another process, which has not yet written its name"
            raise CheckpointError(self._in_use(str(who)))
        if holder is not None:
            self._require_gone(holder)
            logger.warning("--save %s was left by %s; taken over", self.path.parent, holder)
        this = Holder.this()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(asdict(this)).encode(), 0)
        os.fsync(self._file)
        if granted is None:
            time.sleep(_SETTLE_S)
            if (holder := self._read()) != this or not self._is_in_place():
                raise CheckpointError(self._in_use(str(holder)))

    def _require_gone(self, holder: Holder) -> None:
        """Refuses to go on unless the process that the lock names is known to have ended."""
        this = Holder.this()
        if holder.boot == this.boot:
            if _start_ticks(holder.pid) == holder.start_ticks:
                raise CheckpointError(self._in_use(str(holder)))
            return
        if this.job and holder.job == this.job and holder.attempt != this.attempt:
            return
        silent_s = self._silent_s()
        if silent_s < SILENT_S:
            raise CheckpointError(
                self._in_use(f"{holder}, which gave a sign of life {silent_s:.0f} s ago")
                + f"; if it is gone, try again in {SILENT_S - silent_s:.0f} s"
            )
        if holder.host != this.host:
            raise CheckpointError(
                f"--save {self.path.parent} is locked by {holder}, which has given no sign of life "
                f"for {silent_s:.0f} s: it was killed, or its machine is cut off; make sure that "
                f"it is gone, then delete {self.path}"
            )

    def _in_use(self, by: str) -> str:
        return f"--save {self.path.parent} is in use by {by}; end that run or choose another folder"

    def _is_in_place(self) -> bool:
        """Whether the open file is still the one of this name."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _read(self) -> Holder | None:
        """Reads whom the lock names; None where it names nobody."""
        try:
            text = os.pread(self._file, 1 << 16, 0).decode()
            return record("", Holder, parse_mapping(text, is_json=True))
        except (ConfigError, ValueError):
            return None

    def _silent_s(self) -> float:
        """Seconds since the last touch, by the file system's clock: machines' own may differ."""
        with tempfile.TemporaryFile(dir=self.path.parent) as probe:
            probe.write(b"now")
            probe.flush()
            return os.fstat(probe.fileno()).st_mtime - os.fstat(self._file).st_mtime

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._file)


_held: dict[Path, SaveLock] = {}


def take(folder: Path) -> None:
    """Locks ``folder`` until :func:`release_all`; a second call of this process does nothing.

    Raises :class:`CheckpointError` and ``OSError`` as :class:`SaveLock`.
    """
    if folder.resolve() not in _held:
        _held[folder.resolve()] = SaveLock(folder)


def release_all() -> None:
    """Gives back what this process holds; a second call does nothing."""
    while _held:
        _held.popitem()[1].release()


def _flock(file: int) -> bool | None:
    """Takes the lock and says whether it is granted; None where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def await_flock(file: int) -> bool:
    """Takes the lock, or says that another process still has it after :data:`PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while _flock(file) is False:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_ticks(pid: int) -> str:
    """When the process started; empty where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = text.rpartition(")")[2].split()  # what stands before may hold any name
    return "" if state in "ZX" else fields[18]
