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

    def is_here(self) -> bool:
        """Whether :meth:`item` would not wait."""
        return self._made is None or bool(self._made.query())

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
