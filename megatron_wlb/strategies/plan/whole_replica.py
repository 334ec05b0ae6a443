"""A replica of a strategy that runs documents whole: what it costs."""

from __future__ import annotations

from dataclasses import replace

from megatron_wlb.cost import Cost
from megatron_wlb.cost.analytic import AnalyticModel
from megatron_wlb.cost.memory import MemoryModel
from megatron_wlb.cost.step_costs import StageCosts, analytic_costs
from megatron_wlb.cost.table import ProfiledCost
from megatron_wlb.planning.balance.replica_costs import LEAST_TOKENS, ReplicaCosts, Scheme

SHORT_TOKENS = 256
UTILIZED = 0.9
"""The share of the most tokens a second from which on micro-batches are long enough."""


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
