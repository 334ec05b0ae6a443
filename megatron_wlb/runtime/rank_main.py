"""What the programs that torchrun starts have in common: their logs, and how they end."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from megatron_wlb.children import ending_with_us
from megatron_wlb.errors import (
    CheckpointError,
    ConfigError,
    LostRankError,
    WLBError,
    interrupted,
)
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.runtime.saving import lock as save_lock

OTHER_RANK_S = 5.0
"""How long a rank keeps an error to itself. Most are the same on all ranks: torchrun ends the
others once rank 0 has told it, and one that only this rank has is told a little later."""

LOST_PEER_S = 30.0
"""How long a rank that lost another one waits to be ended. On other machines than the lost one's
torchrun needs some seconds to notice."""

ORPHAN_S = 1.0
"""How often a rank looks for the torchrun that started it."""

REPORT = "this report is torchrun's; `python -m megatron_wlb.torchrun` in its place leaves it out"
"""The last line of what torchrun prints below our error. No process that it started can prevent
that, but each says what the report shows of its end."""

TOLD = "told_by_megatron_wlb"
"""Key of torchrun's error file: nothing need be added to what the process said."""


def rank_main(program: Callable[[], object], *, set_up_logs: bool = True) -> int:
    """Runs ``program`` on this rank; returns the exit code.

    Errors are one line on stderr unless ``WLB_TRACEBACK=1``; rank 0 logs to stdout, unless logs are
    the program's own to set up. A rank whose torchrun was killed ends at once, as if killed too:
    nobody would end it, and a resumed run would meet it in its folders.
    """
    rank = int(os.environ.get("RANK", "0"))
    if set_up_logs:
        _set_up_logs(rank)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        watch = threading.Thread(
            target=_end_as_orphan, args=(os.getppid(),), name="orphan-watch", daemon=True
        )
        watch.start()
    try:
        with ending_with_us():
            program()
    except WLBError as error:
        if os.environ.get("WLB_TRACEBACK") == "1":
            raise
        if rank:
            _await_end(OTHER_RANK_S)
        _is_first_to_tell()
        _tell(error)
        return error.exit_code
    except Exception as error:
        if os.environ.get("WLB_TRACEBACK") == "1" or not watchdog.lost_peer(error):
            _is_first_to_tell()  # by the traceback
            raise
        said = " ".join(str(error).partition(" This is typically")[0].split())
        lost = LostRankError(
            f"another rank ended or stopped ({said}): {watchdog.whereabouts(error)}; start the run "
            "again"
        )
        if not _is_first_to_tell():
            # Another rank has said why. torchrun ends this one as soon as it notices.
            _await_end(LOST_PEER_S)
        _tell(lost)
        return lost.exit_code
    except KeyboardInterrupt:
        return interrupted() if not rank else 128 + signal.SIGINT  # told once
    finally:
        save_lock.release_all()
    return 0


def _is_first_to_tell() -> bool:
    """Whether no other rank told an error before. Their count is where torchrun keeps addresses."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return True
    store = dist.distributed_c10d._get_default_store()
    try:
        store.set_timeout(datetime.timedelta(seconds=OTHER_RANK_S))
        return bool(store.add(TOLD, 1) == 1)
    except RuntimeError:  # its process is gone too
        return True


def end(error: WLBError) -> None:
    """Tells the error and ends this process and those that it started, whatever it waits for."""
    with contextlib.suppress(OSError):
        _tell(error)
        sys.stderr.flush()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(error.exit_code)


def _await_end(seconds: float) -> None:
    """Sleeps unless SIGTERM comes, also where ``--exit-signal-handler`` took it for a wish to save:
    that is over.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(seconds)


def _end_as_orphan(torchrun: int) -> None:
    """Ends this process and those that it started, once its parent is not ``torchrun`` any more.

    By looking, and not by a signal at the parent's death: that one would come at the end of the
    thread that started us, and a program that waits in a collective may never handle it.
    """
    while os.getppid() == torchrun:
        time.sleep(ORPHAN_S)
    end(WLBError(f"torchrun (process {torchrun}) is gone, so this ends too"))


def _tell(error: WLBError) -> None:
    """Tells the error on stderr and to torchrun, whose report then says it, not how to trace it."""
    rank = int(os.environ.get("RANK", "0"))
    report = error.report(f" (rank {rank})" if rank else "")
    sys.stderr.write(report)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        shown = f"{report.strip()}\n({REPORT})"
        details = {"py_callstack": shown, "timestamp": str(int(time.time())), TOLD: True}
        with contextlib.suppress(OSError):
            Path(path).write_text(
                json.dumps({"message": {"message": report.strip(), "extraInfo": details}})
            )


def _set_up_logs(rank: int) -> None:
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.ERROR,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stdout,
        force=True,  # whatever was imported before may have set up others
    )
    # Megatron tells of its buckets and indices at length; its warnings stay.
    logging.getLogger("megatron").setLevel(logging.WARNING)


def check_writable(flag: str, path: Path, writer: int = 0, *, is_folder: bool = False) -> None:
    """Makes the empty file ``path``, or writes in a folder, on the rank that will: so no work is
    lost for want of a place.

    Raises :class:`ConfigError`, which names ``flag``, where it cannot be written.
    """
    if os.environ.get("RANK") == str(writer):
        try:
            (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
            if is_folder:
                tempfile.TemporaryFile(dir=path).close()
            else:
                path.touch()
        except OSError as error:
            raise ConfigError(
                f"cannot write {flag} {path}: {error.strerror}; choose another place"
            ) from None


@contextlib.contextmanager
def writing(flag: str, place: str) -> Iterator[None]:
    """Makes one line of what a full disk or an unwritable place raises.

    Raises :class:`CheckpointError`, which names ``flag``, for an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {flag} {place}: {error.strerror}; make room or choose another place"
        ) from None
