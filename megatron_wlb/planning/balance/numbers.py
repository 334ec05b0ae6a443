"""Chooses how many micro-batches a step has, by simulated time (Hydraulis §6).

More of them fill and drain the pipeline sooner; fewer cost less besides their documents, and bring
heavy documents more company. Which number is best depends on the documents of the step. These stay:
only which of them share a micro-batch changes. Every data-parallel rank runs as many as the others,
so that no collective that goes with micro-batches waits for ever, and virtual stages get multiples
of their groups. What context-parallel ranks wait for each other is not simulated.

Unlike the paper, the number of the batch size stays unless another one saves
:data:`WORTH_ANOTHER` of the step, and few numbers are simulated, as in
:mod:`megatron_wlb.planning.balance.assign`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_wlb.cost import Parallelism
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.cost.schedule.graph import graph_of
from megatron_wlb.cost.step_costs import StepCosts
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document, MicroBatchPlan
from megatron_wlb.planning.balance.assign import numbers_to_try, replica_us
from megatron_wlb.planning.balance.dispatch import Numbers, StepDocuments
from megatron_wlb.planning.balance.replica_costs import LEAST_TOKENS, ReplicaCosts, Scheme
from megatron_wlb.planning.packing import check_numbers
from megatron_wlb.planning.packing.placement import place
from megatron_wlb.planning.planner import Shaping, deal
from megatron_wlb.planning.slicing.room import MemoryLimit

WORTH_ANOTHER = 0.01
"""Share of the step that another number must save: simulation is not exact."""


class NumberChooser:
    """Deals a step's documents into the number of micro-batches with which it is shortest.

    Args:
        costs: of one data-parallel rank's pipeline.
        dp_size: ranks that share a step, each with as many micro-batches.
        max_tokens: the longest micro-batch of a step of so many on each rank; 0 where memory has no
            room for any. None is longer than ``costs.max_tokens``.
        in_stream_order: whether micro-batches, and documents in them, keep the stream's order.
        then: shapes the step of the number that is chosen.
        experts: groups of replicas that run micro-batches of the same place together. What these
            wait for each other is not simulated.
    """

    def __init__(
        self,
        costs: ReplicaCosts,
        dp_size: int,
        *,
        max_tokens: Callable[[int], int],
        in_stream_order: bool = False,
        then: Shaping | None = None,
        experts: ExpertGroups | None = None,
    ) -> None:
        self._costs, self._dp_size, self._max_tokens = costs, dp_size, max_tokens
        self._experts = experts
        self._in_stream_order, self._then = in_stream_order, then

    @classmethod
    def of(
        cls,
        costs: StepCosts,
        layout: Parallelism,
        *,
        num_micro_batches: int,
        max_tokens: int,
        mean_tokens: int,
        length_multiple: int,
        memory: MemoryLimit | None,
        **more: Any,
    ) -> NumberChooser:
        """The chooser of a run whose ranks have ``num_micro_batches`` of ``mean_tokens`` each by
        its batch size, and S_max ``max_tokens``.
        """
        p = layout
        replica = ReplicaCosts(
            Scheme(p.tp_size, p.cp_size, p.pp_size, p.vpp_size),
            max_tokens,
            costs,
            min(LEAST_TOKENS * p.tp_size * p.cp_size, mean_tokens),
            group_size=p.group_size,
        )
        held = max_tokens_by_number(p, memory, num_micro_batches, max_tokens, length_multiple)
        return cls(replica, p.dp_size, max_tokens=held, **more)

    def shape(self, ranks: Sequence[Sequence[Sequence[Document]]]) -> list[list[list[Document]]]:
        """Deals the same documents anew, or leaves them where that is not faster."""
        chosen = self._choose(ranks)
        return chosen if self._then is None else self._then.shape(chosen)

    def check(self, packing: str) -> None:
        check_numbers(packing)
        if self._then is not None:
            self._then.check(packing)

    def _choose(self, ranks: Sequence[Sequence[Sequence[Document]]]) -> list[list[list[Document]]]:
        # In the stream's order, where that is kept: micro-batches go to the ranks in turns.
        documents = [d for turn in zip(*ranks, strict=True) for own in turn for d in own]
        if not documents:
            return [[[*own] for own in rank] for rank in ranks]
        step = StepDocuments([document.length for document in documents])
        numbered = [documents[at] for at in step.order.tolist()]
        number_of = {document: number for number, document in enumerate(numbered)}
        best = [[[number_of[d] for d in own] for own in rank] for rank in ranks]
        limit_us = (1 - WORTH_ANOTHER) * self._step_us(step, best)
        for number in self._numbers(step):
            dealt = self.deal(step, number) if number != len(ranks[0]) else None
            if dealt is not None and (us := self._step_us(step, dealt)) < limit_us:
                best, limit_us = dealt, us
        return [[[numbered[n] for n in own] for own in rank] for rank in best]

    def _numbers(self, step: StepDocuments) -> list[int]:
        """Numbers of micro-batches of a rank to try."""
        return numbers_to_try(self._costs, step.us(self._costs), step.lengths, self._dp_size)

    def _step_us(self, step: StepDocuments, ranks: Sequence[Numbers]) -> float:
        return max(replica_us(step, self._costs, list(enumerate(ranks))))

    def deal(self, step: StepDocuments, number: int) -> list[Numbers] | None:
        """The documents in so many micro-batches a rank; None where these are too long."""
        max_tokens, dp_size, num = self._max_tokens(number), self._dp_size, number * self._dp_size
        times_us = step.us(self._costs)
        if self._in_stream_order:
            in_order = np.argsort(step.order)
            until_us = times_us[in_order].cumsum()
            middles = (until_us - times_us[in_order] / 2) / until_us[-1]
            index_of = np.minimum((middles * num).astype(np.int64), num - 1)
        else:
            placement = place(times_us, step.lengths, num, max_tokens)
            if len(placement.left):
                return None
            in_order, index_of = np.arange(len(times_us)), placement.index_of
        bins: Numbers = [[] for _ in range(num)]
        for document, at in zip(in_order.tolist(), index_of.tolist(), strict=True):
            bins[at].append(document)
        if max(sum(step.sizes[n] for n in own) for own in bins) > max_tokens:
            return None
        if self._in_stream_order:
            return [bins[rank::dp_size] for rank in range(dp_size)]
        if self._experts is not None:  # whose share is known of the whole model alone
            times_us = step.rank_us(self._costs).sum(axis=0)
        timed = [
            MicroBatchPlan(at, (), int(step.lengths[own].sum()), float(times_us[own].sum()))
            for at, own in enumerate(bins)
        ]
        return [[bins[m.index] for m in rank] for rank in deal(timed, dp_size, self._experts)]


def max_tokens_by_number(
    layout: Parallelism, memory: MemoryLimit | None, each: int, most: int, multiple: int
) -> Callable[[int], int]:
    """Tells S_max by the number of micro-batches a rank, of a run whose own is ``most``.

    It is what fits memory or, where that is not known, what holds no more tokens at once than
    ``each`` micro-batches of ``most`` do. 0 where that is none.
    """

    def held(number: int) -> int:
        """Micro-batches of a chunk whose activations a rank holds at once, at most."""
        graph = graph_of(layout.pp_size, layout.vpp_size, number, layout.group_size)
        return max(
            int(np.cumsum([1 if action.kind == "F" else -1 for action in actions]).max())
            for actions in graph.order
        )

    @lru_cache
    def max_tokens(number: int) -> int:
        if memory is None:
            return min(most, most * held(each) // held(number) // multiple * multiple)
        try:
            return min(most, memory.model.max_tokens(memory.limit_bytes, number, multiple=multiple))
        except ConfigError:
            return 0

    return max_tokens
