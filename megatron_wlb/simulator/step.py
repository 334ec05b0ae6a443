"""A whole training step, simulated: pipelines of all data-parallel ranks, reduction and update.

Each data-parallel rank's pipeline is replayed for itself (:mod:`megatron_wlb.cost.schedule.graph`);
they meet where gradients are reduced, and all ranks meet at the update, as the norm of all
gradients comes first. Everything here is *simulated*. Times are in µs and start at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.cost.memory import MemoryModel
from megatron_wlb.cost.schedule.graph import Floats, Graph, Replay, graph_of
from megatron_wlb.cost.schedule.hosting import Copies
from megatron_wlb.cost.schedule.messages import slice_graph
from megatron_wlb.cost.shape import Parallelism
from megatron_wlb.cost.slices import Unit, UnitTable
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.errors import ConfigError, PlanError
from megatron_wlb.plan import MicroBatchPlan, StepPlan
from megatron_wlb.planning.slicing.room import rows_seen, unit_of
from megatron_wlb.simulator.engine import check_times
from megatron_wlb.simulator.memory import StepMemory, step_memory
from megatron_wlb.simulator.step_timeline import Activity, StepTimeline

Lengths: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""``[dp_size][num_micro_batches][segments]``: tokens of each document, and of padding."""


_Units: TypeAlias = tuple[tuple[Unit, ...], ...]
"""``[dp_size][micro-batches]``"""

_TOGETHER = 64
"""Pipelines whose units' bytes are worked out together."""


