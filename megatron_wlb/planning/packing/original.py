"""Megatron's own packing: fixed windows of the token stream. The baseline."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan
from megatron_wlb.planning.packing.base import Limits, Packer, load_state, save_state

if TYPE_CHECKING:
    from megatron_wlb.cost import CostModel
    from megatron_wlb.planning.packing.settings import PackingSettings


UNSHAPED_WINDOWS = (
    "micro-batches of {} packing are windows, so they cannot be shaped; use hold or wlb, or leave "
    "--wlb-shape (+shape) out"
)


class OriginalPacker(Packer):
    """Cuts the stream of documents every ``window`` tokens; N micro-batches a step, in its order.

    A micro-batch is the next ``micro_batch_size`` windows, one after another in one row.

    As Megatron does, but the documents' boundaries are kept, so that tokens attend within their
    own document only. A piece that runs in a later step counts as arriving in that step: a cut
    delays nothing. Only where too few tokens have arrived are the last windows short or empty.
    """

    name: ClassVar[str] = "original"
    in_stream_order: ClassVar[bool] = True
    reads = frozenset({"micro_batches"})
    reads_if_numbered = frozenset({"max_tokens"})
    windows = True
    unshaped = UNSHAPED_WINDOWS

    def __init__(self, limits: Limits) -> None:
        check_windows(self.name, limits)
        self.limits = limits
        self._waiting: list[Document] = []  # in stream order

    @classmethod
    def make(cls, settings: PackingSettings, limits: Limits, cost: CostModel) -> OriginalPacker:
        return cls(limits)

    @property
    def waiting(self) -> Sequence[Document]:
        return tuple(self._waiting)

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        """Returns the next N micro-batches; documents may have any length."""
        self.limits = self.limits.at(step)
        micro_batches, self._waiting = cut_windows([*self._waiting, *documents], self.limits, step)
        return micro_batches

    def flush(self, step: int) -> list[list[Document]]:
        return self.pack((), step)

    def state_dict(self) -> dict[str, Any]:
        return save_state(self, waiting=self._waiting)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        (self._waiting,) = load_state(self, state, "waiting")


def check_windows(packing: str, limits: Limits) -> None:
    """Raises :class:`ConfigError` if more tokens arrive in a step than its windows hold."""
    if limits.num_micro_batches * limits.micro_batch_tokens < limits.step_tokens:
        num_windows = limits.num_micro_batches * limits.micro_batch_size
        raise ConfigError(
            f"{packing} packing runs {num_windows} windows of {limits.window} "
            f"tokens a step, but {limits.step_tokens} tokens arrive; raise num_micro_batches"
        )


def cut_windows(
    documents: Sequence[Document], limits: Limits, step: int, num_steps: int = 1
) -> tuple[list[list[Document]], list[Document]]:
    """Fills the micro-batches of ``num_steps`` from ``step`` on, in order; returns the rest too.

    A document that does not end with its window is cut, inside a micro-batch too. What lies in
    windows of a later step arrives then.
    """
    documents, window, each = [*documents], limits.window, limits.micro_batch_size
    windows_a_step = limits.num_micro_batches * each
    ends = [*accumulate([document.length for document in documents])]
    windows: list[list[Document]] = []
    first = 0
    for number in range(1, num_steps * windows_a_step + 1):
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
    rows = [[*chain(*windows[at : at + each])] for at in range(0, len(windows), each)]
    return rows, documents[first:]


def in_windows(plan: StepPlan, num_micro_batches: int) -> StepPlan:
    """The documents of a step as Megatron would pack them: in the stream's order, cut into so many
    rows of equal length that are dealt out in turn. So a document is cut where two rows meet, and
    nowhere else. All tokens of the step run, so rows may be longer or shorter than a window.
    """
    documents = sorted(plan.documents, key=attrgetter("arrival", "offset"))
    dp_size = len(plan.micro_batches)
    num_tokens = sum([document.length for document in documents])
    window = -(-num_tokens // num_micro_batches)
    limits = Limits(num_micro_batches, window, window, num_tokens)
    packed, _ = cut_windows(documents, limits, plan.step)
    every = [
        MicroBatchPlan(number, tuple(Span(d, 0, d.length) for d in row), window, 0.0)
        for number, row in enumerate(packed)
    ]
    ranks = tuple(tuple(every[rank::dp_size]) for rank in range(dp_size))
    return replace(plan, packing="original", micro_batches=ranks, chains=(), window_bytes=0.0)


def count_cut(lengths: Sequence[int], window: int) -> int:
    """Counts the documents of a line that :func:`cut_windows` cuts."""
    ends = [*accumulate(lengths)]
    return sum(
        (end - length) // window != (end - 1) // window
        for end, length in zip(ends, lengths, strict=True)
    )
