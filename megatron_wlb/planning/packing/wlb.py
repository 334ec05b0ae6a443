"""WLB-LLM's packing: outlier documents wait in queues until each micro-batch can have one."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document
from megatron_wlb.planning.packing.base import BALANCED, Limits, Packer, load_state, save_state
from megatron_wlb.planning.packing.placement import CostTable, rank

if TYPE_CHECKING:
    from megatron_wlb.planning.packing.settings import PackingSettings


class WLBPacker(Packer):
    """Algorithm 1 of WLB-LLM (§4.3), with its gaps closed.

    A document of at least ``L_1`` tokens waits, first in first out, in the queue ``i`` with
    ``L_i ≤ length < L_{i+1}`` (lines 4-10). A queue with N documents fires: they run, one for each
    micro-batch (lines 11-15). Everything that runs is placed in descending order of cost, each
    document on the least loaded micro-batch (lines 16-27); what finds no room runs in the next
    step (line 29).

    Departures from the algorithm as printed, and why:

    * Line 12 fires every full queue at once, and each only once. Here the queues fire longest wait
      first, again if still full, and all but the first only under ``limits.token_cap``: several
      firing at once would overflow S_max, and one that gains more than N a step would never empty.
    * A queue whose first document has waited ``max_age`` steps fires with what it holds: without
      it a document can wait for ever. Its fellows go with it, because a heavy document is better
      matched by other heavy ones than by many light ones.
    * If nothing else runs, the queue that has waited longest fires: no step is empty.
    * Line 17 puts remaining documents before new ones; here they are sorted together, because a
      light document placed before a heavy one spoils the balance. Age goes before cost instead:
      documents that have waited ``max_age`` steps come first.
    * Line 16 sorts by length, here by cost: the same, for a cost that grows with length.
    * Above ``limits.max_step_tokens`` the lightest documents run in the next step (but not due
      ones): they are the easiest to balance later.
    * Lines 23 and 26 have ``< S_max``; a document of exactly S_max fits.
    * Line 26 falls back to the shortest micro-batch only; here to the least loaded one that has
      room, which there is whenever the shortest has.
    * The loop ends with the data and leaves documents in its queues; ``flush`` runs them.

    ``queue_thresholds`` are ``L_1 < L_2 < …`` in tokens. By default a third and two thirds of the
    window: two queues are the paper's best, and of six pairs tried on heavy-tailed lengths with 4
    and 16 micro-batches this one was first or close to it in all cases.

    Raises :class:`ConfigError` for thresholds below 1 or not strictly ascending.
    """

    name: ClassVar[str] = "wlb"
    reads = BALANCED | {"queue_thresholds"}
    number = "queue_thresholds"

    def __init__(
        self, limits: Limits, cost: CostModel, queue_thresholds: Sequence[int] = ()
    ) -> None:
        window = limits.window
        thresholds = list(queue_thresholds) or [max(1, window // 3), max(2, 2 * window // 3)]
        if thresholds[0] < 1 or any(low >= high for low, high in pairwise(thresholds)):
            raise ConfigError(
                f"queue_thresholds {thresholds} must be positive and strictly ascending; "
                "order them and remove duplicates"
            )
        self.limits = limits
        self.queue_thresholds = thresholds
        self._costs_us = CostTable(cost, limits)
        self._remained: list[Document] = []  # to run, but did not fit
        self._queues: list[deque[Document]] = [deque() for _ in thresholds]

    @classmethod
    def make(cls, settings: PackingSettings, limits: Limits, cost: CostModel) -> WLBPacker:
        return cls(limits, cost, settings.queue_thresholds)

    @classmethod
    def read(cls, number: int, window: int) -> dict[str, Any]:
        """K queues part the window evenly: at ``i · window ÷ (K + 1)``."""
        if number >= window:
            raise ConfigError(f"more queues than a window of {window} parts in")
        return {cls.number: tuple(window * i // (number + 1) for i in range(1, number + 1))}

    @classmethod
    def said(cls, settings: PackingSettings) -> Iterable[str]:
        if settings.queue_thresholds:
            yield "L " + " ".join(map(str, settings.queue_thresholds))

    @property
    def waiting(self) -> Sequence[Document]:
        return (*self._remained, *(d for queue in self._queues for d in queue))

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        self.limits = self.limits.at(step)
        self.limits.check(documents)
        running = self._remained + self._enqueue(documents)
        running += self._fire(step, sum([document.length for document in running]))
        return self._place(running, step)

    def flush(self, step: int) -> list[list[Document]]:
        self.limits = self.limits.at(step)
        running = list(self.waiting)
        for queue in self._queues:
            queue.clear()
        return self._place(running, step)

    def state_dict(self) -> dict[str, Any]:
        queued = (d for queue in self._queues for d in queue)
        return save_state(self, remained=self._remained, queued=queued)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Follows :meth:`Packer.load_state_dict`; thresholds may differ."""
        remained, queued = load_state(self, state, "remained", "queued")
        self.limits.check(remained + queued)
        for queue in self._queues:
            queue.clear()
        queued.sort(key=lambda document: document.key)  # each queue is in stream order
        self._remained = remained + self._enqueue(queued)

    def _enqueue(self, documents: Sequence[Document]) -> list[Document]:
        """Puts outliers into their queues; returns the others."""
        shortest = self.queue_thresholds[0]
        for document in documents:
            if document.length >= shortest:
                number = bisect_right(self.queue_thresholds, document.length)
                self._queues[number - 1].append(document)
        return [document for document in documents if document.length < shortest]

    def _fire(self, step: int, tokens: int) -> list[Document]:
        """Takes from the queues what runs beside other documents of ``tokens`` in total."""
        num_micro_batches, max_age = self.limits.num_micro_batches, self.limits.max_age
        fired: list[Document] = []
        for queue in self._queues:
            while queue and step - queue[0].step >= max_age:
                fired += _take(queue, num_micro_batches)
        tokens += sum(document.length for document in fired)
        for queue in self._longest_wait_first():
            while len(queue) >= num_micro_batches:
                next_tokens = sum(d.length for d in islice(queue, num_micro_batches))
                if fired and tokens + next_tokens > self.limits.token_cap:
                    break
                fired += _take(queue, num_micro_batches)
                tokens += next_tokens
        if not tokens:
            for queue in self._longest_wait_first()[:1]:
                fired += _take(queue, num_micro_batches)
        return fired

    def _longest_wait_first(self) -> list[deque[Document]]:
        return sorted(filter(None, self._queues), key=lambda queue: queue[0].key)

    def _place(self, running: Sequence[Document], step: int) -> list[list[Document]]:
        limits = self.limits
        ranking = rank(running, self._costs_us, step - limits.max_age)
        placement = ranking.place(limits.num_micro_batches, limits.max_tokens, limits.step_cap)
        micro_batches, self._remained = ranking.take_each(placement)
        return micro_batches


def _take(queue: deque[Document], count: int) -> list[Document]:
    return [queue.popleft() for _ in range(min(count, len(queue)))]
