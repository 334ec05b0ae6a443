"""Activations that wait in the host's memory, from a forward to its backward.

When they go and come back is in :mod:`megatron_wlb.cost.schedule.hosting`. What a forward saves is
found in its graph. The storages of these tensors are copied and emptied, and filled again before
the backward. The graph holds the tensors all the time, and need not know. (Hooks on saved tensors
would replace parameters, too, by tensors without what Megatron notes at them.) Parameters, keys and
values of documents in slices, whole numbers, and what the pipeline sends and receives stay.

On a GPU copies run on two streams of their own. The stream of the passes waits for them, the host
does not. So memory that is free again is used in the order of that stream.

The host's memory is pinned before a step's first message, as much as the plan needs. To pin some
may wait for all that the device has to do, and that may need messages which the host would still
have to send.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.schedule.hosting import SLAB_BYTES, Window, hosted_passes
from megatron_wlb.cost.schedule.order import Action, Pass

SMALL, SMALL_BYTES = 1 / 256, 1 << 20
"""Storages with less than such a share of a pass's largest one stay, if they are below so many
bytes. There are many, and to launch their copies would take longer than these run."""
WHOLE = torch.uint8, torch.int32, torch.int64
"""Numbers of these are places, counts and FP8 weights, which other passes may need."""
BEYOND = 1.05
"""Slabs that are pinned to one that is expected, at first: prediction is as exact as that."""
ENOUGH_SLABS = 64
"""A step that expects fewer says little of how exact predictions are."""
SLABS_AT_ONCE = 128
"""Slabs that are pinned together, which takes long."""


class Slabs:
    """The host's memory, pinned where there is a GPU; what was used once is used again."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._free: list[torch.Tensor] = []

    def reserve(self, number: int) -> None:
        """Has so many slabs free."""
        while len(self._free) < number:
            at_once = SLABS_AT_ONCE if self._on_gpu else 1
            block = torch.empty(
                at_once * SLAB_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._on_gpu
            )
            self._free += torch.split(block, SLAB_BYTES)

    @property
    def free_bytes(self) -> int:
        return len(self._free) * SLAB_BYTES

    def take(self, num_bytes: int) -> list[torch.Tensor]:
        """Slabs ``[SLAB_BYTES]`` of uint8 for so many bytes, of those that are free."""
        number = -(-num_bytes // SLAB_BYTES)
        taken, self._free = self._free[:number], self._free[number:]
        return taken

    def give(self, slabs: Iterable[torch.Tensor]) -> None:
        self._free += slabs


class _Lane:
    """Copies one way, behind each other; on a GPU a stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        after: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event | None:
        """Copies ``(to, from)`` behind all passes so far, and ``after`` another copy; what to wait
        for.
        """
        if self._stream is None:
            for to, source in pairs:
                to.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        event: torch.cuda.Event = self._stream.record_event()
        return event


@dataclass
class _Kept:
    """What one hosted pass keeps."""

    storages: list[torch.UntypedStorage]
    sizes: list[int]
    num_wanted: int
    """Slabs for these, and for what stays on the device as there are no more."""
    slabs: list[torch.Tensor] = field(default_factory=list)
    gone: torch.cuda.Event | None = None
    came: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of slabs and of storages that have the same bytes."""
        at = 0
        for storage, size in zip(self.storages, self.sizes, strict=True):
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            begin = 0
            while begin < size:
                number, offset = divmod(at, SLAB_BYTES)
                length = min(size - begin, SLAB_BYTES - offset)
                yield self.slabs[number][offset : offset + length], whole[begin : begin + length]
                at, begin = at + length, begin + length


class Host:
    """The host's memory of a device, and the way there and back."""

    def __init__(self, device: torch.device) -> None:
        self.slabs = Slabs(device)
        self.out, self.back = _Lane(device), _Lane(device)
        self.beyond = BEYOND
        """How many slabs steps need, to one that is expected."""


class Passage:
    """The hosted passes of one rank in one step.

    Args:
        host: what is kept from step to step.
        actions: the rank's, in their order.
        hosted: of each micro-batch, whether it is.
        window_bytes: of each window of :class:`.Window`.
        stays: tells the tensors that are nobody's activations, such as parameters.
        expected_bytes: ``[chunks, micro-batches]``: what each would send. Slabs are pinned for
            them here. What finds none after all stays on the device.
    """

    def __init__(
        self,
        host: Host,
        actions: Sequence[Action],
        hosted: Sequence[bool],
        window_bytes: float,
        stays: Callable[[], Iterable[torch.Tensor]],
        expected_bytes: Floats,
    ) -> None:
        self._host, self._hosted, self._stays = host, hosted, stays
        self._window = Window(hosted_passes(actions, hosted), window_bytes)
        self._kept: dict[Pass, _Kept] = {}
        self.num_bytes = 0
        """What has gone to the host."""
        slabs = np.ceil(expected_bytes / SLAB_BYTES)
        moves = (
            (1 if a.kind == "F" else -1) * int(slabs[a.chunk, a.micro_batch])
            for a in actions
            if hosted[a.micro_batch]
        )
        self._num_expected = max(1, *accumulate(moves))
        host.slabs.reserve(math.ceil(host.beyond * self._num_expected))

    def before(self, action: Action) -> None:
        """Has gone and come what must before an action."""
        moves = self._window.before(action)
        for one in moves.gone:
            kept = self._kept[one]
            _wait(kept.gone)
            for storage in kept.storages:
                storage.resize_(0)
        for one in moves.comes:
            kept = self._kept[one]
            for storage, size in zip(kept.storages, kept.sizes, strict=True):
                storage.resize_(size)
            pairs = ((whole, slab) for slab, whole in kept.pairs())
            kept.came = self._host.back.copy(pairs, after=kept.gone)
        one = action.chunk, action.micro_batch
        if action.kind == "B" and one in self._kept:
            kept = self._kept.pop(one)
            _wait(kept.came or kept.gone)
            self._host.slabs.give(kept.slabs)
            self._window.behind(action, kept.num_bytes)

    def behind(self, action: Action, received: torch.Tensor | None, output: torch.Tensor) -> None:
        """Follows a forward pass, which has received ``received``, if anything, and computed
        ``output``; both stay.
        """
        if not self._hosted[action.micro_batch]:
            return
        ends = [output] if received is None else [output, received]
        stays = {_name(tensor) for tensor in (*self._stays(), *ends)}
        storages = {_name(tensor): tensor.untyped_storage() for tensor in saved_tensors(output)}
        found = [
            storage
            for name, storage in storages.items()
            if name not in stays and storage.resizable() and storage.nbytes()
        ]
        largest = max((storage.nbytes() for storage in found), default=0)
        least = min(SMALL * largest, SMALL_BYTES)
        found = [storage for storage in found if storage.nbytes() >= least]
        ends_at = [*accumulate((storage.nbytes() for storage in found), initial=0)]
        found = found[: bisect_right(ends_at, self._host.slabs.free_bytes) - 1]
        sizes = [storage.nbytes() for storage in found]
        kept = _Kept(found, sizes, -(-ends_at[-1] // SLAB_BYTES))
        kept.slabs = self._host.slabs.take(kept.num_bytes)
        # Slabs that were read before are free: the passes have waited for those copies.
        kept.gone = self._host.out.copy(kept.pairs())
        self._kept[action.chunk, action.micro_batch] = kept
        num_wanted = sum(own.num_wanted for own in self._kept.values())
        expected = max(self._num_expected, ENOUGH_SLABS)
        self._host.beyond = max(self._host.beyond, num_wanted / expected)
        self._window.behind(action, kept.num_bytes)
        self.num_bytes += kept.num_bytes


def saved_tensors(output: torch.Tensor) -> Iterator[torch.Tensor]:
    """What the graph of an output keeps for its backward, but whole numbers; some come again.

    Attention runs calls with graphs of their own, of which its node tells (``calls``).
    """
    roots = [output.grad_fn]
    seen = set[Any]()
    while roots:
        node = roots.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        roots += (of for of, _ in node.next_functions)
        values = [getattr(node, name) for name in _saved_names(type(node))]
        for call in getattr(node, "calls", ()):
            values.append(call.kept)
            roots.append(call.out.grad_fn)
        for value in values:
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.dtype not in WHOLE:
                    yield tensor


@cache
def _saved_names(kind: type) -> list[str]:
    """The attributes of a kind of node that are what it keeps."""
    return [name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors"]


def _name(tensor: torch.Tensor) -> int:
    name: int = tensor.untyped_storage()._cdata
    return name


def _wait(event: torch.cuda.Event | None) -> None:
    """Has the passes that come wait for a copy."""
    if event is not None:
        event.wait()
