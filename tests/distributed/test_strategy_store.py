"""What the store of strategies moves and keeps, counted; and that weights come layer by layer."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import MODELS
from helpers.strategy_ranks import (
    open_runner,
    plan_for,
    run_step,
    strategies_file,
    with_strategies,
)
from helpers.workload import make_workload

from megatron_wlb.cost import Execution, Hardware, MemoryModel, load_hardware
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config
from megatron_wlb.strategies.plan.store_costs import ParameterStore
from megatron_wlb.strategies.plan.strategy import Cluster, Strategy

WORKLOAD = make_workload([[60, 55, 57, 58], [8, 44, 21], [60, 3, 25], [4, 50]], vocab_size=120)
STRATEGIES = ("4*tp1:128", "2*tp2:128", "tp2:128+pp2:128", "tp2cp2:128")
NUM_RANKS = 4
FP32 = 4
OF_A_DISTRIBUTED_OPTIMIZER = 1.15
"""How much more than its collectives may be moved."""


def config_of(folder: Path) -> Config:
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
        f"--make-vocab-size-divisible-by 64 --global-batch-size 2 {MODELS['llama']}"
    )
    return with_strategies(parse(flags.split()), strategies_file(folder, STRATEGIES))


@dataclasses.dataclass(frozen=True)
class Counted:
    """Bytes on one rank."""

    pulled: tuple[int, ...]
    """By step: what it sends to other ranks before the push."""
    pushed: tuple[int, ...]
    held: int
    """The most that buffers on their way take at a time."""
    losses: tuple[float, ...]
    store: int
    sizes: tuple[int, ...]
    """Elements of each bucket."""


@dataclasses.dataclass(eq=False)
class _Work:
    """Stands for buffers as long as what waits for them does: gloo keeps them a moment longer."""

    work: Any
    num_bytes: int

    def wait(self) -> None:
        self.work.wait()

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


def count(config: Config, room_bytes: float) -> Counted:
    """Runs a step of each strategy and counts what goes to other ranks."""
    import weakref

    import torch
    import torch.distributed as dist

    from megatron_wlb.strategies.run import routes

    rank = dist.get_rank()
    run, runner = open_runner(config, WORKLOAD, lambda *_: room_bytes)
    real, sent, held = dist.all_to_all_single, [], 0
    kept: weakref.WeakSet[_Work] = weakref.WeakSet()

    def counted(got: Any, given: Any, coming: Any, going: Any, **options: Any) -> _Work:
        nonlocal held
        sent.append((sum(going) - going[rank]) * given.element_size())
        work = _Work(real(got, given, coming, going, **options), got.nbytes + given.nbytes)
        kept.add(work)
        held = max(held, sum(one.num_bytes for one in kept))
        return work

    pulled, pushed, losses = [], [], []
    num = len(runner.buckets.sizes)
    replicas = [links.replica for links in runner._links.values()]
    with mock.patch.object(routes.dist, "all_to_all_single", counted):
        for step in range(len(STRATEGIES)):
            sent.clear()
            plan = dataclasses.replace(plan_for(run, WORKLOAD, step), step=step)
            losses.append(run_step(runner, plan))
            pulled.append(sum(sent[:num]))
            pushed.append(sum(sent[num:]))
            assert len(sent) == 2 * num
            own = runner._links[plan.strategy.key].replica
            open_ = {id(one) for one in replicas if one.arena.weights.untyped_storage().nbytes()}
            assert open_ == {id(own)}, "memory of another layout"
            runner.store.optimizer.step()
    assert all(torch.isfinite(shard).all() for shard in runner.store.weights)
    bytes_, store = (tuple(pulled), tuple(pushed), held), runner.store.num_bytes
    return Counted(*bytes_, tuple(losses), store, (*runner.buckets.sizes,))


def test_exchange_and_store_take_no_more_bytes_than_planned(gloo: GlooPool, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    found = gloo.run(NUM_RANKS, count, config, math.inf)
    shape = model_shape(config, 128)
    planned = dataclasses.replace(
        ParameterStore.of(shape, Cluster(NUM_RANKS, NUM_RANKS)), weight_bytes=FP32
    )
    num_parameters = sum(found[0].sizes)
    assert found[0].sizes == planned.buckets

    moved = [sum(one.pulled[n] + one.pushed[n] for one in found) for n in range(len(STRATEGIES))]
    for text, bytes_moved in zip(STRATEGIES, moved, strict=True):
        exchange = planned.exchange(Strategy.parse(text, planned.cluster))
        # Norms are whole on tensor-parallel ranks, and counted as if they were divided. Parts are
        # planned as if they lay anywhere.
        assert bytes_moved <= 1.03 * (exchange.pull.sum() + exchange.push.sum()), text
    # A distributed optimizer of some replicas gathers weights and scatters gradients.
    for at, num_replicas in ((0, 4), (1, 2)):
        own = 2 * (num_replicas - 1) * num_parameters * FP32
        assert 0.97 * own <= moved[at] <= OF_A_DISTRIBUTED_OPTIMIZER * own

    for scheme in (Scheme(), Scheme(2), Scheme(2, 2)):
        model = MemoryModel(shape, Execution(scheme.parallelism, bf16=False, store_ranks=NUM_RANKS))
        most = max(one.store for one in found)
        assert model.state_bytes(0).optimizer == pytest.approx(most, rel=0.03)
    assert max(one.held for one in found) > 1.9 * model.update_bytes(0), "gradients of all layers"


def test_exchange_without_room_goes_layer_by_layer(gloo: GlooPool, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    whole, found = (gloo.run(NUM_RANKS, count, config, room) for room in (math.inf, 0.0))
    shape = model_shape(config, 128)
    execution = Execution(Scheme(2).parallelism, bf16=False, store_ranks=NUM_RANKS)
    planned = MemoryModel(shape, execution).update_bytes(0)
    for one, other in zip(found, whole, strict=True):
        assert one.losses == other.losses and one.pushed == other.pushed
        assert one.held <= planned
    assert max(one.held for one in found) == pytest.approx(planned, rel=0.03)


@pytest.mark.parametrize("num_replicas", [8, 16, 32])
def test_many_replicas_move_little_more_than_a_distributed_optimizer(num_replicas: int) -> None:
    hardware: Hardware = load_hardware("h100-sxm")
    store = ParameterStore(Cluster(64, hardware.devices_per_node), (4096, 8192, 4096))
    scheme = Scheme(64 // num_replicas)
    kinds = [(scheme, 4096)] * num_replicas
    exchange = store.exchange(Strategy.of(store.cluster, kinds))
    moved = exchange.pull.sum() + exchange.push.sum()
    own = (num_replicas - 1) * sum(store.buckets) * (store.weight_bytes + store.gradient_bytes)
    assert moved <= OF_A_DISTRIBUTED_OPTIMIZER * own


def order_of_waits(config: Config) -> tuple[list[str], bool]:
    """Notes when weights are waited for and layers run, in a step of one replica a rank; and
    whether Megatron's globals are as before, also after an error.
    """
    from megatron.core import parallel_state

    from megatron_wlb.strategies.run.routes import Pull, Push

    run, runner = open_runner(config, WORKLOAD)
    before = dict(vars(parallel_state))
    notes: list[str] = []
    wait, post = Pull.wait, Push.post

    def waiting(pull: Pull, bucket: int) -> None:
        if any(one.bucket == bucket for one in pull._coming):
            notes.append(f"weights {bucket}")
        wait(pull, bucket)

    def posting(push: Push, down_to: int) -> None:
        notes.extend(f"gradients {n}" for n in range(push._next, down_to - 1, -1))
        post(push, down_to)

    plan = plan_for(run, WORKLOAD, 0)
    local = runner._links[plan.strategy.key].replica if plan.strategy else None
    for number, layer in enumerate(local.model.gpts[0].decoder.layers):
        layer.register_forward_hook(lambda *_, n=number: notes.append(f"forward {n}"))
        layer.register_full_backward_hook(lambda *_, n=number: notes.append(f"backward {n}"))
    with (
        mock.patch.object(Pull, "wait", waiting),
        mock.patch.object(Push, "post", posting),
    ):
        run_step(runner, plan)
    try:
        with local.groups.current():
            inside = parallel_state.get_data_parallel_world_size()
            raise RuntimeError("as in a forward pass")
    except RuntimeError:
        return notes, inside == 1 and dict(vars(parallel_state)) == before


def test_weights_are_waited_for_and_gradients_pushed_layer_by_layer(
    gloo: GlooPool, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    for notes, is_as_before in gloo.run(NUM_RANKS, order_of_waits, config):
        assert is_as_before
        first = notes.index("forward 0")
        assert notes[:first] == ["weights 0"], "the other layers' are still under way"
        for layer in (1, 2, 3):
            assert notes.index(f"weights {layer}") > notes.index(f"forward {layer - 1}")
        # The last backward pass of a rank lets each layer's gradients go as it is done with them.
        last = len(notes) - 1 - notes[::-1].index("backward 1")
        assert last < notes.index("gradients 1") < notes.index("gradients 0")
        assert notes.index("gradients 3") < last, "gone while others are worked out"
