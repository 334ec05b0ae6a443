"""Pipeline communication whose shapes come from the step's plan instead of from the peer.

Stock Megatron exchanges three integers before every tensor when lengths vary, with a device-wide
synchronisation (``P2PCommunicator._communicate_shapes``). Every stage already holds the plan, so
here the same question is answered locally: the only messages between stages are activations and
gradients, and their overlap with computation stays possible.
"""

from __future__ import annotations

import inspect
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_wlb.cost.schedule.order import receive_order
from megatron_wlb.errors import PlanError
from megatron_wlb.runtime.ranks import watchdog

Shape = list[int]
NO_SHAPE: Shape = [0, 0, 0]

TAKES_SHAPE_PROVIDER = "shape_provider" in inspect.signature(P2PCommunicator.__init__).parameters
"""Whether megatron-core has our patch (``patches/``): then shapes go in by a public door."""


class Contents(NamedTuple):
    """What a debugged message holds, in the form of a shape, as which Megatron can send it."""

    crc32: int
    """A checksum of the tensor's bytes."""
    sum_bits: int
    """The bits of its sum in fp64, for people."""
    num_elements: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Contents:
        """Sums up a tensor; the host waits for it."""
        here = tensor.detach().cpu().contiguous()
        (sum_bits,) = struct.unpack("<q", struct.pack("<d", here.double().sum().item()))
        crc32 = zlib.crc32(here.view(torch.uint8).numpy().data)
        return cls(crc32, sum_bits, here.numel())

    def size(self) -> tuple[int, int, int]:
        return self.crc32, self.sum_bits, self.num_elements

    def __str__(self) -> str:
        (total,) = struct.unpack("<d", struct.pack("<q", self.sum_bits))
        return f"{self.num_elements} numbers with sum {total:.9g} and crc32 {self.crc32:08x}"


class Message(NamedTuple):
    """A tensor that the plan foresees."""

    shape: Shape
    what: str
    """Whether it is an activation or a gradient, and of which micro-batch and chunk."""


class PlanCommunicator(P2PCommunicator):  # type: ignore[misc]
    """A ``P2PCommunicator`` that knows from the plan what it will receive.

    Call :meth:`begin` before each run of a schedule and :meth:`end` after it. The order in between
    is a property of the schedule (:func:`megatron_wlb.cost.schedule.order.receive_order`).

    With ``verify`` each receive also runs Megatron's own exchange and compares, and once more with
    what the tensors hold: for debugging, as it costs more than the plan saves.
    """

    def __init__(
        self, pp_group: torch.distributed.ProcessGroup, config: ModelParallelConfig, verify: bool
    ) -> None:
        super().__init__(pp_group, config)
        if TAKES_SHAPE_PROVIDER and not verify:
            self.shape_provider = partial(self._communicate_shapes, None, None)
        self.verify = verify
        self._forward: list[Message] = []
        self._backward: list[Message] = []
        self._sent: list[tuple[Message, Contents] | None] = [None, None]
        """What comes from the previous and the next stage, as they say, with ``verify``."""
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

        def messages(order: Sequence[tuple[int, int]], kind: str) -> list[Message]:
            hidden = self.config.hidden_size
            # Reversed, so that the next one is popped from the end.
            return [
                Message([local_lengths[m], 1, hidden], f"{kind} of micro-batch {m}, chunk {chunk}")
                for chunk, m in reversed(order)
            ]

        self._forward = messages(forward, "the activation")
        self._backward = [] if forward_only else messages(backward, "the gradient")
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
        planned = self._planned(recv_prev, recv_next)
        shapes = [NO_SHAPE if message is None else message.shape for message in planned]
        if self.verify:
            self._compare_shapes(planned, tensor_send_next, tensor_send_prev)
            exchange = super()._communicate_shapes
            tensors = tensor_send_next, tensor_send_prev
            own = (None if tensor is None else Contents.of(tensor) for tensor in tensors)
            sent = exchange(*own, recv_prev, recv_next)
            self._sent = [
                None if message is None else (message, Contents(*contents))
                for message, contents in zip(planned, sent, strict=True)
            ]
        return shapes[0], shapes[1]

    def _compare_shapes(
        self, planned: Sequence[Message | None], send_next: Any, send_prev: Any
    ) -> None:
        recv_prev, recv_next = (message is not None for message in planned)
        real = super()._communicate_shapes(send_next, send_prev, recv_prev, recv_next)
        peers, rank = (self.prev_rank, self.next_rank), torch.distributed.get_rank()
        for message, shape, peer in zip(planned, real, peers, strict=True):
            if message is not None and list(shape) != message.shape:
                raise PlanError(
                    f"{self._label}: stage {self.pp_group.rank()} (rank {rank}) expects shape "
                    f"{message.shape} for {message.what}, but rank {peer} sends {list(shape)}; the "
                    "ranks do not run the same plan"
                )

    def _communicate(self, **given: Any) -> Any:
        peers = self.prev_rank, self.next_rank
        busy = (given["recv_prev"] or given["tensor_send_prev"] is not None,
                given["recv_next"] or given["tensor_send_next"] is not None)  # fmt: skip
        with watchdog.waiting_for(compress(peers, busy)):
            *received, handles = super()._communicate(**given)
        for name in handles or ():
            handles[name] = _Handle(handles[name], peers[name.endswith("next")])
        if not self.verify:
            return *received, handles
        for name, tensor, peer, sent in zip(
            ("recv_prev", "recv_next"), received, peers, self._sent, strict=True
        ):
            if tensor is None:
                continue
            assert sent is not None
            message, contents = sent
            compare = partial(
                compare_contents, f"{self._label}: {message.what}", peer, contents, tensor
            )
            if handles is None:  # it has been waited for
                compare()
            else:
                handles[name].compare = compare
        return *received, handles

    def _planned(self, recv_prev: bool, recv_next: bool) -> tuple[Message | None, Message | None]:
        return (
            self._next(self._forward, "activation") if recv_prev else None,
            self._next(self._backward, "gradient") if recv_next else None,
        )

    def _next(self, messages: list[Message], what: str) -> Message:
        if not messages:
            raise PlanError(
                f"{self._label}: stage {self.pp_group.rank()} is asked to receive an {what} beyond "
                "the last one of its plan"
            )
        return messages.pop()


def compare_contents(what: str, sender: int, sent: Contents, tensor: torch.Tensor) -> None:
    """Raises :class:`PlanError` where a tensor is not what its sender says that it has sent."""
    here = Contents.of(tensor)
    if (here.crc32, here.num_elements) != (sent.crc32, sent.num_elements):
        raise PlanError(
            f"{what}: rank {sender} sent {sent}, rank {torch.distributed.get_rank()} received "
            f"{here}; look at the network and memory between them"
        )


class _Handle:
    """A message that says whom it waits for, and may compare then."""

    def __init__(self, handle: Any, peer: int) -> None:
        self._handle, self._peer = handle, peer
        self.compare: Callable[[], None] = lambda: None

    def wait(self, *limit: Any) -> Any:
        with watchdog.waiting_for([self._peer]):
            waited = self._handle.wait(*limit)
        self.compare()
        return waited
