"""Plans one step of given samples, for trainers that read nothing ahead and delay nothing.

Fine-tuning and reinforcement learning have the samples of a step and must train all of them in it.
First samples go to data-parallel ranks, by the time that they take and the bubbles that the longest
makes (:mod:`megatron_wlb.planning.balance.dispatch`); then each rank's own go to micro-batches, as
many as are fastest in simulation (:mod:`megatron_wlb.planning.balance.assign`). Both are
Hydraulis's two stages (§6), here for replicas that are alike. Samples that begin alike may share
what they have in common (:mod:`megatron_wlb.planning.balance.trees`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TypeVar

import numpy.typing as npt

from megatron_wlb.cost import CostModel, Parallelism
from megatron_wlb.cost.memory import GIB, MemoryModel
from megatron_wlb.cost.step_costs import StepCosts
from megatron_wlb.data.arrays import array_of
from megatron_wlb.errors import ConfigError, PackingError
from megatron_wlb.plan import Document, SharedUse, Span, StepPlan, Units
from megatron_wlb.plan.sharding import length_multiple
from megatron_wlb.plan.target_runs import Runs
from megatron_wlb.planning.balance.assign import (
    bins_of,
    laid_out,
    numbers_to_try,
    pack,
    replica_us,
)
from megatron_wlb.planning.balance.dispatch import Numbers, StepDocuments, dispatch
from megatron_wlb.planning.balance.numbers import NumberChooser
from megatron_wlb.planning.balance.replica_costs import LEAST_TOKENS, ReplicaCosts, Scheme
from megatron_wlb.planning.balance.shared_plan import (
    SharedPlan,
    SharedStep,
    plan_inside,
    plan_trees,
)
from megatron_wlb.planning.balance.trees import SharedPrefixes
from megatron_wlb.planning.greedy import Bins
from megatron_wlb.planning.packing.slim import SlimPacker
from megatron_wlb.planning.planner import hosting_bytes
from megatron_wlb.planning.slicing.cut import Slicer, numbers_of_units
from megatron_wlb.planning.slicing.pipeline import Pipeline
from megatron_wlb.planning.slicing.room import MemoryLimit
from megatron_wlb.planning.slicing.units import SLICE_MULTIPLE, Cuts

T = TypeVar("T", Span, SharedUse)

IN_FLIGHT = 4
"""Micro-batches for each stage with which a pipeline holds as much as with any more."""


def plan_step(
    lengths: Sequence[int],
    max_tokens: int,
    cost: CostModel,
    costs: StepCosts,
    layout: Parallelism,
    *,
    slices: bool = False,
    number: int | None = None,
    equal: bool = True,
    groups: npt.ArrayLike | None = None,
    targets: Sequence[Runs] | None = None,
    memory: MemoryLimit | None = None,
    alike: int = 1,
    shared: SharedPrefixes | None = None,
    model: MemoryModel | None = None,
) -> StepPlan:
    """Plans a step as :func:`megatron_wlb.plan_batch` says, by the costs of its stages.

    So many neighbouring replicas as are ``alike`` meet in each pass. Layers of the ``model`` may
    predict further ahead, or carry states. Raises :class:`ConfigError` and :class:`PackingError` as
    there.
    """
    if shared is not None and groups is not None:
        raise ConfigError(
            "shared prefixes and groups of samples do not go together; leave one of them out"
        )
    group_of: list[int] | None = None
    if groups is not None:
        given = array_of(groups)
        if slices or given.shape != (len(lengths),) or given.dtype.kind not in "iu":
            why = f"{len(lengths)} samples need a whole number each"
            raise ConfigError(
                f"groups holds {given.dtype} of shape {given.shape}, but "
                f"{'slices are not grouped' if slices else why}; correct or leave it out"
            )
        group_of = given.tolist()
    multiple = length_multiple(layout.tp_size, layout.cp_size, layout.sequence_parallel)
    longest, limit = max(range(len(lengths)), key=lengths.__getitem__), "max_tokens"
    if memory is not None and not slices:
        fitting = _fitting(memory, layout)
        if fitting < max_tokens:
            max_tokens, limit = fitting, f"what fits {memory.limit_bytes / GIB:g} GiB,"
    if not slices and lengths[longest] > max_tokens - max_tokens % multiple:
        raise ConfigError(
            f"sample {longest} has {lengths[longest]} tokens, above {limit} {max_tokens} (a "
            f"multiple of {multiple} counts); raise it, cut the sample or plan slices"
        )
    if slices:
        plan = slice_samples(
            lengths, max_tokens, cost, costs, layout,
            number=number, memory=memory, alike=alike, shared=shared, model=model,
        )  # fmt: skip
    else:
        plan = plan_samples(
            lengths, max_tokens, costs, layout,
            number=number, equal=equal, groups=group_of, alike=alike, shared=shared, model=model,
        )  # fmt: skip
    return plan if targets is None else _with_targets(plan, targets)


def _with_targets(plan: StepPlan, targets: Sequence[Runs]) -> StepPlan:
    """The same plan of samples that have ``targets`` each."""

    def made(part: T) -> T:
        document = part.document._replace(targets=targets[part.document.number])
        return part._replace(document=document)

    ranks = (
        tuple(
            replace(
                m,
                spans=tuple(map(made, m.spans)),
                sharing=m.sharing._replace(uses=tuple(map(made, m.sharing.uses))),
            )
            for m in own
        )
        for own in plan.micro_batches
    )
    return replace(plan, micro_batches=tuple(ranks))


def plan_samples(
    lengths: Sequence[int],
    max_tokens: int,
    costs: StepCosts,
    layout: Parallelism,
    *,
    number: int | None = None,
    equal: bool = True,
    groups: Sequence[int] | None = None,
    alike: int = 1,
    shared: SharedPrefixes | None = None,
    model: MemoryModel | None = None,
) -> StepPlan:
    """Plans a step of whole samples, as :func:`plan_step` says: each on its own, or with what they
    share once in a micro-batch where that is faster.

    Raises :class:`PackingError` where they do not fit ``number`` micro-batches of a rank.
    """
    replica, step = replica_of(costs, layout, max_tokens), StepDocuments(lengths)
    samples, order = [sample(*one) for one in enumerate(lengths)], step.order.tolist()
    pipeline = Pipeline(costs, layout, replica.scheme.length_multiple, alike)

    def units_of(bins: Sequence[Numbers]) -> list[Units]:
        return [replica.units([[samples[order[n]] for n in own] for own in rank]) for rank in bins]

    group_of = range(len(lengths)) if groups is None else groups
    spread = _together(step, replica, group_of, layout.dp_size)
    ways = _packed(step, replica, spread, number, equal)
    if groups is None:
        dispatched = _dispatched(step, replica, layout.dp_size)
        if dispatched != spread:
            ways += _packed(step, replica, dispatched, number, equal)
        # Across ranks there may be room where on one of them there is none; and replicas that share
        # experts wait less for each other where their micro-batches are alike.
        numbers = [] if number is None else [number]
        if number is None and costs.experts is not None:
            numbers = numbers_to_try(replica, step.us(replica), step.lengths, layout.dp_size)
        chooser = NumberChooser(
            replica, layout.dp_size, max_tokens=lambda _: replica.max_tokens, experts=costs.experts
        )
        ways += filter(None, (chooser.deal(step, each) for each in numbers))
    if costs.experts is None:
        fitting = [(_step_us(step, replica, bins), bins) for bins in ways]
    else:  # replicas wait for each other
        fitting = [(pipeline.slowest_us(units_of(bins)), bins) for bins in ways]
    if shared is not None and any(shared.common):
        step_shared = SharedStep(shared, lengths, replica, model)
        packed = plan_inside(step_shared, pipeline, layout.dp_size, number)
        if packed is not None and packed.us < min([us for us, _ in fitting], default=math.inf):
            return plan_of("samples", packed.units, replica)
    if not fitting:
        raise PackingError(
            f"{len(lengths)} samples of {sum(lengths)} tokens do not fit {number} micro-batches of "
            f"{replica.max_tokens} tokens on each of {layout.dp_size} data-parallel ranks; raise "
            "num_micro_batches or max_tokens"
        )
    _, best = min(fitting, key=itemgetter(0))
    return plan_of("samples", units_of(best), replica)


def slice_samples(
    lengths: Sequence[int],
    max_tokens: int,
    cost: CostModel,
    costs: StepCosts,
    layout: Parallelism,
    *,
    number: int | None = None,
    memory: MemoryLimit | None = None,
    alike: int = 1,
    shared: SharedPrefixes | None = None,
    model: MemoryModel | None = None,
) -> StepPlan:
    """Plans a step of slices of samples, as :func:`plan_step` says; or of whole ones, or trees of
    them, that share what they begin with, whichever is fastest.

    Raises :class:`ConfigError` where they do not fit ``memory``.
    """
    replica = replica_of(costs, layout, max_tokens)
    # What one rank may have: every dp_size-th, the longest first.
    worst = [sorted(lengths, reverse=True)[:: layout.dp_size]]
    most, multiple = replica.max_tokens, replica.scheme.length_multiple
    num = -(-sum(lengths) // (layout.dp_size * most))
    slicer = Slicer(
        Cuts(cost, most, multiple, min(SLICE_MULTIPLE, most), layout.dp_size, alike),
        Pipeline(costs, layout, multiple, alike, memory),
        [number] if number else numbers_of_units(num, layout.pp_size),
        merges=False,
        worst=worst,
    )
    units = slicer.cut([sample(*one) for one in enumerate(lengths)], 0)
    peak_bytes = 0.0
    if memory is not None:
        peak_bytes = max(memory.peak_bytes(own) if own.spans else 0.0 for own in units)
    fits = memory is None or peak_bytes <= memory.limit_bytes
    if shared is not None and any(shared.common):
        step, slowest_us = SharedStep(shared, lengths, replica, model), slicer.pipeline.slowest_us
        ways = [
            _inside(step, max_tokens, slicer.pipeline, number),
            plan_trees(step, slicer.pipeline, layout.dp_size, number),
        ]
        timed = [(slowest_us(way.units), way.units) for way in ways if way is not None]
        us, found = min(timed, key=itemgetter(0), default=(math.inf, units))
        if us < (slowest_us(units) if fits else math.inf):
            return plan_of("samples", found, replica)
    if memory is not None and not fits:
        raise ConfigError(
            f"slices of {len(lengths)} samples need {peak_bytes / GIB:.2f} GiB, above "
            f"{memory.limit_bytes / GIB:g} GiB; use more TP, CP or PP, lower max_tokens, or "
            "give a step fewer long samples"
        )
    return plan_of(SlimPacker.name, units, replica)


def _inside(
    step: SharedStep, max_tokens: int, pipeline: Pipeline, number: int | None
) -> SharedPlan | None:
    """Samples that share inside micro-batches, of as many tokens as fit memory."""
    layout, memory = pipeline.layout, pipeline.memory
    if memory is not None:
        max_tokens = min(max_tokens, _fitting(memory, layout))
    if max(step.lengths) > max_tokens:
        return None
    fitting = replace(step, replica=replica_of(pipeline.costs, layout, max_tokens))
    return plan_inside(fitting, pipeline, layout.dp_size, number)


def _fitting(memory: MemoryLimit, layout: Parallelism) -> int:
    """The most tokens of a micro-batch of whole samples in such memory."""
    multiple = length_multiple(layout.tp_size, layout.cp_size, layout.sequence_parallel)
    stages = IN_FLIGHT * layout.pp_size
    return memory.model.max_tokens(memory.limit_bytes, stages, multiple=multiple)


def plan_of(packing: str, units: Sequence[Units], replica: ReplicaCosts) -> StepPlan:
    """The plan of a step in which each data-parallel rank runs such units."""
    ranks, chains = laid_out([(own, replica) for own in units])
    return StepPlan(0, packing, ranks, 0, 0, chains, window_bytes=hosting_bytes(units))


def replica_of(costs: StepCosts, layout: Parallelism, max_tokens: int) -> ReplicaCosts:
    """Costs of one replica, whose S_max leaves room for padding."""
    # A scheme's TP says what lengths are padded to: nothing without sequence parallelism.
    tp_size = layout.tp_size if layout.sequence_parallel else 1
    scheme = Scheme(tp_size, layout.cp_size, layout.pp_size, layout.vpp_size)
    return ReplicaCosts(
        scheme,
        max_tokens - max_tokens % scheme.length_multiple,
        costs,
        LEAST_TOKENS * layout.tp_size * layout.cp_size,
        group_size=layout.group_size,
    )


def _dispatched(step: StepDocuments, costs: ReplicaCosts, dp_size: int) -> Numbers:
    """Samples of each rank, by Hydraulis's first stage: long ones may lie together."""
    ranks = dispatch(step, [(costs, range(dp_size))], math.inf)
    assert ranks is not None  # There is no limit.
    return ranks


