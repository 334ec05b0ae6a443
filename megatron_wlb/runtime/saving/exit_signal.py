"""SIGTERM as a wish to save and leave: ``--exit-signal-handler``, as Megatron-LM has it."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from megatron_wlb.runtime.ranks.hosts import Hosts


class ExitSignal:
    """Notes SIGTERM in place of ending by it, from entry to exit; nothing unless ``enabled``.

    It may reach ranks in different steps, or one of them only: :meth:`received` says the same on
    all.
    """

    def __init__(self, *, enabled: bool, hosts: Hosts) -> None:
        self._enabled = enabled
        self._hosts = hosts
        self._noted = False
        self._before: Any = None

    def __enter__(self) -> ExitSignal:
        if self._enabled:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            signal.signal(signal.SIGTERM, self._before)

    def received(self) -> bool:
        """Whether any rank has it; called by every rank after the same step."""
        return self._enabled and self._hosts.max(int(self._noted)) == [1]

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._noted = True
