"""What adapters of other trainers share: plans whose micro-batches all have a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_wlb.api import plan_batch
from megatron_wlb.cost import Cost, DocumentCost, Parallelism
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.greedy import Bins, small_at_ends

Parts = list[list[int]]
"""Numbers of samples, a list for each rank or micro-batch."""
Numbers = npt.NDArray[np.int64]

FLOPS_A_US = 4e8
"""What a device does in a µs; only ratios of times matter."""
TOKENS = 1024
MOST_SWAPS = 64
"""The most swaps of a part, in the mean."""


def cost_of_flops(short_flops: float, long_flops: float) -> DocumentCost:
    """``linear · n + quadratic · n²`` from the forward FLOPs of samples of ``TOKENS`` and of twice
    as many. A backward takes twice the time.
    """
    short, long = short_flops / FLOPS_A_US, long_flops / FLOPS_A_US
    quadratic = max(0.0, long - 2 * short) / (2 * TOKENS**2)
    linear = short / TOKENS - quadratic * TOKENS
    return DocumentCost(linear, quadratic, 2 * linear, 2 * quadratic)


def filled_ranks(
    lengths: Sequence[int],
    max_tokens: int,
    layout: Parallelism,
    cost: DocumentCost,
    *,
    most_samples: int | None = None,
) -> list[Parts]:
    """The micro-batches of each rank, ``[dp_size][micro-batches]`` of samples: whole samples, as
    many micro-batches on each rank, none empty.

    A sample above ``max_tokens`` fills a micro-batch, so that it is alone there. With
    ``most_samples`` no micro-batch has more of them. They are those of :func:`plan_batch` if these
    are so; else its number is kept as far as samples are enough.

    Raises :class:`ConfigError` where samples are fewer than the micro-batches that they need.
    """
    clipped = [min(length, max_tokens) for length in lengths]
    plan = plan_batch(clipped, max_tokens=max_tokens, layout=layout, cost=cost)
    ranks = [[list(m.samples) for m in rank] for rank in plan.micro_batches]
    limit = most_samples or len(lengths)
    if all(0 < len(part) <= limit for rank in ranks for part in rank):
        return ranks
    sizes = np.array(clipped, dtype=np.int64)
    times = times_of(cost, sizes, max_tokens)
    parts = fewest_parts(times, sizes, max_tokens, limit)
    group = micro_batch_group(layout)
    unit = layout.dp_size * group
    least, most = -(-len(parts) // unit) * unit, len(lengths) // unit * unit
    if least > most:
        held = "" if most_samples is None else f" and {most_samples} samples"
        raise ConfigError(
            f"{len(lengths)} samples are too few for {least} micro-batches of at most {max_tokens} "
            f"tokens{held} with a sample each: {layout.dp_size} data-parallel ranks have a "
            f"multiple of {group} each; give a step a multiple of {unit} samples"
        )
    number = min(max(least, len(ranks[0]) * layout.dp_size), most)
    each = number // layout.dp_size
    if layout.pp_size == 1:
        found = _by_rank(times, sizes, max_tokens, layout.dp_size, each, limit)
        if found is not None:
            return found
    parts = as_many_parts(times, sizes, max_tokens, parts, number, limit)
    part_times = np.array([int(times[part].sum()) for part in parts], dtype=np.int64)
    dealt = partitions(part_times, layout.dp_size, each)
    return [small_ends(times, [parts[at] for at in own]) for own in dealt]


def micro_batch_group(layout: Parallelism) -> int:
    """What the number of a rank's micro-batches is a multiple of."""
    return (layout.group_size or layout.pp_size) if layout.vpp_size > 1 else 1


def _by_rank(
    times: Numbers, sizes: Numbers, max_tokens: int, dp_size: int, each: int, limit: int
) -> list[Parts] | None:
    """Samples dealt to ranks before micro-batches: without a pipeline a rank's sum alone counts.
    None where one has no room for ``each`` micro-batches, or fewer samples.
    """
    dealt = _placed(times, sizes, each * max_tokens, dp_size, each * limit)
    if dealt is None or min(map(len, dealt)) < each:
        return None
    _swap(times, sizes, each * max_tokens, dealt, moves=False)
    ranks = []
    for own in map(np.array, dealt):
        given = times[own], sizes[own], max_tokens
        fewest = fewest_parts(*given, limit)
        if len(fewest) > each:
            return None
        ranks.append([own[part].tolist() for part in as_many_parts(*given, fewest, each, limit)])
    return ranks


