"""Replicas that exchange tokens with experts: where they wait, and which of their work is even.

Where expert parallelism spans several data-parallel replicas, every layer of experts is a barrier:
none goes on before all of a group have sent their tokens. So micro-batches of the same place in the
schedule run together, and each lasts as long as the slowest. What experts do is even over the
group, whoever sends the tokens; the rest is each replica's own.

Legend: ``S`` virtual stages, ``N`` micro-batches, ``R`` replicas of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from megatron_wlb.cost.schedule.graph import Floats, Graph, Replay
from megatron_wlb.cost.schedule.hosting import Copies

if TYPE_CHECKING:
    from megatron_wlb.cost import Cost
    from megatron_wlb.cost.analytic import AnalyticModel


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of neighbouring replicas, and the work in each virtual stage that they share."""

    num_replicas: int
    """Replicas of a group; at least 2."""
    routed_us: tuple[tuple[float, float], ...]
    """Time of a token's experts in each virtual stage, forward and backward; 0 of a stage of dense
    layers, where nobody waits."""

    @classmethod
    def of(
        cls, model: AnalyticModel, measured: Cost | None = None, num_tokens: int = 1
    ) -> ExpertGroups | None:
        """None where each replica has all experts, or there are none.

        In a ``measured`` cost of the whole model, read at so many tokens, experts have the share of
        linear work that ``model`` predicts.
        """
        num_replicas, stages = model.parallelism.expert_replicas, model.parallelism.stages
        if num_replicas == 1 or not model.shape.experts:
            return None
        routed_us = tuple(map(model.routed_us, stages(model.shape)))
        if measured is not None:
            whole, real = model.cost().work([num_tokens]), measured.work([num_tokens])
            forward = real.forward_linear_us / whole.forward_linear_us
            backward = real.backward_linear_us / whole.backward_linear_us
            routed_us = tuple((first * forward, then * backward) for first, then in routed_us)
        return cls(num_replicas, routed_us)

    @property
    def exchanges(self) -> tuple[bool, ...]:
        """Whether each virtual stage has experts."""
        return tuple(forward_us > 0 for forward_us, _ in self.routed_us)

    @cached_property
    def _token_us(self) -> float:
        return sum(map(sum, self.routed_us))

    def own_us(self, total_us: float, num_tokens: int) -> float:
        """Time of a micro-batch but for what experts do, which is even over its group."""
        return total_us - self._token_us * num_tokens

    def share(
        self, times_us: Sequence[Floats], num_tokens: Sequence[Sequence[float]]
    ) -> tuple[list[Floats], list[Floats]]:
        """What each replica does, and how long it waits for others, ``[2, S, N]`` each.

        Args:
            times_us: of each replica ``[2, S, N]``, as if it had all experts.
            num_tokens: of each replica ``[N]``, padding included: its own.
        """
        rates = np.array(self.routed_us).T[:, :, None]  # [2, S, 1]
        tokens = np.array(num_tokens, dtype=np.float64)[:, None, None]  # [replicas, 1, 1, N]
        times = np.stack(times_us)
        routed = np.minimum(rates * tokens, times)
        size = self.num_replicas
        grouped = (len(times) // size, size, *times.shape[1:])
        even = routed.reshape(grouped).mean(axis=1, keepdims=True)
        busy = (times - routed).reshape(grouped) + even
        waits = np.where(rates > 0, busy.max(axis=1, keepdims=True) - busy, 0.0)
        return list(busy.reshape(times.shape)), list(waits.reshape(times.shape))

    def replay(
        self,
        graph: Graph,
        times_us: Sequence[Floats],
        num_tokens: Sequence[Sequence[float]],
        p2p_us: Sequence[Floats],
        copies: Sequence[Copies | None] = (),
    ) -> tuple[list[Floats], list[Floats], Replay]:
        """What :meth:`share` says, and when all of it runs, ``[1 + nodes, replicas]``."""
        busy, waits = self.share(times_us, num_tokens)
        lasting = np.stack([own + wait for own, wait in zip(busy, waits, strict=True)], axis=-1)
        replay = graph.replay(
            lasting,
            np.stack(p2p_us, axis=-1),
            together=self.num_replicas,
            stages=self.exchanges,
            copies=copies,
        )
        return busy, waits, replay
