"""Samples that begin alike: what they share, and the rows of the trees that they are.

A step of reinforcement learning has several answers to a prompt, or rollouts that branch off each
other. Each such sample is a branch (:attr:`.Sharing.above`): it runs its own tokens, and attends to
those that it shares, in its micro-batch or in earlier ones of a tree. WLB-LLM, Hydraulis and
SlimPack have nothing of the kind; several trainers have it within one micro-batch, by a mask.

A branch begins before the first token that differs. The last token that is alike predicts another
one in each sample, so it runs in each: a row predicts only what all that share it have next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.errors import ConfigError, WLBError
from megatron_wlb.plan import (
    Document,
    HandedState,
    RowRun,
    SharedUse,
    Sharing,
    Span,
    TreePart,
)
from megatron_wlb.reading import shown

LEAST_SHARED = 64
"""Tokens that are worth a branch of their own: fewer take less time than what attention does
besides (a kernel call a layer)."""
ASKED = (
    "give each sample a tuple (earlier sample, equal leading tokens) or None, or the token ids of "
    "all samples"
)
BLOCK = 4096
"""Tokens that are compared at once."""
Branch: TypeAlias = tuple[int, int] | None
"""An earlier sample, and how many leading tokens are the same; None: none is."""
Tokens: TypeAlias = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class SharedPrefixes:
    """Which samples of a step begin alike."""

    order: Sequence[int]
    """All samples, each behind the one that it shares most with, and before those that share less
    with that one: depth first."""
    common: Sequence[int]
    """``[samples]``: leading tokens that each, in this order, shares with the one before it."""

    @classmethod
    def found(cls, samples: Sequence[Tokens], least: int = LEAST_SHARED) -> SharedPrefixes:
        """Compares token ids, ``[length]`` of each sample; branches ``least`` tokens apart.

        O(all tokens) where samples fall in groups.
        """
        order, common = [], []
        waiting = [(own, 0) for own in _alike(samples, range(len(samples)), 0, least)]
        while waiting:
            members, shared = waiting.pop()
            pivot = max(members, key=lambda n: (len(samples[n]), -n))
            order.append(pivot)
            common.append(shared)
            equal = [
                (_num_equal(samples[pivot], samples[n], shared), n) for n in members if n != pivot
            ]
            groups: dict[int, list[int]] = {}
            anchor = shared
            for number, n in sorted(equal):
                anchor = number if number - anchor >= least else anchor
                groups.setdefault(anchor, []).append(n)
            # The last is taken first: those that share most.
            for start, group in sorted(groups.items()):
                waiting += [(own, start) for own in _alike(samples, group, start, least)]
        return cls(order, common)

    @classmethod
    def given(cls, branches: Sequence[Branch], lengths: Sequence[int]) -> SharedPrefixes:
        """Takes an earlier sample of each, and how many leading tokens both have.

        Raises :class:`ConfigError` for others than these.
        """
        if len(branches) != len(lengths):
            raise ConfigError(
                f"shared has {len(branches)} entries for {len(lengths)} samples; {ASKED}"
            )
        parents: list[tuple[int, int]] = []
        longer: dict[int, int] = {}  # samples that another one begins with, and that one
        for number, branch in enumerate(branches):
            if branch is None:
                parents.append((-1, 0))
                continue
            parent, size = _checked(number, branch, lengths)
            while parent in longer:
                parent = longer[parent]
            if size == lengths[parent]:  # the longer one comes first: it has all rows of a history
                parents.append(parents[parent])
                parents[parent], longer[parent] = (number, size), number
            else:
                parents.append((parent, size))
        children: list[list[tuple[int, int]]] = [[] for _ in lengths]
        roots = []
        for number, (parent, size) in enumerate(parents):
            while parent in longer and longer[parent] != number:
                parent = longer[parent]
            while parent >= 0 and parents[parent][1] >= size:  # shared with that one's parent, too
                parent = parents[parent][0]
            if parent < 0:
                roots.append(number)
            else:
                children[parent].append((-size, number))
        order, common = [], []
        waiting = [(0, root) for root in reversed(roots)]
        while waiting:
            size, number = waiting.pop()
            order.append(number)
            common.append(-size)
            waiting += sorted(children[number], reverse=True)
        return cls(order, common)

    @classmethod
    def of(
        cls, shared: Sequence[Branch] | Sequence[npt.ArrayLike], lengths: Sequence[int]
    ) -> SharedPrefixes:
        """Takes branches, tuples or None, as :meth:`given` does; or token ids of all samples, of
        which it finds what is equal.

        Raises :class:`ConfigError` as there, and for ids of other numbers than ``lengths``.
        """
        try:
            every: list[Any] = [*shared]
        except TypeError:
            raise ConfigError(f"shared is {shown(shared)}; {ASKED}") from None
        if all(branch is None or isinstance(branch, tuple) for branch in every):
            return cls.given(every, lengths)
        try:
            samples = [np.asarray(ids) for ids in every]
        except ValueError:
            samples = []
        if [ids.shape for ids in samples] != [(length,) for length in lengths]:
            raise ConfigError(
                f"shared has {len(every)} entries for {len(lengths)} samples, not all of which are "
                f"tuples or None, nor as long as the samples; {ASKED}"
            )
        if len({ids.dtype for ids in samples}) > 1:  # beginnings are compared byte by byte
            samples = [ids.astype(np.int64) for ids in samples]
        return cls.found(samples)

    @cached_property
    def _arrays(self) -> tuple[npt.NDArray[np.int64], ...]:
        """:attr:`order` and :attr:`common`, and where each sample stands in these."""
        order, common = np.array(self.order, dtype=np.int64), np.array(self.common, dtype=np.int64)
        return order, common, np.argsort(order)

    def neighbours(self, samples: Sequence[int]) -> tuple[list[int], list[int]]:
        """Puts samples in order; says how many leading tokens each shares with the one before."""
        order, common, places = self._arrays
        at = np.sort(places[list(samples)])
        between = np.minimum.reduceat(common[1 : at[-1] + 1], at[:-1]) if len(at) > 1 else at[1:]
        return order[at].tolist(), [0, *map(int, between)]

    def paths(self, samples: Sequence[int], lengths: Sequence[int], ahead: int) -> list[Path]:
        """Lays samples out, whose own rows lie one behind another.

        ``ahead`` layers predict so many tokens further: a branch begins so many tokens earlier.
        """
        made: list[Path] = []
        open_paths: list[Path] = []  # which the next one may branch off
        first = 0
        for number, common in zip(*self.neighbours(samples), strict=True):
            shared = branch_at(common, ahead)
            while open_paths and open_paths[-1].document.offset >= shared:
                open_paths.pop()
            own = lengths[number] - shared
            document = Document(0, number, shared, own, True, 0, number, 0)
            above = open_paths[-1].up_to(shared) if open_paths else ()
            made.append(Path(document, first, above))
            open_paths.append(made[-1])
            first += own
        return made


class Path(NamedTuple):
    """A sample in a tree, or in a micro-batch that shares."""

    document: Document
    """Its own tokens, from ``offset`` on."""
    first: int
    """The row of the first of these."""
    above: tuple[RowRun, ...]
    """The rows of the tokens before."""

    def up_to(self, token: int) -> tuple[RowRun, ...]:
        """The rows of its tokens before ``token``, one of its own."""
        own = RowRun(self.first, self.first + token - self.document.offset)
        if own.start == own.stop:
            return self.above
        if self.above and self.above[-1].stop == own.start:
            return *self.above[:-1], RowRun(self.above[-1].start, own.stop)
        return *self.above, own


def part_of(paths: Sequence[Path], start: int, stop: int) -> tuple[list[Span], Sharing]:
    """What runs rows ``[start, stop)``: its spans, what each has above it, and who uses what."""
    spans, above, uses = [], [], []
    for path in paths:
        document = path.document
        begin, end = max(start, path.first), min(stop, path.first + document.length)
        if begin < end:
            spans.append(Span(document, begin - path.first, end - path.first))
            above.append(path.up_to(document.offset + begin - path.first))
        place = 0
        for rows in path.above:
            low, high = max(start, rows.start), min(stop, rows.stop)
            if low < high:
                shared = RowRun(low - start, high - start)
                uses.append(SharedUse(document, shared, place + low - rows.start))
            place += rows.stop - rows.start
    return spans, Sharing(tuple(above), tuple(uses))


def tree_part(paths: Sequence[Path], start: int, stop: int) -> TreePart:
    """What rows ``[start, stop)`` are of the tree of all paths."""
    first, last = paths[0].document, paths[-1]
    taken = [path.above[-1].stop for path in paths if path.above and path.first >= stop]
    taken += [stop for path in paths if path.first < stop < path.first + path.document.length]
    takers = Counter(row for row in taken if start < row <= stop)
    left = tuple(HandedState(*state) for state in sorted(takers.items()))
    return TreePart(first.number, start, last.first + last.document.length, left)


def refuse_sharing(
    reasons: Mapping[str, object], remedy: str, error: type[WLBError], where: str = ""
) -> None:
    """Raises ``error`` for the first name whose value is true: the reason, or True."""
    for name, reason in reasons.items():
        if reason:
            why = f": {reason}" if isinstance(reason, str) else ""
            raise error(f"samples cannot share prefixes{where} with {name}{why}; {remedy}")


def branch_at(common: int, ahead: int = 0) -> int:
    """Where a sample branches off one that shares so many tokens: before what predicts unlike
    tokens, at whichever depth.
    """
    return max(0, common - 1 - ahead)


def _checked(number: int, branch: Any, lengths: Sequence[int]) -> tuple[int, int]:
    fine = isinstance(branch, Sequence) and len(branch) == 2
    if fine and all(isinstance(value, int | np.integer) for value in branch):
        parent, size = map(int, branch)
        if 0 <= parent < number and 1 <= size <= min(lengths[parent], lengths[number]):
            return parent, size
    raise ConfigError(
        f"shared has {shown(branch)} for sample {number}; give None, or an earlier sample and "
        "how many leading tokens both have"
    )


def _alike(
    samples: Sequence[Tokens], members: Sequence[int], start: int, least: int
) -> list[list[int]]:
    """Samples whose ``least`` tokens from ``start`` on are equal, together; shorter ones alone."""
    buckets: dict[Any, list[int]] = {}
    for n in members:
        beginning = samples[n][start : start + least]
        key = beginning.tobytes() if len(beginning) == least else n
        buckets.setdefault(key, []).append(n)
    return list(buckets.values())


def _num_equal(a: Tokens, b: Tokens, known: int) -> int:
    """Leading tokens that are equal; the first ``known`` are."""
    most = min(len(a), len(b))
    for start in range(known, most, BLOCK):
        unlike = a[start : min(start + BLOCK, most)] != b[start : min(start + BLOCK, most)]
        if unlike.any():
            return start + int(unlike.argmax())
    return most
