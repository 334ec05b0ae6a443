"""Megatron's own packing: fixed windows of the token stream. The baseline."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron_wlb.errors import ConfigError
from megatron_wlb.packing.base import Limits, load_state, save_state
from megatron_wlb.plan import Document


class OriginalPacker:
    """Cuts the stream of documents every ``window`` tokens; N windows a step, in stream order.

    As Megatron does, but the documents' boundaries are kept, so that tokens attend within their
    own document only. A piece that runs in a later step counts as arriving in that step: a cut
    delays nothing. Only where too few tokens have arrived are the last windows short or empty.
    """

    name: ClassVar[str] = "original"
    in_stream_order: ClassVar[bool] = True
    look_ahead = 0

    def __init__(self, limits: Limits) -> None:
        check_windows(self.name, limits)
        self.limits = limits
        self._waiting: deque[Document] = deque()  # in stream order

    @property
    def waiting(self) -> Sequence[Document]:
        return tuple(self._waiting)

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        """The next N windows; documents may be of any length."""
        self._waiting.extend(documents)
        num_windows = self.limits.num_micro_batches
        return cut_windows(self._waiting, num_windows, num_windows, self.limits.window, step)

    def flush(self, step: int) -> list[list[Document]]:
        return self.pack((), step)

    def state_dict(self) -> dict[str, Any]:
        return save_state(self, waiting=self._waiting)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        (waiting,) = load_state(self, state, "waiting")
        self._waiting = deque(waiting)


def check_windows(packing: str, limits: Limits) -> None:
    """Raises :class:`ConfigError` if more tokens arrive in a step than N windows hold."""
    if limits.num_micro_batches * limits.window < limits.step_tokens:
        raise ConfigError(
            f"{packing} packing runs {limits.num_micro_batches} windows of {limits.window} "
            f"tokens a step, but {limits.step_tokens} tokens arrive; raise num_micro_batches"
        )


def cut_windows(
    documents: deque[Document], num_windows: int, windows_a_step: int, window: int, step: int
) -> list[list[Document]]:
    """Takes from ``documents``, in order, what fills the windows of ``step`` and those after it.

    A document that does not end with its window is cut. What lies in windows of a later step
    arrives then; what is beyond the last window goes back.
    """
    windows: list[list[Document]] = []
    while len(windows) < num_windows:
        cut: list[Document] = []
        room = window
        windows.append(cut)
        while room and documents:
            document = documents.popleft()
            if document.length > room:
                later_steps, windows_before = divmod(len(windows), windows_a_step)
                tail_step = document.step if windows_before else step + later_steps
                document, tail = document.cut(room, tail_step)
                documents.appendleft(tail)
            cut.append(document)
            room -= document.length
    return windows
