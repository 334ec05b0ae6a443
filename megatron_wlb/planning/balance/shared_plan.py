"""Plans of a step whose samples begin alike: shared inside micro-batches, or in trees over several.

Samples lie in the depth-first order of all. Neighbours share most, and what a sample shares with
the one before it is all that it can share there. So micro-batches run *stretches* of neighbours:

- **Inside a micro-batch** a stretch runs whole, with whatever else there is room for. Of a tree in
  several stretches each runs the prefix again. Megatron's own schedule runs the step.
- **In a tree over micro-batches** the rows of a stretch are cut into units of like work, anywhere,
  as a document is cut into slices: a chain. Nothing runs twice, but all rows of the chain are held
  until its last unit has run. So a chain has no more rows than a pipeline of full micro-batches.

Both are simulated for a few numbers of micro-batches.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise, zip_longest
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_wlb.cost.memory import MemoryModel
from megatron_wlb.cost.schedule.graph import Floats, graph_of
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Sharing, Span, Units
from megatron_wlb.planning.balance.assign import running_order
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts
from megatron_wlb.planning.balance.trees import (
    Path,
    SharedPrefixes,
    branch_at,
    part_of,
    refuse_sharing,
    tree_part,
)
from megatron_wlb.planning.greedy import Bins
from megatron_wlb.planning.packing.placement import place
from megatron_wlb.planning.slicing.pipeline import Pipeline
from megatron_wlb.settings.config import Config

CUTS = (4.0, 2.0, 1.0)
"""The most work of a run, in shares of a micro-batch's where nothing runs twice, that are tried."""
STEP, MOST_TIMES, FINE = 1.35, 8, 32
"""Between numbers of micro-batches that are looked at; up to how often the fewest, and the
pipeline's stages; and the part by which a number grows that has no room."""
SIMULATED_NUMBERS, SIMULATED = 3, 2
"""Numbers of micro-batches that are simulated, and ways of each."""

MOST_KEYS = 4
"""Keys of a micro-batch that context-parallel ranks copy, at most, in S_max: those of all paths."""
GRID = 257
"""Lengths whose times are known; others lie between."""


@dataclass(frozen=True)
class Stretch:
    """Neighbours of one tree that run in one micro-batch, or in one chain."""

    samples: Sequence[int]
    us: float
    num_tokens: int