class Simulator:
    """Simulates steps of one run.

    Args:
        costs: of stages, transfers, reduction and update.
        parallelism: the layout; TP and CP only matter through ``costs``.
        memory: for what each rank holds; left out if None, which is faster.

    Raises:
        ConfigError: costs that are not one for each stage of the layout.
    """

    def __init__(
        self,
        costs: StepCosts,
        parallelism: Parallelism,
        *,
        memory: MemoryModel | None = None,
    ) -> None:
        if len(costs.stages.stages) != parallelism.num_stages:
            raise ConfigError(
                f"there are costs of {len(costs.stages.stages)} stages, but the layout has "
                f"{parallelism.num_stages} (PP × VPP); give one for each"
            )
        if costs.update_us and len(costs.update_us) != parallelism.pp_size:
            raise ConfigError(
                f"there are {len(costs.update_us)} update times for PP {parallelism.pp_size}; "
                "give one for each pipeline rank"
            )
        self.costs = costs
        self.parallelism = parallelism
        self.memory = memory
        self._last: tuple[StepPlan, list[Graph], _Units] | None = None

    def graph(self, num_micro_batches: int) -> Graph:
        """The schedule of so many micro-batches a data-parallel rank."""
        p = self.parallelism
        return graph_of(p.pp_size, p.vpp_size, num_micro_batches, p.group_size)

    def step(
        self,
        micro_batches: StepPlan | Lengths,
        attention_scale: Sequence[npt.ArrayLike] | None = None,
        *,
        with_memory: bool = True,
    ) -> StepTimeline:
        """One step.

        Args:
            micro_batches: a plan, or lengths of each rank's micro-batches in running order.
            attention_scale: of each data-parallel rank ``[N]`` or ``[2, N]`` (forward and
                backward), the attention of the slowest context-parallel rank in even shares; 1 is
                perfect balance.
            with_memory: whether to tell what ranks hold, if this has a model of it.

        Raises:
            ConfigError: a schedule that Megatron refuses.
            PlanError: no micro-batches, or, without slices, not as many on each data-parallel rank.
        """
        lengths, num_tokens = _lengths(micro_batches)
        sliced = None
        if isinstance(micro_batches, StepPlan) and micro_batches.chains:
            sliced = micro_batches
        counts = sorted({len(rank) for rank in lengths})
        same = len(counts) == 1 or (len(counts) > 1 and sliced is not None)
        if len(lengths) != self.parallelism.dp_size or not same or counts[0] < 1:
            raise PlanError(
                f"there are micro-batches for {len(lengths)} data-parallel ranks, {counts} on each;"
                f" give the same number, at least 1, to each of {self.parallelism.dp_size}"
            )
        scale = attention_scale if attention_scale is not None else [None] * len(lengths)
        stages = self.costs.stages
        units: _Units = ()
        copies: list[Copies | None] = [None] * len(lengths)
        if sliced is None:
            graphs = [self.graph(counts[0])] * len(lengths)
            padded = [[sum(segments) for segments in rank] for rank in lengths]
        else:
            graphs, units = self._sliced(sliced)
            padded = [[unit.num_tokens for unit in rank] for rank in units]
            if (link := stages.host) is not None:
                pairs = zip(graphs, units, strict=True)
                copies = [link.copies(*each, sliced.window_bytes) for each in pairs]
        if isinstance(micro_batches, StepPlan):
            rows = zip(micro_batches.micro_batches, lengths, scale, strict=True)
            times = [_times_us(stages, *each) for each in rows]
        else:
            times = list(map(stages.times_us, lengths, scale))
        gaps = list(map(self.costs.p2p_us, padded))
        for own in times:
            check_times("stage times", own)
        groups = self.costs.experts
        waits: list[Floats] = []
        if groups is None:
            replays = _replays(graphs, times, gaps, copies)
        else:
            times, waits, replays = _coupled(graphs, groups, times, padded, gaps, copies)
        collectives, step_us = self._finish(graphs, replays)
        memory: tuple[StepMemory, ...] = ()
        if with_memory and self.memory is not None:
            window_bytes = sliced.window_bytes if sliced else 0.0
            memory = _held(self.memory, graphs, padded, units, window_bytes)
        done = tuple(graphs), tuple(times), tuple(gaps), tuple(replays)
        return StepTimeline(*done, collectives, step_us, num_tokens, memory, units, tuple(waits))

    def plan_memory(self, plan: StepPlan) -> tuple[StepMemory, ...]:
        """What each data-parallel rank's pipeline holds in a step, without its times."""
        assert self.memory is not None
        ranks = plan.micro_batches
        padded = [[m.padded_length for m in rank] for rank in ranks]
        if not plan.chains:
            return _held(self.memory, [self.graph(len(padded[0]))] * len(padded), padded)
        graphs, units = self._sliced(plan)
        return _held(self.memory, graphs, padded, units, plan.window_bytes)

    def _sliced(self, plan: StepPlan) -> tuple[list[Graph], _Units]:
        """The schedule and the micro-batches of each data-parallel rank, made once for a plan."""
        if self._last is None or self._last[0] is not plan:
            p = self.parallelism
            graphs = [slice_graph(p.pp_size, own, p.vpp_size) for own in plan.chains]
            units = tuple(tuple(map(unit, rank)) for rank in plan.micro_batches)
            self._last = plan, graphs, units
        return self._last[1:]

    def _finish(
        self, graphs: Sequence[Graph], replays: Sequence[Replay]
    ) -> tuple[tuple[tuple[Activity, ...], ...], float]:
        """Reductions and updates of each pipeline rank, and when the last one ends."""
        costs = self.costs
        pp_size = graphs[0].pp_size
        reduced = [self._reduce(graphs, replays, rank) for rank in range(pp_size)]
        parts, free_us = [own for own, _ in reduced], [done_us for _, done_us in reduced]
        if costs.embedding_us and pp_size > 1:
            start_us = max(free_us[0], free_us[-1])
            for rank in (0, pp_size - 1):
                free_us[rank] = start_us + costs.embedding_us
                parts[rank].append(Activity(-1, rank, "embedding", start_us, free_us[rank]))
        end_us = max(free_us)
        if costs.update_us or costs.fixed_us:
            start_us = end_us
            for rank, update_us in enumerate(costs.update_us or [0.0] * pp_size):
                stop_us = start_us + (costs.fixed_us + update_us)
                parts[rank].append(Activity(-1, rank, "update", start_us, stop_us))
                end_us = max(end_us, stop_us)
        return tuple(map(tuple, parts)), end_us

    def _reduce(
        self, graphs: Sequence[Graph], replays: Sequence[Replay], rank: int
    ) -> tuple[list[Activity], float]:
        """A pipeline rank's reductions, which its data-parallel ranks do together, one by one."""
        costs = self.costs
        # Chunks' last backwards; the order of these is the same in all replicas.
        lasts = [
            {a.chunk: at for at, a in enumerate(graph.order[rank]) if a.kind == "B"}
            for graph in graphs
        ]
        last = lasts[0]
        rows = [
            (g, r, [own[chunk] for chunk in last])
            for g, r, own in zip(graphs, replays, lasts, strict=True)
        ]
        starts = np.max([g.of_rank(r.start_us, rank)[ends] for g, r, ends in rows], axis=0)
        stops = np.max([g.of_rank(r.stop_us, rank)[ends] for g, r, ends in rows], axis=0)
        free_us = done_us = float(stops.max())
        if not any(costs.reduce_us):
            return [], done_us
        if costs.overlap_reduce:
            free_us = 0.0
        parts = []
        for number, chunk in sorted(enumerate(last), key=lambda item: last[item[1]]):
            stage = chunk * graphs[0].pp_size + rank
            whole_us = costs.reduce_us[stage]
            start_us, stop_us = free_us, free_us + whole_us
            if costs.overlap_reduce:
                num = costs.reduce_buckets[stage] if costs.reduce_buckets else 1
                # Gradients come evenly over the last backward: part i of num is there at
                # begin + i · each, and takes its share of the whole.
                begin, end = float(starts[number]), float(stops[number])
                first_us = begin + (end - begin) / num
                start_us = max(free_us, first_us)
                stop_us = max(start_us + whole_us, end + whole_us / num)
            parts.append(Activity(-1, rank, f"reduce {chunk}", start_us, stop_us))
            free_us = stop_us
        return parts, max(done_us, free_us)


def slowest_us(
    plan: StepPlan, stages: StageCosts, layout: Parallelism, experts: ExpertGroups | None = None
) -> float:
    """Time of the slowest data-parallel rank's pipeline in a layout, transfers not counted.

    Replicas that exchange tokens with ``experts`` wait for each other.
    """
    layout = replace(layout, dp_size=len(plan.micro_batches))
    simulator = Simulator(StepCosts(stages, experts=experts), layout)
    return simulator.step(plan, with_memory=False).pipeline_us


