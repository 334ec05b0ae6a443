"""How good a packing is: balance, delay, and how even the steps are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import Document, StepPlan


@dataclass(frozen=True, slots=True)
class PackingMetrics:
    """Over a run of steps; times are predicted, delays are steps between arrival and run."""

    num_steps: int
    num_documents: int
    """That ran; pieces of cut ones count each."""
    num_tokens: int
    """That ran, without padding."""
    imbalance_mean: float
    """Mean over the steps of ``max · N / Σ`` of micro-batch times. (§7.4 prints PP_size for N,
    which is the same only where there are as many micro-batches as stages.)"""
    imbalance_weighted: float
    """``Σ max · N / ΣΣ``: the steps weighted by their time, so what a run loses."""
    imbalance_p95: float
    """95th percentile over the steps."""
    imbalance_worst: float
    """Of the worst step."""
    rank_imbalance_mean: float
    """Mean over the steps of ``max · dp_size / Σ`` of the data-parallel ranks' sums."""
    delay_mean_steps: float
    """Token-weighted, over the documents that ran; running early counts as running late does."""
    delay_p99_steps: int
    """The least delay that 99 % of the tokens that ran do not exceed."""
    delay_max_steps: int
    num_waiting: int
    """Documents that arrived and have not run; in none of the delays above."""
    waiting_tokens: int
    waiting_age_mean_steps: float
    """Token-weighted delay that they would have if all ran in the step after the last: the least
    that they can have."""
    tokens_cv: float
    """Standard deviation ÷ mean of the tokens of a step."""
    padding_share: float
    """Padding ÷ all tokens computed."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def measure(plans: Sequence[StepPlan], waiting: Sequence[Document] = ()) -> PackingMetrics:
    """Metrics of consecutive ``plans``, after which the documents ``waiting`` had not run.

    Those that were only read ahead do not count as waiting.

    Raises :class:`PlanError` without plans, or if ``waiting`` is not what the last plan counted.
    """
    if not plans:
        raise PlanError("no steps to measure; plan at least one")
    last = plans[-1]
    waiting = [document for document in waiting if document.step <= last.step]
    if len(waiting) != last.num_waiting:
        raise PlanError(
            f"{last.num_waiting} documents wait after step {last.step}, but {len(waiting)} were "
            "given to measure; give packer.waiting as it was then"
        )
    times_us = [[micro_batch.predicted_us for micro_batch in plan] for plan in plans]
    max_us = sum(max(step) * len(step) for step in times_us)
    total_us = sum(map(sum, times_us))
    imbalances = [plan.imbalance for plan in plans]
    tokens = np.array([plan.num_tokens for plan in plans], dtype=np.float64)
    padding = sum(plan.padding_tokens for plan in plans)
    num_tokens = sum(plan.num_tokens for plan in plans)

    delays: Counter[int] = Counter()  # tokens by delay
    for plan in plans:
        for document in plan.documents:
            delays[abs(plan.step - document.step)] += document.length
    waiting_tokens = sum(document.length for document in waiting)
    waited = sum(document.length * (last.step + 1 - document.step) for document in waiting)

    return PackingMetrics(
        num_steps=len(plans),
        num_documents=sum(len(micro_batch.spans) for plan in plans for micro_batch in plan),
        num_tokens=num_tokens,
        imbalance_mean=float(np.mean(imbalances)),
        imbalance_weighted=max_us / total_us if total_us else 1.0,
        imbalance_p95=float(np.percentile(imbalances, 95)),
        imbalance_worst=max(imbalances),
        rank_imbalance_mean=float(np.mean([_rank_imbalance(plan) for plan in plans])),
        delay_mean_steps=sum(delay * n for delay, n in delays.items()) / max(1, num_tokens),
        delay_p99_steps=_percentile(delays, 99),
        delay_max_steps=max(delays, default=0),
        num_waiting=len(waiting),
        waiting_tokens=waiting_tokens,
        waiting_age_mean_steps=waited / max(1, waiting_tokens),
        tokens_cv=float(tokens.std() / tokens.mean()) if num_tokens else 0.0,
        padding_share=padding / max(1, padding + num_tokens),
    )


def _rank_imbalance(plan: StepPlan) -> float:
    sums_us = [sum(m.predicted_us for m in rank) for rank in plan.micro_batches]
    total_us = sum(sums_us)
    return max(sums_us) * len(sums_us) / total_us if total_us else 1.0


def _percentile(delays: Counter[int], percent: int) -> int:
    """The least delay that ``percent`` of the tokens do not exceed."""
    needed = delays.total() * percent
    seen = 0
    for delay in sorted(delays):
        seen += 100 * delays[delay]
        if seen >= needed:
            return delay
    return 0
