"""Ctrl-C is one line and exit code 130 also while a program still imports what it needs.

Programs import this before all that takes time, for that effect: a hook for what nothing catches.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron_wlb.errors import interrupted

_before = sys.excepthook


def restore() -> None:
    """Takes the hook away, where a program that is not ours begins."""
    sys.excepthook = _before


def _hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _before(kind, error, trace)
        return
    code = interrupted()
    sys.stderr.flush()
    os._exit(code)  # nothing of ours has begun


sys.excepthook = _hook
