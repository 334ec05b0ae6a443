"""SIGTERM as a wish to save and leave: ``--exit-signal-handler``, as Megatron-LM has it."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch


class ExitSignal:
    """Notes SIGTERM in place of ending by it, from entry to exit; nothing unless ``enabled``.

    It may reach ranks in different steps, or one of them only: :meth:`received` says the same on
    all.
    """

    def __init__(self, *, enabled: bool, device: str) -> None:
        self._enabled = enabled
        self._device = device
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
        if not self._enabled:
            return False
        noted = torch.tensor([self._noted], dtype=torch.int32, device=self._device)
        torch.distributed.all_reduce(noted, op=torch.distributed.ReduceOp.MAX)
        return bool(noted.item())

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._noted = True
