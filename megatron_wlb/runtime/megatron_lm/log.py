"""What a step was, in Megatron's own logs: TensorBoard, W&B, its log lines and progress.txt."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_wlb.cost import load_hardware
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.from_config import parallelism
from megatron_wlb.planning.packing.original import in_windows
from megatron_wlb.runtime import emulation
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.gpt.prediction import track_step
from megatron_wlb.runtime.megatron_lm.metrics_file import MetricsFile, step_values
from megatron_wlb.runtime.megatron_lm.session import RunningStep, Session
from megatron_wlb.runtime.ranks.transfer import HostCopy
from megatron_wlb.settings.config import WlbConfig
from megatron_wlb.simulator.step import slowest_us


class SoFar:
    """What steps took since the process began, over what was predicted, and so of `original`."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=1000)
        self._predicted_ms = self._original_ms = 0.0

    def add(self, figures: Mapping[str, float]) -> None:
        """Notes a step; ``predicted_original_ms`` is that of the same work in windows."""
        self._errors.append(figures["step_ms"] / max(figures["predicted_ms"], 1e-9))
        if "predicted_original_ms" in figures:
            self._predicted_ms += figures["predicted_ms"]
            self._original_ms += figures["predicted_original_ms"]

    def __str__(self) -> str:
        """``(measured 1.08 × so far, ± 0.02; original 1.31 ×)``: the median of the last steps with
        half the distance of its quartiles, which the first ones move little; then all together.
        """
        said = []
        if len(self._errors) > 3:
            low, middle, high = statistics.quantiles(self._errors, n=4)
            said.append(f"measured {middle:.3g} × so far, ± {(high - low) / 2:.2g}")
        if self._predicted_ms:
            said.append(f"original {self._original_ms / self._predicted_ms:.3g} ×")
        return f" ({'; '.join(said)})" if said else ""


