from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from megatron_wlb.cost import Execution, MemoryModel, ModelShape, Parallelism, load_hardware
from megatron_wlb.strategies.plan.store_costs import ParameterStore, part
from megatron_wlb.strategies.plan.strategy import Cluster, Strategy

SHAPE = ModelShape(
    64, 192, 8, 8, 8, 8, 520, True, rms_norm=True, linear_bias=False, tied_embeddings=False
)
CLUSTER = Cluster(16, 4)
STORE = ParameterStore.of(SHAPE, CLUSTER)


def needed_by(strategy: Strategy, rank: int) -> dict[int, tuple[int, int]]:
    """The elements ``[start, stop)`` that a rank needs of each bucket; empty for an idle rank."""
    for replica in strategy.replicas:
        if rank in replica.ranks:
            scheme, place = replica.scheme, replica.ranks.index(rank)
            stage = place // (scheme.tp_size * scheme.cp_size)
            layers = STORE._layers(scheme.pp_size, scheme.vpp_size, stage)
            own = place % scheme.tp_size, scheme.tp_size
            return {bucket: part(STORE.buckets[bucket], *own) for bucket in layers}
    return {}


def test_shards_of_all_ranks_are_the_whole_model() -> None:
    assert sum(STORE.buckets) == MemoryModel(SHAPE, Execution()).num_parameters(0)
    for bucket, size in enumerate(STORE.buckets):
        shards = [STORE.shard(bucket, rank) for rank in range(16)]
        assert shards[0][0] == 0 and shards[-1][1] == size
        assert all(a[1] == b[0] for a, b in pairwise(shards))
        assert max(b - a for a, b in shards) - min(b - a for a, b in shards) <= 1


@pytest.mark.parametrize("text", ["tp4pp2:1k+2*tp2cp2:1k", "tp2pp2vpp2:1k+tp1:1k", "4*tp4:1k"])
def test_exchange_is_what_ranks_need_and_do_not_keep(text: str) -> None:
    strategy = Strategy.parse(text, CLUSTER)
    pull = STORE.exchange(strategy).pull / 2  # element by element, from who needs what
    for rank in range(16):
        needed = needed_by(strategy, rank)
        assert bool(needed) == any(rank in replica.ranks for replica in strategy.replicas)
        for owner in range(16):
            overlap = 0
            for bucket, (start, stop) in needed.items():
                first, last = STORE.shard(bucket, owner)
                overlap += max(0, min(stop, last) - max(start, first))
            assert pull[owner, rank] == (0 if owner == rank else overlap)
    assert (STORE.exchange(strategy).push == 4 * pull.T).all()


def test_every_replica_holds_every_parameter_once() -> None:
    strategy = Strategy.parse("tp4pp2:1k+2*tp2cp2:1k", CLUSTER)
    for replica in strategy.replicas:
        elements = sum(
            stop - start
            for rank in replica.ranks
            for start, stop in needed_by(strategy, rank).values()
        )
        assert elements == sum(STORE.buckets) * replica.scheme.cp_size


def test_more_replicas_move_more_and_idle_ranks_only_give() -> None:
    hardware = load_hardware("a100")
    few, many = (Strategy.parse(text, CLUSTER) for text in ("2*tp4:1k", "8*tp2:1k"))
    less, more = map(STORE.exchange, (few, many))
    assert less.pull.sum() < more.pull.sum() and less.push.sum() < more.push.sum()
    times = STORE.times(few, hardware)
    assert not times.pull_us[8:].any() and times.push_us[8:].all()
    assert times.update_us > 0 and times.pull_us[:8].all()


def test_network_is_slower_than_a_node() -> None:
    hardware = load_hardware("a100")
    near = ParameterStore(Cluster(8, 8), STORE.buckets)
    far = ParameterStore(Cluster(8, 2), STORE.buckets)
    inside = near.times(Strategy.parse("4*tp2:1k", near.cluster), hardware).pull_us
    across = far.times(Strategy.parse("4*tp2:1k", far.cluster), hardware).pull_us
    ratio = np.max(across - hardware.latency_us) / np.max(inside - hardware.latency_us)
    # The busiest rank needs nothing that its own node keeps, and the network is 12 times slower.
    assert ratio == pytest.approx(12, rel=0.01)


def test_memory_of_a_store_does_not_depend_on_the_layout() -> None:
    def state(store: int | None, **layout: int):
        execution = Execution(Parallelism(**layout), store_ranks=store, kernels="torch")
        return MemoryModel(SHAPE, execution).state_bytes(0)

    whole = MemoryModel(SHAPE, Execution()).num_parameters(0)
    assert state(16).optimizer == state(16, tp_size=4, pp_size=2).optimizer == -(-whole // 16) * 16
    assert state(16).weights == 2 * whole and state(16, tp_size=4).weights < whole
    assert state(16).optimizer < state(None).optimizer == 12 * whole
    torchs = Execution(store_ranks=16, kernels="torch")
    # Gradients of the largest layer go, and come, in fp32.
    assert MemoryModel(SHAPE, torchs).update_bytes(0) == 8 * max(STORE.buckets)
