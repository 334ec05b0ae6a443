"""Everything a training run holds, and its loop: plan, step, update, log, evaluate, save."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_wlb.cost import Cost, cost_from_dict
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import TrainingError, WLBError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.from_config import (
    known_cost,
    make_evaluation_planner,
    make_planner,
    padded_vocab_size,
)
from megatron_wlb.planning.ledger.writer import StepLedger
from megatron_wlb.planning.plan_ahead import PlanAhead, Plans
from megatron_wlb.runtime.compat import targets
from megatron_wlb.runtime.gpt.build import Model, build_model, settle_kernel
from megatron_wlb.runtime.measuring.measure import measured_cost
from megatron_wlb.runtime.measuring.metrics import MetricsFile, step_values
from megatron_wlb.runtime.rank_main import writing
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.runtime.ranks.agreement import of_corpora, of_state
from megatron_wlb.runtime.ranks.hosts import Hosts
from megatron_wlb.runtime.ranks.transfer import HostCopy
from megatron_wlb.runtime.saving import checkpoint
from megatron_wlb.runtime.saving.core import begin_save
from megatron_wlb.runtime.saving.exit_signal import ExitSignal
from megatron_wlb.runtime.saving.ledger import open_ledger
from megatron_wlb.runtime.saving.newest import latest
from megatron_wlb.runtime.saving.resume import (
    TOLD,
    file_digests,
    require_same_tokens,
    tell_changes,
)
from megatron_wlb.runtime.stepping.optimizer import build_optimizer, update
from megatron_wlb.runtime.stepping.step import StepLoss, StepRunner
from megatron_wlb.settings.config import Config

logger = logging.getLogger(__name__)


class Trainer:
    """A run of the embedded trainer; Megatron's groups must exist (:func:`initialize`).

    ``cost`` replaces what ``--wlb-cost`` would give, for runs that share a measured one.
    """

    ledger = StepLedger(None)
    """Which documents ran at which step; it is opened where the loop begins."""

    def __init__(self, config: Config, device: str, *, cost: Cost | None = None) -> None:
        targets.check(allow_untested=config.wlb.wlb_allow_untested_megatron)
        checkpoint.check_folder(config)
        self.config = config
        self.corpora = Corpora.open(config)
        hosts = compared_hosts(config, self.corpora)
        vocab_size = self.corpora.vocab_size
        self.model: Model = build_model(config, vocab_size)
        self.optimizer, self.scheduler = build_optimizer(config, self.model)
        self.runner = StepRunner.of(config, self.model, self.corpora, device, hosts)
        self.iteration = 0
        restored = checkpoint.load(config, self.model, self.optimizer, self.scheduler)
        state = {} if restored is None else restored[1]
        self.kernel = settle_kernel(config, self.model, state.get("kernel"))
        if restored is not None:
            # The cost is restored, not measured again: other costs would make other plans.
            self.cost = cost_from_dict(state["cost"])
        else:
            cost = cost or known_cost(config, padded_vocab_size(config, vocab_size))
            self.cost = cost or measured_cost(self.model, config.data.seq_length, vocab_size)
        dp_size = self.model.groups.dp.size()
        self.planner = make_planner(config, self.corpora, self.cost, dp_size)
        if restored is not None:
            self.iteration, _, settings = restored
            self.planner.load_state_dict(state["planner"])
            require_same_tokens(self.corpora, state.get("samples"))
            tell_changes(config, settings, state, *TOLD)
            logger.info(
                "resumed after iteration %d from %s", self.iteration, config.checkpoint.load
            )
        self.runner.hosts.compare(
            "after the start",
            of_state(self.iteration, self.kernel, self.cost.as_dict(), self.planner.state_dict()),
        )
        self.plans: Plans | PlanAhead = self.planner
        if config.data.eval_interval:
            _ = self.evaluation_plans  # An empty split is an error now, not in an hour.

    @cached_property
    def evaluation_plans(self) -> tuple[StepPlan, ...]:
        """The first ``--eval-iters`` steps of the validation documents, or all if there are fewer.

        Raises :class:`CorpusError` where there are none.
        """
        planner = make_evaluation_planner(
            self.config, self.corpora, self.cost, self.model.groups.dp.size()
        )
        plans = (planner.next_plan() for _ in range(self.config.data.eval_iters))
        return tuple(plan for plan in plans if plan is not None)

    def train_step(self, plan: StepPlan) -> tuple[StepLoss, HostCopy, float]:
        """Runs one plan and updates the weights; returns loss, gradient norm and learning rate.

        The device may still be at work on it.
        """
        for chunk in self.model.chunks:
            chunk.train()
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        loss = self.runner.run(plan)
        grad_norm = update(self.optimizer, self.config.training.clip_grad)
        # Counted in windows, not in tokens: a schedule keeps its meaning under every packing.
        self.scheduler.step(increment=self.config.training.global_batch_size)
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        return loss, grad_norm, lr

    def evaluate(self) -> float:
        """Computes the mean loss over :attr:`evaluation_plans`."""
        for chunk in self.model.chunks:
            chunk.eval()
        plans = self.evaluation_plans
        with self.model.whole_weights(), torch.no_grad():
            losses: list[StepLoss] = [self.runner.run(plan, forward_only=True) for plan in plans]
        num_targets = sum(loss.num_targets for loss in losses)
        return sum(loss.loss_sum for loss in losses) / (num_targets or 1)

    def save(self) -> None:
        """Writes a checkpoint after the present iteration."""
        begin_save(f"the checkpoint after iteration {self.iteration}", self.runner, self.ledger)
        state = {
            "planner": self.plans.state_dict(),
            **file_digests(self.config),
            "samples": self.corpora.samples,
            "kernel": self.kernel,
            "cost": self.cost.as_dict(),
        }
        with self.model.whole_weights():
            folder = checkpoint.save(
                self.config, self.iteration, self.model, self.optimizer, self.scheduler, state
            )
        logger.info("saved %s", folder)

    def train(self) -> None:
        """The loop. Ends at ``--train-iters``, ``--exit-interval``, when the data end, or, with
        ``--exit-signal-handler``, at SIGTERM; after a save each time.
        """
        enabled = self.config.training.exit_signal_handler
        with ExitSignal(enabled=enabled, hosts=self.runner.hosts) as exit_signal:
            self._train(exit_signal)

    def _train(self, exit_signal: ExitSignal) -> None:
        training, data = self.config.training, self.config.data
        saved = self.iteration
        last = None
        self.ledger = open_ledger(
            self.config,
            self.config.checkpoint.save,
            self.config.checkpoint.load,
            self.iteration,
            self.planner,
            self.corpora.vocab_size,
        )
        with RunLog(self.config) as log, PlanAhead(self.planner) as self.plans:
            while self.iteration < training.train_iters:
                start = time.monotonic()
                watchdog.at("the plan of iteration %d", self.iteration + 1, is_slow=True)
                plan = self.plans.next_plan()
                if plan is None:
                    logger.info(
                        "all documents of the %s epochs are trained", self.config.wlb.wlb_epochs
                    )
                    break
                planned, last = time.monotonic(), plan
                step = Noted(plan, start, planned, *self.train_step(plan))
                self.iteration += 1
                self.ledger.step(plan, self.iteration)
                log.tell()  # of the step before: this one keeps the device at work meanwhile
                log.note(self.iteration, step)
                if data.eval_interval and self.iteration % data.eval_interval == 0:
                    log.tell()
                    log.evaluation(self.iteration, self.evaluate())
                if self._due(self.config.checkpoint.save_interval):
                    log.tell()  # no checkpoint has weights of a loss that is no number
                    self.save()
                    saved = self.iteration
                if exit_signal.received():
                    logger.info("leaving after iteration %d: SIGTERM was received", self.iteration)
                    break
                if self._due(training.exit_interval):
                    break
            log.tell()
        if self.config.checkpoint.save is not None and saved != self.iteration:
            self.save()
        self.ledger.close()
        if last is not None and last.num_waiting:
            where = "are in the checkpoint" if self.config.checkpoint.save else "were not trained"
            logger.info(
                "%d documents of %d tokens wait for a later step and %s",
                last.num_waiting,
                last.waiting_tokens,
                where,
            )

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.iteration % interval == 0


def compared_hosts(config: Config, corpora: Corpora) -> Hosts:
    """The hosts of a run, which have compared their corpora, and which checkpoint they would load,
    before a model is built; called by every rank.

    Raises :class:`PlanError` where a rank has another.
    """
    minutes = config.parallel.distributed_timeout_minutes
    groups = ProcessGroupCollection.use_mpu_process_groups()
    hosts = Hosts(groups, datetime.timedelta(minutes=minutes))
    load = config.checkpoint.load
    newest = "none" if load is None else str(latest(load))
    hosts.compare("at the start", of_corpora(corpora) | {"newest checkpoint in --load": newest})
    return hosts


@dataclass(frozen=True)
class Noted:
    """A step that the device may still be at work on."""

    plan: StepPlan
    asked_s: float
    planned_s: float
    """Monotonic times at which the loop asked for the plan, and had it."""
    loss: StepLoss
    grad_norm: HostCopy
    lr: float


class RunLog:
    """Progress lines, TensorBoard and JSON lines; only rank 0 writes.

    A step is noted when it is under way, and told of when its loss is there: on a GPU, the next
    step is under way by then. It took the time from the step told of before, so that times add up
    to that of the run.
    """

    def __init__(self, config: Config) -> None:
        self._interval = config.logging.log_interval
        self._total = config.training.train_iters
        self._noted: tuple[int, Noted] | None = None
        self._told_s = 0.0
        self._writer: Any = None
        is_first = torch.distributed.get_rank() == 0
        self._metrics = MetricsFile(config.wlb.wlb_metrics if is_first else None)
        if is_first and config.logging.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            with writing("--tensorboard-dir", config.logging.tensorboard_dir):
                self._writer = SummaryWriter(config.logging.tensorboard_dir)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(WLBError):  # The run ends by another error.
                self.tell(wait=False)
        with contextlib.suppress(OSError):  # All was flushed, or the error told, before.
            if self._writer is not None:
                self._writer.close()
            self._metrics.close()

    def note(self, iteration: int, step: Noted) -> None:
        """Takes a step, and tells of it if the device is done with it."""
        assert self._noted is None
        self._noted = iteration, step
        self.tell(wait=False)

    def tell(self, *, wait: bool = True) -> None:
        """Writes the step that was noted, if one was; waits for its loss, or does nothing.

        Raises :class:`TrainingError` for a loss that is no finite number.
        """
        if self._noted is None or not (wait or self._noted[1].grad_norm.is_here()):
            return
        (iteration, step), self._noted = self._noted, None
        loss, grad_norm = step.loss.mean, step.grad_norm.item()
        if not math.isfinite(loss):
            raise TrainingError(
                f"iteration {iteration}: the loss is {loss}; lower --lr, or give --clip-grad, and "
                "resume from the last checkpoint"
            )
        begin_s, self._told_s = max(step.asked_s, self._told_s), time.monotonic()
        took = step_values(step.plan, step.planned_s - step.asked_s, self._told_s - begin_s)
        ahead = {f"mtp_{k}_loss": mean.item() for k, mean in enumerate(step.loss.ahead, start=1)}
        values = {"loss": loss, **ahead, "grad_norm": grad_norm, "lr": step.lr, **took}
        self._step(iteration, values)

    def _step(self, iteration: int, values: dict[str, float]) -> None:
        values_by_name = {"iteration": iteration, **values}
        self._metrics.write(values_by_name)
        self._plot("train", values, iteration)
        if iteration % self._interval == 0:
            more = {"total": self._total, "per_s": values["tokens"] / values["step_ms"] * 1e3}
            logger.info(
                "iteration %(iteration)5d/%(total)d | lm loss %(loss).5f | grad norm "
                "%(grad_norm).3f | lr %(lr).2e | tokens %(tokens)d | imbalance %(imbalance).3f | "
                "delay %(delay_steps).2f | waiting %(waiting_documents)d | step %(step_ms).0f ms | "
                "%(per_s).0f tokens/s",
                values_by_name | more,
            )

    def evaluation(self, iteration: int, loss: float) -> None:
        logger.info("validation after iteration %d | lm loss %.5f", iteration, loss)
        self._metrics.write({"iteration": iteration, "valid_loss": loss})
        self._plot("valid", {"loss": loss}, iteration)

    def _plot(self, group: str, values: dict[str, float], iteration: int) -> None:
        if self._writer is not None:
            with writing("--tensorboard-dir", self._writer.log_dir):
                for name, value in values.items():
                    self._writer.add_scalar(f"{group}/{name}", value, iteration)
