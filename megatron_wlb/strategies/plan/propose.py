"""Proposes the strategies that a run chooses from, by its documents (Hydraulis §7).

Once for the whole run: every scheme that fits in memory is priced; dynamic programming over
intervals of length and ranks says which scheme is best for which lengths, for each longest length
that a step may have; fractions of replicas are rounded to whole ones in each way near them; and of
all these, with every equal layout, those are kept that make simulated steps fastest together.

Departures from the paper: all ranks of an interval's scheme are counted, so the scheme of an
interval does not depend on how many ranks it gets; rounding shares what is left out again among the
other schemes; and the candidates are few, as each is simulated on sample steps before it is kept.

Legend: ``E`` lengths at which intervals end; ``R`` parts of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost import AnalyticModel, Cost, MemoryModel
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.balance.dispatch import StepDocuments, lower_bound_us
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts, Scheme
from megatron_wlb.planning.run import Devices
from megatron_wlb.strategies.plan.assigner import Candidate, assign
from megatron_wlb.strategies.plan.sliced_replica import sliced_costs
from megatron_wlb.strategies.plan.store_costs import ExchangeTimes, ParameterStore
from megatron_wlb.strategies.plan.strategy import Cluster, Strategy
from megatron_wlb.strategies.plan.whole_replica import replica_costs

NUM_PARTS = 128
"""Parts of all ranks that intervals are given: the step of n (0.1 replicas in the paper)."""
NUM_INTERVALS = 16
"""Intervals of length besides those that end where a scheme's memory does."""
MOST_STAGES = 8
MOST_SIMULATED, MOST_EQUAL = 40, 8
"""Strategies, and equal layouts, that are simulated on all sample steps: the best on a quarter of
them."""
MOST_CANDIDATES = 10
WORTH = 0.003
"""A share of the time of all sample steps for which one more candidate is kept."""


