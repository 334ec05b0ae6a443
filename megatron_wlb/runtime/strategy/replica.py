"""A replica's chunks on this rank, their place in memory, and when gradients are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from megatron_wlb.plan import ReplicaPlan, StepPlan
from megatron_wlb.runtime.gpt.build import Model
from megatron_wlb.runtime.stepping.step import StepRunner, forward_step
from megatron_wlb.runtime.strategy.groups import ReplicaGroups
from megatron_wlb.runtime.strategy.pieces import (
    EmptyObject,
    Held,
    Piece,
    empty_objects,
    held_pieces,
)
from megatron_wlb.runtime.strategy.routes import Pull, Push


class Arena:
    """The weights and gradients of whichever replica a rank runs: memory of the largest."""

    def __init__(self, models: Sequence[Model], dtype: torch.dtype, device: torch.device) -> None:
        most = max((_num_elements(model) for model in models), default=0)
        self.weights = torch.zeros(most, dtype=dtype, device=device)
        self.gradients = torch.zeros(most, device=device)

    def place(self, model: Model) -> None:
        """Lets a model's parameters and their ``main_grad`` be parts of this memory."""
        offset = 0
        for parameter in _parameters(model):
            part = slice(offset, offset + parameter.numel())
            parameter.data = self.weights[part].view(parameter.shape)
            parameter.main_grad = self.gradients[part].view(parameter.shape)
            offset += parameter.numel()


class LocalReplica:
    """What a rank has of one replica. Its parameters must be placed in an arena."""

    def __init__(self, model: Model, runner: StepRunner, groups: ReplicaGroups) -> None:
        self.model = model
        self.runner = runner
        self.groups = groups
        with groups.current():
            self.held: list[Held] = held_pieces(model, model.config.num_layers)
            self.objects: list[EmptyObject] = empty_objects(model)
        self.pull: Pull | None = None
        """What the forward passes of the present step wait for."""
        self._push: Push | None = None
        self._missing: Counter[int] = Counter()
        """Gradients of each bucket that the present step has still to add."""
        bucket_of = {id(held.parameter): held.piece.whole.bucket for held in self.held}
        self._buckets = Counter(bucket_of.values())
        for gpt in model.gpts:
            for module in _units(gpt):
                needed = sorted({bucket_of[id(p)] for p in module.parameters()})
                module.register_forward_pre_hook(self._waits_for(needed))
        for parameter in _parameters(model):
            hook = self._adds_to(bucket_of[id(parameter)])
            parameter.register_post_accumulate_grad_hook(hook)

    @property
    def pieces(self) -> list[Piece]:
        return [held.piece for held in self.held]

    def run(
        self, plan: StepPlan, own: ReplicaPlan, pull: Pull, push: Push | None
    ) -> torch.Tensor | float:
        """Runs the replica's schedule; returns this rank's part of the sum of losses.

        Weights are waited for layer by layer, and gradients are pushed, if that is wanted, layer by
        layer as the last backward pass is done with them.
        """
        alone = StepPlan(plan.step, plan.packing, (own.micro_batches,), 0, 0)
        self.pull, self._push = pull, push
        num = len(own.micro_batches)
        self._missing = Counter({bucket: num * n for bucket, n in self._buckets.items()})
        for chunk in self.model.chunks:
            chunk.train(push is not None)
        with self.groups.current():
            reports = self.runner.run_schedule(alone, forward_step, forward_only=push is None)
            is_counted = self.model.groups.tp.rank() == 0
        self.pull = self._push = None
        return sum(reports) if is_counted and reports else 0.0

    def _waits_for(self, buckets: Sequence[int]) -> Any:
        def wait(_module: Any, _given: Any) -> None:
            if self.pull is not None:
                for bucket in buckets:
                    self.pull.wait(bucket)

        return wait

    def _adds_to(self, bucket: int) -> Any:
        def add(parameter: Any) -> None:
            # As in Megatron's DistributedDataParallel: the product may have added it already.
            added = getattr(parameter, "grad_added_to_main_grad", False)
            to_add = not added or getattr(parameter, "zero_out_wgrad", False)
            if to_add and parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            self._missing[bucket] -= 1
            if self._push is not None and not self._missing[bucket]:
                open_buckets = [b for b, num in self._missing.items() if num > 0]
                self._push.post(max(open_buckets, default=-1) + 1)

        return add


def _units(gpt: Any) -> list[torch.nn.Module]:
    """The modules of a chunk that have parameters of one bucket each."""
    ends = (gpt, "embedding"), (gpt.decoder, "final_layernorm"), (gpt, "output_layer")
    units = [*gpt.decoder.layers, *(getattr(owner, name, None) for owner, name in ends)]
    return [unit for unit in units if unit is not None]


def _parameters(model: Model) -> list[Any]:
    return [parameter for gpt in model.gpts for parameter in gpt.parameters()]


def _num_elements(model: Model) -> int:
    return sum(parameter.numel() for parameter in _parameters(model))
