"""Moves values: arrays to the device, numbers from it, and Python objects to all ranks.

None of the moves to and from a device lets the host wait for what the device still has to do.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy.typing as npt
import torch

from megatron_wlb.errors import WLBError
from megatron_wlb.runtime.ranks.watchdog import waiting_for

T = TypeVar("T")


def to_device(array: npt.NDArray[Any] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on ``device``; on the CPU it may share the array's memory.

    A copy to a GPU starts from pinned memory. From any other, CUDA may wait until the kernels
    before it are done, and the host could not queue up the next micro-batch meanwhile.
    """
    return pinned(torch.as_tensor(array), device).to(device, non_blocking=True)


def pinned(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor, of the host, in memory from which it is copied to ``device`` at once."""
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


PER_TOKEN_BYTES, LEAST_BYTES, HEADROOM = 64.0, 1 << 20, 1.25
"""Sizes of a :class:`PinnedBlock`: what a token takes before that is known, what there is in any
case, and how much more than was needed."""
ALIGNED_BYTES = 64


class PinnedBlock:
    """What is copied to a GPU in one step, in memory that is pinned before it, all at once.

    To pin some may wait for all that the device has to do, and that may need messages which the
    host would still have to send. Torch gives a block to no other step before its copies are over.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8)
        self._num_tokens, self._used, self._per_token = 0, 0, 0.0

    def begin(self, num_tokens: int) -> None:
        """Begins a step of so many tokens."""
        if torch.device(self._device).type != "cuda":
            return
        if self._num_tokens:
            self._per_token = max(self._per_token, HEADROOM * self._used / self._num_tokens)
        self._num_tokens, self._used = num_tokens, 0
        num_bytes = LEAST_BYTES + int((self._per_token or PER_TOKEN_BYTES) * num_tokens)
        self._block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the function of that name; where the block is full, it pins more."""
        begin, end = self._used, self._used + tensor.nbytes
        self._used = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES
        if end > len(self._block):
            return pinned(tensor, self._device)
        # A tensor of its own: of views autograd would take a change of one for one of all.
        block = torch.empty(0, dtype=torch.uint8).set_(self._block.untyped_storage())
        return block[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def mapped(
    value: T,
    change: Callable[[torch.Tensor], torch.Tensor],
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> T:
    """The value with each tensor in it changed: in tuples and dataclasses, to any depth.

    What is there twice is changed once. Where nothing changes it is the same object. ``known`` are
    the tensors changed so far, by their identity.
    """
    known = {} if known is None else known
    given: Any = value
    made = given
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            known[id(value)] = value, change(value)
        made = known[id(value)][1]
    elif type(given) is tuple:
        parts = tuple(mapped(part, change, known) for part in given)
        if any(new is not old for new, old in zip(parts, given, strict=True)):
            made = parts
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        parts_by_name = {name: mapped(part, change, known) for name, part in old.items()}
        new = {name: part for name, part in parts_by_name.items() if part is not old[name]}
        made = dataclasses.replace(given, **new) if new else given
    result: T = made
    return result


class HostCopy:
    """A number of the device on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.detach().to("cpu", non_blocking=True, copy=True)
        self._made: Any = None
        if tensor.is_cuda:
            self._made = torch.cuda.current_stream().record_event()

    def item(self) -> float:
        """Waits for what the device had to do before the copy, and for nothing that came after."""
        if self._made is not None:
            self._made.synchronize()
        return float(self._copy.item())


def of_all_ranks(mine: T, group: torch.distributed.ProcessGroup | None = None) -> list[T]:
    """What each rank of the group, or of the world if there is one, gives, by rank; called by all
    of them.
    """
    if not torch.distributed.is_initialized():
        return [mine]
    gathered: list[T] = [mine] * torch.distributed.get_world_size(group)
    with waiting_for(others(group)):
        torch.distributed.all_gather_object(gathered, mine, group=group)
    return gathered


def others(group: torch.distributed.ProcessGroup | None = None) -> list[int]:
    """The other ranks of a group, or of the world."""
    ranks: list[int] = torch.distributed.get_process_group_ranks(group)
    return [rank for rank in ranks if rank != torch.distributed.get_rank()]


def open_group(
    ranks: Sequence[int],
    timeout: datetime.timedelta | None = None,
    backend: str | None = None,
    like: torch.distributed.ProcessGroup | None = None,
) -> torch.distributed.ProcessGroup:
    """Makes this rank's group; all ranks of the world call it together, each with its own ranks.

    It gets the options of ``like``.
    """
    options = None if like is None else nccl_options(like)
    opened: torch.distributed.ProcessGroup | None = None
    for members in sorted(set(of_all_ranks(tuple(ranks)))):  # all take part in making every group
        made = torch.distributed.new_group(
            list(members), timeout=timeout, backend=backend, pg_options=options
        )
        opened = made if members == tuple(ranks) else opened
    assert opened is not None
    return opened


def nccl_options(group: torch.distributed.ProcessGroup) -> Any:
    """A copy of the options that Megatron made a group of NCCL with; None for another."""
    if torch.distributed.get_backend(group) != torch.distributed.Backend.NCCL:
        return None
    known: Any = group._get_backend(torch.device("cuda")).options
    made: Any = torch.distributed.ProcessGroupNCCL.Options(
        is_high_priority_stream=known.is_high_priority_stream
    )
    made.config = known.config
    return made


def from_first_rank(make: Callable[[], T]) -> T:
    """Brings what the first rank makes to every rank, or raises its :class:`WLBError` there, so
    that none waits for the others for ever; called by all of them.
    """
    made: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            made[0] = make()
        except WLBError as error:
            made[1] = error
    torch.distributed.broadcast_object_list(made, src=0)
    if made[1] is not None:
        raise made[1]
    result: T = made[0]
    return result