@dataclass(frozen=True)
class StrategySpace(Devices):
    """All schemes of a model on a cluster, and what each costs.

    The vocabulary is padded for every TP.
    """

    ep_size: int = 1
    etp_size: int | None = None
    """How far experts are divided in replicas that have so many ranks
    (:meth:`.Scheme.expert_sizes`)."""
    longest: int = 1 << 17
    """The longest document that may come: no room is looked for slices of longer ones."""
    measured: Mapping[tuple[int, int], Cost] | None = None
    """Measured times of documents by TP and CP; other replicas are not offered then."""
    slices: bool = True
    """Whether pipelines may also run documents in slices."""
    schemes: tuple[Scheme, ...] | None = None
    """What replicas may be; if not given, all powers of two of TP in a node and of CP, with each
    PP up to :data:`MOST_STAGES` that divides the layers."""

    @cached_property
    def cluster(self) -> Cluster:
        return Cluster(self.num_devices, self.hardware.devices_per_node)

    @cached_property
    def store(self) -> ParameterStore:
        store = ParameterStore.of(self.shape, self.cluster, self.ep_size, self.etp_size)
        return replace(store, weight_bytes=self.element_bytes)

    @cached_property
    def _priced(self) -> tuple[dict[tuple[Scheme, int], ReplicaCosts], dict[Scheme, str]]:
        fit: dict[tuple[Scheme, int], ReplicaCosts] = {}
        rejected: dict[Scheme, str] = {}
        for scheme in self.offered():
            try:
                found = self.price(scheme)
            except ConfigError as error:
                rejected[scheme] = str(error)
            else:
                fit[found.kind] = found
        return fit, rejected

    @cached_property
    def _given(self) -> dict[tuple[Scheme, int], ReplicaCosts]:
        """What kinds cost that were asked for and are not in :attr:`costs`."""
        return {}

    @property
    def costs(self) -> Mapping[tuple[Scheme, int], ReplicaCosts]:
        """What every scheme that fits in memory costs."""
        return self._priced[0]

    @property
    def rejected(self) -> Mapping[Scheme, str]:
        """Why others do not."""
        return self._priced[1]

    def price(self, scheme: Scheme, longest: int | None = None) -> ReplicaCosts:
        """Costs of a replica; ``longest`` replaces the space's. Raises :class:`ConfigError` where
        it cannot be, or does not fit.
        """
        ep_size, etp_size = scheme.expert_sizes(self.ep_size, self.etp_size)
        layout = replace(scheme.parallelism, ep_size=ep_size, etp_size=etp_size)
        placed = self.executed(parallelism=layout, store_ranks=self.num_devices)
        memory = MemoryModel(self.shape, placed.execution)
        model = AnalyticModel(self.shape, placed.execution, self.hardware)
        given = model, memory, self.limit_gib(layout) * GIB, self._measured(scheme)
        if scheme.sliced:
            return sliced_costs(*given, longest or self.longest)
        return replica_costs(*given)

    def _measured(self, scheme: Scheme) -> Cost | None:
        if self.measured is None:
            return None
        found = self.measured.get((scheme.tp_size, scheme.cp_size))
        if found is None:
            known = ", ".join(str(Scheme(*sizes)) for sizes in sorted(self.measured))
            raise ConfigError(
                f"--wlb-cost has no tables for {scheme}, only for {known}; measure that TP and CP, "
                "too, or leave such replicas out"
            )
        return found

    def candidate(self, strategy: Strategy) -> Candidate:
        """A strategy with its costs; kinds that this space has not are priced as they come.

        Their ``max_tokens`` are the strategy's. Raises :class:`ConfigError` for those that memory
        does not hold.
        """
        costs = dict(self.costs)
        for kind in strategy.kinds:
            if kind not in costs:
                costs[kind] = self._given[kind] = self._given.get(kind) or self._limited(*kind)
        times = self.exchange(strategy)
        pull_us, push_us = (
            tuple(float(us[list(replica.ranks)].max()) for replica in strategy.replicas)
            for us in (times.pull_us, times.push_us)
        )
        return Candidate(strategy, costs, times.update_us + times.apart_us, pull_us, push_us)

    def exchange(self, strategy: Strategy) -> ExchangeTimes:
        """What the exchange of a strategy with known costs takes. What memory does not hold at once
        goes before or behind the passes.
        """
        times = self.store.times(strategy, self.hardware)
        given = self.store.shard_elements * len(strategy.replicas)
        sizes = self.store.weight_bytes, self.store.gradient_bytes
        held = np.ones((2, self.num_devices))
        for kind, numbers in strategy.kinds.items():
            own = self.costs.get(kind) or self._given[kind]
            for stage, (at, size) in product(range(own.scheme.pp_size), enumerate(sizes)):
                ranks = [rank for n in numbers for rank in strategy.replicas[n].stages[stage]]
                held[at, ranks] = own.held(stage, given, size)
        whole_us = np.array([times.pull_us, times.push_us])
        pull_us, push_us = held * whole_us
        apart_us = float((whole_us.sum(axis=0) - pull_us - push_us).max())
        return replace(times, pull_us=pull_us, push_us=push_us, apart_us=apart_us)

    def equal(self, costs: ReplicaCosts) -> Candidate:
        """The strategy of as many such replicas as there is room for."""
        num = self.num_devices // costs.scheme.num_ranks
        return self.candidate(Strategy.of(self.cluster, [costs.kind] * num))

    def _limited(self, scheme: Scheme, max_tokens: int) -> ReplicaCosts:
        own = self.price(scheme, max_tokens)
        if max_tokens > own.max_tokens:
            raise ConfigError(
                f"{scheme} is to take documents of {max_tokens} tokens, but memory holds "
                f"{own.max_tokens}; give less, or use more TP, CP or PP"
            )
        return replace(own, max_tokens=max_tokens)

    def offered(self) -> Iterator[Scheme]:
        """All schemes that replicas may have, whether they fit or not."""
        if self.schemes is not None:
            yield from self.schemes
            return
        sizes = [*_powers(self.num_devices)]
        node = self.cluster.devices_per_node
        in_node = [*_powers(min(self.num_devices, node, self.max_tp or node))]
        pipelines = [n for n in range(1, MOST_STAGES + 1) if self.shape.num_layers % n == 0]
        for tp_size, cp_size, pp_size in product(in_node, sizes, pipelines):
            if tp_size * cp_size * pp_size <= self.num_devices:
                yield Scheme(tp_size, cp_size, pp_size)
                if pp_size > 1 and self.slices:
                    yield Scheme(tp_size, cp_size, pp_size, sliced=True)


@dataclass(frozen=True)
class Proposal:
    """What was found."""

    candidates: tuple[Candidate, ...]
    """The strategies to choose from in each step, the most useful first."""
    best_equal: Candidate
    """The fastest equal layout that takes every document."""
    num_tried: int


