"""Runs strategies on one rank of a gloo world, from the oracle's weights, and records it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.oracle import State
from helpers.ranks import corpora_of
from helpers.workload import Workload
from megatron_wlb.plan import StepPlan
from megatron_wlb.settings.config import Config

Fault = Callable[[Any], contextlib.AbstractContextManager[None]]
"""Breaks a ``StrategyRunner`` for the length of a ``with`` block."""

_SAVED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Megatron saves norms by the names that TransformerEngine's layers give them."""


@dataclass(frozen=True)
class StrategyRecord:
    """What a rank saw. Gradients and weights are of the tensors that it gathered, by their names
    in the whole model.
    """

    losses: tuple[float, ...]
    evaluated: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[State, ...]
    final: State


def strategies_file(folder: Path, texts: Sequence[str], num_devices: int = 4) -> str:
    lines = [f"num_devices: {num_devices}", f"devices_per_node: {num_devices}", "strategies:"]
    path = folder / "strategies.yaml"
    path.write_text("\n".join([*lines, *(f"- {text}" for text in texts)]) + "\n")
    return str(path)


def with_strategies(config: Config, path: str) -> Config:
    wlb = dataclasses.replace(config.wlb, wlb_strategies=path, wlb_hardware="cpu")
    return dataclasses.replace(config, wlb=wlb)


def padded(config: Config, workload: Workload, num_ranks: int = 4) -> Config:
    """The settings of the oracle's run: with the vocabulary padded for all strategies."""
    from megatron_wlb.strategies.plan.strategy_run import StrategyRun

    return StrategyRun.of(config, corpora_of(workload), num_ranks).config


def plan_for(run: Any, workload: Workload, step: int) -> StepPlan:
    """The next strategy each step; every third step all is run by the first replica."""
    from megatron_wlb.planning.balance.dispatch import StepDocuments
    from megatron_wlb.strategies.plan.assigner import assign, step_plan

    documents = workload.steps[step]
    candidate = run.candidates[step % len(run.candidates)]
    chosen = assign(StepDocuments([d.length for d in documents]), candidate)
    assert chosen is not None
    selectors = run.selectors
    plan = step_plan(step, documents, chosen, selectors)
    others = plan.micro_batches[1:]
    schemes = {replica.scheme for replica in candidate.strategy.replicas}
    if step % 3 == 2 and len(schemes) == 1 and not selectors.keys() & schemes:
        first = sum(plan.micro_batches, ())
        plan = dataclasses.replace(plan, micro_batches=(first, *((),) * len(others)))
    return plan


def open_runner(
    config: Config, workload: Workload, room_bytes: Callable[[Any, int], float] | None = None
) -> tuple[Any, Any]:
    """The run of these settings and its runner, with models of megatron-core alone."""
    import torch
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_wlb.runtime.gpt.build import build_model
    from megatron_wlb.runtime.ranks.hosts import Hosts
    from megatron_wlb.runtime.stepping.optimizer import optimizer_config
    from megatron_wlb.runtime.stepping.step import StepRunner
    from megatron_wlb.runtime.trainer import distributed
    from megatron_wlb.strategies.plan.strategy_run import StrategyRun
    from megatron_wlb.strategies.run.groups import GroupOpener
    from megatron_wlb.strategies.run.replica import Arena, LocalReplica, parameters_of
    from megatron_wlb.strategies.run.runner import StrategyRunner
    from megatron_wlb.strategies.run.store import groups_of

    distributed.initialize_groups(config)
    corpora = corpora_of(workload)
    run = StrategyRun.of(config, corpora, dist.get_world_size())
    config, opener, opened = run.config, GroupOpener(), {}
    for layout in run.layouts:
        scheme, ranks = layout
        groups = opener.replica(scheme, ranks, *run.expert_sizes(scheme))
        if groups is None:
            continue
        own = run.replica_config(scheme)
        with groups.current():
            distributed.seed(own)
            model = build_model(own, run.vocab_size, _kernel, wrapped=False)
            runner = StepRunner.of(own, model, corpora, model.device.type)
            runner.verify_plan_interval = 0
        opened[layout] = model, runner, groups
    models = [model for model, _, _ in opened.values()]
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    options = optimizer_config(config, dtype)
    chunks = [chunk for model in models for chunk in model.chunks]
    param_groups, group_of = groups_of(chunks, options)
    replicas = {
        layout: LocalReplica(Arena(parameters_of(own[0]), dtype), *own, group_of)
        for layout, own in opened.items()
    }
    for replica in replicas.values():
        replica.arena.close()
    made = StrategyRunner(
        run.strategies,
        replicas,
        Hosts(ProcessGroupCollection.use_mpu_process_groups()),
        config.model.num_layers,
        dtype,
        room_bytes or run.room_bytes,
        config.wlb.wlb_verify_plan_interval,
    )
    made.store.optimize(options, param_groups)
    return run, made


