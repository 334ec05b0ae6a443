"""The tape of a model chunk: its operations in forward order, and the bytes that each keeps.

Forward writes it: each operation adds what its backward needs. Backward reads it from the end: each
needs some working memory, then lets go of what it kept. Full recompute is an operation that keeps
its input and, in backward, writes and reads an inner tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.schedule.graph import Floats

MOST_IN_PATTERN = 8
"""Groups of layers in a pattern that comes several times."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Operation:
    """Bytes a token of one operation; ``weight_bytes`` are absolute."""

    name: str
    saved: float = 0.0
    """Kept from its forward to its backward, its output included where a later one needs it."""
    forward: float = 0.0
    """Alive besides only while it runs forward."""
    backward: float = 0.0
    """Alive besides only while it runs backward: gradients in and out, temporaries."""
    weight_bytes: int = 0
    """The gradient of its weight, before it is added to the gradient buffer."""
    inner: tuple[Operation, ...] = ()
    """What is written and read again in backward, for an operation that recomputes."""
    cached: float = 0.0
    """The part of ``saved`` that is not kept if a document's buffer has its keys and values."""
    keys: float = 0.0
    """Such buffers' bytes, a token of the document; context-parallel ranks do not divide it."""
    gradients: float = 0.0
    """Bytes of their gradients' buffers, a token of the document."""
    joined: float = 0.0
    """Kept besides where a slice and whole documents share a micro-batch: two outputs in one."""
    prefix: float = 0.0
    """Bytes in which its backward works, a key of the slices before."""
    apart: float = 0.0
    """Kept besides in a micro-batch that runs a slice, by kernels that hand on its state."""
    state: float = 0.0
    """Bytes of the state that a slice takes or leaves, once."""
    stays: float = 0.0
    """The part of ``saved`` that is on the device even if a micro-batch is hosted."""


@dataclass(frozen=True, eq=False)
class Tape:
    """The operations of one model chunk, in forward order; equal to itself alone."""

    runs: tuple[tuple[int, tuple[Operation, ...]], ...]
    """Operations, each group so often in a row: those of equal layers."""

    @classmethod
    def of(cls, operations: tuple[Operation, ...]) -> Tape:
        """Operations of which nothing is known to come again."""
        return cls(((1, operations),))

    @property
    def operations(self) -> tuple[Operation, ...]:
        return tuple(o for num, group in self.runs for o in group * num)

    def total(self, of: Callable[[Operation], float]) -> float:
        """The sum over all operations."""
        return sum(num * sum(map(of, group)) for num, group in self.runs)

    def walked(self, *, backward: bool = False) -> Iterator[tuple[int, Operation]]:
        """The operations in the order of a pass, each with how many it stands for.

        Forward, each of equal groups leaves more than it found. Backward, what is alive changes by
        as much from one to the next. So the most is alive in the first or the last, and those
        between stand together. What ``cached`` and ``joined`` change forward lasts until attention.
        """
        for num, group in reversed(self.runs) if backward else self.runs:
            ordered = group[::-1] if backward else group
            for times in (1, num - 2, 1) if num > 2 else (1,) * num:
                yield from ((times, operation) for operation in ordered)

    @cached_property
    def saved_per_token(self) -> float:
        """Bytes that a micro-batch in flight keeps, a token."""
        return self.total(attrgetter("saved"))

    @cached_property
    def stays_per_token(self) -> float:
        """Bytes of them that do not go to the host."""
        return self.total(attrgetter("stays"))

    def forward_peak_bytes(self, num_tokens: npt.ArrayLike) -> Floats:
        """The most that a micro-batch adds while it runs forward, what it keeps included.

        Of many, all at once.
        """
        return _most(self._forward, num_tokens)

    def backward_peak_bytes(self, num_tokens: npt.ArrayLike) -> Floats:
        """The most of a micro-batch while it runs backward, what it has kept included.

        Of many, all at once.
        """
        return _most(self._backward, num_tokens)

    @cached_property
    def _forward(self) -> Floats:
        """What is alive in each moment: bytes a token, and bytes once, ``[2, moments]``."""
        kept, moments = 0.0, [(0.0, 0.0)]
        for times, operation in self.walked():
            working = operation.forward
            if operation.inner:  # forward without keeping anything: its largest operation
                working = max(o.forward + o.saved for o in operation.inner)
            kept += times * operation.saved
            moments.append((kept + working, 0.0))
        return _highest(moments)

    @cached_property
    def _backward(self) -> Floats:
        kept = self.saved_per_token
        moments = [(kept, 0.0)]
        for times, operation in self.walked(backward=True):
            tokens, weight = kept + operation.backward, operation.weight_bytes
            moments.append((tokens, weight))
            if operation.inner:
                inner = Tape.of(operation.inner)
                both = np.concatenate([inner._forward, inner._backward], axis=1).T.tolist()
                moments += ((tokens + own, weight + once) for own, once in both)
            kept -= times * operation.saved
        return _highest(moments)


def in_runs(items: Sequence[Item]) -> Iterator[tuple[int, Sequence[Item]]]:
    """The items in order, as patterns and how often each comes in a row: what is shortest so."""
    at = 0
    while at < len(items):
        found = [(1, 1)]  # how often, and of how many items
        for size in range(1, min(MOST_IN_PATTERN, (len(items) - at) // 2) + 1):
            pattern, num = items[at : at + size], 1
            while items[at + num * size : at + (num + 1) * size] == pattern:
                num += 1
            found.append((num, size))
        num, size = max(found, key=lambda one: ((one[0] - 1) * one[1], -one[1]))
        yield num, items[at : at + size]
        at += num * size


def _most(moments: Floats, num_tokens: npt.ArrayLike) -> Floats:
    tokens = np.asarray(num_tokens, dtype=np.float64)
    per_token, once = (row.reshape(-1, *[1] * tokens.ndim) for row in moments)
    most: Floats = (per_token * tokens + once).max(axis=0)
    return most


def _highest(moments: Iterable[tuple[float, float]]) -> Floats:
    """Leaves out moments beside which another is as high in both."""
    left: list[tuple[float, float]] = []
    for own, once in sorted(moments, reverse=True):
        if not left or once > left[-1][1]:
            left.append((own, once))
    return np.array(left).T


def with_more(operation: Operation, *, saved: float = 0.0, backward: float = 0.0) -> Operation:
    """``operation`` with more bytes."""
    saved, backward = operation.saved + saved, operation.backward + backward
    return replace(operation, saved=saved, backward=backward)


def scaled(operations: Iterable[Operation], factor: float) -> tuple[Operation, ...]:
    """``operations`` on a share of the tokens."""
    return tuple(
        replace(
            o,
            saved=o.saved * factor,
            forward=o.forward * factor,
            backward=o.backward * factor,
            inner=scaled(o.inner, factor),
            cached=o.cached * factor,
            joined=o.joined * factor,
            apart=o.apart * factor,
            state=o.state * factor,
            stays=o.stays * factor,
        )
        for o in operations
    )
