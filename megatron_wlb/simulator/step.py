"""A whole training step, simulated: pipelines of all data-parallel ranks, reduction and update.

Each data-parallel rank's pipeline is replayed for itself (:mod:`megatron_wlb.schedule.graph`); they
meet where gradients are reduced, and all ranks meet at the update, as the norm of all gradients
comes first. Everything here is *simulated*. Times are in µs and start at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.memory import MemoryModel
from megatron_wlb.cost.shape import Parallelism
from megatron_wlb.cost.step_costs import StepCosts
from megatron_wlb.errors import ConfigError, PlanError
from megatron_wlb.plan import StepPlan
from megatron_wlb.schedule.graph import Graph, Replay, graph_of
from megatron_wlb.schedule.order import Order
from megatron_wlb.simulator.engine import check_times
from megatron_wlb.simulator.memory import StepMemory, step_memory
from megatron_wlb.simulator.step_timeline import Activity, StepTimeline

Lengths: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""``[dp_size][num_micro_batches][segments]``: tokens of each document, and of padding."""


class Simulator:
    """Simulates steps of one run.

    Args:
        costs: of stages, transfers, reduction and update.
        parallelism: the layout; TP and CP only matter through ``costs``.
        order: another schedule than Megatron's 1F1B or interleaved one, whose ranks wait in sends;
            all steps then have its N.
        memory: for what each rank holds; left out if None, which is faster.

    Raises:
        ConfigError: costs that are not one for each stage of the layout.
    """

    def __init__(
        self,
        costs: StepCosts,
        parallelism: Parallelism,
        *,
        order: Order | None = None,
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
        self._graph = None if order is None else Graph(order, "blocking")

    def graph(self, num_micro_batches: int) -> Graph:
        """The schedule of so many micro-batches a data-parallel rank."""
        if self._graph is not None:
            if self._graph.num_micro_batches != num_micro_batches:
                raise PlanError(
                    f"the order is of {self._graph.num_micro_batches} micro-batches, but a "
                    f"data-parallel rank has {num_micro_batches}; give an order for these"
                )
            return self._graph
        p = self.parallelism
        return graph_of(p.pp_size, p.vpp_size, num_micro_batches, p.group_size)

    def step(
        self,
        micro_batches: StepPlan | Lengths,
        attention_scale: Sequence[npt.ArrayLike] | None = None,
    ) -> StepTimeline:
        """One step.

        Args:
            micro_batches: a plan, or lengths of each rank's micro-batches in running order.
            attention_scale: of each data-parallel rank ``[N]`` or ``[2, N]`` (forward and
                backward), the attention of the slowest context-parallel rank in even shares; 1 is
                perfect balance.

        Raises:
            ConfigError: a schedule that Megatron refuses.
            PlanError: no micro-batches, or not as many on each data-parallel rank as the layout
                has.
        """
        lengths, num_tokens = _lengths(micro_batches)
        counts = sorted({len(rank) for rank in lengths})
        if len(lengths) != self.parallelism.dp_size or len(counts) != 1 or counts[0] < 1:
            raise PlanError(
                f"there are micro-batches for {len(lengths)} data-parallel ranks, {counts} on each;"
                f" give the same number, at least 1, to each of {self.parallelism.dp_size}"
            )
        graph = self.graph(counts[0])
        padded = [[sum(segments) for segments in rank] for rank in lengths]
        scale = attention_scale if attention_scale is not None else [None] * len(lengths)
        times, gaps, replays = [], [], []
        for rank, tokens, factors in zip(lengths, padded, scale, strict=True):
            times.append(self.costs.stages.times_us(rank, factors))
            gaps.append(self.costs.p2p_us(tokens))
            check_times("stage times", times[-1])
            replays.append(graph.replay(times[-1], gaps[-1]))
        collectives, step_us = self._finish(graph, replays)
        memory: tuple[StepMemory, ...] = ()
        if self.memory is not None:
            memory = tuple(step_memory(self.memory, graph.order, tokens) for tokens in padded)
        done = tuple(times), tuple(gaps), tuple(replays)
        return StepTimeline(graph, *done, collectives, step_us, num_tokens, memory)

    def _finish(
        self, graph: Graph, replays: Sequence[Replay]
    ) -> tuple[tuple[tuple[Activity, ...], ...], float]:
        """Reductions and updates of each pipeline rank, and when the last one ends."""
        costs = self.costs
        reduced = [self._reduce(graph, replays, rank) for rank in range(graph.pp_size)]
        parts, free_us = [own for own, _ in reduced], [done_us for _, done_us in reduced]
        if costs.embedding_us and graph.pp_size > 1:
            start_us = max(free_us[0], free_us[-1])
            for rank in (0, graph.pp_size - 1):
                free_us[rank] = start_us + costs.embedding_us
                parts[rank].append(Activity(-1, rank, "embedding", start_us, free_us[rank]))
        end_us = max(free_us)
        if costs.update_us or costs.fixed_us:
            start_us = end_us
            for rank, update_us in enumerate(costs.update_us or [0.0] * graph.pp_size):
                stop_us = start_us + (costs.fixed_us + update_us)
                parts[rank].append(Activity(-1, rank, "update", start_us, stop_us))
                end_us = max(end_us, stop_us)
        return tuple(map(tuple, parts)), end_us

    def _reduce(
        self, graph: Graph, replays: Sequence[Replay], rank: int
    ) -> tuple[list[Activity], float]:
        """A pipeline rank's reductions, which its data-parallel ranks do together, one by one."""
        costs = self.costs
        actions = graph.order[rank]
        starts = np.max([graph.of_rank(r.start_us, rank) for r in replays], axis=0)
        stops = np.max([graph.of_rank(r.stop_us, rank) for r in replays], axis=0)
        free_us = done_us = float(stops[-1])
        if not any(costs.reduce_us):
            return [], done_us
        last = {a.chunk: at for at, a in enumerate(actions) if a.kind == "B"}
        if costs.overlap_reduce:
            free_us = 0.0
        parts = []
        for chunk, at in sorted(last.items(), key=lambda item: item[1]):
            stage = chunk * graph.pp_size + rank
            whole_us = costs.reduce_us[stage]
            start_us, stop_us = free_us, free_us + whole_us
            if costs.overlap_reduce:
                num = costs.reduce_buckets[stage] if costs.reduce_buckets else 1
                # Gradients come evenly over the last backward: part i of num is there at
                # begin + i · each, and takes its share of the whole.
                begin, end = float(starts[at]), float(stops[at])
                first_us = begin + (end - begin) / num
                start_us = max(free_us, first_us)
                stop_us = max(start_us + whole_us, end + whole_us / num)
            parts.append(Activity(-1, rank, f"reduce {chunk}", start_us, stop_us))
            free_us = stop_us
        return parts, max(done_us, free_us)


def _lengths(micro_batches: StepPlan | Lengths) -> tuple[Lengths, int]:
    """The segments of each micro-batch, and the number of all tokens."""
    if isinstance(micro_batches, StepPlan):
        plan = micro_batches
        return [[m.lengths for m in rank] for rank in plan.micro_batches], plan.num_tokens
    segments = [length for rank in micro_batches for m in rank for length in m]
    if min(segments, default=1) < 1:
        raise PlanError(f"a micro-batch has a document of {min(segments)} tokens; give at least 1")
    return micro_batches, sum(segments)