@dataclass(frozen=True, eq=False)
class SharedStep:
    """Samples of a step, what they share, and what they take on a replica."""

    shared: SharedPrefixes
    lengths: Sequence[int]
    replica: ReplicaCosts
    model: MemoryModel | None
    """Whose layers may predict further ahead, or carry states; None: no layer does."""

    @property
    def ahead(self) -> int:
        """Layers that predict further ahead."""
        return 0 if self.model is None else self.model.shape.num_ahead

    @cached_property
    def rows_of_states(self) -> int:
        """Rows whose activations take as much memory as the states that a branch has: one of its
        own and one of what it branches off.
        """
        if self.model is None:
            return 0
        rows = [0.0]
        for chunks in self.model.tapes:
            states = sum(tape.total(lambda o: 0.0 if o.inner else o.state) for tape in chunks)
            rows.append(2 * states / sum(tape.saved_per_token for tape in chunks) if states else 0)
        return math.ceil(max(rows))

    @cached_property
    def samples(self) -> list[tuple[int, int, int, float, float]]:
        """In order: number, tokens shared with the one before, all tokens, what its own take, and
        what all take, in µs.
        """
        before = [branch_at(common, self.ahead) for common in self.shared.common]
        sizes = [self.lengths[number] for number in self.shared.order]
        whole_us, before_us = (self.us(np.array(each)) for each in (sizes, before))
        rows = self.shared.order, before, sizes, (whole_us - before_us).tolist(), whole_us.tolist()
        return list(zip(*rows, strict=True))

    @cached_property
    def total_us(self) -> float:
        """Where nothing runs twice."""
        return sum(own_us for *_, own_us, _ in self.samples)

    @cached_property
    def num_tokens(self) -> int:
        """How many run then."""
        return sum(size - before for _, before, size, *_ in self.samples)

    def us(self, tokens: Floats) -> Floats:
        """What documents take on the rank where that is most."""
        found: Floats = np.interp(tokens, *self._grid)
        return found

    def tokens(self, us: float) -> int:
        """The longest document that takes so long."""
        lengths, times_us = self._grid
        return int(np.interp(us, times_us, lengths))

    @cached_property
    def _grid(self) -> tuple[Floats, Floats]:
        lengths = np.unique(np.geomspace(1, max(self.lengths), GRID).astype(np.int64))
        times_us = self.replica.rank_us(lengths.tolist(), least=True).max(axis=0)
        return np.append(0, lengths), np.append(0.0, np.maximum.accumulate(times_us))

    def stretches(self, most_us: float, max_tokens: int) -> Iterator[Stretch]:
        """Neighbours as long as they share, are at most so much work, and fit ``max_tokens``."""
        own: list[int] = []
        us, num_tokens = 0.0, 0
        for number, before, size, own_us, whole_us in self.samples:
            more = max(size - before, self.share_of_keys(size)) + self.rows_of_states
            if own and before and us + own_us <= most_us and num_tokens + more <= max_tokens:
                own.append(number)
                us, num_tokens = us + own_us, num_tokens + more
                continue
            if own:
                yield Stretch(own, us, num_tokens)
            own, us, num_tokens = [number], whole_us, size
        yield Stretch(own, us, num_tokens)

    def share_of_keys(self, size: int) -> int:
        """What a sample counts of S_max for the keys of its whole path, where ranks have a copy of
        them: context-parallel ranks.
        """
        return -(-size // MOST_KEYS) if self.replica.scheme.cp_size > 1 else 0

    def inside(self, bins: Sequence[Sequence[int]]) -> Units:
        """What a rank runs whose micro-batches have these samples."""
        made = [self.rows(samples) for samples in bins]
        return Units([spans for spans, _ in made], sharing=[sharing for _, sharing in made])

    def rows(self, samples: Sequence[int]) -> tuple[list[Span], Sharing]:
        paths = self.shared.paths(samples, self.lengths, self.ahead) if samples else []
        return part_of(paths, 0, sum(path.document.length for path in paths))

    def inside_us(self, bins: Sequence[Sequence[int]]) -> float:
        """The simulated time of its pipeline."""
        scheme, multiple = self.replica.scheme, self.replica.scheme.length_multiple
        segments, padded, branches = [], [], []
        for samples in bins:
            numbers, commons = self.shared.neighbours(samples) if samples else ([], [])
            pairs = [
                (before := branch_at(common, self.ahead), self.lengths[number] - before)
                for number, common in zip(numbers, commons, strict=True)
            ]
            num_tokens = sum(own for _, own in pairs)
            padded.append(max(1, -(-num_tokens // multiple)) * multiple)
            segments.append([*(own for _, own in pairs), padded[-1] - num_tokens])
            branches.append([pair for pair in pairs if pair[0]])
        costs = self.replica.costs
        times_us = costs.stages.times_us(segments, branches=branches)
        sizes = scheme.pp_size, scheme.vpp_size, len(padded), self.replica.group_size
        return float(graph_of(*sizes).step_us(times_us, costs.p2p_us(padded)))

    def chain(self, stretch: Stretch, number: int) -> list[tuple[list[Span], Sharing]]:
        """A tree in so many units of like work, or more where they would not fit S_max."""
        paths = self.shared.paths(stretch.samples, self.lengths, self.ahead)
        places = [(path.document.offset, path.document.length) for path in paths]
        ends = np.array([(offset, offset + own) for offset, own in places])
        starts_us = self.us(ends[:, 0])
        before_us = [0.0, *accumulate((self.us(ends[:, 1]) - starts_us).tolist())]
        num_rows = paths[-1].first + paths[-1].document.length
        multiple, most = self.replica.scheme.length_multiple, self.replica.max_tokens
        edges = [0]
        for unit in range(1, number):
            goal_us = before_us[-1] * unit / number
            at = min(bisect_right(before_us, goal_us), len(paths)) - 1
            own = self.tokens(starts_us[at] + goal_us - before_us[at]) - places[at][0]
            row = paths[at].first + min(max(own, 0), places[at][1])
            edges.append(max(edges[-1], row // multiple * multiple))
        edges = sorted({*edges, num_rows})
        fitting = [edges[0]]
        for start, stop in pairwise(edges):
            parts = -(-(stop - start) // most)
            step = -(-(stop - start) // (parts * multiple)) * multiple
            for part in range(1, parts + 1):
                end = min(stop, start + step * part)
                while fitting[-1] < end:
                    fitting.append(self._fitting(paths, fitting[-1], end))
        units = []
        for start, stop in pairwise(fitting):
            spans, sharing = part_of(paths, start, stop)
            units.append((spans, sharing._replace(tree=tree_part(paths, start, stop))))
        return units

    def _fitting(self, paths: Sequence[Path], start: int, stop: int) -> int:
        """Up to where rows from ``start`` on fit a unit, by keys that ranks copy, and states."""
        most, multiple = self.replica.max_tokens, self.replica.scheme.length_multiple
        keys, states = 0, 0
        for path in paths:
            if path.first >= stop:
                break
            if (end := path.first + path.document.length) > start:
                keys += self.share_of_keys(path.document.offset + path.document.length)
                states += self.rows_of_states
                count = max(keys, min(end, stop) - start + states)
                if count > most and path.first >= start + multiple:
                    return path.first // multiple * multiple
        return stop


class SharedPlan(NamedTuple):
    """What each rank runs, and the simulated time of the slowest."""

    us: float
    units: list[Units]


def plan_inside(
    step: SharedStep, pipeline: Pipeline, dp_size: int, number: int | None = None
) -> SharedPlan | None:
    """The fastest plan of samples that share prefixes inside micro-batches, in simulation.

    Trees are cut in runs of at most a share of a micro-batch's work (:data:`CUTS`), which go to
    the micro-batches of all ranks by LPT, and these to the ranks. ``number`` is that of each rank's
    micro-batches, tried alone if given. None where nothing tried has room for all.
    """
    total_us, num_tokens = step.total_us / dp_size, step.num_tokens // dp_size
    replica = step.replica
    if max(step.lengths) > replica.max_tokens:
        return None
    dealt: list[tuple[float, int, list[list[list[int]]]]] = []
    known: dict[tuple[int, float], int] = {}  # the number that was tried last of the same runs
    for each in [number] if number else _numbers(num_tokens, len(step.lengths), replica):
        for share in CUTS:
            runs = list(step.stretches(share * total_us / each, replica.max_tokens))
            runs.sort(key=lambda run: -run.us)
            name = len(runs), sum(run.us for run in runs)
            if each <= known.get(name, 0):
                continue
            needed, unit = each, replica.number_multiple
            if number is None:  # none that is empty on all ranks
                needed = min(each, -(-len(runs) // dp_size // unit) * unit)
            found = _dealt(runs, needed, dp_size, replica)
            while found is None and number is None:
                needed += max(1, needed // FINE // unit) * unit
                found = _dealt(runs, needed, dp_size, replica)
            known[name] = needed if needed >= each else sys.maxsize
            if found is not None:
                dealt.append((found[0], needed, found[1]))
    best: tuple[float, list[list[list[int]]]] | None = None
    numbers: Counter[int] = Counter()
    for _, each, ranks in sorted(dealt, key=itemgetter(0, 1)):
        numbers[each] += 1
        if numbers[each] > SIMULATED or len(numbers) > SIMULATED_NUMBERS:
            continue
        us = max(step.inside_us(own) for own in ranks)
        if best is None or us < best[0]:
            best = us, ranks
    if best is None:
        return None
    us, units = best[0], [step.inside(own) for own in best[1]]
    if pipeline.costs.experts is not None:  # replicas wait for each other
        us = pipeline.slowest_us(units)
    return SharedPlan(us, units)


def plan_trees(
    step: SharedStep, pipeline: Pipeline, dp_size: int, number: int | None = None
) -> SharedPlan | None:
    """The fastest plan of trees over micro-batches, in simulation; None where none fits memory.

    Trees heavier than a unit are chains, and others lie in micro-batches by LPT, as above.
    ``number`` is about that of each rank's micro-batches.
    """
    replica, best = step.replica, None
    most = replica.scheme.pp_size * replica.max_tokens
    stretches = sorted(step.stretches(math.inf, most), key=lambda stretch: -stretch.us)
    total_us = sum(stretch.us for stretch in stretches) / dp_size
    num_tokens = sum(stretch.num_tokens for stretch in stretches) // dp_size
    numbers = [number] if number else _numbers(num_tokens, 1 << 30, replica)
    estimates = [
        (each * replica.micro_batch_us + replica.warm_up * total_us / each, each)
        for each in numbers
    ]
    for _, each in sorted(estimates)[:SIMULATED_NUMBERS]:
        loads = Bins((0.0, rank) for rank in range(dp_size))
        ranks: list[list[Stretch]] = [[] for _ in range(dp_size)]
        for stretch in stretches:
            rank = loads.place(stretch.us)
            assert rank is not None  # Each has room for all.
            ranks[rank].append(stretch)
        for small_first in (False, True):
            groups = (ranks[at : at + pipeline.alike] for at in range(0, dp_size, pipeline.alike))
            grouped = (_in_units(step, own, total_us / each, small_first) for own in groups)
            units = pipeline.with_room([*chain.from_iterable(grouped)])
            if pipeline.memory is not None:
                peaks = map(pipeline.memory.peak_bytes, units)
                if max(peaks) > pipeline.memory.limit_bytes:
                    continue
            us = pipeline.slowest_us(units)
            if best is None or us < best.us:
                best = SharedPlan(us, units)
    return best


Chain: TypeAlias = list[tuple[list[Span], Sharing]]
"""What units run, one behind another."""


def _in_units(
    step: SharedStep, ranks: Sequence[Sequence[Stretch]], unit_us: float, small_first: bool
) -> list[Units]:
    """The units of ranks that run alike, each about so much work: chains of trees, and
    micro-batches of small ones. The chains of all are as long; what has less runs nothing last.
    """

    def number(stretch: Stretch) -> int:
        parts = round(stretch.us / unit_us)
        return parts if parts > 1 else int(stretch.num_tokens > step.replica.max_tokens)

    trees = [[stretch for stretch in own if number(stretch)] for own in ranks]
    small = [[stretch for stretch in own if not number(stretch)] for own in ranks]
    rows: list[list[Chain]] = []
    for row in zip_longest(*trees):
        parts = max(number(stretch) for stretch in row if stretch)
        rows.append([step.chain(stretch, parts) if stretch else [] for stretch in row])
    bins = zip_longest(*(_small_bins(step, own, unit_us) for own in small))
    alone = [[[step.rows(samples or [])] for samples in row] for row in bins]
    every = [*alone, *rows] if small_first else [*rows, *alone]
    sizes = [max(map(len, row)) for row in every] or [1]
    made = []
    for chains in zip(*every, strict=True) if every else [[[]]] * len(ranks):
        padded = zip(chains, sizes, strict=True)
        own = [*chain.from_iterable(c + [([], Sharing())] * (size - len(c)) for c, size in padded)]
        spans, sharing = ([*column] for column in zip(*own, strict=True))
        made.append(Units(spans, replicas=[()] * len(own), chains=sizes, sharing=sharing))
    return made


def _small_bins(step: SharedStep, stretches: Sequence[Stretch], unit_us: float) -> list[list[int]]:
    """The samples of micro-batches of about so much work, in the order in which they run."""
    if not stretches:
        return []
    tokens = np.array([stretch.num_tokens for stretch in stretches])
    times_us = np.array([stretch.us for stretch in stretches])
    number = max(1, round(float(times_us.sum()) / unit_us))
    while len((found := place(times_us, tokens, number, step.replica.max_tokens)).left):
        number += 1
    bins: list[list[int]] = [[] for _ in range(number)]
    for stretch, at in zip(stretches, found.index_of.tolist(), strict=True):
        bins[at] += stretch.samples
    order = sorted(range(number), key=lambda at: (found.loads_us[at], at))
    return running_order([bins[at] for at in order if bins[at]], step.replica)


def _numbers(num_tokens: int, num_samples: int, replica: ReplicaCosts) -> list[int]:
    """Numbers of micro-batches of a replica to look at, for so many tokens that run."""
    least = max(1, -(-num_tokens // replica.max_tokens))
    most = least * MOST_TIMES + replica.scheme.pp_size * MOST_TIMES
    most = max(least, min(most, num_samples, num_tokens // replica.least_tokens))
    unit, steps = replica.number_multiple, math.ceil(math.log(most / least, STEP)) + 1
    return sorted({-(-round(least * STEP**step) // unit) * unit for step in range(steps)})


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


def check_shared(config: Config) -> None:
    """Raises :class:`ConfigError` for a model in which a row cannot stand for several samples."""
    m = config.model
    reasons = {
        "--attention-dropout": m.attention_dropout and "one draw would serve all of them",
        "--hidden-dropout": m.hidden_dropout and "one draw would serve all of them",
        "--moe-router-load-balancing-type seq_aux_loss": "seq_aux_loss"
        in m.moe_router_load_balancing_type
        and any(m.moe_aux_loss_coeff)
        and "it counts the tokens of each sample",
    }
    refuse_sharing(reasons, "leave shared out, or the flag", ConfigError)
