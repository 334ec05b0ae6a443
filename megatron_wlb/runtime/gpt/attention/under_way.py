"""Collectives under way as values, and memory that is given back meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

# Their names from torch 2.13 on; the old ones warn there.
all_gather, reduce_scatter = (
    getattr(dist, new, None) or getattr(dist, old)
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)


class UnderWay:
    """A collective that has begun. What it fills and what it reads stay until it is done.

    ``whole`` is what comes of it, if not what is received. Without anything to send nothing runs.
    """

    def __init__(
        self,
        start: Callable[..., Any],
        received: torch.Tensor,
        sent: torch.Tensor,
        group: dist.ProcessGroup,
        whole: torch.Tensor | None = None,
    ) -> None:
        self._tensors = [received if whole is None else whole, sent]
        self._work = start(received, sent, group=group, async_op=True) if len(sent) else None

    def wait(self) -> torch.Tensor:
        """What has come. It is handed over: to be called once."""
        if self._work is not None:
            self._work.wait()
        self._work = None  # which holds the tensors, too
        received = self._tensors[0]
        self._tensors.clear()
        return received


def one_ahead(begun: Iterable[T]) -> Iterator[T]:
    """What an iterator begins, each when the one behind it is begun too."""
    begun = iter(begun)
    present = next(begun)
    for following in begun:
        yield present
        present = following
    yield present


def free(tensor: torch.Tensor) -> None:
    """Gives back the memory, though graphs hold the tensor; :func:`regain` takes it again.

    On a GPU the allocator hands it on in stream order, after the kernels that read it.
    """
    tensor.untyped_storage().resize_(0)


def regain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with memory again. What it held is to be written: autograd need not know."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    return tensor
