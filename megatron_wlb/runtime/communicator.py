"""Pipeline communication whose shapes come from the step's plan instead of from the peer.

Stock Megatron exchanges three integers before every tensor when lengths vary, with a device-wide
synchronisation (``P2PCommunicator._communicate_shapes``). Every stage already holds the plan, so
here the same question is answered locally: the only messages between stages are activations and
gradients, and their overlap with computation stays possible.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_wlb.errors import PlanError
from megatron_wlb.schedule.order import receive_order

Shape = list[int]
NO_SHAPE: Shape = [0, 0, 0]

TAKES_SHAPE_PROVIDER = "shape_provider" in inspect.signature(P2PCommunicator.__init__).parameters
"""Whether megatron-core has our patch (``patches/``): then shapes go in by a public door."""


class PlanCommunicator(P2PCommunicator):  # type: ignore[misc]
    """A ``P2PCommunicator`` that knows from the plan what it will receive.

    Call :meth:`begin` before each run of a schedule and :meth:`end` after it. The order in between
    is a property of the schedule (:func:`megatron_wlb.schedule.order.receive_order`).

    With ``verify`` each receive also runs Megatron's own exchange and compares: for debugging,
    as it costs what the plan saves.
    """

    def __init__(
        self, pp_group: torch.distributed.ProcessGroup, config: ModelParallelConfig, verify: bool
    ) -> None:
        super().__init__(pp_group, config)
        if TAKES_SHAPE_PROVIDER and not verify:
            self.shape_provider = self._planned_shapes
        self.verify = verify
        self._forward: list[Shape] = []
        self._backward: list[Shape] = []
        self._label = "no step"

    def begin(self, local_lengths: Sequence[int], *, forward_only: bool, label: str) -> None:
        """Takes the lengths of the micro-batches that the next run of the schedule will see.

        Args:
            local_lengths: per micro-batch of this data-parallel rank in running order, the tokens
                of the tensors between stages: padded length ÷ CP, and ÷ TP with sequence parallel.
            forward_only: whether the schedule runs without backward (evaluation).
            label: names the step in errors.

        Raises :class:`PlanError` where the previous run received fewer tensors than its plan
        foresaw.
        """
        self.end()
        vpp = self.virtual_pipeline_model_parallel_size or 1
        forward, backward = receive_order(
            self.pp_group.size(),
            vpp,
            len(local_lengths),
            getattr(self.config, "microbatch_group_size_per_vp_stage", None) if vpp > 1 else None,
            self.pp_group.rank(),
        )

        def shapes(order: Sequence[tuple[int, int]]) -> list[Shape]:
            hidden = self.config.hidden_size
            # Reversed, so that the next one is popped from the end.
            return [[local_lengths[m], 1, hidden] for _, m in reversed(order)]

        self._forward = shapes(forward)
        self._backward = [] if forward_only else shapes(backward)
        self._label = label

    def end(self) -> None:
        """Checks that the run received every tensor that the plan foresaw."""
        if self._forward or self._backward:
            raise PlanError(
                f"{self._label}: the schedule ended with {len(self._forward)} activations and "
                f"{len(self._backward)} gradients of the plan not received; the ranks do not run "
                "the same plan"
            )

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        prev_shape, next_shape = self._planned_shapes(recv_prev, recv_next)
        if self.verify:
            real = super()._communicate_shapes(
                tensor_send_next, tensor_send_prev, recv_prev, recv_next
            )
            if list(real) != [prev_shape, next_shape]:
                raise PlanError(
                    f"{self._label}: stage {self.pp_group.rank()} expects shapes {prev_shape} from "
                    f"the previous and {next_shape} from the next stage by its plan, but they send "
                    f"{real[0]} and {real[1]}; the ranks do not run the same plan"
                )
        return prev_shape, next_shape

    def _planned_shapes(self, recv_prev: bool, recv_next: bool) -> tuple[Shape, Shape]:
        return (
            self._next_shape(self._forward, "activation") if recv_prev else NO_SHAPE,
            self._next_shape(self._backward, "gradient") if recv_next else NO_SHAPE,
        )

    def _next_shape(self, shapes: list[Shape], what: str) -> Shape:
        if not shapes:
            raise PlanError(
                f"{self._label}: stage {self.pp_group.rank()} is asked to receive an {what} beyond "
                "the last one of its plan"
            )
        return shapes.pop()