def _packed(
    step: StepDocuments, costs: ReplicaCosts, ranks: Numbers, number: int | None, equal: bool
) -> list[list[Numbers]]:
    """Each rank's samples in micro-batches: ``[ways][dp_size][micro-batches]``. There is no way
    where a given ``number`` has no room for them.
    """
    if number is not None:
        bins = [bins_of(step, costs, own, number) for own in ranks]
        return [bins] if max(map(len, bins)) == number else []
    packed = iter(pack(step, costs, [own for own in ranks if own], 0.0))
    bins = [next(packed).bins if own else [] for own in ranks]
    if not equal:
        return [bins]
    # What is packed is as if so many had been asked for.
    known = {(at, len(own)): own for at, own in enumerate(bins) if own}
    numbers = {_alike(step, costs, ranks, len(own), known) for own in bins if own}
    return [[known[at, number] for at in range(len(ranks))] for number in sorted(numbers)]


def _alike(
    step: StepDocuments,
    costs: ReplicaCosts,
    ranks: Numbers,
    least: int,
    known: dict[tuple[int, int], Numbers],
) -> int:
    """As many micro-batches on each rank, ``least`` or more; ``known`` then has each rank's."""
    while True:
        for at, own in enumerate(ranks):
            if (at, least) not in known:
                found = bins_of(step, costs, own, least)
                for number in range(least, len(found) + 1, costs.number_multiple):
                    known[at, number] = found  # Numbers between have no room for all.
        most = max(len(known[at, least]) for at in range(len(ranks)))
        if most == least:
            return most
        least = most


