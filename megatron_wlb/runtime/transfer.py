"""Arrays made on the host -> tensors on the device, while it computes."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on ``device``; on the CPU it may share the array's memory.

    A copy to a GPU starts from pinned memory. From any other, CUDA may wait until the kernels
    before it are done, and the host could not queue up the next micro-batch meanwhile.
    """
    tensor = torch.as_tensor(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
