"""Checkpoints of strategies and of plain runs are one kind: to the last bit, there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gloo import GlooPool
from helpers.layouts import MODELS, further
from helpers.nccl.record import recorded, recorded_programs
from helpers.nccl.rules import hangs
from helpers.oracle import State
from helpers.strategy_ranks import (
    gather,
    open_runner,
    plan_for,
    run_step,
    strategies_file,
    with_strategies,
)
from helpers.workload import make_workload

from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config

WORKLOAD = make_workload([[37, 1, 60, 12, 29], [8, 60, 1, 44], [51, 1, 33, 6]], vocab_size=59)
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--global-batch-size 4 --train-iters 14 --lr 0.01"
)
MOMENTS = ("exp_avg", "exp_avg_sq")


def config_of(
    model: str, folder: Path, strategies: tuple[str, ...], vocabulary: int, more: list[str]
) -> Config:
    folder.mkdir()
    flags = [*FLAGS.split(), *MODELS[model].split(), *more]
    flags += ["--make-vocab-size-divisible-by", str(vocabulary)]
    return with_strategies(parse(flags), strategies_file(folder, strategies))


def everything(runner: Any) -> dict[str, State]:
    """Weights and moments of the whole model, on each rank."""
    import torch.distributed as dist

    num = range(len(runner.buckets.sizes))
    shards = {"": runner.store.weights}
    shards |= {name: [runner.store.moment(name, b) for b in num] for name in MOMENTS}
    found: dict[str, State] = {}
    for name, own in shards.items():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, gather(runner, own))
        found[name] = {key: array for part in parts for key, array in part.items()}
    return found


def there_and_back(strategies: Config, plain: Config, others: Config, folder: str) -> list[str]:
    """Trains strategies, loads that into a plain model and Megatron's own optimizer, saves them,
    and loads that for other strategies.
    """
    import torch.distributed as dist
    from helpers.ranks import load as held_of
    from megatron.core import dist_checkpointing, parallel_state

    from megatron_wlb.runtime.gpt.build import build_model
    from megatron_wlb.runtime.stepping.optimizer import build_optimizer
    from megatron_wlb.runtime.trainer import distributed
    from megatron_wlb.strategies.run import shard_files

    first, second = f"{folder}/first", f"{folder}/second"
    if dist.get_rank() == 0:
        Path(first).mkdir()
        Path(second).mkdir()
    dist.barrier()
    found = []
    run, runner = open_runner(strategies, WORKLOAD)
    for step in range(3):
        run_step(runner, plan_for(run, WORKLOAD, step))
        runner.store.optimizer.step()
    before = everything(runner)
    state = {
        "model": shard_files.model_state(runner),
        "optimizer": shard_files.optimizer_state(runner),
    }
    dist_checkpointing.save(state, first)
    dist.barrier()
    parallel_state.destroy_model_parallel()

    distributed.initialize_groups(plain)
    model = build_model(plain, WORKLOAD.vocab_size)
    optimizer = build_optimizer(plain, model)

    def described(*, is_loading: bool) -> dict[str, Any]:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        own = model.gpts[0].sharded_state_dict(metadata={"dp_cp_group": group})
        held = optimizer.sharded_state_dict(own, is_loading=is_loading, metadata={})
        return {"model": own, "optimizer": held}

    loaded = dist_checkpointing.load(described(is_loading=True), first)
    model.gpts[0].load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    if {group["step"] for group in optimizer.param_groups} != {3}:
        found.append("Adam's updates are not counted on in the plain run")
    states = optimizer.chained_optimizers[0].optimizer.state
    parameters = [p for gpt in model.gpts for p in gpt.parameters()]
    mains = [getattr(p, "main_param", p) for p in parameters]
    pairs = list(zip(parameters, mains, strict=True))
    weights = [main.detach().numpy().reshape(p.shape).copy() for p, main in pairs]
    if not all((p == main.to(p.dtype).view(p.shape)).all() for p, main in pairs):
        found.append("the weights of passes are not the master weights, rounded")
    held, _ = held_of(plain, model, before[""])  # where they lie; sets the same weights again
    for at, part in enumerate(held):
        arrays = {"": weights[at]} | {n: states[mains[at]][n].numpy() for n in MOMENTS}
        for name, array in arrays.items():
            if not np.array_equal(array, before[name][part.name].reshape(-1)[part.indices]):
                found.append(f"{name} of {part.name} differs in the plain run")
    dist_checkpointing.save(described(is_loading=False), second)
    dist.barrier()
    parallel_state.destroy_model_parallel()

    run, runner = open_runner(others, WORKLOAD)
    asked = {
        "model": shard_files.model_state(runner),
        "optimizer": shard_files.optimizer_state(runner, is_loading=True),
    }
    read = dist_checkpointing.load(asked, second)
    shard_files.set_model(runner, read["model"])
    shard_files.set_optimizer(runner, read["optimizer"])
    for name, arrays in everything(runner).items():
        for key, array in arrays.items():
            if not np.array_equal(array, before[name][key]):
                found.append(f"{name} of {key} differs with other strategies")
    if {group["step"] for group in runner.store.optimizer.param_groups} != {3}:
        found.append("Adam's updates are not counted on")
    return found


@pytest.mark.parametrize("model", ["llama", further("gpt2"), further("llama --bf16")])
def test_checkpoints_go_between_strategies_and_plain_runs(
    gloo: GlooPool, tmp_path: Path, model: str
) -> None:
    model, *more = model.split()
    strategies = config_of(model, tmp_path / "a", ("tp2:128+pp2:128", "tp2cp2:128"), 32, more)
    others = config_of(model, tmp_path / "b", ("pp2vpp2:128+2*tp1:128",), 64, more)
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
    flags = [*FLAGS.split(), *MODELS[model].split(), *layout.split(), *more]
    plain = parse([*flags, "--make-vocab-size-divisible-by", "32"])
    given = there_and_back, strategies, plain, others, str(tmp_path)
    ranks = gloo.run(4, recorded, *given)
    assert [found for found, _ in ranks] == [[]] * 4
    assert hangs(recorded_programs(ranks)) == {}
