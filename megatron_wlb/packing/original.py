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

    def __init__(self, limits: Limits) -> None:
        capacity = limits.num_micro_batches * limits.window
        if capacity < limits.step_tokens:
            raise ConfigError(
                f"original packing runs {limits.num_micro_batches} windows of {limits.window} "
                f"tokens a step, but {limits.step_tokens} tokens arrive; raise num_micro_batches"
            )
        self.limits = limits
        self._waiting: deque[Document] = deque()  # in stream order

    @property
    def waiting(self) -> Sequence[Document]:
        return tuple(self._waiting)

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        """The next N windows; documents may be of any length."""
        self._waiting.extend(documents)
        windows: list[list[Document]] = [[] for _ in range(self.limits.num_micro_batches)]
        for window in windows:
            room = self.limits.window
            while room and self._waiting:
                document = self._waiting.popleft()
                if document.length > room:
                    tail_step = step + 1 if window is windows[-1] else document.step
                    document, tail = document.cut(room, tail_step)
                    self._waiting.appendleft(tail)
                window.append(document)
                room -= document.length
        return windows

    def flush(self, step: int) -> list[list[Document]]:
        return self.pack((), step)

    def state_dict(self) -> dict[str, Any]:
        return save_state(self, waiting=self._waiting)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        (waiting,) = load_state(self, state, "waiting")
        self._waiting = deque(waiting)
