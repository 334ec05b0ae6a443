"""Megatron's own packing: fixed windows of the token stream. The baseline."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
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
        self._waiting: list[Document] = []  # in stream order

    @property
    def waiting(self) -> Sequence[Document]:
        return tuple(self._waiting)

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        """Returns the next N windows; documents may have any length."""
        num_windows, window = self.limits.num_micro_batches, self.limits.window
        documents = [*self._waiting, *documents]
        windows, self._waiting = cut_windows(documents, num_windows, num_windows, window, step)
        return windows

    def flush(self, step: int) -> list[list[Document]]:
        return self.pack((), step)

    def state_dict(self) -> dict[str, Any]:
        return save_state(self, waiting=self._waiting)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        (self._waiting,) = load_state(self, state, "waiting")


def check_windows(packing: str, limits: Limits) -> None:
    """Raises :class:`ConfigError` if more tokens arrive in a step than N windows hold."""
    if limits.num_micro_batches * limits.window < limits.step_tokens:
        raise ConfigError(
            f"{packing} packing runs {limits.num_micro_batches} windows of {limits.window} "
            f"tokens a step, but {limits.step_tokens} tokens arrive; raise num_micro_batches"
        )


def cut_windows(
    documents: Sequence[Document], num_windows: int, windows_a_step: int, window: int, step: int
) -> tuple[list[list[Document]], list[Document]]:
    """Fills the windows of ``step`` and those after it, in order; returns the rest as well.

    A document that does not end with its window is cut. What lies in windows of a later step
    arrives then.
    """
    documents = [*documents]
    ends = [*accumulate([document.length for document in documents])]
    windows: list[list[Document]] = []
    first = 0
    for number in range(1, num_windows + 1):
        last = bisect_left(ends, number * window, lo=first)
        cut = documents[first : last + 1]
        first = last + 1
        if last < len(documents) and ends[last] > number * window:
            later_steps, windows_before = divmod(number, windows_a_step)
            tail_step = cut[-1].step if windows_before else step + later_steps
            room = cut[-1].length - (ends[last] - number * window)
            cut[-1], documents[last] = cut[-1].cut(room, tail_step)
            first = last
        windows.append(cut)
    return windows, documents[first:]