def unit(m: MicroBatchPlan) -> Unit:
    """The part of a micro-batch that is one data-parallel rank's."""
    num_tokens = m.padded_length // (len(m.replicas) or 1)
    alone = unit_of(m.spans, num_tokens, m.sharing)
    return alone._replace(ranks=m.replicas, recomputed=m.recomputed, divided=m.divided)


def _times_us(
    stages: StageCosts,
    rank: Sequence[MicroBatchPlan],
    lengths: Sequence[Sequence[int]],
    scale: npt.ArrayLike | None = None,
) -> Floats:
    """As :meth:`StageCosts.times_us` of a rank's micro-batches, with ``lengths`` of segments."""
    start, branches = rows_seen((m.spans, m.sharing) for m in rank)
    table = UnitTable.of(map(unit, rank))._replace(start=start)
    return stages.times_us(lengths, scale, table, branches)


def _held(
    model: MemoryModel,
    graphs: Sequence[Graph],
    padded: Sequence[Sequence[int]],
    units: Sequence[Sequence[Unit]] = (),
    window_bytes: float = 0.0,
) -> tuple[StepMemory, ...]:
    result: list[StepMemory] = []
    sliced = partial(model.program_bytes, window_bytes=window_bytes)
    uses = sliced if units else model.activation_bytes
    tables = map(UnitTable.of, units or (map(Unit, lengths) for lengths in padded))
    pairs = list(zip(graphs, tables, strict=True))
    for at in range(0, len(pairs), _TOGETHER):
        some = pairs[at : at + _TOGETHER]
        known, stop = model.bytes_of_units(UnitTable.joined(table for _, table in some)), 0
        for graph, table in some:
            start, stop = stop, stop + len(table.num_tokens)
            own = {which: found[start:stop] for which, found in known.items()}
            result.append(step_memory(model, graph.order, partial(uses, units=table, known=own)))
    return tuple(result)


def _replays(
    graphs: Sequence[Graph],
    times_us: Sequence[Floats],
    p2p_us: Sequence[Floats],
    copies: Sequence[Copies | None],
) -> list[Replay]:
    """The replay of each data-parallel rank; those of one graph are replayed together."""
    together: dict[int, list[int]] = {}
    for rank, graph in enumerate(graphs):
        together.setdefault(id(graph), []).append(rank)
    result: dict[int, Replay] = {}
    for ranks in together.values():
        graph = graphs[ranks[0]]
        if len(ranks) == 1:
            (one,) = ranks
            result[one] = graph.replay(times_us[one], p2p_us[one], copies=[copies[one]])
            continue
        times, gaps = ([each[rank] for rank in ranks] for each in (times_us, p2p_us))
        stacked = np.stack(times, axis=-1), np.stack(gaps, axis=-1)
        replayed = graph.replay(*stacked, copies=[copies[rank] for rank in ranks])
        starts, stops = replayed.start_us.T.copy(), replayed.stop_us.T.copy()
        result |= {rank: Replay(*both) for rank, *both in zip(ranks, starts, stops, strict=True)}
    return [result[rank] for rank in range(len(graphs))]


def _coupled(
    graphs: Sequence[Graph],
    groups: ExpertGroups,
    times_us: Sequence[Floats],
    num_tokens: Sequence[Sequence[int]],
    p2p_us: Sequence[Floats],
    copies: Sequence[Copies | None],
) -> tuple[list[Floats], list[Floats], list[Replay]]:
    """What each data-parallel rank does, how long it waits for others, and its replay, where those
    of a group meet in layers of experts.

    Raises :class:`PlanError` where these do not run alike.
    """
    busy: list[Floats] = []
    waits: list[Floats] = []
    replays: list[Replay] = []
    for at in range(0, len(graphs), groups.num_replicas):
        own = slice(at, at + groups.num_replicas)
        if len(set(map(id, graphs[own]))) > 1:
            raise PlanError(
                f"data-parallel ranks {at} to {own.stop - 1} exchange tokens with experts in each "
                "micro-batch, but run other numbers or orders; plan for ranks that run alike"
            )
        given = times_us[own], num_tokens[own], p2p_us[own], copies[own]
        did, waited, replay = groups.replay(graphs[at], *given)
        busy += did
        waits += waited
        replays += map(Replay, replay.start_us.T.copy(), replay.stop_us.T.copy())
    return busy, waits, replays


def _lengths(micro_batches: StepPlan | Lengths) -> tuple[Lengths, int]:
    """The segments of each micro-batch, and the number of all tokens."""
    if isinstance(micro_batches, StepPlan):
        plan = micro_batches
        return [[m.lengths for m in rank] for rank in plan.micro_batches], plan.num_tokens
    segments = [length for rank in micro_batches for m in rank for length in m]
    if min(segments, default=1) < 1:
        raise PlanError(f"a micro-batch has a document of {min(segments)} tokens; give at least 1")
    return micro_batches, sum(segments)