def shared_ranks(
    tokens: Sequence[npt.NDArray[np.integer[Any]]],
    max_tokens: int,
    layout: Parallelism,
    cost: Cost | str,
) -> list[Parts]:
    """The same as :func:`filled_ranks` where samples share what they begin alike with: only what
    runs counts of ``max_tokens``.
    """
    clipped = [ids[:max_tokens] for ids in tokens]
    lengths = list(map(len, clipped))
    plan = plan_batch(lengths, max_tokens=max_tokens, layout=layout, cost=cost, shared=clipped)
    ranks = [[list(m.samples) for m in rank if m.samples] for rank in plan.micro_batches]
    group = micro_batch_group(layout)
    number = -(-max(map(len, ranks)) // group) * group
    if len(tokens) < number * layout.dp_size:
        raise ConfigError(
            f"{len(tokens)} samples are too few for {number} micro-batches with a sample each on "
            f"each of {layout.dp_size} data-parallel ranks; give a step more samples"
        )
    num_samples = [sum(map(len, rank)) for rank in ranks]
    while min(num_samples) < number:  # a prompt is on one rank, as long as there are enough
        poor, rich = (num_samples.index(of(num_samples)) for of in (min, max))
        part = max(ranks[rich], key=len)
        few = number - num_samples[poor], num_samples[rich] - number, max(1, len(part) // 2)
        moved, part[:] = part[: min(few)], part[min(few) :]
        ranks[rich] = [own for own in ranks[rich] if own]
        ranks[poor].append(moved)
        num_samples[poor] += len(moved)
        num_samples[rich] -= len(moved)
    alike = np.ones(len(tokens), dtype=np.int64)
    return [halved(alike, rank, number, in_order=True) for rank in ranks]


def times_of(cost: DocumentCost, sizes: Numbers, max_tokens: int) -> Numbers:
    """What samples take, as whole numbers from 1 on."""
    scale = 1e6 / cost.document_us(max(1, max_tokens))
    return np.array([1 + round(scale * cost.document_us(int(n))) for n in sizes], dtype=np.int64)


def partitions(times: Numbers, number: int, size: int | None = None) -> Parts:
    """So many parts of like time, of ``size`` samples each if given; ``times`` are above 0."""
    none = np.zeros_like(times)
    parts = _placed(times, none, 0, number, size or len(times))
    assert parts is not None  # There is no cap.
    _swap(times, none, 0, parts, moves=size is None)
    return parts


def as_many_parts(
    times: Numbers, sizes: Numbers, max_tokens: int, parts: Parts, number: int, limit: int
) -> Parts:
    """``number`` parts of like time, where the fewest are ``parts``; samples ascend in each."""
    if number > len(parts):
        found = _placed(times, sizes, max_tokens, number, limit)
        parts = found or halved(times, parts, number)
    _swap(times, sizes, max_tokens, parts, moves=limit >= len(times))
    return sorted(sorted(part) for part in parts)


def small_ends(times: Numbers, parts: Parts) -> Parts:
    """The smallest first and last, so that a pipeline fills and drains soon."""
    return small_at_ends(sorted(parts, key=lambda part: (int(times[part].sum()), part)))


def fewest_parts(times: Numbers, sizes: Numbers, max_tokens: int, limit: int) -> Parts:
    """As few parts as a search finds to hold all samples, at most ``limit`` in each: balanced by
    time where that has room, else by tokens, else by best fit, the longest first.
    """
    least = max(1, -(-int(sizes.sum()) // max_tokens), -(-len(sizes) // limit))
    full: Parts = []
    rooms: list[int] = []
    for sample in np.argsort(-sizes, kind="stable").tolist():
        own = int(sizes[sample])
        fitting = [(room, at) for at, room in enumerate(rooms) if room >= own]
        if fitting:
            _, at = min(fitting)
            full[at].append(sample)
            rooms[at] = rooms[at] - own if len(full[at]) < limit else -1
        else:
            full.append([sample])
            rooms.append(max_tokens - own if limit > 1 else -1)
    for number in range(least, len(full)):
        found = _placed(times, sizes, max_tokens, number, limit)
        if found is not None:
            return found
        found = _placed(sizes, sizes, int(sizes.sum()), number, limit)
        assert found is not None  # There is room for all in each.
        _swap(sizes, sizes, 0, found, moves=limit >= len(sizes))
        if max(int(sizes[part].sum()) for part in found) <= max_tokens and all(found):
            return found
    return _placed(times, sizes, max_tokens, len(full), limit) or full


def _placed(
    times: Numbers, sizes: Numbers, max_tokens: int, number: int, limit: int
) -> Parts | None:
    """The heaviest first, each where least is of the parts with room; None where none has."""
    parts: Parts = [[] for _ in range(number)]
    bins = Bins(((0, at) for at in range(number)), max_tokens, limit)
    for sample in np.argsort(-times, kind="stable").tolist():
        at = bins.place(int(times[sample]), int(sizes[sample]))
        if at is None:
            return None
        parts[at].append(sample)
    return parts


def halved(times: Numbers, parts: Parts, number: int, *, in_order: bool = False) -> Parts:
    """Halves the heaviest parts of several samples until there are ``number``: by time, or
    ``in_order``, so that samples lie together still.
    """
    parts = [[*part] for part in parts]
    while len(parts) < number:
        several = [at for at, part in enumerate(parts) if len(part) > 1]
        at = max(several, key=lambda at: (int(times[parts[at]].sum()), -at))
        part = parts.pop(at)
        if in_order:
            parts[at:at] = [part[: len(part) // 2], part[len(part) // 2 :]]
            continue
        part.sort(key=lambda sample: (-int(times[sample]), sample))
        half: Parts = [[], []]
        for sample in part:
            half[int(times[half[1]].sum() < times[half[0]].sum())].append(sample)
        parts += half
    return parts


def _swap(
    times: Numbers, sizes: Numbers, max_tokens: int, parts: Parts, moves: bool = True
) -> None:
    """Swaps samples of the heaviest part with those of others, for as long as that helps.

    Where one sample can ``move`` without another in return, that is tried, too.
    """
    loads = [int(times[part].sum()) for part in parts]
    tokens = [int(sizes[part].sum()) for part in parts]
    for _ in range(MOST_SWAPS * len(parts)):
        heavy = max(range(len(parts)), key=lambda at: (loads[at], -at))
        for other in sorted(range(len(parts)), key=lambda at: (loads[at], at)):
            gap = loads[heavy] - loads[other]
            if gap <= 1:
                return
            may_move = moves and len(parts[heavy]) > 1
            a, b = np.array(parts[heavy]), np.array(parts[other])
            given_us, given = times[a], sizes[a]
            taken_us, taken = times[b], sizes[b]
            if may_move:
                taken_us, taken = np.append(taken_us, 0), np.append(taken, 0)
            less = given_us[:, None] - taken_us[None, :]
            more = given[:, None] - taken[None, :]
            helps = (less > 0) & (less < gap)
            if max_tokens:
                helps &= (more <= max_tokens - tokens[other]) & (more >= tokens[heavy] - max_tokens)
            if not helps.any():
                continue
            slower = np.where(helps, np.maximum(gap - less, less), gap)
            row, column = divmod(int(slower.argmin()), slower.shape[1])
            sample = parts[heavy].pop(row)
            if column < len(parts[other]):
                parts[heavy].append(parts[other].pop(column))
            parts[other].append(sample)
            loads[heavy] -= int(less[row, column])
            loads[other] += int(less[row, column])
            tokens[heavy] -= int(more[row, column])
            tokens[other] += int(more[row, column])
            break
        else:
            return
