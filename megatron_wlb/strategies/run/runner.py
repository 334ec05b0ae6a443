"""One step of a strategy: pull, run each replica, push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import StepPlan
from megatron_wlb.runtime.ranks.hosts import Hosts
from megatron_wlb.runtime.ranks.reads import Reads
from megatron_wlb.runtime.ranks.transfer import of_all_ranks
from megatron_wlb.strategies.plan.strategy import Layout, Strategy
from megatron_wlb.strategies.run.buckets import Buckets
from megatron_wlb.strategies.run.pieces import Piece, whole_pieces
from megatron_wlb.strategies.run.replica import LocalReplica
from megatron_wlb.strategies.run.routes import Pull, Push, Routes
from megatron_wlb.strategies.run.store import Store


@dataclass(frozen=True)
class _Links:
    """A strategy on this rank."""

    number: int | None
    """Its replica; None for a rank that is idle."""
    replica: LocalReplica | None
    room_bytes: float
    pull: Routes
    push: Routes


class StrategyRunner:
    """Runs steps of some strategies on a store.

    ``replicas`` are this rank's parts, of the strategies' replicas that it is in. Its first weights
    are those of the first strategy's first replica. ``room_bytes`` says what the exchange may take
    of a rank's memory in a strategy. All ranks of the world make it together.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        replicas: dict[Layout, LocalReplica],
        hosts: Hosts,
        num_layers: int,
        dtype: torch.dtype,
        room_bytes: Callable[[Strategy, int], float],
        verify_plan_interval: int = 1,
    ) -> None:
        self.hosts = hosts
        self.verify_plan_interval = verify_plan_interval
        self.dtype = dtype
        """What passes run with."""
        self._num_runs = 0
        self._last: LocalReplica | None = None
        """What ran last, and what it read is not compared yet."""
        self._opened: LocalReplica | None = None
        rank, world = dist.get_rank(), dist.get_world_size()
        known = of_all_ranks({layout: local.pieces for layout, local in replicas.items()})
        every = [piece for own in known for pieces in own.values() for piece in pieces]
        self.buckets = Buckets(every, num_layers, world)
        self.wholes = whole_pieces(iter(every))
        own_objects = {one for local in replicas.values() for one in local.objects}
        self.objects = sorted(set().union(*of_all_ranks(own_objects)))
        """What checkpoints hold besides."""
        used: dict[str, list[list[Piece]]] = {}
        for strategy in strategies:
            users = used[strategy.key] = [[] for _ in range(world)]
            for replica in strategy.replicas:
                for user in replica.ranks:
                    users[user] = known[user][replica.layout]
        self.buckets.place([*used.values()])
        self.store = Store(self.buckets)
        self._links = {}
        for strategy in strategies:
            users = used[strategy.key]
            number = next((n for n, r in enumerate(strategy.replicas) if rank in r.ranks), None)
            adding = [[piece for piece in pieces if piece.adds] for pieces in users]
            self._links[strategy.key] = _Links(
                number,
                None if number is None else replicas[strategy.replicas[number].layout],
                room_bytes(strategy, rank),
                Routes(self.buckets, users, rank),
                Routes(self.buckets, adding, rank),
            )

    def take_weights(self, strategy: Strategy) -> None:
        """Lets the store have the weights that a strategy's first replica has now."""
        replica = strategy.replicas[0]
        links, rank = self._links[strategy.key], dist.get_rank()
        held = links.replica.held if links.replica and rank in replica.ranks else []
        own = [one for one in held if one.piece.is_first]
        givers = of_all_ranks([one.piece for one in own])
        routes = Routes(self.buckets, givers, rank)
        self.give(routes, [one.weight.float() for one in own], self.store.weights)
        if links.replica is not None:
            links.replica.arena.close()

    def _open(self, local: LocalReplica | None) -> None:
        """Lets one layout have memory; it keeps it until another one runs."""
        if self._opened is not local and self._opened is not None:
            self._opened.arena.close()
        self._opened = local
        if local is not None:
            local.arena.open()

    def give(
        self, routes: Routes, tensors: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
    ) -> None:
        """Sets shards to what ranks have, each element of which one has."""
        for shard in shards:
            shard.detach().zero_()
        Push(routes, tensors).finish(shards)

    def compare_reads(self) -> None:
        """As :meth:`StepRunner.compare_reads`, over all replicas."""
        if self.verify_plan_interval:
            self.hosts.compare_reads(self._take_reads())

    def _take_reads(self) -> Reads | None:
        local, self._last = self._last, None
        return None if local is None else local.runner.take_reads()

    def run_schedule(
        self, plan: StepPlan, *, forward_only: bool, **options: Any
    ) -> list[torch.Tensor]:
        """Runs forward (and backward) of one step, as :meth:`StepRunner.run_schedule`; what the
        losses report whose part of the sum is this rank's. Gradients are left in the store, divided
        by the number of targets.

        Ranks with nothing to run take part in the exchange. Raises :class:`PlanError` where ranks
        disagree, or for a strategy that this run has not.
        """
        is_due = self.verify_plan_interval and self._num_runs % self.verify_plan_interval == 0
        self._num_runs += 1
        reads = self._take_reads()  # forgotten if not due: next time it would be of other steps
        if is_due:
            self.hosts.compare_step(plan, reads)
        links = None if plan.strategy is None else self._links.get(plan.strategy.key)
        if links is None:
            raise PlanError(
                f"step {plan.step} is for strategy {plan.strategy}, which is not one of this run's "
                f"{len(self._links)}; plan with those of --wlb-strategies"
            )
        local = links.replica
        self._open(local)
        weights = [held.weight for held in local.held] if local else []
        adding = [held.gradient for held in local.held if held.piece.adds] if local else []
        pull = Pull(links.pull, self.store.weights, weights, self.dtype, links.room_bytes)
        push = None
        if not forward_only:
            if local is not None:
                local.arena.gradients.zero_()
            self.store.forget_gradients()
            push = Push(links.push, adding, links.room_bytes)
        reports: list[torch.Tensor] = []
        number = links.number
        if local is not None and number is not None and plan.micro_batches[number]:
            reports = local.run(plan, number, pull, push, **options)
            self._last = local
        pull.finish()
        if push is not None:
            push.finish(self.store.gradients)
            self.store.divide_gradients(plan.num_targets)
        return reports
