"""Packs each replica's documents in as many micro-batches as is fastest (Hydraulis §6, Appendix C).

The second stage of assigning documents; :mod:`megatron_wlb.planning.balance.dispatch` is the first.
Departures from the paper, with their reasons:

* A replica's time is that of the simulated schedule. The paper's ``max · (PP - 1 + V)`` is an upper
  bound that is several times too high where micro-batches are unlike.
* Micro-batches are packed by LPT instead of an ILP, which takes a hundred times the time and is no
  faster in the mean (docs/results/hydraulis.md).

Legend: ``B`` documents, in descending order of length; ``V`` micro-batches of a replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.schedule.graph import Floats, graph_of
from megatron_wlb.cost.slices import NOTHING, UnitTable
from megatron_wlb.plan import MicroBatchPlan, Sharing, Units
from megatron_wlb.planning.balance.dispatch import WORTH, Numbers, StepDocuments
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts
from megatron_wlb.planning.greedy import small_at_ends
from megatron_wlb.planning.packing.placement import place
from megatron_wlb.planning.slicing.room import rows_seen

T = TypeVar("T")

MOST_TRIES = 3
"""Numbers of micro-batches that are simulated of a replica."""


@dataclass(frozen=True)
class Packed:
    """A replica's documents in micro-batches."""

    us: float
    bins: Numbers


