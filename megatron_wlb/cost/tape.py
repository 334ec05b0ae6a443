"""The tape of a model chunk: its operations in forward order, and the bytes that each keeps.

Forward writes it: each operation adds what its backward needs. Backward reads it from the end: each
needs some working memory, then lets go of what it kept. Full recompute is an operation that keeps
its input and, in backward, writes and reads an inner tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.schedule.graph import Floats

MOST_IN_PATTERN = 8
"""Groups of layers in a pattern that comes several times."""

Item = TypeVar("Item")


class Runs(Enum):
    """What of its documents a micro-batch runs."""

    WHOLE = "whole documents"
    SLICE = "a slice and nothing else"
    BOTH = "a slice beside whole documents"
    AGAIN = "a slice's layers, once more"


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

    def kept(self, runs: Runs) -> float:
        """Bytes a token from its forward to its backward."""
        if runs is Runs.WHOLE:
            return self.saved
        besides = -self.cached if runs is Runs.SLICE else self.joined
        return self.saved + self.apart + (0.0 if runs is Runs.AGAIN else besides)


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

    def peak_bytes(self, num_tokens: npt.ArrayLike, *, backward: bool) -> Floats:
        """The most that micro-batches of whole documents add while they run forward, or have while
        they run backward, what they keep included.
        """
        tokens = np.asarray(num_tokens, dtype=np.float64)
        per_token, once = (row.reshape(-1, *[1] * tokens.ndim) for row in self._whole[backward])
        most: Floats = (per_token * tokens + once).max(axis=0)
        return most

    @cached_property
    def _whole(self) -> tuple[Floats, Floats]:
        """Bytes a token, and bytes once, of whole documents: forward and backward."""
        forward, backward = (self.moments(again, Runs.WHOLE)[:2] for again in (False, True))
        return highest(forward), highest(backward)

    def moments(self, backward: bool, runs: Runs, in_fp32: bool = False) -> Floats:
        """What is alive in each moment of a pass, ``[12, moments]``, by what it grows with.

        Tokens; once; then the buffers of layers that have not run, that run now and that have run:
        of keys, and of their gradients; keys of the slices before. Then, where ranks divide the
        buffers, these keys, those of the slice besides, and this rank's share of the former.
        ``in_fp32`` says whether these ranks sum gradients of keys and values in fp32.
        """
        left = [self.total(attrgetter("keys")), self.total(attrgetter("gradients"))]
        own, done = [0.0, 0.0], [0.0, 0.0]
        kept = self.total(lambda o: o.kept(runs)) if backward else 0.0
        given = 0.0  # to attention, which does not keep it
        once_more = runs if runs is Runs.WHOLE else Runs.AGAIN
        moments: list[list[float]] = []

        def note(tokens: float, once: float, *rows: float) -> None:
            (keys, gradients), (own_keys, own_gradients) = left, own
            of_keys = keys - own_keys, own_keys, done[0]
            of_gradients = gradients - own_gradients, own_gradients, done[1]
            none = (0.0,) * (4 - len(rows))
            moments.append([tokens, once, *of_keys, *of_gradients, *rows, *none])

        note(kept, 0.0)
        for times, operation in self.walked(backward=backward):
            own = [times * operation.keys, times * operation.gradients]
            saved, inner = operation.kept(runs), operation.inner
            if times > 1:
                kept += -times * saved if backward else times * saved
            elif backward:
                tokens, once = kept + operation.backward, float(operation.weight_bytes)
                # Divided rows as they come and in their order, then with their gradients, then
                # these as they go; those of the next layer come meanwhile.
                keys, sums = (0.0, 0.0) if inner else own
                note(tokens, once, operation.prefix, 0.0, 2 * keys + sums)
                if keys or sums:
                    note(kept, once, 0.0, 0.0, 3 * keys)
                    sent = sums if in_fp32 else keys
                    note(tokens, once, 0.0, sent, keys + sums, sent)
                for more, weight, *rest in _inside(inner, once_more, in_fp32) if inner else ():
                    note(tokens + more, once + weight, *rest[6:])
                kept -= saved
            else:
                working = operation.forward
                if inner:  # forward without keeping anything: its largest operation
                    working = max(o.forward + o.kept(once_more) for o in inner)
                kept += saved
                given += operation.kept(once_more) - saved
                keys = max((o.keys for o in inner), default=operation.keys)
                note(kept + given + working, 0.0, 0.0, 2 * keys, keys)
                if operation.keys:
                    given = 0.0
            left = [a - b for a, b in zip(left, own, strict=True)]
            done = [a + b for a, b in zip(done, own, strict=True)]
        return np.array(moments, dtype=np.float64).T


@lru_cache(maxsize=1024)
def _inside(inner: tuple[Operation, ...], runs: Runs, in_fp32: bool) -> list[list[float]]:
    """The highest moments of operations that run again, as :meth:`Tape.moments` has them."""
    both = [Tape.of(inner).moments(backward, runs, in_fp32) for backward in (False, True)]
    found: list[list[float]] = highest(np.concatenate(both, axis=1)).T.tolist()
    return found


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


def highest(moments: Floats) -> Floats:
    """Leaves out moments beside which another is as high in everything: no peak changes."""
    left = moments[:, np.argsort(-moments.sum(axis=0), kind="stable")]
    found = []
    while left.shape[1]:  # none of those behind is above the first in everything
        found.append(left[:, 0])
        left = left[:, (left > left[:, :1]).any(axis=0)]
    return np.stack(found, axis=1)


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