def _step_us(step: StepDocuments, costs: ReplicaCosts, ranks: Sequence[Numbers]) -> float:
    by_number: dict[int, list[tuple[int, Numbers]]] = {}
    for at, bins in enumerate(ranks):
        by_number.setdefault(len(bins), []).append((at, bins))
    by_number.pop(0, None)
    return max(max(replica_us(step, costs, own)) for own in by_number.values())


def _together(
    step: StepDocuments, costs: ReplicaCosts, groups: Sequence[int], dp_size: int
) -> Numbers:
    """Samples of each rank, a group on one: the heaviest group first, where least work is (LPT)."""
    members: dict[int, list[int]] = {}
    for number, at in enumerate(step.order.tolist()):
        members.setdefault(groups[at], []).append(number)
    times_us = step.us(costs)
    each_us = times_us.tolist()
    sums_us = {
        group: float(times_us[own].sum()) if len(own) > 1 else each_us[own[0]]
        for group, own in members.items()
    }
    bins = Bins((0.0, rank) for rank in range(dp_size))
    ranks: Numbers = [[] for _ in range(dp_size)]
    for group in sorted(members, key=lambda group: (-sums_us[group], group)):
        rank = bins.place(sums_us[group])
        assert rank is not None  # Each has room for all.
        ranks[rank] += members[group]
    return list(map(sorted, ranks))


def sample(number: int, length: int) -> Document:
    return Document(0, number, 0, length, True, 0, number, 0)
