"""torchrun that leaves our errors the last word: ``python -m megatron_wlb.torchrun <as torchrun>``.

When a process fails, torchrun prints a traceback and a report of its own below that process's one
line, and ends with 1. Here nothing follows where all that failed have told their error by
:func:`megatron_wlb.runtime.rank_main.rank_main`, or were ended for it by torchrun; the exit code is
that of the error. All else is torchrun's.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from megatron_wlb import interrupts  # noqa: F401 - before all that takes time

# isort: split
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_wlb.errors import interrupted
from megatron_wlb.runtime.rank_main import TOLD

_LOGGERS = tuple(
    logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}")
    for name in ("api", "errors.error_handler")
)
"""The loggers that say which process ended how, and which were ended after it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs torchrun; returns the exit code of a process that told its error, else raises."""
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    for logger in _LOGGERS:
        logger.addFilter(hold)
    try:
        run.main(argv)
    except ChildFailedError as error:
        told = [failure.exitcode for failure in error.failures.values() if _has_told(failure)]
        ended = [f.exitcode for f in error.failures.values() if f.exitcode == -signal.SIGTERM]
        if not told or len(told) + len(ended) < len(error.failures):
            raise
        held.clear()
        return told[0]
    except SignalException as error:
        if error.sigval != signal.SIGINT:
            raise
        held.clear()
        return interrupted()
    finally:
        for logger in _LOGGERS:
            logger.removeFilter(hold)
        for record in held:
            logging.getLogger(record.name).handle(record)
    return 0


def _has_told(failure: ProcessFailure) -> bool:
    message = failure.error_file_data.get("message")
    return isinstance(message, dict) and TOLD in message.get("extraInfo", {})


if __name__ == "__main__":
    sys.exit(main())