def propose(
    space: StrategySpace,
    steps: Sequence[Sequence[int]],
    *,
    longest: int | None = None,
    most: int = MOST_CANDIDATES,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Proposal:
    """Proposes strategies for steps of such lengths.

    Args:
        space: the schemes.
        steps: sample steps, lengths of the documents of each.
        longest: the longest document that may come; that of the samples if not given.
        most: strategies to keep.
        progress: told how many of how many strategies are simulated.

    Raises:
        ConfigError: no scheme takes the longest document.
    """
    lengths = np.sort(np.array([n for step in steps for n in step], dtype=np.int64))
    longest = max(longest or 1, int(lengths[-1]))
    if not any(tokens >= longest for _, tokens in space.costs):
        nearest = max((tokens for _, tokens in space.costs), default=0)
        raise ConfigError(
            f"no replica on {space.num_devices} devices takes a document of {longest} tokens, the "
            f"most is {nearest}; recompute activations, split documents, or use more devices"
        )
    documents = [StepDocuments(step) for step in steps]
    pool = [*map(space.equal, space.costs.values())]
    num_equal = len(pool)
    pool += map(space.candidate, _rounded_strategies(space, lengths))
    num_tried, few = len(pool), max(1, len(documents) // 4)
    able = np.array([candidate.strategy.max_tokens >= longest for candidate in pool])
    equal = np.arange(num_tried) < num_equal
    is_equal = able & equal
    table = _simulated(pool, documents[:few], equal, progress)
    # Beside the best equal layout, not alone: few strategies take the longest documents.
    alone = np.where(is_equal, table.sum(axis=1), math.inf)
    beside = np.minimum(table, table[alone.argmin()]).sum(axis=1)
    likely = {*np.argsort(beside, kind="stable")[:MOST_SIMULATED].tolist()}
    likely |= {n for n in np.argsort(alone, kind="stable")[:MOST_EQUAL].tolist() if is_equal[n]}
    kept_pool = sorted(likely)
    pool, able, is_equal = [pool[n] for n in kept_pool], able[kept_pool], is_equal[kept_pool]
    rest = _simulated(pool, documents[few:], is_equal, progress)
    table = np.concatenate([table[kept_pool], rest], axis=1)
    best_equal = int(np.where(is_equal, table.sum(axis=1), math.inf).argmin())
    kept = [int(np.where(able, table.sum(axis=1), math.inf).argmin())]
    while len(kept) < most:
        own = table[kept].min(axis=0)
        gains = own.sum() - np.minimum(table, own).sum(axis=1)
        gains[kept] = 0.0
        best = int(gains.argmax())
        if gains[best] <= WORTH * own.sum():
            break
        kept.append(best)
    return Proposal(tuple(pool[number] for number in kept), pool[best_equal], num_tried)


def _simulated(
    pool: Sequence[Candidate],
    steps: Sequence[StepDocuments],
    always: npt.NDArray[np.bool_],
    progress: Callable[[int, int], object],
) -> npt.NDArray[np.float64]:
    """``[candidates, steps]``: times of steps; infinite where a candidate does not take them.

    But for those that ``always`` are simulated, it is their bound where that is above the best time
    before.
    """
    table = np.full((len(pool), len(steps)), math.inf)
    best_us = [math.inf] * len(steps)
    for number, candidate in enumerate(pool):
        for at, step in enumerate(steps):
            if step.longest > candidate.strategy.max_tokens:
                continue
            us = lower_bound_us(step, candidate.groups) + candidate.fixed_us
            if always[number] or us < best_us[at]:
                found = assign(step, candidate)
                assert found is not None
                us = found.step_us
                best_us[at] = min(us, best_us[at])
            table[number, at] = us
        progress(number + 1, len(pool))
    return table


# ── which scheme for which lengths ──────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Share:
    """A scheme's part of a relaxed strategy."""

    costs: ReplicaCosts
    num_replicas: float


def relaxed(
    priced: Sequence[ReplicaCosts], num_devices: int, lengths: npt.NDArray[np.int64]
) -> list[list[Share]]:
    """The best relaxed strategy for each longest length: shares of schemes, for long ones first.

    ``t[n][l]`` of Equation 4 is the least time in which n ranks run all documents up to l. Each
    interval's documents run on one scheme, which may have a fraction of a replica.
    """
    edges = _edges(priced, lengths)
    assert lengths[-1] <= edges[-1]
    sizes = np.array([costs.scheme.num_ranks for costs in priced])
    values, counts = np.unique(lengths, return_counts=True)
    at_edges = np.searchsorted(values, edges, side="right")
    # [schemes, 1 + E]: ranks · µs of all documents up to each edge.
    work = np.array(
        [
            [0.0, *np.cumsum(counts * _work_us(costs, values))[at_edges - 1]]
            for costs in priced
        ]
    ) * sizes[:, None]  # fmt: skip
    reach = np.array([costs.max_tokens for costs in priced])
    parts = np.arange(NUM_PARTS + 1)
    given = parts[None, :]  # ranks that the last interval gets, of n
    before = parts[:, None] - given
    each = num_devices / NUM_PARTS
    times = [np.zeros(NUM_PARTS + 1)]
    chosen: list[list[tuple[int, int, int]]] = [[]]  # [E][n]: interval's start, scheme, parts
    for stop in range(1, len(edges) + 1):
        best = np.full(NUM_PARTS + 1, math.inf)
        how = [(0, 0, 0)] * (NUM_PARTS + 1)
        able = np.flatnonzero(reach >= edges[stop - 1])
        for start in range(stop):
            own = work[able, stop] - work[able, start]
            scheme = int(able[own.argmin()])
            with np.errstate(divide="ignore"):
                own_us = own.min() / (given * each) if own.min() else np.zeros_like(given, float)
            total = np.where(before >= 0, np.maximum(times[start][before], own_us), math.inf)
            at = total.argmin(axis=1)
            least = total[parts, at]
            for n in np.flatnonzero(least < best).tolist():
                best[n], how[n] = least[n], (start, scheme, int(at[n]))
        times.append(best)
        chosen.append(how)
    found = []
    for stop in range(len(edges), 0, -1):
        shares: dict[int, float] = {}
        n = NUM_PARTS
        while stop:
            stop, scheme, own = chosen[stop][n]
            shares[scheme] = shares.get(scheme, 0.0) + own * each / sizes[scheme]
            n -= own
        found.append([Share(priced[scheme], num) for scheme, num in shares.items()])
    return found


def _work_us(costs: ReplicaCosts, lengths: npt.NDArray[np.int64]) -> Floats:
    """T(l, P) of documents, where nothing but slices' filling is waited for."""
    us: Floats = costs.rank_us(lengths.tolist()).max(axis=0) * (1 + costs.filling)
    return us


def _edges(priced: Sequence[ReplicaCosts], lengths: npt.NDArray[np.int64]) -> list[int]:
    """Where intervals end: at the reach of schemes, and where as much work lies between."""
    longest = int(lengths[-1])
    weights = np.cumsum(lengths)
    at = np.searchsorted(weights, weights[-1] * np.arange(1, NUM_INTERVALS) / NUM_INTERVALS)
    edges = {int(lengths[n]) for n in at.tolist()} | {longest}
    edges |= {costs.max_tokens for costs in priced if lengths[0] <= costs.max_tokens < longest}
    most = max(costs.max_tokens for costs in priced)
    return sorted(edge for edge in edges if edge <= most)


def _rounded_strategies(space: StrategySpace, lengths: npt.NDArray[np.int64]) -> Iterator[Strategy]:
    """Every strategy of whole replicas near a relaxed one, once: of all schemes, and of those that
    run documents whole.
    """
    seen: set[tuple[int, ...]] = set()
    names = {kind: number for number, kind in enumerate(space.costs)}
    every = list(space.costs.values())
    whole = [costs for costs in every if not costs.scheme.sliced]
    reach = max((costs.max_tokens for costs in whole), default=0)
    given = [(every, lengths), (whole, lengths[lengths <= reach])]
    if len(whole) == len(every) or not len(given[1][1]):
        given.pop()
    for shares in (own for some, fit in given for own in relaxed(some, space.num_devices, fit)):
        shares = sorted(shares, key=lambda share: -share.costs.max_tokens)
        sizes = [share.costs.scheme.num_ranks for share in shares]
        numbers = [share.num_replicas for share in shares]
        for counts in _rounded(numbers, sizes, space.num_devices):
            if not counts[0]:
                continue  # Nothing would take the longest documents.
            pairs = zip(shares, counts, strict=True)
            kinds = [share.costs.kind for share, count in pairs for _ in range(count)]
            key = tuple(names[kind] for kind in kinds)
            if kinds and key not in seen:
                seen.add(key)
                try:
                    yield Strategy.of(space.cluster, kinds)
                except ConfigError:  # as TP groups of odd sizes leave gaps in nodes
                    continue


def _rounded(
    numbers: Sequence[float], sizes: Sequence[int], num_ranks: int
) -> Iterator[tuple[int, ...]]:
    """Whole numbers of replicas near ``numbers``: each up and down in turn.

    What rounding leaves or takes is shared by those behind in proportion.
    """
    if not numbers:
        yield ()
        return
    size, wanted = sizes[0], sum(n * s for n, s in zip(numbers, sizes, strict=True))
    number = numbers[0] * num_ranks / wanted if wanted else 0.0
    last = len(numbers) == 1
    near = {math.floor(number), math.ceil(number)} if not last else {num_ranks // size}
    for count in sorted(near):
        if count * size > num_ranks:
            continue
        for rest in _rounded(numbers[1:], sizes[1:], num_ranks - count * size):
            yield (count, *rest)


def _powers(most: int) -> Iterator[int]:
    return (1 << n for n in range(most.bit_length()))
