"""What units take, and which of them are recomputed so that devices have room for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from megatron_wlb.cost import Parallelism
from megatron_wlb.cost.program import Program
from megatron_wlb.cost.schedule.graph import Floats, Graph, graph_of
from megatron_wlb.cost.schedule.hosting import Copies
from megatron_wlb.cost.schedule.messages import slice_graph
from megatron_wlb.cost.slices import HOST, LAYERS, NOTHING, Recomputed, UnitTable
from megatron_wlb.cost.step_costs import StepCosts
from megatron_wlb.plan import Span, Units
from megatron_wlb.planning.slicing.room import MemoryLimit, rows_seen, units_of

COPY_PRICE, LAG_PRICE = 0.05, 0.2
"""What of a copy's time to the host is a price, where units are chosen for it; and what of that by
which it is longer than the forward, so that it lags behind."""


@dataclass(frozen=True)
class Pipeline:
    """The pipelines of all replicas."""

    costs: StepCosts
    layout: Parallelism
    length_multiple: int = 1
    """What units are padded to a multiple of."""
    alike: int = 1
    """How many neighbouring replicas run units alike."""
    memory: MemoryLimit | None = None
    """What a device may hold; None: anything."""

    @property
    def may_host(self) -> bool:
        """Whether micro-batches may wait in the host's memory."""
        return bool(self.memory and self.memory.host_bytes and self.costs.stages.host)

    def slowest_us(self, replicas: Sequence[Units]) -> float:
        """:meth:`simulated_us` of the slowest of all."""
        groups = (replicas[at : at + self.alike] for at in range(0, len(replicas), self.alike))
        return max(map(self.simulated_us, groups))

    def simulated_us(self, group: Sequence[Units]) -> float:
        """Time of forwards and backwards of replicas that run alike, or of one."""
        times, gaps, tokens = zip(*map(self.times_us, group), strict=True)
        layout, experts = self.layout, self.costs.experts
        if group[0].chains:
            graph = slice_graph(layout.pp_size, tuple(group[0].chains), layout.vpp_size)
        else:  # Megatron's own schedule
            number = len(group[0].spans)
            graph = graph_of(layout.pp_size, layout.vpp_size, number, layout.group_size)
        copies = [self._copies(graph, units) for units in group]
        if experts is None:
            given = zip(times, gaps, copies, strict=True)
            return max(float(graph.step_us(us, gap, [own])) for us, gap, own in given)
        return float(experts.replay(graph, times, tokens, gaps, copies)[2].stop_us.max())

    def times_us(self, units: Units) -> tuple[Floats, Floats, list[float]]:
        """Times ``[2, S, N]`` of a replica's units, times of their transfers, and its tokens."""
        lengths = [[stop - start for _, start, stop in unit] or [0] for unit in units.spans]
        table = UnitTable.of(units_of(units, self.length_multiple))
        ranks = table.num_ranks.tolist()
        tokens = [sum(own) / num for own, num in zip(lengths, ranks, strict=True)]
        branches: list[list[tuple[int, int]]] = []
        if units.sharing:
            start, branches = rows_seen(zip(units.spans, units.sharing, strict=True))
            table = table._replace(start=start)
        times_us = self.costs.stages.times_us(lengths, None, table, branches)
        return times_us, self.costs.p2p_us(tokens), tokens

    def with_room(self, replicas: Sequence[Units]) -> list[Units]:
        """The same, of which units are recomputed as memory asks: alike in replicas that run alike,
        and those that several replicas run together in all of them.
        """
        return self.with_rooms([replicas])[0]

    def with_rooms(self, steps: Sequence[Sequence[Units]]) -> list[list[Units]]:
        """:meth:`with_room` of the replicas of each step, in less time than one by one."""
        if self.memory is None or not self.memory.recomputes:
            return [[*replicas] for replicas in steps]
        programs = iter(self.memory.programs([units for replicas in steps for units in replicas]))
        return [self._with_room(replicas, [*islice(programs, len(replicas))]) for replicas in steps]

    def _with_room(self, replicas: Sequence[Units], programs: Sequence[Program]) -> list[Units]:
        assert self.memory is not None
        together: dict[Span, Recomputed] = {}
        chosen = []
        pairs = [*zip(programs, replicas, strict=True)]
        for at in range(0, len(replicas), self.alike):
            group = pairs[at : at + self.alike]
            again = [NOTHING] * len(replicas[at].spans)
            for program, units in group:
                given = [*map(_both, again, _shared(units, together))]
                again = self.memory.recomputed(program, units, given, self._again_us(units))
                rows = zip(units.spans, units.replicas, again, strict=True)
                together |= {spans[0]: each for spans, ranks, each in rows if ranks}
            chosen += [again] * len(group)
        return [
            units._replace(recomputed=[*map(_both, again, _shared(units, together))])
            for units, again in zip(replicas, chosen, strict=True)
        ]

    def _copies(self, graph: Graph, units: Units) -> Copies | None:
        """What goes to the host and comes back, if anything does."""
        link = self.costs.stages.host
        if link is None or HOST not in units.recomputed:
            return None
        return link.copies(graph, units_of(units, self.length_multiple), units.window_bytes)

    def _again_us(self, units: Units) -> Floats:
        """What it takes to recompute units, ``[kinds, units]``, by :attr:`.Unit.recomputed`.

        Copies run beside passes, so that their price is a share of their time.
        """
        units = units._replace(recomputed=())
        (forward_us, _), _, tokens = self.times_us(units)
        given, stages = (forward_us, np.array(tokens)), self.costs.stages
        again = [stages.again_us(*given, kind).sum(axis=0) for kind in Recomputed]
        if units.window_bytes and stages.host:
            copies_us = stages.host.times_us(units_of(units, self.length_multiple))
            lags_us = np.maximum(0.0, copies_us - forward_us)
            again[HOST] = (COPY_PRICE * copies_us + LAG_PRICE * lags_us).sum(axis=0)
        return np.array(again)


def _both(one: Recomputed, other: Recomputed) -> Recomputed:
    """What is recomputed of a unit for two replicas' sake: layers, if they differ."""
    return max(one, other) if one == other or NOTHING in (one, other) else LAYERS


def _shared(units: Units, together: Mapping[Span, Recomputed]) -> list[Recomputed]:
    """What is recomputed of units that several replicas run together, by the others."""
    return [
        together.get(spans[0], NOTHING) if ranks else NOTHING
        for spans, ranks in zip(units.spans, units.replicas, strict=True)
    ]
