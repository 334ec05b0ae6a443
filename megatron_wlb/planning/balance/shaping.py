"""Shaped plans: sizes and order of a step's micro-batches by simulated step time.

Equal micro-batches are not the fastest. The first ones fill the pipeline and the last ones drain
it while other ranks wait, so a step is shorter when these are small and those between larger. For
micro-batches of sizes ``w`` the step is a maximum over paths of sums of ``w``, which is convex: its
minimum over all ``w`` with ``Σ w = 1`` is found once for a run (:func:`best_sizes`). Each step's
documents are then placed to come near these sizes, heaviest first, and moved while that makes the
simulated step shorter. The imbalance degree cannot see this: shaped plans are unequal on purpose.

Legend: ``S`` virtual stages, ``N`` micro-batches of a data-parallel rank, ``D`` documents, ``K``
alternatives, ``Q`` different stages. Everything is computed by additions, products, divisions and
comparisons of 64-bit numbers in a fixed order, and by counts instead of clocks, so that all ranks
come to the same plan.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from megatron_wlb.cost.document import DocumentCost
from megatron_wlb.cost.schedule.graph import Floats, Graph, graph_of
from megatron_wlb.cost.shape import Parallelism
from megatron_wlb.cost.step_costs import BACKWARD_OVERHEAD, StageCost, StepCosts
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document
from megatron_wlb.planning.greedy import Bins
from megatron_wlb.planning.packing import check_shaping

Ranks: TypeAlias = Sequence[Sequence[Sequence[Document]]]
"""``[dp_size][N][documents]``, in running order."""

DESCENT_ROUNDS = 300
MOMENTUM = 0.8
NUM_ALTERNATIVES = 64
MAX_ROUNDS = 16
ROUND_ACTIONS = 3072
"""Actions of the schedule that are looked at in rounds of alternatives: 6 rounds for PP=4 and
N=64, some 20 ms."""
MOVES = (0.3, 0.1, 0.03, 0.01)
"""Work of the documents that are tried to move, in mean micro-batches."""
PATIENCE = 3
"""Rounds without success in a row, each with other pairs of micro-batches, after which it ends."""
WORTH_MOVING = 1e-6
"""Share of the step that a move must save: less may be rounding."""
GRID = 257
"""Points between which tables of measured costs are taken as straight lines."""


class _Work:
    """Times of any set of micro-batches from sums over their documents."""

    def __init__(self, stages: Sequence[StageCost], max_tokens: int) -> None:
        kinds: list[StageCost] = []
        self._kind: list[int] = []  # of each stage
        for stage in stages:
            same = [n for n, kind in enumerate(kinds) if kind is stage or kind == stage]
            if not same:
                kinds.append(stage)
            self._kind.append(same[0] if same else len(kinds) - 1)
        self._kinds = kinds
        self._grid = np.unique(np.linspace(0, max_tokens, GRID).round())
        self._linear = [
            None if isinstance(kind, DocumentCost) else self._table(kind) for kind in kinds
        ]

    def _table(self, kind: StageCost) -> Floats:
        """Times of all but attention, by tokens: ``[2, GRID]``."""
        works = [kind.work([int(tokens)]) for tokens in self._grid[1:]]
        nothing = (0.0, 0.0)
        linear = [nothing, *((w.forward_linear_us, w.backward_linear_us) for w in works)]
        overhead_us = works[0].overhead_us
        shares = np.array([1 - BACKWARD_OVERHEAD, BACKWARD_OVERHEAD]) * overhead_us
        return np.array(linear, dtype=np.float64).T + shares[:, None]

    def attention_us(self, lengths: Sequence[int]) -> Floats:
        """Attention times of single documents, ``[2, Q, D]``."""
        result = np.empty((2, len(self._kinds), len(lengths)))
        whole = np.array(lengths, dtype=np.float64)
        for number, kind in enumerate(self._kinds):
            if isinstance(kind, DocumentCost):
                beyond = np.maximum(whole - (kind.reach_tokens or math.inf), 0)
                result[:, number] = kind.attention_us(whole**2, beyond**2)
            else:
                works = [kind.work([length]) for length in lengths]
                result[0, number] = [work.forward_attention_us for work in works]
                result[1, number] = [work.backward_attention_us for work in works]
        return result

    def times_us(self, tokens: Floats, attention_us: Floats) -> Floats:
        """``[N]``, ``[2, Q, N]`` -> ``[2, S, N]``; for K plans all have an axis K behind."""
        times = attention_us.copy()
        for number, kind in enumerate(self._kinds):
            table = self._linear[number]
            if table is not None:
                for backward in (0, 1):
                    times[backward, number] += np.interp(tokens, self._grid, table[backward])
            elif isinstance(kind, DocumentCost):
                fixed_us = kind.micro_batch_us
                times[0, number] += kind.forward_linear_us * tokens
                times[0, number] += (1 - BACKWARD_OVERHEAD) * fixed_us
                times[1, number] += kind.backward_linear_us * tokens
                times[1, number] += BACKWARD_OVERHEAD * fixed_us
        return times[:, self._kind]


@dataclass
class _Pipeline:
    """The micro-batches of one data-parallel rank while they are shaped."""

    members: list[list[int]]
    """The documents of each micro-batch by number, ascending: the heaviest first."""
    tokens: Floats
    attention_us: Floats
    step_us: float


class Shaper:
    """Reshapes balanced steps so that their simulated time is shorter, never longer.

    ``num_micro_batches`` are those of one data-parallel rank, where a step has no other number;
    none gets longer than ``max_tokens`` (S_max). The best sizes are those for documents of half the
    ``window``. Raises :class:`ConfigError` for a layout that Megatron refuses.
    """

    def __init__(
        self,
        costs: StepCosts,
        parallelism: Parallelism,
        *,
        num_micro_batches: int,
        max_tokens: int,
        window: int,
    ) -> None:
        p = parallelism
        stages = costs.stages.stages
        if len(stages) != p.num_stages:
            raise ConfigError(
                f"there are costs of {len(stages)} stages, but the layout has {p.num_stages} "
                "(PP × VPP); give one for each"
            )
        self._layout = p
        self._work = _Work(stages, max_tokens)
        self._costs = costs
        self._max_tokens = max_tokens
        typical = [max(1, window // 2)]
        unit_us = costs.stages.times_us([typical])[:, :, 0]
        self._unit = tuple(map(tuple, (unit_us / unit_us.sum()).tolist()))
        self._fit(num_micro_batches)

    def _fit(self, num_micro_batches: int) -> None:
        """Turns to steps of so many micro-batches a rank: what is kept for each is looked up."""
        p = self._layout
        self._graph = graph_of(p.pp_size, p.vpp_size, num_micro_batches, p.group_size)
        self._sizes = best_sizes(self._graph, self._unit)
        num_actions = sum(map(len, self._graph.order))
        self._num_rounds = min(MAX_ROUNDS, ROUND_ACTIONS // num_actions)

    def shape(self, ranks: Ranks) -> list[list[list[Document]]]:
        """Deals the same documents anew over all ranks, or leaves them where that is not faster."""
        if not any(any(rank) for rank in ranks):
            return [[list(micro_batch) for micro_batch in rank] for rank in ranks]
        self._fit(len(ranks[0]))
        documents, step, given = self._numbered(ranks)
        best = [self._pipeline(step, members) for members in given]
        placed = _place(step, len(ranks), self._sizes)
        if placed is not None:
            pipelines = [self._pipeline(step, members) for members in placed]
            if _slowest(pipelines).step_us < _slowest(best).step_us:
                best = pipelines
        self._improve(step, best)
        return [[[documents[n] for n in numbers] for numbers in p.members] for p in best]

    def check(self, packing: str) -> None:
        check_shaping(packing)

    def step_us(self, ranks: Ranks) -> float:
        """Simulated time of forward and backward of a step, by which plans are compared."""
        self._fit(len(ranks[0]))
        _, step, given = self._numbered(ranks)
        return _slowest([self._pipeline(step, members) for members in given]).step_us

    def _numbered(self, ranks: Ranks) -> tuple[list[Document], _Sorted, list[list[list[int]]]]:
        """Numbers documents in descending order of work, ties as they came.

        Returns the documents in this order, what they take, and their numbers in place of them.
        """
        documents = [d for rank in ranks for micro_batch in rank for d in micro_batch]
        lengths = np.array([d.length for d in documents], dtype=np.float64)
        attention_us = self._work.attention_us([d.length for d in documents])
        alone_us = self._work.times_us(lengths, attention_us).sum(axis=(0, 1))
        alone_us -= self._work.times_us(np.zeros(1), attention_us[:, :, :1] * 0).sum()
        order = np.argsort(-alone_us, kind="stable").tolist()
        step = _Sorted(
            lengths[order], attention_us[:, :, order], alone_us[order].tolist(), self._max_tokens
        )
        number_of = {at: number for number, at in enumerate(order)}
        given, at = [], 0
        for rank in ranks:
            members = []
            for micro_batch in rank:
                members.append(sorted(number_of[at + n] for n in range(len(micro_batch))))
                at += len(micro_batch)
            given.append(members)
        return [documents[at] for at in order], step, given

    def _pipeline(self, step: _Sorted, members: list[list[int]]) -> _Pipeline:
        tokens = np.array([step.lengths[numbers].sum() for numbers in members])
        attention_us = np.stack(
            [step.attention_us[:, :, numbers].sum(axis=2) for numbers in members], axis=2
        )
        return _Pipeline(members, tokens, attention_us, float(self._run(tokens, attention_us)))

    def _run(self, tokens: Floats, attention_us: Floats) -> Floats:
        times_us = self._work.times_us(tokens, attention_us)
        return self._graph.step_us(times_us, self._p2p_us(tokens))

    def _p2p_us(self, tokens: Floats) -> Floats:
        return self._costs.p2p_latency_us + self._costs.p2p_us_per_token * tokens

    def _improve(self, step: _Sorted, pipelines: list[_Pipeline]) -> None:
        """Moves single documents between micro-batches of the slowest rank while that helps."""
        failed = 0
        for _ in range(self._num_rounds):
            slowest = _slowest(pipelines)
            moves = self._moves(step, slowest, failed)
            if not moves:
                return
            source, target, number = (np.array(column) for column in zip(*moves, strict=True))
            each = np.arange(len(moves))
            tokens = np.repeat(slowest.tokens[:, None], len(moves), axis=1)
            tokens[source, each] -= step.lengths[number]
            tokens[target, each] += step.lengths[number]
            attention_us = np.repeat(slowest.attention_us[..., None], len(moves), axis=3)
            attention_us[:, :, source, each] -= step.attention_us[:, :, number]
            attention_us[:, :, target, each] += step.attention_us[:, :, number]
            steps_us = self._run(tokens, attention_us)
            best = int(steps_us.argmin())
            if steps_us[best] >= (1 - WORTH_MOVING) * slowest.step_us:
                failed += 1
                if failed > PATIENCE:
                    return
                continue
            failed = 0
            old, new, moved = moves[best]
            slowest.members[old].remove(moved)
            insort(slowest.members[new], moved)
            slowest.tokens = tokens[:, best].copy()
            slowest.attention_us = attention_us[..., best].copy()
            slowest.step_us = float(steps_us[best])

    def _moves(self, step: _Sorted, pipeline: _Pipeline, failed: int) -> list[tuple[int, int, int]]:
        """Lists (from, to, document) to try: off micro-batches with much of the critical path."""
        shares = _critical_shares(
            self._graph,
            self._work.times_us(pipeline.tokens, pipeline.attention_us),
            self._p2p_us(pipeline.tokens),
        )
        num = len(shares)
        pairs = np.argsort((shares[None, :] - shares[:, None]).ravel(), kind="stable").tolist()
        skipped = failed * NUM_ALTERNATIVES // len(MOVES)
        mean_us = sum(step.alone_us[n] for numbers in pipeline.members for n in numbers) / num
        moves: list[tuple[int, int, int]] = []
        for pair in pairs[skipped:]:
            source, target = divmod(pair, num)
            numbers = pipeline.members[source]
            if source == target or not numbers:
                continue
            room = self._max_tokens - pipeline.tokens[target]
            found: set[int] = set()
            for share in MOVES:
                # The first that is not heavier: documents are numbered in descending order of work.
                at = bisect_left(numbers, -share * mean_us, key=lambda n: -step.alone_us[n])
                if at < len(numbers) and step.lengths[numbers[at]] <= room:
                    found.add(numbers[at])
            moves += [(source, target, number) for number in sorted(found)]
            if len(moves) >= NUM_ALTERNATIVES:
                break
        return moves


@dataclass(frozen=True)
class _Sorted:
    """The documents of a step, heaviest first."""

    lengths: Floats
    attention_us: Floats
    """``[2, Q, D]``"""
    alone_us: list[float]
    max_tokens: int


@lru_cache(maxsize=64)
def best_sizes(graph: Graph, unit_us: tuple[tuple[float, ...], ...]) -> Floats:
    """Sizes of micro-batches, Σ = 1, with which a step is shortest: about, as found by descent.

    ``unit_us`` is ``[2][S]``, forward and backward of a micro-batch of size 1, which take
    proportionally less for a smaller one. Equal sizes are where the search starts, so that no worse
    ones come out of it. Some 0.3 s for PP=4 and N=64, once for a run.
    """
    units_us = np.array(unit_us)[:, :, None]
    num = graph.num_micro_batches
    nothing = np.zeros(num)
    sizes = np.full(num, 1.0 / num)
    best, best_us = sizes, float("inf")
    slope = np.zeros(num)
    for number in range(DESCENT_ROUNDS):
        times_us = units_us * sizes
        step_us = float(graph.step_us(times_us, nothing))
        if step_us < best_us:
            best, best_us = sizes, step_us
        # The share of the critical path in each micro-batch's time is the slope of the step's time.
        share = _critical_shares(graph, times_us, nothing)
        # Near the minimum many paths are about critical, and take turns: the mean of the last ones.
        slope = MOMENTUM * slope + (1.0 - MOMENTUM) * (share - share.sum() / num)
        steepest = np.abs(slope).max()
        if not steepest:
            break
        # Multiplied, sizes stay positive; smaller steps later, as the slope jumps at the minimum.
        sizes = sizes * (1.0 - 0.3 / float(np.sqrt(1.0 + number)) * slope / steepest)
        sizes = sizes / sizes.sum()
    best.flags.writeable = False  # it is handed out again
    return best


def _critical_shares(graph: Graph, times_us: Floats, p2p_us: Floats) -> Floats:
    """The share of each micro-batch's time that is on the critical path: ``[N]``."""
    replayed = graph.replay(times_us, p2p_us)
    stops = [float(graph.of_rank(replayed.stop_us, rank)[-1]) for rank in range(graph.pp_size)]
    rank = stops.index(max(stops))
    on_path = [0.0] * graph.num_micro_batches
    end = (rank, graph.order[rank][-1])
    for node, start_us, stop_us in graph.critical_path(replayed, times_us, p2p_us, end):
        if not node.is_transfer:
            on_path[node.action.micro_batch] += stop_us - start_us
    whole_us = times_us.sum(axis=(0, 1))
    return np.array(on_path) / np.where(whole_us > 0, whole_us, 1.0)


def _place(step: _Sorted, dp_size: int, sizes: Floats) -> list[list[list[int]]] | None:
    """Places documents, heaviest first, where most wanted work is missing and there is room.

    None if a document finds no room at all.
    """
    rank_us = sum(step.alone_us) / dp_size
    bins = Bins(
        (
            (-size * rank_us, (rank, at))
            for rank in range(dp_size)
            for at, size in enumerate(sizes.tolist())
        ),
        step.max_tokens,
    )
    members: list[list[list[int]]] = [[[] for _ in sizes] for _ in range(dp_size)]
    lengths = step.lengths.astype(np.int64).tolist()
    for number, (length, us) in enumerate(zip(lengths, step.alone_us, strict=True)):
        found = bins.place(us, length)
        if found is None:
            return None
        rank, at = found
        members[rank][at].append(number)
    return members


def _slowest(pipelines: Sequence[_Pipeline]) -> _Pipeline:
    return max(pipelines, key=lambda pipeline: pipeline.step_us)
