"""How good a packing is: balance, delay, and how even the steps are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_wlb.cost.document import imbalance
from megatron_wlb.errors import PlanError
from megatron_wlb.plan import Document, StepPlan


@dataclass(frozen=True, slots=True)
class PackingMetrics:
    """Metrics of a run of steps; times are predicted, delays are steps from arrival to run."""

    num_steps: int
    num_documents: int
    """Documents that ran; pieces of cut ones count each."""
    num_tokens: int
    """Tokens that ran, without padding."""
    imbalance_mean: float
    """Mean over the steps of ``max · N / Σ`` of micro-batch times. (§7.4 prints PP_size for N,
    which is the same only where there are as many micro-batches as stages.)"""
    imbalance_weighted: float
    """``Σ max · N / ΣΣ``: the steps weighted by their time, so what a run loses."""
    imbalance_p95: float
    """95th percentile of the steps' imbalance."""
    imbalance_worst: float
    """Imbalance of the worst step."""
    rank_imbalance_mean: float
    """Mean over the steps of ``max · dp_size / Σ`` of the data-parallel ranks' sums."""
    delay_mean_steps: float
    """Token-weighted mean over the documents that ran; early counts as late does."""
    delay_p99_steps: int
    """The least delay that 99 % of the tokens that ran do not exceed."""
    delay_max_steps: int
    num_waiting: int
    """Documents that arrived and have not run. The delays above do not count them."""
    waiting_tokens: int
    waiting_age_mean_steps: float
    """Token-weighted delay of all that waits if it ran in the step after the last: the least
    that it can have."""
    tokens_cv: float
    """Standard deviation ÷ mean of the tokens of a step."""
    padding_share: float
    """Padding ÷ all tokens computed."""

    def as_dict(self) -> dict[str, Any]:
        """All metrics by name, JSON-able."""
        return asdict(self)


class Meter:
    """Gathers the metrics of consecutive steps; keeps a few numbers of each, not the plans."""

    def __init__(self) -> None:
        self._last: StepPlan | None = None
        self._num_documents = 0
        self._padding_tokens = 0
        self._step_tokens: list[int] = []
        self._imbalances: list[float] = []
        self._rank_imbalances: list[float] = []
        self._max_us = 0.0  # Σ over the steps of max · N
        self._total_us = 0.0
        self._delays: Counter[int] = Counter()  # tokens by delay

    def add(self, plan: StepPlan) -> None:
        """Counts one more step."""
        times_us = [micro_batch.predicted_us for micro_batch in plan]
        self._last = plan
        self._padding_tokens += plan.padding_tokens
        self._step_tokens.append(plan.num_tokens)
        self._imbalances.append(plan.imbalance)
        self._rank_imbalances.append(
            imbalance([sum(m.predicted_us for m in rank) for rank in plan.micro_batches])
        )
        self._max_us += max(times_us) * len(times_us)
        self._total_us += sum(times_us)
        for document in plan.documents:
            self._num_documents += 1
            self._delays[abs(plan.step - document.step)] += document.length

    def metrics(self, waiting: Sequence[Document] = ()) -> PackingMetrics:
        """The metrics of the steps so far, after which the documents ``waiting`` had not run.

        Those that were only read ahead do not count as waiting.

        Raises :class:`PlanError` without steps, or if ``waiting`` is not what the last one counted.
        """
        last = self._last
        if last is None:
            raise PlanError("no steps to measure; plan at least one")
        waiting = [document for document in waiting if document.step <= last.step]
        if len(waiting) != last.num_waiting:
            raise PlanError(
                f"{last.num_waiting} documents wait after step {last.step}, but {len(waiting)} "
                "were given to measure; give packer.waiting as it was then"
            )
        tokens = np.array(self._step_tokens, dtype=np.float64)
        num_tokens, padding, delays = sum(self._step_tokens), self._padding_tokens, self._delays
        waiting_tokens = sum(document.length for document in waiting)
        waited = sum(document.length * (last.step + 1 - document.step) for document in waiting)
        return PackingMetrics(
            num_steps=len(tokens),
            num_documents=self._num_documents,
            num_tokens=num_tokens,
            imbalance_mean=float(np.mean(self._imbalances)),
            imbalance_weighted=self._max_us / self._total_us if self._total_us else 1.0,
            imbalance_p95=float(np.percentile(self._imbalances, 95)),
            imbalance_worst=max(self._imbalances),
            rank_imbalance_mean=float(np.mean(self._rank_imbalances)),
            delay_mean_steps=sum(delay * n for delay, n in delays.items()) / max(1, num_tokens),
            delay_p99_steps=_percentile(delays, 99),
            delay_max_steps=max(delays, default=0),
            num_waiting=len(waiting),
            waiting_tokens=waiting_tokens,
            waiting_age_mean_steps=waited / max(1, waiting_tokens),
            tokens_cv=float(tokens.std() / tokens.mean()) if num_tokens else 0.0,
            padding_share=padding / max(1, padding + num_tokens),
        )


def measure(plans: Iterable[StepPlan], waiting: Sequence[Document] = ()) -> PackingMetrics:
    """Metrics of consecutive ``plans``; for ``waiting`` and errors see :meth:`Meter.metrics`."""
    meter = Meter()
    for plan in plans:
        meter.add(plan)
    return meter.metrics(waiting)


def _percentile(delays: Counter[int], percent: int) -> int:
    """The least delay that ``percent`` of the tokens do not exceed."""
    needed = delays.total() * percent
    seen = 0
    for delay in sorted(delays):
        seen += 100 * delays[delay]
        if seen >= needed:
            return delay
    return 0
