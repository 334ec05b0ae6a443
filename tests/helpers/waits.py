"""Records where a host would wait for its GPU: on a CPU, where nothing waits.

Each call that takes a value out of a tensor waits on a GPU for all that the tensor needs. Here
every tensor counts as one of the device. What only the host has must therefore be read as numpy
arrays, which no call below sees.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_METHODS = (
    "item tolist numpy cpu nonzero masked_select unique equal "
    "__bool__ __int__ __float__ __index__ __array__"
)
_READING = {getattr(torch.Tensor, name) for name in _METHODS.split(" ")}
_READING |= {torch.nonzero, torch.equal, torch.is_nonzero, torch.masked_select, torch.unique}
_OPERATIONS = {
    "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal",
    "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount",
}  # fmt: skip


_OF_THE_HOST = ("/runtime/emulation/cpu.py", "/runtime/emulation/adam.py")
"""Files that stand in for the device's own, and look at host tensors."""


class _Calls(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        moves = func is torch.Tensor.to and not kwargs.get("non_blocking")
        to_host = moves and any(str(given) == "cpu" for given in (*args[1:], kwargs.get("device")))
        if to_host or func in _READING:
            self.note(func.__name__)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in _OPERATIONS or _counts_a_mask(name, args):
            self.note(name)
        return func(*args, **(kwargs or {}))


def _counts_a_mask(name: str, args: Any) -> bool:
    """Whether it indexes by a mask. To set all that it marks to one number, none are counted."""
    if name not in ("aten::index", "aten::index_put", "aten::index_put_"):
        return False
    masks = any(at is not None and at.dtype in (torch.bool, torch.uint8) for at in args[1])
    return masks and (name == "aten::index" or args[2].numel() > 1)


@contextmanager
def recorded(*inside: str) -> Iterator[set[str]]:
    """The places at which this thread would wait: ``megatron/core/x.py:function`` each.

    With ``inside`` only calls below a function of one of these names count.
    """
    places: set[str] = set()

    def note(name: str) -> None:
        frames = list(_frames())
        if inside and not any(frame.f_code.co_name in inside for frame in frames):
            return
        if any(frame.f_code.co_filename.endswith(_OF_THE_HOST[1]) for frame in frames):
            return
        places.add(next(filter(None, map(_place, frames)), name))

    def synchronize(*_: Any) -> None:
        note("synchronize")

    with (
        mock.patch.object(torch.cuda, "synchronize", synchronize),
        _Calls(note),
        _Operations(note),
    ):
        yield places


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: types.FrameType) -> str:
    """Where in Megatron or here the frame is; empty for one elsewhere."""
    path = frame.f_code.co_filename
    for package in ("/megatron_wlb/", "/megatron/"):
        if package in path and not path.endswith(_OF_THE_HOST):
            return f"{package[1:]}{path.rpartition(package)[2]}:{frame.f_code.co_name}"
    return ""