def _kernel(_name: str, demand: Any) -> Any:
    from megatron_wlb.runtime.gpt.attention.kernels import agreed_kernel

    return agreed_kernel(
        "sdpa" if demand.dropout or demand.device.type == "cuda" else "torch-cpu", demand
    )


def run_step(runner: Any, plan: StepPlan, *, forward_only: bool = False) -> float:
    """The loss of a step, on every rank."""
    import torch
    import torch.distributed as dist

    reports = runner.run_schedule(plan, forward_only=forward_only)
    total = torch.zeros(1, dtype=torch.float64, device=runner.store.weights[0].device)
    for report in reports:
        total += report[0]
    dist.all_reduce(total)
    return float(total) / plan.num_targets


def name_of(whole: Any) -> str:
    """The whole model's name of a tensor."""
    name = str(whole.key)
    for saved, called in _SAVED_NORMS.items():
        name = name.replace(saved, called)
    layer = "".join(f"{at}." for at in whole.stack)
    return name.replace("decoder.layers.", f"decoder.layers.{layer}")


def gather(runner: Any, shards: Sequence[Any]) -> State:
    """The tensors that this rank saves, by their names in the whole model."""
    from megatron_wlb.strategies.run.shard_files import gathered

    pairs = zip(*gathered(runner, shards), strict=True)
    return {name_of(p.whole): t.cpu().numpy().copy() for p, t in pairs}


def set_weights(runner: Any, state: State) -> None:
    import torch

    from megatron_wlb.strategies.run.shard_files import dealt

    pieces, routes = dealt(runner)
    device = runner.store.weights[0].device
    tensors = [torch.from_numpy(state[name_of(piece.whole)]).to(device) for piece in pieces]
    runner.give(routes, tensors, runner.store.weights)


def train(
    config: Config,
    workload: Workload,
    initial: State,
    fault: Fault = contextlib.nullcontext,
) -> StrategyRecord:
    """Runs the workload's steps as the trainer does, with another strategy in each."""
    import torch

    from megatron_wlb.runtime.stepping.optimizer import build_scheduler

    run, runner = open_runner(config, workload)
    optimizer = runner.store.optimizer
    scheduler = build_scheduler(run.config, optimizer)
    set_weights(runner, initial)
    losses, evaluated, norms, gradients = [], [], [], []
    with fault(runner):
        for step in range(len(workload.steps)):
            plan = plan_for(run, workload, step)
            losses.append(run_step(runner, plan))
            kept = [g.clone() for g in runner.store.gradients]
            with torch.no_grad():
                evaluated.append(run_step(runner, plan, forward_only=True))
            assert all(map(torch.equal, kept, runner.store.gradients))
            gradients.append(gather(runner, kept))
            norms.append(float(optimizer.step()[1]))
            scheduler.step(increment=config.training.global_batch_size)
    return StrategyRecord(
        tuple(losses),
        tuple(evaluated),
        tuple(norms),
        tuple(gradients),
        gather(runner, runner.store.weights),
    )
