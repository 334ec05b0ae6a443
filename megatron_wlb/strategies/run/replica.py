"""A replica's chunks on this rank, their place in memory, and when gradients are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from megatron_wlb.plan import StepPlan
from megatron_wlb.runtime.gpt.attention.dropout import begin_stream
from megatron_wlb.runtime.gpt.build import Model
from megatron_wlb.runtime.stepping.step import StepRunner
from megatron_wlb.strategies.run.groups import ReplicaGroups
from megatron_wlb.strategies.run.pieces import (
    EmptyObject,
    GroupOf,
    HeldPiece,
    Piece,
    empty_objects,
    held_pieces,
)
from megatron_wlb.strategies.run.routes import Pull, Push


class Arena:
    """The weights and gradients of what a rank has of a replica, in one piece of memory.

    Parameters keep their values, and are parts of it from then on. It has memory from :meth:`open`
    to :meth:`close`: a rank has that of one layout at a time.
    """

    def __init__(self, parameters: Sequence[Any], dtype: torch.dtype) -> None:
        num_elements = sum(parameter.numel() for parameter in parameters)
        device = torch.cuda.current_device()  # the CPU, under emulation
        self.weights = torch.empty(num_elements, dtype=dtype, device=device)
        self.gradients = torch.empty(num_elements, device=device)
        offset = 0
        for parameter in parameters:
            part = slice(offset, offset + parameter.numel())
            weight = self.weights[part].view(parameter.shape)
            parameter.data = weight.copy_(parameter.data)
            parameter.main_grad = self.gradients[part].view(parameter.shape)
            offset = part.stop

    def open(self) -> None:
        """Takes memory, if it has none; what is in it is nothing to rely on."""
        if not self.weights.untyped_storage().nbytes():
            self._resize(self.weights.numel())

    def close(self) -> None:
        self._resize(0)

    def _resize(self, num_elements: int) -> None:
        for flat in (self.weights, self.gradients):
            flat.untyped_storage().resize_(num_elements * flat.element_size())


class LocalReplica:
    """What a rank has of one replica. ``arena`` is the memory of its parameters, and open."""

    def __init__(
        self,
        arena: Arena,
        model: Model,
        runner: StepRunner,
        groups: ReplicaGroups,
        group_of: GroupOf,
        seed: int = 0,
    ) -> None:
        self.arena = arena
        self.model = model
        self._seed = seed
        self.runner = runner
        if groups.links is not None:
            runner.links = groups.links
        self.groups = groups
        with groups.current():
            self.held: list[HeldPiece] = held_pieces(model, model.config.num_layers, group_of)
            self.objects: list[EmptyObject] = empty_objects(model)
        self.pull: Pull | None = None
        """What the forward passes of the present step wait for."""
        self._push: Push | None = None
        self._missing: Counter[int] = Counter()
        """Gradients of each bucket that the present step has still to add."""
        bucket_of = {id(held.parameter): held.piece.whole.bucket for held in self.held}
        self._buckets = Counter(bucket_of.values())
        # These are complete in the rank's last pass, if it is the first of its pipeline: no message
        # is left to send or receive then. An exchange of all ranks that starts before a message
        # could keep that from its peer, which comes to the exchange only behind it.
        first = model.gpts[0].parameters() if model.groups.pp.rank() == 0 else ()
        self._last_buckets = {bucket_of[id(parameter)] for parameter in first}
        for gpt in model.gpts:
            for module in _units(gpt):
                needed = sorted({bucket_of[id(p)] for p in module.parameters()})
                module.register_forward_pre_hook(self._waits_for(needed))
        for parameter in parameters_of(model):
            hook = self._adds_to(bucket_of[id(parameter)])
            parameter.register_post_accumulate_grad_hook(hook)

    @property
    def pieces(self) -> list[Piece]:
        return [held.piece for held in self.held]

    def run(
        self,
        step: StepPlan,
        number: int,
        pull: Pull,
        push: Push | None,
        **options: Any,
    ) -> list[torch.Tensor]:
        """Runs the schedule of the ``number``-th replica of a step's strategy; what the losses
        report whose part of the sum is this rank's.

        Weights are waited for layer by layer, and gradients are pushed, if that is wanted, layer by
        layer as the last backward pass is done with them.
        """
        self.pull, self._push = pull, push
        plan = step.alone(number)
        num = len(plan.micro_batches[0])
        self._missing = Counter({bucket: num * n for bucket, n in self._buckets.items()})
        for chunk in self.model.chunks:
            chunk.train(push is not None)
        with self.groups.current():
            self._begin_streams(plan.step, number)
            reports = self.runner.run_schedule(
                plan, forward_only=push is None, step=step, **options
            )
            is_counted = self.model.groups.tp.rank() == 0
        self.pull = self._push = None
        return reports if is_counted else []

    def _begin_streams(self, step: int, number: int) -> None:
        """Starts the streams of random numbers anew, so that what a step drops depends on the step
        and its replica, and not on the layouts of steps before. Tensor-parallel ranks have those of
        one seed, as Megatron asks for; others have their own. Attention's are each rank's.
        """
        groups = self.model.groups
        place = (self._seed, step, number, groups.pp.rank(), groups.cp.rank())
        seed = int(np.random.SeedSequence(place).generate_state(1)[0] >> 1)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        begin_stream(seed)

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
            is_last = bucket in self._last_buckets and not self._missing[bucket]
            if self._push is not None and is_last:
                open_buckets = [b for b, num in self._missing.items() if num > 0]
                self._push.post(max(open_buckets, default=-1) + 1)

        return add


def _units(gpt: Any) -> list[torch.nn.Module]:
    """The modules of a chunk that have parameters of one bucket each."""
    ends = (gpt, "embedding"), (gpt.decoder, "final_layernorm"), (gpt, "output_layer"), (gpt, "mtp")
    units = [*gpt.decoder.layers, *(getattr(owner, name, None) for owner, name in ends)]
    return [unit for unit in units if unit is not None]


def parameters_of(model: Model) -> list[Any]:
    return [parameter for gpt in model.gpts for parameter in gpt.parameters()]
