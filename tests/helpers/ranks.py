"""Runs the runtime on one rank of a gloo world, from the oracle's weights, and records it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean
from typing import Any

from helpers.oracle import State
from helpers.plans import PlanFor, scatter_for
from helpers.shards import Held, RankRun, held_by, whole_name
from helpers.workload import OwnLoss, Workload
from megatron_wlb.settings.config import Config

Fault = Callable[[Any], contextlib.AbstractContextManager[None]]
"""Breaks a ``StepRunner`` for the length of a ``with`` block."""


def build_trainer(config: Config, workload: Workload, **options: Any) -> Any:
    """A ``Trainer`` on Megatron's groups; ``options`` are settings of ours, without ``wlb_``."""
    import torch

    from megatron_wlb.planning import guards
    from megatron_wlb.runtime.trainer import distributed
    from megatron_wlb.runtime.trainer.trainer import Trainer

    world_size = torch.distributed.get_world_size()
    ours = {f"wlb_{name}": value for name, value in options.items()}
    config = dataclasses.replace(config, wlb=dataclasses.replace(config.wlb, **ours))
    guards.check(config, world_size)
    guards.check_micro_batches(config, world_size)
    distributed.initialize_groups(config)
    device = torch.empty(0, device="cuda").device.type  # the CPU, under emulation
    trainer = Trainer(config, device, corpora_of(workload))
    if workload.loss is not None:
        trainer.runner.batches.loss = partial(_own_loss, workload.loss)
    return trainer


def build_runner(config: Config, workload: Workload, **options: Any) -> Any:
    """The ``StepRunner`` of a fresh :func:`build_trainer`."""
    return build_trainer(config, workload, **options).runner


def corpora_of(workload: Workload) -> Any:
    from megatron_wlb.data.corpora import Corpora

    corpora: Any = [workload.corpus]
    return Corpora(corpora, workload.vocab_size, {})


def _own_loss(function: OwnLoss, log_probs: Any, targets: Any) -> Any:
    return function(log_probs, targets.samples, targets.positions)


def load(config: Config, model: Any, state: State) -> tuple[list[Held], list[Any]]:
    """Sets a rank's parameters to its shards of ``state``; returns where they lie, and them."""
    import torch

    tied = not config.model.untie_embeddings_and_output_weights
    groups = model.groups
    first_expert = (config.model.num_experts or 0) // groups.ep.size() * groups.ep.rank()
    named = []
    for first, gpt in zip(_first_layers(config, model), model.gpts, strict=True):
        named += [(whole_name(n, first, tied, first_expert), p) for n, p in gpt.named_parameters()]
    tp, etp = groups.tp, (groups.expt_tp.rank(), groups.expt_tp.size())
    held = held_by(state, named, tp.rank(), tp.size(), config.model, etp)
    with torch.no_grad():
        for part, (_, parameter) in zip(held, named, strict=True):
            parameter.copy_(torch.from_numpy(state[part.name].reshape(-1)[part.indices]))
    return held, [parameter for _, parameter in named]


def train(
    config: Config,
    workload: Workload,
    initial: State,
    fault: Fault = contextlib.nullcontext,
    plan_for: PlanFor = scatter_for,
) -> RankRun:
    """Runs the workload's steps as the trainer does; gradients are taken unclipped.

    Each step is evaluated too, after its backward pass, which must leave the gradients alone.
    """
    import torch

    trainer = build_trainer(config, workload)
    model, runner = trainer.model, trainer.runner
    held, parameters = load(config, model, initial)
    ranges = [_gradient_range(trainer.optimizer, p) for p in parameters]
    losses, ahead, evaluated, gradients, auxiliary = [], [], [], [], []
    with fault(runner):
        for number in range(len(workload.steps)):
            plan = plan_for(config, workload, torch.distributed.get_world_size(), number)
            before = _biases(config, model)
            loss = trainer.gradients(plan)
            losses.append(loss.mean)
            ahead.append(tuple(depth.item() for depth in loss.ahead))
            auxiliary.append(logged(fmean(map(len, plan.micro_batches))))
            hooked = [chunk for chunk in model.chunks if chunk.use_forward_hook]
            for chunk in model.chunks:
                chunk.eval()
            for chunk in hooked:
                # Before the update there is nothing to gather, and the gathering after it is due.
                chunk.disable_forward_pre_hook(param_sync=False)
            with torch.no_grad(), _with_biases(config, model, before):
                evaluated.append(runner.run(plan, forward_only=True).mean)
            for chunk in hooked:
                chunk.enable_forward_pre_hook()
            gradients.append(
                tuple(
                    p.main_grad.reshape(-1)[slice(*span)].cpu().numpy().copy()
                    for p, span in zip(parameters, ranges, strict=True)
                )
            )
            trainer.update()
    with model.whole_weights():
        weights = tuple(p.detach().float().cpu().numpy().copy() for p in parameters)
    return RankRun(
        tuple(held),
        tuple(losses),
        tuple(evaluated),
        tuple(gradients),
        tuple(ranges),
        weights,
        tuple(ahead),
        tuple(auxiliary),
        _biases(config, model),
    )


def logged(num_micro_batches: float) -> dict[str, list[float]]:
    """The auxiliary losses of a step, as Megatron's log has them, and none for the next one."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    tracker = get_moe_metrics_tracker()
    tracker._sync_metrics([*tracker.metrics], None)
    logged = {n: (one.values / num_micro_batches).tolist() for n, one in tracker.metrics.items()}
    tracker.metrics.clear()  # its own method keeps groups of processes that are gone
    return logged


def _biases(config: Config, model: Any) -> State:
    return {n: b.cpu().numpy().copy() for n, b in _expert_biases(config, model).items()}


@contextlib.contextmanager
def _with_biases(config: Config, model: Any, biases: State) -> Iterator[None]:
    """Routers have other biases inside: those of before a step, which moved them at its end."""
    import torch

    after = _biases(config, model)
    for values in (biases, after):
        for name, buffer in _expert_biases(config, model).items():
            buffer.copy_(torch.from_numpy(values[name]))
        if values is biases:
            yield


def _expert_biases(config: Config, model: Any) -> dict[str, Any]:
    return {
        whole_name(name, first, tied=False): buffer
        for first, gpt in zip(_first_layers(config, model), model.gpts, strict=True)
        for name, buffer in gpt.named_buffers()
        if name.endswith("expert_bias")
    }


def _first_layers(config: Config, model: Any) -> list[int]:
    """The number of each chunk's first layer, over the whole model."""
    stages, stage = model.groups.pp.size(), model.groups.pp.rank()
    layers = config.parallel.split.layers(config.model.num_layers, stages, len(model.gpts))
    return [sum(layers[: chunk * stages + stage]) for chunk in range(len(model.gpts))]


def _gradient_range(optimizer: Any, parameter: Any) -> tuple[int, int]:
    """The flat elements of a parameter whose reduced gradient this rank has."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not hasattr(inner, "model_param_gbuf_map"):  # not the distributed optimizer
            return 0, parameter.numel()
        if parameter in inner.model_param_gbuf_map:
            found = inner._get_model_param_range_map(parameter)["param"]
            return found.start, found.end
    return 0, 0  # other data-parallel ranks have it
