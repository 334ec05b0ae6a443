"""A replica of a strategy that cuts long documents into slices: what it costs, and its units.

Hydraulis runs documents whole, so the longest one that a replica takes must fit its memory once for
each micro-batch in flight, and stalls its pipeline. In slices (SlimPack §4) a document's
activations are held once, and bubbles are as short as a slice. So fewer ranks take a document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from megatron_wlb.cost import AnalyticModel, Cost, CostModel, MemoryModel
from megatron_wlb.cost.table import ProfiledCost
from megatron_wlb.plan import Document, Span, Units
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts
from megatron_wlb.planning.slicing.cut import Slicer
from megatron_wlb.planning.slicing.pipeline import Pipeline
from megatron_wlb.planning.slicing.room import MemoryLimit, worst_steps
from megatron_wlb.planning.slicing.units import SLICE_MULTIPLE, Cuts, slice_multiple
from megatron_wlb.strategies.plan.whole_replica import replica_costs

UNITS = 16
"""Units for each stage, where documents are long enough: filling and draining the pipeline take
less than a 16th of the step."""
FEWEST_UNITS = 4
"""Units for each stage into which the longest document is cut at least, however short it is."""
MOST_TRIES = 3
"""Lengths that are tried besides the longest, for the longest document that memory holds."""
MOST_KNOWN = 64
"""Replicas of a scheme that a step may have, about."""


@dataclass(frozen=True, eq=False)
class SlicedCosts(ReplicaCosts):
    """Costs of a replica whose documents run in slices.

    ``max_tokens`` is the longest document, and ``least_tokens`` what a unit has at least in the
    mean.
    """

    cost: CostModel = field(kw_only=True)
    """The time of documents in the whole model, by which they are cut."""

    @property
    def warm_up(self) -> float:
        """0: no document stalls the others."""
        return 0.0

    @property
    def filling(self) -> float:
        """As in a step with most units."""
        return (self.scheme.pp_size - 1) / (self.scheme.vpp_size * self.most_units)

    @property
    def most_units(self) -> int:
        return UNITS * self.scheme.pp_size

    @cached_property
    def slicer(self) -> Slicer:
        assert self.memory is not None
        multiple, layout = self.scheme.length_multiple, self.scheme.parallelism
        execution = self.memory.execution
        recomputes = execution.recompute.granularity is None and execution.recomputes
        memory = MemoryLimit(self.memory, self.limit_bytes, multiple, False, recomputes)
        return Slicer(
            Cuts(self.cost, self.max_tokens, multiple, slice_multiple(self.max_tokens)),
            Pipeline(self.costs, layout, multiple, memory=memory),
            [self.most_units],
            worst=worst_steps(self.max_tokens, 2 * self.max_tokens),
        )

    @property
    def fits(self) -> bool:
        """Whether memory holds slices of the longest documents."""
        return self.slicer.peak_bytes <= self.limit_bytes

    def units(self, given: Sequence[Sequence[Document]]) -> Units:
        """Cuts the documents, however they are ``given``."""
        documents = [document for one in given for document in one]
        if not documents:
            return Units([])
        units = self._laid(tuple(document.length for document in documents))
        spans = [
            [Span(documents[document.number], start, stop) for document, start, stop in own]
            for own in units.spans
        ]
        return units._replace(spans=spans)

    @cached_property
    def _laid(self) -> Callable[[tuple[int, ...]], Units]:
        """The units of documents of such lengths, which are numbered. A step asks for them as it is
        assigned, and as it is planned.
        """
        return lru_cache(maxsize=MOST_KNOWN)(self._lay)

    def _lay(self, lengths: tuple[int, ...]) -> Units:
        documents = [Document(0, n, 0, own, True, 0, n, 0) for n, own in enumerate(lengths)]
        longest = self.max_tokens // (FEWEST_UNITS * self.scheme.pp_size)
        shortest = max(1, min(self.least_tokens, longest))
        number = min(self.most_units, sum(lengths) // shortest)
        return self.slicer.alone(documents, max(1, number))

    def step_us(self, lengths: Sequence[int], pull_us: float, push_us: float) -> float:
        """Simulated time of documents of these lengths, with what is waited for of the exchange."""
        units = self._laid(tuple(lengths))
        (forward_us, backward_us), *_ = self.slicer.pipeline.times_us(units)
        last = len(units.spans) - units.chains[-1]  # whose backward pass ends the step
        beside_us = np.array([forward_us[0, 0], backward_us[0, last]])
        waits_us = self.waits_us(np.array([pull_us, push_us]), beside_us)
        return self.slicer.pipeline.simulated_us([units]) + float(waits_us.sum())


def sliced_costs(
    model: AnalyticModel,
    memory: MemoryModel,
    limit_bytes: float,
    measured: Cost | None,
    longest: int,
) -> SlicedCosts:
    """Costs of one replica alone, as :func:`.replica_costs`; its documents may be as long as memory
    holds, about, and as ``longest`` at most.

    Raises :class:`ConfigError` where such a replica cannot be, or has no room for slices of the
    documents that it takes whole.
    """
    whole = replica_costs(model, memory, limit_bytes, measured)
    scheme, multiple, cost = whole.scheme, whole.scheme.length_multiple, measured or model.cost()
    if isinstance(measured, ProfiledCost) and measured.most_tokens < longest + SLICE_MULTIPLE:
        end = int(min(longest, measured.most_tokens))  # no cut is looked for beyond
        longest = end - end % math.lcm(multiple, slice_multiple(end))

    def taking(max_tokens: int) -> SlicedCosts:
        return SlicedCosts(
            replace(scheme, sliced=True), max_tokens, whole.costs, whole.least_tokens, memory,
            cost=cost, limit_bytes=limit_bytes,
        )  # fmt: skip

    high = -(-longest // multiple) * multiple
    low = min(whole.max_tokens, high)
    best = taking(high)
    if best.fits:
        return best
    best = taking(low)
    best.slicer.check_room()
    for _ in range(MOST_TRIES):
        middle = int(math.sqrt(low * high))
        found = taking(middle - middle % multiple)
        low, high, best = (middle, high, found) if found.fits else (low, middle, best)
    return best