def numbers_to_try(
    costs: ReplicaCosts, times_us: Floats, lengths: npt.NDArray[np.int64], dp_size: int = 1
) -> list[int]:
    """Numbers of micro-batches to try of each of so many equal replicas, the most promising first.
    ``times_us`` and ``lengths`` are those of all their documents, the longest first.

    By ``Σ + (PP - 1) / VPP · max``, whose maximum is at least the mean and the longest document.
    From V = Σ ÷ longest on only simulation tells them apart, so they stand apart by a quarter.
    """
    total_us, longest_us = float(times_us.sum()) / dp_size, float(times_us[0])
    num_tokens, num_documents = -(-int(lengths.sum()) // dp_size), -(-len(lengths) // dp_size)
    least = max(1, -(-num_tokens // costs.max_tokens))
    most = max(least, min(num_documents, num_tokens // costs.least_tokens))
    unit = costs.number_multiple
    if costs.scheme.pp_size == 1:
        return [_round_up(least, unit)]
    each_us = costs.micro_batch_us

    def bound_us(number: int) -> float:
        slowest_us = max(total_us / number, longest_us) + each_us
        return total_us + number * each_us + costs.warm_up * slowest_us

    grid = {_round_up(number, unit) for number in (least, *_grid(least, most), most)}
    chosen: list[int] = []
    for number in sorted(grid, key=lambda number: (bound_us(number), number)):
        if all(max(number, other) >= 1.25 * min(number, other) for other in chosen):
            chosen.append(number)
    return chosen[:MOST_TRIES]


def _grid(least: int, most: int) -> Iterator[int]:
    """Numbers in ``[least, most]``: all up to 8, then eight in each doubling, so that schedules
    are few and known.
    """
    for number in range(least, most + 1):
        if number <= 8 or number % (1 << (number.bit_length() - 4)) == 0:
            yield number


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def pack(
    step: StepDocuments,
    costs: ReplicaCosts,
    replicas: Sequence[list[int]],
    floor_us: float,
    exchange_us: Floats | None = None,
) -> list[Packed]:
    """Packs each replica's documents, with the number of micro-batches that is fastest.

    Only replicas that the step may wait for are tried with other numbers: ``floor_us`` is less
    than the step takes. ``exchange_us`` is ``[2, replicas]``: what weights and gradients take.
    """
    times_us, lengths = step.us(costs), step.lengths
    tries = [numbers_to_try(costs, times_us[own], lengths[own]) for own in replicas]
    best: list[Packed | None] = [None] * len(replicas)
    for turn in range(MOST_TRIES):
        enough_us = floor_us * (1 + WORTH)
        due: dict[int, list[tuple[int, Numbers]]] = {}
        for at, own in enumerate(replicas):
            known = best[at]
            if turn < len(tries[at]) and (known is None or known.us > enough_us):
                bins = bins_of(step, costs, own, tries[at][turn])
                due.setdefault(len(bins), []).append((at, bins))
        if not due:
            break
        for some in due.values():
            own_us = None if exchange_us is None else exchange_us[:, [at for at, _ in some]]
            for (at, bins), us in zip(some, replica_us(step, costs, some, own_us), strict=True):
                known = best[at]
                if known is None or us < known.us:
                    best[at] = Packed(us, bins)
    return [own for own in best if own is not None]


def bins_of(step: StepDocuments, costs: ReplicaCosts, documents: list[int], number: int) -> Numbers:
    """LPT into so many micro-batches, or more where they would not hold all, in running order."""
    unit = costs.number_multiple
    times_us, lengths = step.us(costs)[documents], step.lengths[documents]
    assert lengths.max(initial=0) <= costs.max_tokens  # Else no number has room.
    while True:
        found = place(times_us, lengths, number, costs.max_tokens)
        if not len(found.left):
            break
        number += unit
    bins: Numbers = [[] for _ in range(number)]
    for document, at in zip(documents, found.index_of.tolist(), strict=True):
        bins[at].append(document)
    order = sorted(range(number), key=lambda at: (found.loads_us[at], at))
    return running_order([bins[at] for at in order], costs)


def running_order(ascending: Sequence[T], costs: ReplicaCosts) -> list[T]:
    """A replica's micro-batches, which ascend in load, as they are to run."""
    if costs.scheme.pp_size == 1:  # no bubbles; the largest two hide most of the exchange
        return [ascending[-1], *ascending[:-1]]
    return small_at_ends(ascending)


def replica_us(
    step: StepDocuments,
    costs: ReplicaCosts,
    some: Sequence[tuple[int, Numbers]],
    exchange_us: Floats | None = None,
) -> list[float]:
    """Simulated times of replicas with equally many micro-batches, together."""
    scheme, number = costs.scheme, len(some[0][1])
    multiple, sizes = scheme.length_multiple, step.sizes
    segments, padded = [], []
    for _, bins in some:
        for own in bins:
            lengths = [sizes[n] for n in own]
            total = max(1, -(-sum(lengths) // multiple)) * multiple
            segments.append([*lengths, total - sum(lengths)])
            padded.append(total)
    stages = costs.costs.stages
    times_us = stages.times_us(segments).reshape(2, -1, len(some), number)
    graph = graph_of(scheme.pp_size, scheme.vpp_size, number, costs.group_size)
    p2p_us = costs.costs.p2p_us(padded).reshape(len(some), number)
    done = graph.step_us(np.moveaxis(times_us, 2, 3), p2p_us.T)
    if exchange_us is not None:
        # The first stage runs first and last: the first forward hides the pull, the last backward
        # the push.
        beside_us = times_us[0, 0, :, 0], times_us[1, 0, :, -1]
        for own_us, passes_us in zip(exchange_us, beside_us, strict=True):
            done = done + costs.waits_us(own_us, passes_us)
    result: list[float] = np.atleast_1d(done).tolist()
    return result


# ── plans ───────────────────────────────────────────────────────────────────────────────────────


Ranks: TypeAlias = tuple[tuple[MicroBatchPlan, ...], ...]


def laid_out(
    replicas: Iterable[tuple[Units, ReplicaCosts]],
) -> tuple[Ranks, tuple[tuple[int, ...], ...]]:
    """The micro-batches of each replica, numbered on, and its chains; no chains where no replica
    has any.
    """
    ranks: list[tuple[MicroBatchPlan, ...]] = []
    chains, numbers = [], count()
    for units, costs in replicas:
        multiple, size = costs.scheme.length_multiple, len(units.spans)
        again = units.recomputed or [NOTHING] * size
        sharing = units.sharing or [Sharing()] * size
        own = [
            MicroBatchPlan(
                next(numbers),
                tuple(spans),
                max(1, -(-sum(span.length for span in spans) // multiple)) * multiple,
                0.0,
                recomputed=each,
                divided=units.divided and bool(spans) and spans[0].is_slice,
                sharing=shared,
            )
            for spans, each, shared in zip(units.spans, again, sharing, strict=True)
        ]
        starts, branches = rows_seen((m.spans, m.sharing) for m in own)
        lengths = [[span.length for span in m.spans] for m in own]
        given = lengths, None, UnitTable.starting(starts), branches
        times_us = costs.costs.stages.times_us(*given).sum(axis=(0, 1))
        ranks.append(
            tuple(replace(m, predicted_us=us) for m, us in zip(own, times_us.tolist(), strict=True))
        )
        chains.append(tuple(units.chains))
    return tuple(ranks), tuple(chains) if any(chains) else ()
