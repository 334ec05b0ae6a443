"""What a simulated step says: when every rank does what, why not earlier, how well it is filled.

Times are in µs and start at 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_wlb.cost.document import imbalance
from megatron_wlb.cost.schedule.graph import Floats, Graph, Replay
from megatron_wlb.cost.slices import Unit
from megatron_wlb.errors import PlanError
from megatron_wlb.simulator.engine import Timeline, timeline
from megatron_wlb.simulator.memory import StepMemory


class Activity(NamedTuple):
    """What a rank does in a part of a step; ``dp_rank`` -1: the same on all data-parallel ranks."""

    dp_rank: int
    pp_rank: int
    what: str
    """An action as ``F0.3``, or ``reduce 1`` (chunk 1), ``embedding``, ``update``."""
    start_us: float
    stop_us: float


@dataclass(frozen=True)
class StepTimeline:
    """What every rank does in a simulated step, what it waits for, and what it holds."""

    graphs: tuple[Graph, ...]
    """What each data-parallel rank runs: one and the same, unless documents run in slices."""
    times_us: tuple[Floats, ...]
    """Times of forwards and backwards, per data-parallel rank ``[2, S, N]``."""
    p2p_us: tuple[Floats, ...]
    """Times to send each micro-batch to the next stage, per data-parallel rank ``[N]``."""
    replays: tuple[Replay, ...]
    """One pipeline's replay per data-parallel rank."""
    collectives: tuple[tuple[Activity, ...], ...]
    """Reductions and the update, per pipeline rank, after (or beside) its actions."""
    step_us: float
    """Time from the first forward to the end of the update on the last rank."""
    num_tokens: int
    """Tokens of the step, without padding where a plan was given."""
    memory: tuple[StepMemory, ...] = field(default=())
    """What each data-parallel rank's pipeline holds; empty without a memory model."""
    units: tuple[tuple[Unit, ...], ...] = ()
    """Each data-parallel rank's micro-batches, where documents run in slices."""
    waits_us: tuple[Floats, ...] = ()
    """How long actions wait for those of other replicas that exchange tokens with experts, per
    data-parallel rank ``[2, S, N]``; empty where no replica waits for another."""

    @property
    def graph(self) -> Graph:
        """The graph of all data-parallel ranks.

        Raises :class:`PlanError` where they have several; those are in ``graphs``.
        """
        if any(graph is not self.graphs[0] for graph in self.graphs):
            raise PlanError(
                f"{self.dp_size} data-parallel ranks run {len(set(map(id, self.graphs)))} "
                "different orders, as their documents are cut apart; use the graphs of each"
            )
        return self.graphs[0]

    @property
    def pp_size(self) -> int:
        return self.graphs[0].pp_size

    @property
    def vpp_size(self) -> int:
        return self.graphs[0].vpp_size

    @property
    def dp_size(self) -> int:
        return len(self.replays)

    @cached_property
    def replicas(self) -> tuple[Timeline, ...]:
        """The forwards and backwards of the pipeline ranks, one timeline a data-parallel rank."""
        units = self.units or [()] * self.dp_size
        return tuple(map(timeline, self.graphs, self.replays, units))

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of all ranks together, pipeline by pipeline: for a picture."""
        return Timeline(tuple(rank for line in self.replicas for rank in line.intervals))

    @cached_property
    def pipeline_us(self) -> float:
        """Time from the first forward to the last backward on any rank."""
        return max(float(replayed.stop_us.max()) for replayed in self.replays)

    @cached_property
    def busy_us(self) -> tuple[tuple[float, ...], ...]:
        """``[dp_size][pp_size]``: time in which a rank runs forward or backward."""
        pp_size = self.pp_size
        return tuple(
            tuple(float(times[:, rank::pp_size].sum()) for rank in range(pp_size))
            for times in self.times_us
        )

    @cached_property
    def bubble_share(self) -> float:
        """Share of the ranks' time that they wait: ``1 - Σ busy ÷ (ranks · pipeline_us)``."""
        available_us = self.dp_size * self.pp_size * self.pipeline_us
        busy_us = sum(map(sum, self.busy_us))  # by rounding, it may be more than there is
        return max(0.0, 1.0 - busy_us / available_us) if available_us else 0.0

    @cached_property
    def expert_wait_share(self) -> float:
        """Share of the ranks' time that they wait at exchanges for a replica with more work."""
        available_us = self.dp_size * self.pp_size * self.pipeline_us
        waits_us = float(sum(own.sum() for own in self.waits_us))
        return waits_us / available_us if available_us else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all data-parallel ranks together."""
        return self.num_tokens / self.step_us * 1e6 if self.step_us else 0.0

    @cached_property
    def micro_batch_us(self) -> tuple[tuple[float, ...], ...]:
        """``[dp_size][N]``: forward plus backward over all stages."""
        return tuple(tuple(times.sum(axis=(0, 1)).tolist()) for times in self.times_us)

    @cached_property
    def imbalance(self) -> float:
        """``max · N / Σ`` over all micro-batches of the step (WLB-LLM §3.2); 1 is perfect."""
        return imbalance([us for rank in self.micro_batch_us for us in rank])

    @cached_property
    def pp_imbalance(self) -> float:
        """``max · N / Σ`` within a pipeline, the mean over data-parallel ranks."""
        return float(np.mean([imbalance(rank) for rank in self.micro_batch_us]))

    @cached_property
    def dp_imbalance(self) -> float:
        """The most work of a data-parallel rank ÷ the mean."""
        return imbalance([sum(rank) for rank in self.micro_batch_us])

    @cached_property
    def peak_bytes(self) -> float:
        """The most that any rank holds; 0 without a memory model."""
        return max((rank.peak_bytes for rank in self.memory), default=0.0)

    @cached_property
    def critical_path(self) -> tuple[Activity, ...]:
        """What kept the step from ending earlier, first to last.

        The parts and the transfers between them fill the step, but where replicas that exchange
        tokens with experts wait for each other. Only a reduction that overlaps a backward starts
        within it.
        """
        tail = self._critical_tail()
        what, ranks = "", range(self.pp_size)
        if tail and tail[0].what != "update":
            what, ranks = tail[0].what, range(tail[0].pp_rank, tail[0].pp_rank + 1)
        # A reduction that overlaps waits for its chunk's last backward, all else for the rank's.
        chunk = int(what.split()[1]) if what.startswith("reduce") else None
        if chunk is not None and tail[0].start_us >= self._last_stop_us(tail[0].pp_rank):
            chunk = None
        stop_us, dp_rank, rank, at = -1.0, 0, 0, 0
        for dp, (graph, replayed) in enumerate(zip(self.graphs, self.replays, strict=True)):
            for pp_rank in ranks:
                actions = graph.order[pp_rank]
                end = max(i for i, a in enumerate(actions) if chunk in (None, a.chunk))
                stop = float(graph.of_rank(replayed.stop_us, pp_rank)[end])
                if stop > stop_us:
                    stop_us, dp_rank, rank, at = stop, dp, pp_rank, end
        graph = self.graphs[dp_rank]
        path = graph.critical_path(
            self.replays[dp_rank],
            self.times_us[dp_rank],
            self.p2p_us[dp_rank],
            (rank, graph.order[rank][at]),
        )
        return (
            *(
                Activity(dp_rank, node.rank, str(node.action), start_us, stop_us)
                for node, start_us, stop_us in path
                if not node.is_transfer
            ),
            *tail,
        )

    def _last_stop_us(self, pp_rank: int) -> float:
        """Time at which a pipeline rank's actions are done on all data-parallel ranks."""
        pairs = zip(self.graphs, self.replays, strict=True)
        return max(float(graph.of_rank(r.stop_us, pp_rank)[-1]) for graph, r in pairs)

    def _critical_tail(self) -> list[Activity]:
        """Reductions and the update behind the last of the path's actions."""
        left = sorted(
            (part for parts in self.collectives for part in parts), key=lambda part: part.start_us
        )
        tail: list[Activity] = []
        end_us, pp_rank = self.step_us, -1
        while causes := [part for part in left if part.stop_us == end_us]:
            cause = next((part for part in causes if part.pp_rank == pp_rank), causes[-1])
            left = [part for part in left if part.start_us < cause.start_us]
            tail.insert(0, cause)
            end_us, pp_rank = cause.start_us, cause.pp_rank
        return tail
