"""A run of the embedded trainer with ``--wlb-strategies``.

It is in this trainer because Megatron-LM's loop has one model, one set of groups and one optimizer
a rank for all steps.
"""

from __future__ import annotations

import datetime
import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import CompatibilityError, ConfigError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.strategy_run import StrategyRun
from megatron_wlb.runtime.compat import targets
from megatron_wlb.runtime.gpt.attention.kernels import (
    ChosenKernel,
    Demand,
    agreed_kernel,
    choose_kernel,
)
from megatron_wlb.runtime.gpt.build import (
    Model,
    attention_options,
    build_model,
    transformer_config,
    transformer_impl,
)
from megatron_wlb.runtime.ranks.hosts import Hosts
from megatron_wlb.runtime.ranks.transfer import HostCopy
from megatron_wlb.runtime.saving import checkpoint as saving
from megatron_wlb.runtime.saving.resume import TOLD, require_same_tokens, tell_changes
from megatron_wlb.runtime.stepping.optimizer import build_scheduler
from megatron_wlb.runtime.stepping.step import StepLoss, StepRunner
from megatron_wlb.runtime.strategy import shard_files
from megatron_wlb.runtime.strategy.groups import GroupOpener, ReplicaGroups
from megatron_wlb.runtime.strategy.replica import Arena, LocalReplica
from megatron_wlb.runtime.strategy.runner import Layout, StrategyRunner, layout_of
from megatron_wlb.runtime.trainer import distributed
from megatron_wlb.runtime.trainer.loop import Trainer, compared_hosts
from megatron_wlb.settings.config import Config

logger = logging.getLogger(__name__)


def build_runner(
    run: StrategyRun, corpora: Corpora, device: str, kernel: str, hosts: Hosts | None = None
) -> StrategyRunner:
    """Builds this rank's models of all strategies, in one memory, and the store. Megatron's groups
    must exist, with all sizes 1; all ranks of the world call it together.
    """
    config = run.config
    if transformer_impl(config) == "transformer_engine":
        raise ConfigError(
            "--wlb-strategies has been compared with one process for layers of Megatron alone; use "
            "--transformer-impl local"
        )
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    opener = GroupOpener(timeout)
    opened: dict[Layout, tuple[Model, ReplicaGroups, StepRunner]] = {}
    first = layout_of(run.strategies[0].replicas[0])
    initial: list[torch.Tensor] = []
    for replica in (r for s in run.strategies for r in s.replicas):
        groups = opener.replica(replica)
        if groups is None or layout_of(replica) in opened:
            continue
        own = run.replica_config(replica.scheme)
        with groups.current():
            distributed.seed(own)
            model = build_model(
                own, run.vocab_size, lambda _, demand: agreed_kernel(kernel, demand), wrapped=False
            )
            runner = StepRunner.of(own, model, corpora, device)
            runner.verify_plan_interval = 0  # they are compared once, over all replicas
        opened[layout_of(replica)] = model, groups, runner
        if layout_of(replica) == first:
            initial = [p.detach() for gpt in model.gpts for p in gpt.parameters()]
    distributed.seed(config)
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    current = torch.empty(0, device="cuda").device  # the CPU, under emulation
    arena = Arena([model for model, _, _ in opened.values()], dtype, current)
    for model, _, _ in opened.values():
        arena.place(model)
    replicas = {
        layout: LocalReplica(model, runner, groups)
        for layout, (model, groups, runner) in opened.items()
    }
    made = StrategyRunner(
        run.strategies,
        replicas,
        arena,
        hosts or Hosts(ProcessGroupCollection.use_mpu_process_groups(), timeout),
        config.training,
        config.model.num_layers,
        config.wlb.wlb_verify_plan_interval,
    )
    if initial:
        model, _, _ = opened[first]
        for parameter, values in zip(
            (p for gpt in model.gpts for p in gpt.parameters()), initial, strict=True
        ):
            parameter.data.copy_(values)
    made.take_weights(run.strategies[0])
    return made


def _kernel(config: Config, saved: str | None) -> str:
    """Names the attention kernel of all replicas: the checkpoint's, if there is one that can run.

    All ranks choose it together, for whole layers.
    """

    def choose(name: str, demand: Demand) -> ChosenKernel:
        if saved is not None and name == "auto":
            try:
                return choose_kernel(saved, demand)
            except CompatibilityError as error:
                logger.warning("the checkpoint's steps ran another attention kernel: %s", error)
        return choose_kernel(name, demand)

    return attention_options(config, transformer_config(config), choose).kernel_name


class StrategyTrainer(Trainer):
    """A run whose replicas are unlike; Megatron's groups must exist, with all sizes 1."""

    def __init__(self, config: Config, device: str) -> None:
        targets.check(allow_untested=config.wlb.wlb_allow_untested_megatron)
        saving.check_folder(config)
        self.corpora = Corpora.open(config)
        hosts = compared_hosts(config, self.corpora)
        self.run = StrategyRun.of(config, self.corpora, torch.distributed.get_world_size())
        self.config = config = self.run.config
        for strategy in self.run.strategies:
            logger.info("strategy: %s", strategy)
        hosts.compare("at the start", {"strategies": "; ".join(map(str, self.run.strategies))})
        found = shard_files.find(self.run)
        self.kernel = _kernel(config, None if found is None else found.planner.get("kernel"))
        self.runner: StrategyRunner = build_runner(
            self.run, self.corpora, device, self.kernel, hosts
        )
        self.optimizer = self.runner.store.optimizer
        self.scheduler = build_scheduler(config, self.optimizer)
        self.planner = self.run.planner(self.corpora)
        self.iteration = 0
        if found is not None:
            shard_files.load(self.run, found, self.runner, self.scheduler)
            self.iteration = found.iteration
            self.planner.load_state_dict(found.planner["planner"])
            require_same_tokens(self.corpora, found.planner.get("samples"))
            tell_changes(config, found.settings, found.planner.get("machine"), *TOLD)
            logger.info("resumed after iteration %d from %s", found.iteration, found.folder)
        self._compare_state({})
        self.plans = self.planner
        if config.data.eval_interval:
            _ = self.evaluation_plans

    @cached_property
    def evaluation_plans(self) -> tuple[StepPlan, ...]:
        planner = self.run.planner(self.corpora, "valid")
        plans = (planner.next_plan() for _ in range(self.config.data.eval_iters))
        return tuple(plan for plan in plans if plan is not None)

    def train_step(self, plan: StepPlan) -> tuple[StepLoss, HostCopy, float]:
        loss = self.runner.run(plan)
        grad_norm = self.runner.store.update(plan.num_targets, self.config.training.clip_grad)
        self.scheduler.step(increment=self.config.training.global_batch_size)
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        return loss, grad_norm, lr

    def evaluate(self) -> float:
        return self._evaluated()

    def _write(self, state: dict[str, Any]) -> Path:
        return shard_files.save(self.run, self.iteration, self.runner, self.scheduler, state)
