"""WLB-LLM's Algorithm 1 as it is printed, line by line, and each departure from it by itself.

The package's ``wlb`` closes its gaps (``megatron_wlb/planning/packing/wlb.py``). With all
departures this is the same packing: ``test_algorithm_1.py`` holds both together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_wlb.plan import Document
from megatron_wlb.planning.packing.wlb import WLBPacker

DEPARTURES = {
    "together": "what was left over is sorted with the new",
    "exact": "exactly S_max fits",
    "room": "any micro-batch with room takes what does not fit",
    "fire": "queues fire longest wait first, again if full, and by age",
}


class PrintedPacker(WLBPacker):
    """Algorithm 1 of WLB-LLM with the ``departures`` of its class alone.

    Line numbers are the printed ones. Its state, its queues and its end are the package's.
    """

    name = "algorithm-1"
    departures: frozenset[str] = frozenset()

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        new, remained = self._enqueue(documents), self._remained  # lines 4-10
        if "fire" in self.departures:
            new += self._fire(step, sum(document.length for document in remained + new))
        else:
            for queue in self._queues:  # lines 11-15
                if len(queue) >= self.limits.num_micro_batches:
                    new += [queue.popleft() for _ in range(self.limits.num_micro_batches)]
        if "together" in self.departures:
            new, remained = remained + new, []
        return self._push(remained + sorted(new, key=lambda d: -d.length))  # lines 16 and 17

    def flush(self, step: int) -> list[list[Document]]:
        running = list(self.waiting)
        for queue in self._queues:
            queue.clear()
        return self._push(running)

    def _push(self, documents: Sequence[Document]) -> list[list[Document]]:
        """Lines 18-31."""
        self._remained = []
        number, most = self.limits.num_micro_batches, self.limits.max_tokens
        most += "exact" in self.departures
        batch: list[list[Document]] = [[] for _ in range(number)]
        work_us, lengths = [0.0] * number, [0] * number
        costs_us = self._costs_us.of(np.array([d.length for d in documents], dtype=int)).tolist()
        for document, cost_us in zip(documents, costs_us, strict=True):
            least_work = min(range(number), key=work_us.__getitem__)
            shortest = min(range(number), key=lengths.__getitem__)
            others = [shortest]
            if "room" in self.departures:
                others = sorted(range(number), key=work_us.__getitem__)
            for at in (least_work, *others):
                if lengths[at] + document.length < most:
                    batch[at].append(document)
                    work_us[at] += cost_us
                    lengths[at] += document.length
                    break
            else:
                self._remained.append(document)
        return batch


def with_departures(*names: str) -> type[PrintedPacker]:
    """The algorithm with these departures and no other."""
    unknown = set(names) - set(DEPARTURES)
    assert not unknown, unknown
    return type("Departed", (PrintedPacker,), {"departures": frozenset(names)})
