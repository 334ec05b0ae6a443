"""What one replica of a scheme costs: its stages' times, its transfers, how much it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_wlb.cost import Cost
from megatron_wlb.cost.analytic import AnalyticModel
from megatron_wlb.cost.memory import MemoryModel
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.step_costs import StageCosts, StepCosts, analytic_costs
from megatron_wlb.cost.table import ProfiledCost
from megatron_wlb.plan import Document, Span, Units
from megatron_wlb.plan.replicas import Scheme

LEAST_TOKENS = 1024
"""Tokens of a micro-batch on each TP × CP rank below which kernels are too small (UtilLen of
Appendix C). Assumed, where no cost was measured: the paper prints a picture alone."""
SHORT_TOKENS = 256
UTILIZED = 0.9
"""The share of the most tokens a second from which on micro-batches are long enough."""


@dataclass(frozen=True, eq=False)
class ReplicaCosts:
    """Costs of a replica; compared by identity, as one is made for each scheme of a run."""

    scheme: Scheme
    max_tokens: int
    """S_max, by memory; a multiple of the scheme's ``length_multiple``."""
    costs: StepCosts
    """Times of stages and transfers; exchange and update are the strategy's."""
    least_tokens: int = 1
    """Tokens of a micro-batch in the mean, at least, where documents are enough."""
    memory: MemoryModel | None = None
    limit_bytes: float = math.inf
    """What tensors may take of a rank's memory."""
    group_size: int | None = None
    """Micro-batches that a chunk runs one after another, with virtual stages; PP if not given."""

    @property
    def kind(self) -> tuple[Scheme, int]:
        return self.scheme, self.max_tokens

    @property
    def number_multiple(self) -> int:
        """What its number of micro-batches is a multiple of."""
        scheme = self.scheme
        return (self.group_size or scheme.pp_size) if scheme.vpp_size > 1 else 1

    @property
    def warm_up(self) -> float:
        """How often the longest document counts besides the sum: (PP - 1) / VPP."""
        return (self.scheme.pp_size - 1) / self.scheme.vpp_size

    def units(self, given: Sequence[Sequence[Document]]) -> Units:
        """What it runs of documents that are ``given`` in micro-batches."""
        return Units([[Span(document, 0, document.length) for document in one] for one in given])

    @property
    def filling(self) -> float:
        """What filling and draining the pipeline takes besides, as a share of all documents."""
        return 0.0

    def rank_us(self, lengths: Sequence[int], *, least: bool = False) -> Floats:
        """Forward plus backward of documents on each pipeline rank, ``[PP, documents]``, without
        what every micro-batch costs; each as if it were launched alone, or the ``least`` that it
        takes among others.
        """
        stages = replace(self.costs.stages, launches_us=()) if least else self.costs.stages
        times_us = stages.times_us([*([length] for length in lengths), []]).sum(axis=0)
        by_rank = times_us.reshape(self.scheme.vpp_size, self.scheme.pp_size, -1).sum(axis=0)
        result: Floats = by_rank[:, :-1] - by_rank[:, -1:]
        return result

    @property
    def num_parts(self) -> int:
        """Layers of a pipeline rank: the parts in which its parameters are exchanged."""
        if self.memory is None:
            return 1
        return max(1, self.memory.shape.num_layers // self.scheme.pp_size)

    def waits_us(self, exchange_us: Floats, passes_us: Floats) -> Floats:
        """What is waited for of an exchange beside a pass: one part, or what is longer."""
        share = 1 / self.num_parts
        waits: Floats = np.maximum(share * exchange_us, exchange_us - (1 - share) * passes_us)
        return waits

    def room_bytes(self, pp_rank: int | None) -> float:
        """What parameters leave of a rank's memory, or of one that runs no replica."""
        if self.memory is None:
            return math.inf
        state = self.memory.state_bytes(pp_rank or 0)
        return self.limit_bytes - (state.optimizer if pp_rank is None else state.total)

    def held(self, pp_rank: int, given: int, element_bytes: int) -> float:
        """The share of a rank's exchange that its memory holds at once, where so many elements of
        others are ``given``, too.
        """
        if self.memory is None:
            return 1.0
        num_bytes = element_bytes * (given + self.memory.num_parameters(pp_rank))
        return min(1.0, self.room_bytes(pp_rank) / num_bytes)

    @cached_property
    def micro_batch_us(self) -> float:
        """What a micro-batch takes on a pipeline rank besides its documents, at most."""
        times_us = self.costs.stages.times_us([[]]).sum(axis=0)
        by_rank = times_us.reshape(self.scheme.vpp_size, self.scheme.pp_size).sum(axis=0)
        return float(by_rank.max())


def replica_costs(
    model: AnalyticModel, memory: MemoryModel, limit_bytes: float, measured: Cost | None = None
) -> ReplicaCosts:
    """Costs of one replica alone, modelled; both models' layout is its scheme, with DP 1.
    ``measured`` is the time of documents in that TP and CP, if it is known.

    Raises :class:`ConfigError` where the layout does not divide the model, or memory does not hold
    the shortest micro-batch.
    """
    p = model.parallelism
    scheme = Scheme(p.tp_size, p.cp_size, p.pp_size, p.vpp_size)
    whole, multiple = analytic_costs(model, memory), scheme.length_multiple
    # Twice as many as are in flight at once: longer steps only repeat that.
    max_tokens = memory.max_tokens(limit_bytes, 2 * p.pp_size, multiple=multiple)
    least_tokens, stages = LEAST_TOKENS * p.tp_size * p.cp_size, whole.stages
    if measured is not None:
        stages = StageCosts.spread(measured, model)
        if isinstance(measured, ProfiledCost):
            end = min(max_tokens, measured.most_tokens)
            max_tokens = max(multiple, int(end) // multiple * multiple)
        least_tokens = _least_tokens(stages, max_tokens)
    costs = replace(
        whole, stages=stages, reduce_us=(), reduce_buckets=(), overlap_reduce=False,
        embedding_us=0.0, update_us=(), fixed_us=0.0,
    )  # fmt: skip
    return ReplicaCosts(scheme, max_tokens, costs, least_tokens, memory, limit_bytes)


def _least_tokens(stages: StageCosts, max_tokens: int) -> int:
    """UtilLen (Appendix C), from the curve: tokens of the shortest micro-batch that takes hardly
    more time a token than the best one, all of short documents.
    """
    numbers = [1]
    while 2 * numbers[-1] * SHORT_TOKENS <= max_tokens:
        numbers.append(2 * numbers[-1])
    length = min(SHORT_TOKENS, max_tokens)
    times_us = stages.times_us([[length] * number for number in numbers]).sum(axis=(0, 1))
    each_us = times_us / numbers
    return length * numbers[int((each_us <= each_us.min() / UTILIZED).argmax())]
