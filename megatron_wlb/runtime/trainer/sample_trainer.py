"""Trains a model on samples at hand, by a loss of one's own: reinforcement learning.

Whoever draws the samples is not here. Each call is one step of theirs, planned by
:mod:`megatron_wlb.planning.balance.samples`, so that none waits for another step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.sample_corpus import SampleCorpus
from megatron_wlb.data.targets import targets_of
from megatron_wlb.errors import ConfigError, TrainingError
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.balance.samples import plan_step
from megatron_wlb.planning.balance.shared_plan import check_shared
from megatron_wlb.planning.balance.trees import SharedPrefixes
from megatron_wlb.planning.from_config import (
    check_positions,
    max_tokens,
    parallelism,
    run_of,
)
from megatron_wlb.planning.packing import kind_of
from megatron_wlb.runtime.trainer import distributed
from megatron_wlb.settings.command_line import parse

if TYPE_CHECKING:
    from megatron_wlb.runtime.stepping.losses import LossFunction, TargetTokens
    from megatron_wlb.runtime.stepping.step import ForwardStep


@dataclass(frozen=True)
class SampleBatch:
    """The samples of a step, and the plan that all its passes follow."""

    corpus: SampleCorpus
    plan: StepPlan


class SampleTrainer:
    """A model, its optimizer and the samples that its caller gives it.

    Every rank that torchrun started makes one, and calls it with the same samples. ``flags`` are
    in ``docs/samples.md``: ``--wlb-packing slim`` plans slices, any other one whole samples.
    ``--load`` goes on from what :meth:`save` wrote.

    Raises :class:`ConfigError` for flags that cannot run.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self.config = config = parse(flags)
        if config.data.vocab_size is None:
            raise ConfigError("samples have no vocabulary of their own; give --vocab-size")
        self._trainer = distributed.start(config, Corpora([], config.data.vocab_size, {}))
        self.model, self.runner = self._trainer.model, self._trainer.runner
        from megatron_wlb.runtime.trainer import checkpoint

        checkpoint.check_folders(config)
        checkpoint.load(self._trainer)
        self._cost = self._trainer.cost
        padded, dp_size = self.model.gpts[0].vocab_size, self.model.groups.dp.size()
        run = run_of(config, padded, dp_size, cost=self._cost)
        self._costs = run.planning_costs(config.wlb.wlb_cost == "analytic")
        self._memory = None if config.wlb.wlb_memory_gib is None else run.memory_limit
        self._alike, self._memory_model = run.alike, run.memory
        self.layout = parallelism(config, dp_size)
        self._max_tokens = max_tokens(config, run)

    @property
    def iteration(self) -> int:
        """Steps so far, those before :meth:`save` and ``--load`` included."""
        return self._trainer.iteration

    def batch(
        self,
        samples: Sequence[npt.ArrayLike],
        weights: Sequence[npt.ArrayLike] | None = None,
        groups: npt.ArrayLike | None = None,
        shared: bool = False,
    ) -> SampleBatch:
        """Plans a step of samples.

        Args:
            samples: token ids of each, ``[length]``.
            weights: what each token's loss counts, ``[length]``: 0 for prompts; None: each one 1.
            groups: as :func:`megatron_wlb.plan_batch` has it.
            shared: whether samples that begin alike share what they have in common, in a
                micro-batch or with ``slim`` in trees over several, where that is faster. Losses and
                gradients stay what they are.

        Raises:
            WLBError: samples that cannot be placed, or weights that do not fit them; a model in
                which samples cannot share.
        """
        corpus = SampleCorpus.of(samples)
        check_positions(self.config, int(corpus.lengths.max(initial=0)))
        targets = None if weights is None else targets_of("the batch", weights, corpus.lengths)
        prefixes = None
        if shared:
            check_shared(self.config)
            prefixes = SharedPrefixes.found(corpus.stored)
        plan = plan_step(
            corpus.lengths.tolist(), self._max_tokens, self._cost, self._costs, self.layout,
            slices=kind_of(self.config.wlb.wlb_packing).slices, groups=groups, targets=targets,
            memory=self._memory, alike=self._alike, shared=prefixes, model=self._memory_model,
        )  # fmt: skip
        return SampleBatch(corpus, plan)

    def log_probs(self, batch: SampleBatch) -> list[npt.NDArray[np.float32]]:
        """The log-probability of each sample's targets, ``[length]`` in nats; 0 where none is.

        All ranks have all of them.
        """
        ends = np.cumsum(batch.corpus.lengths)
        device = self.runner.batches.device
        found = torch.zeros(int(ends[-1]), device=device)
        starts = torch.from_numpy(ends - batch.corpus.lengths).to(device)

        def note(log_probs: torch.Tensor, targets: TargetTokens) -> torch.Tensor:
            found[starts[targets.samples] + targets.positions] = log_probs.detach()
            return log_probs

        self.runner.batches.loss = note
        self.forward(batch)
        if self.model.groups.tp.rank():  # each of them has the same
            found.zero_()
        torch.distributed.all_reduce(found)
        return np.split(found.cpu().numpy(), ends[:-1])

    def forward(self, batch: SampleBatch, forward_step: ForwardStep | None = None) -> list[Any]:
        """Runs a batch forward alone, by a function with Megatron's ``forward_step_func`` form if
        one is given; returns what its losses report, on the last stage.
        """
        for chunk in self.model.chunks:
            chunk.eval()
        self.runner.batches.corpora = [batch.corpus]
        with torch.no_grad(), self.model.whole_weights():
            return self.runner.run_schedule(
                batch.plan, forward_only=True, forward_step=forward_step
            )

    def step(self, batch: SampleBatch, loss: LossFunction) -> tuple[float, float]:
        """Updates the weights once by a loss; returns it and the gradient's norm before clipping.

        The loss is Σ weight · loss ÷ Σ weight over the targets of the step. Raises
        :class:`TrainingError`, before weights change, for a loss that is no number.
        """
        self.runner.batches.corpora, self.runner.batches.loss = [batch.corpus], loss
        mean = self._trainer.gradients(batch.plan).mean
        if not math.isfinite(mean):
            raise TrainingError(f"the loss of step {self.iteration} is {mean}; look at its terms")
        norm, _ = self._trainer.update()
        return mean, norm

    def save(self) -> Path:
        """Writes weights and optimizer to ``--save``; returns the folder."""
        from megatron_wlb.runtime.trainer import checkpoint

        with self.model.whole_weights():
            return checkpoint.save(self._trainer)

    def close(self) -> None:
        """Leaves the world that torchrun started."""
        distributed.shutdown()
