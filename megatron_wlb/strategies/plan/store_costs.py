"""The parameter store: which rank keeps which parameters, and what a step pulls and pushes.

Hydraulis §5.2 takes optimisation and propagation apart. Each rank stores a contiguous shard of
every layer's parameters, gradients and optimizer state (its *bucket*), whatever the strategy is. A
step pulls the weights that its replicas need, and pushes their gradients, which the owner sums.

A bucket's elements stand tile by tile: of TP n, tensor-parallel rank t needs the n-th part from
``t · size // n`` on. Norms and biases, which every TP rank needs whole, are counted with the rest.
The order of elements in memory is the runtime's matter. It gives parts of a bucket to ranks that
use them, so what a step moves here is the most that it moves.

Legend: ``R`` ranks of the cluster.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.hardware import Hardware
from megatron_wlb.cost.memory import MemoryModel
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.shape import ModelShape
from megatron_wlb.cost.step_costs import UPDATE_BYTES
from megatron_wlb.strategies.plan.strategy import Cluster, Strategy


@dataclass(frozen=True)
class Exchange:
    """What a strategy's step moves between the store and the replicas, in bytes."""

    pull: Floats
    """``[R, R]``: weights from a rank (row) to a rank; nothing to itself."""
    push: Floats
    """``[R, R]``: gradients from a rank to a rank."""


@dataclass(frozen=True)
class ExchangeTimes:
    """How long links need for it, rank by rank (``[R]``, µs), and the update of the shards."""

    pull_us: Floats
    push_us: Floats
    update_us: float
    apart_us: float = 0.0
    """Time besides, in which no pass runs."""


@dataclass(frozen=True)
class ParameterStore:
    """Shards of every layer's parameters over all ranks of a cluster."""

    cluster: Cluster
    buckets: tuple[int, ...]
    """Parameters of each layer, of the whole model; the first has the embedding, the last one the
    final norm and the LM head."""
    experts: tuple[int, ...] = ()
    """Parameters of each layer's routed experts, if it has some; they are not in ``buckets``."""
    ep_size: int = 1
    etp_size: int | None = None
    """How far experts are divided; see :meth:`.Scheme.expert_sizes`."""
    weight_bytes: int = 2
    gradient_bytes: int = 4

    @classmethod
    def of(
        cls, shape: ModelShape, cluster: Cluster, ep_size: int = 1, etp_size: int | None = None
    ) -> ParameterStore:
        dense, experts = MemoryModel(shape, Execution()).layer_parameters
        return cls(cluster, dense, experts if any(experts) else (), ep_size, etp_size)

    def shard(self, bucket: int, rank: int) -> tuple[int, int]:
        """The elements ``[start, stop)`` of a bucket that a rank keeps."""
        return part(self.buckets[bucket], rank, self.cluster.num_devices)

    def exchange(self, strategy: Strategy) -> Exchange:
        """What a step of a strategy moves.

        Every rank of a replica pulls and pushes for itself, also those of one CP group, which
        need the same. It takes 1 ms for 64 ranks.
        """
        num = self.cluster.num_devices
        owners = np.arange(num)
        pulled = np.zeros((num, num))
        for replica in strategy.replicas:
            scheme = replica.scheme
            inner = scheme.tp_size * scheme.cp_size
            parts = math.prod(scheme.expert_sizes(self.ep_size, self.etp_size))
            divided = ((self.buckets, scheme.tp_size), (self.experts, parts))
            for stage, (sizes, parts) in product(range(scheme.pp_size), divided):
                if not sizes:
                    continue
                users = replica.stages[stage]
                layers = self._layers(scheme.pp_size, scheme.vpp_size, stage)
                part_of = np.arange(inner) % parts
                for size, count in Counter(sizes[layer] for layer in layers).items():
                    start = np.maximum.outer(size * owners // num, size * part_of // parts)
                    stop = np.minimum.outer(
                        size * (owners + 1) // num, size * (part_of + 1) // parts
                    )
                    pulled[:, users] += count * np.maximum(stop - start, 0)
        np.fill_diagonal(pulled, 0)
        return Exchange(pulled * self.weight_bytes, pulled.T * self.gradient_bytes)

    def times(self, strategy: Strategy, hardware: Hardware) -> ExchangeTimes:
        """What the exchange takes: each rank sends and receives at once, in its node and beyond.

        A rank's pull is over when the ranks that send to it are done with all that they send.
        """
        moved = self.exchange(strategy)
        return ExchangeTimes(
            self._times_us(moved.pull, hardware),
            self._times_us(moved.push, hardware),
            hardware.memory_us(UPDATE_BYTES * self.shard_elements),
        )

    @cached_property
    def shard_elements(self) -> int:
        """Parameters that a rank keeps, at most."""
        sizes = np.array(self.buckets) + np.array(self.experts or 0)
        return int((-(-sizes // self.cluster.num_devices)).sum())

    def _times_us(self, moved: Floats, hardware: Hardware) -> Floats:
        num = self.cluster.num_devices
        node = np.arange(num) // self.cluster.devices_per_node
        near = node[:, None] == node[None, :]
        gb_s = np.where(near, hardware.node_link_gb_s, hardware.network_gb_s)
        us = moved / (gb_s * hardware.link_share * 1e3)
        sent, received = (
            np.maximum((us * near).sum(axis=axis), (us * ~near).sum(axis=axis)) for axis in (1, 0)
        )
        senders = np.where(moved > 0, sent[:, None], 0.0).max(axis=0)
        times: Floats = np.maximum(received, senders)
        return np.where(times > 0, times + hardware.latency_us, 0.0)

    def _layers(self, pp_size: int, vpp_size: int, pp_rank: int) -> list[int]:
        """The layers of a pipeline rank, of all its chunks."""
        num, stages = len(self.buckets), pp_size * vpp_size
        chunks = range(pp_rank, stages, pp_size)
        return [n for at in chunks for n in range(at * num // stages, (at + 1) * num // stages)]


def part(size: int, index: int, num: int) -> tuple[int, int]:
    """The elements ``[start, stop)`` of part ``index`` of ``num``, as even as can be."""
    return size * index // num, size * (index + 1) // num
