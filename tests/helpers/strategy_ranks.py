"""Runs strategies on one rank of a gloo world, from the oracle's weights, and records it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.oracle import State
from helpers.workload import MemoryCorpus, Workload
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
class MemoryCorpora:
    """What a run of strategies asks of its corpora."""

    corpora: tuple[Any, ...]
    vocab_size: int


class OpenCorpus(MemoryCorpus):
    """A corpus that need not be opened."""

    def open_tokens(self) -> None:
        pass


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


def corpora_of(workload: Workload) -> Any:
    return MemoryCorpora((OpenCorpus(workload.corpus.stored),), workload.vocab_size)


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
    from megatron_wlb.planning.strategy_run import StrategyRun

    return StrategyRun.of(config, corpora_of(workload), num_ranks).config


def plan_for(run: Any, workload: Workload, step: int) -> StepPlan:
    """The next strategy each step; every third step all is run by the first replica."""
    from megatron_wlb.planning.assign import assign, step_plan
    from megatron_wlb.planning.dispatch import StepDocuments

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


def open_runner(config: Config, workload: Workload) -> tuple[Any, Any]:
    """The run of these settings and its runner."""
    import torch.distributed as dist

    from megatron_wlb.planning.strategy_run import StrategyRun
    from megatron_wlb.runtime.gpt.build import attention_options, transformer_config
    from megatron_wlb.runtime.trainer import distributed
    from megatron_wlb.runtime.trainer.strategy_trainer import build_runner

    distributed.initialize_groups(config)
    corpora = corpora_of(workload)
    run = StrategyRun.of(config, corpora, dist.get_world_size())
    kernel = attention_options(run.config, transformer_config(run.config)).kernel_name
    return run, build_runner(run, corpora, "cpu", kernel)


def name_of(whole: Any) -> str:
    """The whole model's name of a tensor."""
    name = str(whole.key)
    for saved, called in _SAVED_NORMS.items():
        name = name.replace(saved, called)
    layer = "".join(f"{at}." for at in whole.stack)
    return name.replace("decoder.layers.", f"decoder.layers.{layer}")


def gather(runner: Any, shards: Sequence[Any]) -> State:
    """The tensors that this rank saves, by their names in the whole model."""
    from megatron_wlb.runtime.strategy.routes import Pull
    from megatron_wlb.runtime.strategy.shard_files import dealt, empty

    pieces, routes = dealt(runner)
    tensors = empty(pieces, runner)
    Pull(routes, shards, tensors).finish()
    return {name_of(p.whole): t.numpy().copy() for p, t in zip(pieces, tensors, strict=True)}


def set_weights(runner: Any, state: State) -> None:
    import torch

    from megatron_wlb.runtime.strategy.shard_files import dealt

    pieces, routes = dealt(runner)
    tensors = [torch.from_numpy(state[name_of(piece.whole)]) for piece in pieces]
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
    scheduler = build_scheduler(run.config, runner.store.optimizer)
    set_weights(runner, initial)
    losses, evaluated, norms, gradients = [], [], [], []
    with fault(runner):
        for step in range(len(workload.steps)):
            plan = plan_for(run, workload, step)
            losses.append(runner.run(plan).mean)
            kept = [g.clone() for g in runner.store.gradients]
            with torch.no_grad():
                evaluated.append(runner.run(plan, forward_only=True).mean)
            assert all(map(torch.equal, kept, runner.store.gradients))
            gradients.append(gather(runner, [g / plan.num_targets for g in kept]))
            norm = runner.store.update(plan.num_targets, config.training.clip_grad)
            norms.append(norm.item())
            scheduler.step(increment=config.training.global_batch_size)
    return StrategyRecord(
        tuple(losses),
        tuple(evaluated),
        tuple(norms),
        tuple(gradients),
        gather(runner, runner.store.weights),
    )
