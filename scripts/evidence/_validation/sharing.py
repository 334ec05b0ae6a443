"""A replay where pipeline ranks share processor cores: each gets an equal part of its core.

For runs of more processes than cores. Times given are those that an action takes alone on a core
(its CPU time); while k ranks of a core compute, each goes on at 1/k of the speed. The operating
system's turns of some milliseconds are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_wlb.cost.schedule.graph import Floats, Graph, Replay
from megatron_wlb.errors import ConfigError


def replay_shared(
    graph: Graph, times_us: Floats, p2p_us: Floats, core_of_rank: Sequence[int]
) -> Replay:
    """Replays one alternative as :meth:`Graph.replay` does; equal to it where no core is shared.

    Transfers take time but no core. Costs some µs an action and busy rank.

    Raises :class:`ConfigError` unless there is a core for each rank.
    """
    if len(core_of_rank) != graph.pp_size:
        raise ConfigError(
            f"there are cores for {len(core_of_rank)} ranks, but the pipeline has {graph.pp_size}; "
            "give one for each"
        )
    waits = graph.waits(times_us, p2p_us)
    num_nodes = len(graph.nodes)
    followers: list[list[tuple[int, float]]] = [[] for _ in range(num_nodes)]
    missing = [0] * num_nodes
    for at, wait in enumerate(waits):
        for other, gap_us in ((wait.first, 0.0), (wait.second, wait.gap_us)):
            if other >= 0:
                followers[other].append((at, gap_us))
                missing[at] += 1
    ready_us = [0.0] * num_nodes
    left_us = [wait.duration_us for wait in waits]
    start, stop = np.zeros(num_nodes + 1), np.zeros(num_nodes + 1)
    pending = [at for at in range(num_nodes) if not missing[at]]  # begin at ``ready_us``
    running: list[int] = []
    now_us, num_done = 0.0, 0
    while num_done < num_nodes:
        busy = [0] * (1 + max(core_of_rank))
        for at in running:
            if not graph.nodes[at].is_transfer:
                busy[core_of_rank[graph.nodes[at].rank]] += 1

        def slowness(at: int, busy: list[int] = busy) -> int:
            node = graph.nodes[at]
            return 1 if node.is_transfer else busy[core_of_rank[node.rank]]

        next_us = min(
            min((now_us + left_us[at] * slowness(at) for at in running), default=math.inf),
            min((ready_us[at] for at in pending), default=math.inf),
        )
        for at in running:
            left_us[at] -= (next_us - now_us) / slowness(at)
        now_us = next_us
        # Rounding may leave a trace of work.
        done = [at for at in running if left_us[at] <= 1e-9 * (1.0 + now_us)]
        running = [at for at in running if at not in done]
        for at in done:
            num_done += 1
            stop[at + 1] = now_us
            for other, gap_us in followers[at]:
                missing[other] -= 1
                ready_us[other] = max(ready_us[other], now_us + gap_us)
                if not missing[other]:
                    pending.append(other)
        begin = [at for at in pending if ready_us[at] <= now_us]
        pending = [at for at in pending if ready_us[at] > now_us]
        for at in begin:
            start[at + 1] = now_us
        running += begin
    return Replay(start, stop)
