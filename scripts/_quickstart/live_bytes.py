"""Counts bytes of the tensors that are alive, and their peak, by watching every operation.

A storage counts from the first operation that returns it until Python or autograd lets it go,
once, however many tensors view it. What kernels use inside and give back is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from megatron_wlb.runtime.gpt.build import Model

T = TypeVar("T")


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; storages that it has seen are followed beyond that."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes alive."""
        self.peak = 0
        """The most since :meth:`reset_peak`."""
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._left_out: list[Any] = []

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that exist already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not self._recount(storage):
                key, size = id(storage), storage.nbytes()
                self._storages[key] = (weakref.ref(storage, partial(self._forget, key)), size)
                self._count(size)

    def leave_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Never counts a tensor, which stands for another memory's; it must not be seen before."""
        self._left_out.append(tensor.untyped_storage())
        return tensor

    def reset_peak(self) -> None:
        self.peak = self.live

    def _count(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _recount(self, storage: Any) -> bool:
        """Counts what a known storage has been resized by; whether it is one."""
        if any(storage is other for other in self._left_out):
            return True
        known = self._storages.get(id(storage))
        if known is None:
            return False
        self._count(storage.nbytes() - known[1])
        self._storages[id(storage)] = (known[0], storage.nbytes())
        return True

    def _forget(self, key: int, _: Any) -> None:
        self.live -= self._storages.pop(key)[1]

    def __enter__(self) -> LiveBytes:
        # No operation: attention frees and takes back the memory of gathered keys this way.
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            self._recount(storage)
            return result

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize)
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._patch.stop()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def step_bytes(live: LiveBytes, model: Model, run: Callable[[], T]) -> tuple[T, int, int]:
    """What the passes of a step return, the bytes held before, and the most that they add."""
    for chunk in model.chunks:
        chunk.train()
        chunk.zero_grad_buffer()  # type: ignore[operator]
    for gpt in model.gpts:
        gpt.set_input_tensor(None)  # a chunk keeps its last input until the next one
    gc.collect()
    held = live.live
    live.reset_peak()
    result = run()
    return result, held, live.peak - held
