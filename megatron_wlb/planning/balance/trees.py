"""Samples that begin alike: what they share is found, and runs once in each micro-batch.

A step of reinforcement learning has several answers to a prompt, or rollouts that branch off each
other. In a micro-batch each such sample is a branch (:attr:`.Sharing.above`): it runs its
own tokens, and attends to those that it shares. WLB-LLM, Hydraulis and SlimPack have nothing of the
kind; several trainers have it within one micro-batch, by a mask.

A branch begins before the first token that differs. The last token that is alike predicts another
one in each sample, so it runs in each: a row predicts only what all that share it have next.

Samples go to micro-batches in *runs* of neighbours in the depth-first order of all. Neighbours
share most, and what a sample shares with the one before it in a run is all that it can share there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.schedule.graph import graph_of
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document, Rows, SharedUse, Sharing, Span, Units
from megatron_wlb.planning.balance.assign import running_order
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts
from megatron_wlb.planning.greedy import Bins
from megatron_wlb.planning.packing.placement import place
from megatron_wlb.reading import shown

LEAST_SHARED = 64
"""Tokens that are worth a branch of their own: fewer take less time than what attention does
besides (a kernel call a layer)."""
BLOCK = 4096
"""Tokens that are compared at once."""
CUTS = (4.0, 2.0, 1.0, 0.5)
"""The most work of a run, in shares of a micro-batch's where nothing runs twice, that are tried."""
STEP, MOST_TIMES, FINE = 1.35, 8, 32
"""Between numbers of micro-batches that are looked at; up to how often the fewest, and the
pipeline's stages; and the part by which a number grows that has no room."""
SIMULATED_NUMBERS, SIMULATED = 3, 2
"""Numbers of micro-batches that are simulated, and ways of each."""

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
                f"shared has {len(branches)} entries for {len(lengths)} samples; give each sample "
                "one, None or an earlier sample and how many leading tokens both have"
            )
        parents: list[tuple[int, int]] = []
        children: list[list[tuple[int, int]]] = [[] for _ in lengths]
        roots = []
        for number, branch in enumerate(branches):
            if branch is None:
                parents.append((-1, 0))
                roots.append(number)
                continue
            parent, size = _checked(number, branch, lengths)
            while parents[parent][1] >= size:  # which it shares with that one's parent, too
                parent = parents[parent][0]
            parents.append((parent, size))
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
        if all(branch is None or isinstance(branch, tuple) for branch in shared):
            return cls.given(shared, lengths)  # type: ignore[arg-type]
        samples = [np.asarray(ids) for ids in shared]
        if [ids.shape for ids in samples] != [(length,) for length in lengths]:
            raise ConfigError(
                f"shared has {len(samples)} lists for {len(lengths)} samples, or of other lengths; "
                "give the token ids of each sample, or (earlier sample, tokens) or None"
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
        """These samples in order, and what each shares with the one before: leading tokens."""
        order, common, places = self._arrays
        at = np.sort(places[list(samples)])
        between = np.minimum.reduceat(common[1 : at[-1] + 1], at[:-1]) if len(at) > 1 else at[1:]
        return order[at].tolist(), [0, *map(int, between)]

    def paths(self, samples: Sequence[int], lengths: Sequence[int], ahead: int) -> list[Path]:
        """These samples, whose own rows lie one behind another.

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
    above: tuple[Rows, ...]
    """The rows of the tokens before."""

    def up_to(self, token: int) -> tuple[Rows, ...]:
        """The rows of its tokens before ``token``, one of its own."""
        own = Rows(self.first, self.first + token - self.document.offset)
        if own.start == own.stop:
            return self.above
        if self.above and self.above[-1].stop == own.start:
            return *self.above[:-1], Rows(self.above[-1].start, own.stop)
        return *self.above, own


def part_of(
    paths: Sequence[Path], start: int, stop: int
) -> tuple[list[Span], tuple[tuple[Rows, ...], ...], tuple[SharedUse, ...]]:
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
                shared = Rows(low - start, high - start)
                uses.append(SharedUse(document, shared, place + low - rows.start))
            place += rows.stop - rows.start
    return spans, tuple(above), tuple(uses)


@dataclass(frozen=True)
class Stretch:
    """Neighbours of one tree that run in one micro-batch."""

    samples: Sequence[int]
    us: float
    num_tokens: int


def plan_shared(
    lengths: Sequence[int],
    shared: SharedPrefixes,
    replica: ReplicaCosts,
    dp_size: int,
    *,
    number: int | None = None,
    ahead: int = 0,
) -> SharedPlan | None:
    """The fastest plan of samples that share prefixes inside micro-batches, in simulation.

    Trees are cut in runs of at most a share of a micro-batch's work (:data:`CUTS`), which go to
    the micro-batches of all ranks by LPT, and these to the ranks. ``number`` is that of each rank's
    micro-batches, tried alone if given. None where nothing tried has room for all.
    """
    sizes = np.array(lengths, dtype=np.int64)[np.array(shared.order)]
    before = np.array([branch_at(common, ahead) for common in shared.common])
    whole_us = replica.rank_us(sizes.tolist(), least=True).max(axis=0)
    own_us = whole_us - replica.rank_us(before.tolist(), least=True).max(axis=0) * (before > 0)
    rows = shared.order, before.tolist(), sizes.tolist(), own_us.tolist(), whole_us.tolist()
    samples = list(zip(*rows, strict=True))
    total_us, num_tokens = float(own_us.sum()) / dp_size, int((sizes - before).sum()) // dp_size
    dealt: list[tuple[float, int, list[list[list[int]]]]] = []
    known: dict[tuple[int, float], int] = {}  # the number that was tried last of the same runs
    for each in [number] if number else _numbers(num_tokens, len(lengths), replica):
        for share in CUTS:
            runs = list(_stretches(samples, share * total_us / each, replica.max_tokens))
            runs.sort(key=lambda run: -run.us)
            name = len(runs), sum(run.us for run in runs)
            if each <= known.get(name, 0):
                continue
            found, needed = _dealt(runs, each, dp_size, replica), each
            while found is None and number is None:
                more = max(1, needed // FINE // replica.number_multiple)
                needed += more * replica.number_multiple
                found = _dealt(runs, needed, dp_size, replica)
            known[name] = needed
            if found is not None:
                dealt.append((found[0], needed, found[1]))
    best: tuple[float, list[list[list[int]]]] | None = None
    numbers: Counter[int] = Counter()
    for _, each, ranks in sorted(dealt, key=itemgetter(0, 1)):
        numbers[each] += 1
        if numbers[each] > SIMULATED or len(numbers) > SIMULATED_NUMBERS:
            continue
        us = max(_us(own, shared, lengths, ahead, replica) for own in ranks)
        if best is None or us < best[0]:
            best = us, ranks
    if best is None:
        return None
    return SharedPlan(best[0], [_units(own, shared, lengths, ahead) for own in best[1]])


def _numbers(num_tokens: int, num_samples: int, replica: ReplicaCosts) -> list[int]:
    """Numbers of micro-batches of a replica to look at, for so many tokens that run."""
    least = max(1, -(-num_tokens // replica.max_tokens))
    most = least * MOST_TIMES + replica.scheme.pp_size * MOST_TIMES
    most = max(least, min(most, num_samples, num_tokens // replica.least_tokens))
    unit, steps = replica.number_multiple, math.ceil(math.log(most / least, STEP)) + 1
    return sorted({-(-round(least * STEP**step) // unit) * unit for step in range(steps)})


class SharedPlan(NamedTuple):
    """What each rank runs, and the simulated time of the slowest."""

    us: float
    units: list[Units]


def _stretches(
    samples: Sequence[tuple[int, int, int, float, float]], most_us: float, max_tokens: int
) -> Iterator[Stretch]:
    """Neighbours as long as they share, are at most so much work, and fit ``max_tokens``.

    ``samples`` are in depth-first order: number, tokens shared with the one before, all tokens,
    what its own take, and what all take.
    """
    own: list[int] = []
    us, num_tokens = 0.0, 0
    for number, before, size, own_us, whole_us in samples:
        if own and before and us + own_us <= most_us and num_tokens + size - before <= max_tokens:
            own.append(number)
            us, num_tokens = us + own_us, num_tokens + size - before
            continue
        if own:
            yield Stretch(own, us, num_tokens)
        own, us, num_tokens = [number], whole_us, size
    yield Stretch(own, us, num_tokens)


def _dealt(
    runs: Sequence[Stretch], each: int, dp_size: int, replica: ReplicaCosts
) -> tuple[float, list[list[list[int]]]] | None:
    """``[dp_size][each]`` lists of samples in running order, and an estimate of their time; None
    where there is no room.
    """
    tokens = np.array([run.num_tokens for run in runs])
    if tokens.sum() > each * dp_size * replica.max_tokens:
        return None
    columns = np.array([run.us for run in runs]), tokens
    found = place(*columns, each * dp_size, replica.max_tokens)
    if len(found.left):
        return None
    bins: list[list[int]] = [[] for _ in range(each * dp_size)]
    for run, at in zip(runs, found.index_of.tolist(), strict=True):
        bins[at] += run.samples
    loads = Bins(((0.0, rank) for rank in range(dp_size)), places=each)
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for at in sorted(range(len(bins)), key=lambda at: (-found.loads_us[at], at)):
        rank = loads.place(found.loads_us[at])
        assert rank is not None  # There are as many places.
        ranks[rank].insert(0, bins[at])
    each_us = replica.micro_batch_us
    slowest_us = max(load_us for _, load_us, _ in loads) + each * each_us
    slowest_us += replica.warm_up * (max(found.loads_us) + each_us)
    return slowest_us, [running_order(own, replica) for own in ranks]


def _units(
    bins: Sequence[Sequence[int]], shared: SharedPrefixes, lengths: Sequence[int], ahead: int
) -> Units:
    spans, sharing = [], []
    for samples in bins:
        paths = shared.paths(samples, lengths, ahead) if samples else []
        own, above, uses = part_of(paths, 0, sum(path.document.length for path in paths))
        spans.append(own)
        sharing.append(Sharing(above, uses) if any(above) else Sharing())
    return Units(spans, sharing=sharing)


def _us(
    bins: Sequence[Sequence[int]],
    shared: SharedPrefixes,
    lengths: Sequence[int],
    ahead: int,
    replica: ReplicaCosts,
) -> float:
    """The simulated time of a rank's pipeline."""
    scheme, multiple = replica.scheme, replica.scheme.length_multiple
    segments, padded, branches = [], [], []
    for samples in bins:
        numbers, commons = shared.neighbours(samples) if samples else ([], [])
        pairs = [
            (before := branch_at(common, ahead), lengths[number] - before)
            for number, common in zip(numbers, commons, strict=True)
        ]
        num_tokens = sum(own for _, own in pairs)
        padded.append(max(1, -(-num_tokens // multiple)) * multiple)
        segments.append([*(own for _, own in pairs), padded[-1] - num_tokens])
        branches.append([pair for pair in pairs if pair[0]])
    times_us = replica.costs.stages.times_us(segments, branches=branches)
    graph = graph_of(scheme.pp_size, scheme.vpp_size, len(padded), replica.group_size)
    return float(graph.step_us(times_us, replica.costs.p2p_us(padded)))


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