class Log:
    """Wraps Megatron's ``training_log`` and its count of floating-point operations."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._is_logging = False
        self._so_far = SoFar()

    def install(self, patches: PatchSet) -> None:
        from megatron.training import training

        patches.wrap(MTPLossLoggingHelper, "track_mtp_metrics", track_step)
        for name in (
            "training_log",
            "num_floating_point_operations",
            "checkpoint_and_decide_exit",
            "compute_throughputs_and_append_to_progress_log",
        ):
            patches.wrap(training, name, getattr(self, name))

    def num_floating_point_operations(
        self, original: Any, args: Any, batch_size: int, **sums_of_lengths: Any
    ) -> float:
        """Counts the operations of the last step; inside a log line the mean of its steps."""
        session = self.session
        if session.step is None:  # nothing has run
            return float(original(args, batch_size, **sums_of_lengths))
        if self._is_logging:
            return statistics.fmean(session.flops_since_log)
        flops = session.flops.of_plan(session.step.plan)
        session.flops_since_log.append(flops)
        return flops

    def training_log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Megatron's line and figures, and after them ours.

        Ours of a step without a line wait until the next one is under way: the device has nothing
        to do while Megatron logs.
        """
        stop_s = time.monotonic()
        self.session.before_log()
        self._is_logging = True
        try:
            result = original(*args, **kwargs)
        finally:
            self._is_logging = False
        values = inspect.signature(original).bind(*args, **kwargs).arguments
        session, iteration = self.session, int(values["iteration"])
        assert session.step is not None
        plan = session.step.plan
        session.totals.add(plan)
        session.ledger.step(plan, iteration, "no update" if values["skipped_iter"] else "")
        settings = session.args
        is_first = bool(values.get("is_first_iteration"))
        if iteration % settings.log_interval == 0 and not is_first:
            session.flops_since_log.clear()
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            is_said = iteration % settings.log_interval == 0 or is_first
            loss = values["loss_dict"].get("lm loss")
            numbers = {"grad_norm": values["grad_norm"], "lr": values["learning_rate"]}
            copy = None if loss is None else HostCopy(loss)
            session.behind.append(
                partial(self._tell, iteration, session.step, stop_s, copy, numbers, is_said)
            )
            # A line at its place in Megatron's log; and after the last step no other one comes.
            if is_said or iteration == settings.train_iters:
                session.catch_up()
            if is_first and session.restored is not None:
                # Megatron's sums are not reset after the first line of a process.
                from megatron.training import print_rank_last

                print_rank_last(
                    " wlb: the next 'lm loss' above counts the first step after the resume again; "
                    "TensorBoard, W&B and --wlb-metrics have each step's own"
                )
        return result

    def checkpoint_and_decide_exit(self, original: Callable[..., bool], *args: Any) -> bool:
        """Megatron's; before it closes its logs ours have all steps."""
        leaves = original(*args)
        if leaves:
            self.session.catch_up()
        return leaves

    def _tell(
        self,
        iteration: int,
        step: RunningStep,
        stop_s: float,
        loss: HostCopy | None,
        numbers: dict[str, float],
        is_said: bool,
    ) -> None:
        """Writes a step's figures, which takes a replay of its schedule."""
        figures = self.figures(step, stop_s)
        self._plot(figures, iteration)
        mean = math.nan if loss is None else loss.item()
        named = {"strategy": str(step.plan.strategy)} if step.plan.strategy else {}
        self._metrics.write({"iteration": iteration, "loss": mean, **numbers, **figures, **named})
        if is_said:
            self._say(step.plan, figures)

    def compute_throughputs_and_append_to_progress_log(
        self, original: Callable[..., Any], iteration: int, num_floating_point_operations: float
    ) -> None:
        """Megatron's line in ``progress.txt`` after a save, and one of ours."""
        from megatron.training.utils import append_to_progress_log

        original(iteration, num_floating_point_operations)
        if self.session.args.save is None:
            return
        totals = self.session.totals
        steps = max(totals.steps, 1)
        append_to_progress_log(
            self.session.args.save,
            f"Workload balance\tIteration: {iteration}\t"
            f"Packing: {self.session.config.wlb.wlb_packing}\t"
            f"Tokens trained: {totals.tokens}\tPadding: {totals.padding}\t"
            f"Mean imbalance (predicted): {totals.imbalance / steps:.4f}\t"
            f"Mean delay: {totals.delay_steps / steps:.3f} steps",
        )

    def figures(self, step: RunningStep, stop_s: float) -> dict[str, float]:
        """The numbers of a step, by name."""
        session, plan = self.session, step.plan
        flops = session.flops.of_plan(plan) / torch.distributed.get_world_size()
        tflops_per_device = flops / (stop_s - step.asked_s) / 1e12
        figures: dict[str, float] = {
            **step_values(plan, step.planned_s - step.asked_s, stop_s - step.asked_s),
            "tflops_per_device": tflops_per_device,
        }
        if self._knows_machine:
            figures["mfu"] = tflops_per_device / self._peak_tflops
        knows_costs = self._knows_machine or session.config.wlb.wlb_cost != "analytic"
        if knows_costs and session.cost is not None:
            figures["predicted_ms"] = self.predicted_us(plan) / 1e3
            if (original_us := self.original_us(plan)) is not None:
                figures["predicted_original_ms"] = original_us / 1e3
            self._so_far.add(figures)
        if self._divides(plan):
            num_micro_batches = sum(plan.shardings.values())
            for kind, number in sorted(plan.shardings.items()):
                figures[f"sharding_{kind}"] = number / num_micro_batches
        return figures

    def _divides(self, plan: StepPlan) -> bool:
        """Whether micro-batches are divided over context-parallel ranks."""
        strategy = plan.strategy
        if strategy is None:
            return bool(self.session.model.groups.cp.size() > 1)
        return any(replica.scheme.cp_size > 1 for replica in strategy.replicas)

    def predicted_us(self, plan: StepPlan) -> float:
        """Predicts both passes of the slowest data-parallel rank by a replay.

        Micro-batches take what the cost model says, with padding, in the shares of chunks' layers,
        and wait for others that they exchange tokens with; collectives of data parallelism and the
        update are not in it.
        """
        model, p = self.session.config.model, self.session.config.parallel
        layers = [*p.split.layers(model.num_layers, p.pipeline_model_parallel_size, p.vpp_size)]
        layers[-1] += model.mtp_num_layers or 0
        shares = [num / sum(layers) for num in layers]
        assert self.session.cost is not None, "strategies are predicted as they are chosen"
        stages = StageCosts.shared(self.session.cost, shares)
        return slowest_us(plan, stages, parallelism(self.session.config), self.session.experts)

    def original_us(self, plan: StepPlan) -> float | None:
        """Predicts the same of `original`: as much work, in as many windows as the batch has. None
        of `original` itself, and where Megatron's schedule cannot run so many micro-batches.
        """
        if plan.packing == "original" or not plan.num_tokens:
            return None
        windows = in_windows(plan, get_num_microbatches() * len(plan.micro_batches))
        work = self.session.flops.of_plan(plan) / self.session.flops.of_plan(windows)
        try:
            return work * self.predicted_us(windows)
        except ConfigError:
            return None

    @cached_property
    def _knows_machine(self) -> bool:
        """Whether ``--wlb-hardware`` may be what runs: a CPU is not its default."""
        named = self.session.config.wlb.wlb_hardware
        return not emulation.installed() or named != WlbConfig().wlb_hardware

    @cached_property
    def _peak_tflops(self) -> float:
        return load_hardware(self.session.config.wlb.wlb_hardware).peak_tflops

    def _plot(self, figures: dict[str, float], iteration: int) -> None:
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        if iteration % self.session.args.tensorboard_log_interval:
            return
        named = {f"wlb/{name}": value for name, value in figures.items()}
        if writer := get_tensorboard_writer():
            for name, value in named.items():
                writer.add_scalar(name, value, iteration)
        if wandb := get_wandb_writer():
            wandb.log(named, iteration)

    @cached_property
    def _metrics(self) -> MetricsFile:
        return MetricsFile(self.session.config.wlb.wlb_metrics)

    def _say(self, plan: StepPlan, figures: dict[str, float]) -> None:
        from megatron.training import print_rank_last

        shardings = ""
        if self._divides(plan):
            counts = (f"{number} {kind}" for kind, number in sorted(plan.shardings.items()))
            shardings = f"sharding: {', '.join(counts)} | "
        merged = predicted = mfu = ""
        strategy = f"{plan.strategy} | " if plan.strategy else ""
        if "merged_documents" in figures:
            merged = f"merged: {figures['merged_documents']} documents | "
        if "predicted_ms" in figures:
            predicted = f", predicted {figures['predicted_ms']:.3g}{self._so_far}"
        if "mfu" in figures:
            of = self.session.config.wlb.wlb_hardware
            mfu = f" MFU (of {of}): {100 * figures['mfu']:.1f} % |"
        print_rank_last(
            f" wlb {plan.packing} | {strategy}{shardings}{merged}tokens: {plan.num_tokens} | "
            f"padding: {plan.padding_tokens} | "
            f"imbalance (predicted): {plan.imbalance:.4f} | delay (steps): {plan.delay_steps:.3f} "
            f"| waiting: {plan.num_waiting} documents, {plan.waiting_tokens} tokens | step (ms): "
            f"{figures['step_ms']:.1f}{predicted} | plan wait (ms): "
            f"{figures['plan_wait_ms']:.2f} |{mfu}"
        )
