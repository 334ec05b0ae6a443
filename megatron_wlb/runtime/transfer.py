"""Moves values: arrays made on the host to the device, and Python objects to all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy.typing as npt
import torch

from megatron_wlb.errors import WLBError

T = TypeVar("T")


def to_device(array: npt.NDArray[Any] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on ``device``; on the CPU it may share the array's memory.

    A copy to a GPU starts from pinned memory. From any other, CUDA may wait until the kernels
    before it are done, and the host could not queue up the next micro-batch meanwhile.
    """
    tensor = torch.as_tensor(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def of_all_ranks(mine: T, group: torch.distributed.ProcessGroup | None = None) -> list[T]:
    """What each rank of the group, or of the world if there is one, gives, by rank; called by all
    of them.
    """
    if not torch.distributed.is_initialized():
        return [mine]
    gathered: list[T] = [mine] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, mine, group=group)
    return gathered


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
