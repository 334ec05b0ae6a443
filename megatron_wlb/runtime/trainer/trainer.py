"""Settings -> Megatron's model and optimizer -> steps of plans, without a loop around them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_wlb.cost import Cost
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.from_config import known_cost, make_planner
from megatron_wlb.planning.planner import Planner
from megatron_wlb.runtime.compat import hooks
from megatron_wlb.runtime.gpt.build import build_model
from megatron_wlb.runtime.measuring.measure import measured_cost
from megatron_wlb.runtime.stepping.optimizer import build_optimizer, build_scheduler
from megatron_wlb.runtime.stepping.step import StepLoss, StepRunner
from megatron_wlb.settings.config import Config


class Trainer:
    """A model, its optimizer, and what runs plans on them; all ranks call it alike.

    :func:`.distributed.start` makes one in the world that torchrun started; where Megatron's groups
    exist (:func:`.distributed.initialize_groups`) it can be made as it is::

        trainer = distributed.start(parse(flags))     # before Megatron is imported
        for _ in range(100):
            loss, norm, lr = trainer.step(trainer.planner.next_plan())
        distributed.shutdown()

    Any plan will do that fits the layout.
    """

    scheduler: OptimizerParamScheduler

    def __init__(self, config: Config, device: str, corpora: Corpora | None = None) -> None:
        """Builds the model; ``corpora`` are those of the settings where none are given."""
        hooks.check(allow_untested=config.wlb.wlb_allow_untested_megatron)
        self.config = config
        self.corpora = Corpora.open(config) if corpora is None else corpora
        self.model = build_model(config, self.corpora.vocab_size)
        self.runner = StepRunner.of(config, self.model, self.corpora, device)
        self.iteration = 0
        """Steps so far."""

    @cached_property
    def optimizer(self) -> Any:
        """Megatron's, made when it is first asked for: measurements need none. Its schedule comes
        with it, which also says how fast the first step learns, and what decays.
        """
        optimizer = build_optimizer(self.config, self.model)
        self.scheduler = build_scheduler(self.config, optimizer)
        return optimizer

    @cached_property
    def cost(self) -> Cost:
        """What ``--wlb-cost`` says; it may be set before it is used, to share a measured one."""
        known = known_cost(self.config, self.model.gpts[0].vocab_size)
        window, vocab_size = self.config.data.seq_length, self.corpora.vocab_size
        return known or measured_cost(self.model, window, vocab_size)

    @cached_property
    def planner(self) -> Planner:
        """Plans the training documents, from the first one on."""
        return make_planner(self.config, self.corpora, self.cost, self.model.groups.dp.size())

    def step(self, plan: StepPlan) -> tuple[StepLoss, float, float]:
        """Runs a plan and updates the weights; returns loss, gradient norm and learning rate."""
        return self.gradients(plan), *self.update()

    def gradients(self, plan: StepPlan) -> StepLoss:
        """Leaves a plan's gradients in the model, and no others; returns its loss."""
        for chunk in self.model.chunks:
            chunk.train()
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        return self.runner.run(plan)

    def update(self) -> tuple[float, float]:
        """Updates the weights by these gradients, then the learning rate; returns the gradients'
        norm before clipping, and the rate.
        """
        _, norm, _ = self.optimizer.step()
        # Counted in windows, not in tokens: a schedule keeps its meaning under every packing.
        self.scheduler.step(increment=self.config.training.global_batch_size)
        self.iteration += 1
        return norm, max(group["lr"] for group in self.optimizer.param_groups)
