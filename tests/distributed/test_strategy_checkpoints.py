"""Checkpoints of strategies and of plain runs are one kind: to the last bit, there and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gloo import GlooPool
from helpers.layouts import MODELS, further
from helpers.oracle import State
from helpers.strategy_ranks import (
    gather,
    open_runner,
    plan_for,
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


def saving(config: Config, save: str | None = None, load: str | None = None) -> Config:
    checkpoint = dataclasses.replace(config.checkpoint, save=save, load=load)
    return dataclasses.replace(config, checkpoint=checkpoint)


def everything(runner: Any) -> dict[str, State]:
    """Weights and moments of the whole model, on each rank."""
    import torch.distributed as dist

    num = range(len(runner.buckets.sizes))
    shards = {"": runner.store.weights}
    shards |= {name: [runner.store.moments(name, b) for b in num] for name in MOMENTS}
    found: dict[str, State] = {}
    for name, own in shards.items():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, gather(runner, own))
        found[name] = {key: array for part in parts for key, array in part.items()}
    return found


def there_and_back(strategies: Config, plain: Config, others: Config, folder: str) -> list[str]:
    """Trains strategies, resumes as a plain run, saves, and resumes with other strategies."""
    import torch.distributed as dist
    from helpers.ranks import load as held_of
    from megatron.core import parallel_state

    from megatron_wlb.runtime.gpt.build import build_model
    from megatron_wlb.runtime.saving import checkpoint
    from megatron_wlb.runtime.stepping.optimizer import build_optimizer, build_scheduler
    from megatron_wlb.runtime.strategy import shard_files as of_strategies
    from megatron_wlb.runtime.trainer import distributed

    found = []
    run, runner = open_runner(saving(strategies, save=f"{folder}/first"), WORKLOAD)
    scheduler = build_scheduler(run.config, runner.store.optimizer)
    for step in range(3):
        plan = plan_for(run, WORKLOAD, step)
        runner.run(plan)
        runner.store.update(plan.num_targets, 1.0)
        scheduler.step(increment=4)
    before = everything(runner)
    of_strategies.save(run, 3, runner, scheduler, {"planner": 1})
    dist.barrier()
    parallel_state.destroy_model_parallel()

    plain = saving(plain, save=f"{folder}/second", load=f"{folder}/first")
    distributed.initialize_groups(plain)
    model = build_model(plain, WORKLOAD.vocab_size)
    optimizer, plain_scheduler = build_optimizer(plain, model)
    loaded = checkpoint.load(plain, model, optimizer, plain_scheduler)
    assert loaded is not None
    if loaded[:2] != (3, {"planner": 1}):
        found.append(f"resumed at {loaded[:2]}")
    if plain_scheduler.num_steps != scheduler.num_steps:
        found.append(f"the schedule is at {plain_scheduler.num_steps}")
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
    checkpoint.save(plain, 3, model, optimizer, plain_scheduler, {"planner": 2})
    dist.barrier()
    parallel_state.destroy_model_parallel()

    run, runner = open_runner(saving(others, load=f"{folder}/second"), WORKLOAD)
    scheduler = build_scheduler(run.config, runner.store.optimizer)
    resumed = of_strategies.find(run)
    assert resumed is not None
    of_strategies.load(run, resumed, runner, scheduler)
    if (resumed.iteration, resumed.planner) != (3, {"planner": 2}):
        found.append(f"resumed at {resumed.iteration}")
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
    found = gloo.run(4, there_and_back, strategies, plain, others, str(tmp_path))
    assert found == [[]] * 4
