"""Plans of a workload's steps for a layout: of whole documents, of slices, and of both changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from helpers.workload import Workload, run_alike, scatter, slice_up
from megatron_wlb.cost.slices import HOST, LAYERS, MLPS, NOTHING, Recomputed
from megatron_wlb.plan import (
    Document,
    HandedState,
    MicroBatchPlan,
    RowRun,
    Sharing,
    Span,
    StepPlan,
    TreePart,
)
from megatron_wlb.plan.sharding import Sharding, length_multiple
from megatron_wlb.planning.balance.trees import Path, SharedPrefixes, part_of, tree_part
from megatron_wlb.settings.config import Config

PlanFor: TypeAlias = Callable[[Config, Workload, int, int], StepPlan]
"""Makes the plan of a step: of settings, a workload, a number of ranks, and the step's number."""

SHARDINGS = {
    "per-sequence": Sharding("per-sequence"),
    "per-document": Sharding("per-document"),
    "adaptive": Sharding("per-document-remainder"),  # no choice here; so that it runs too
    "hybrid": Sharding("hybrid", 24),
}
"""What micro-batches get, by ``--wlb-cp-sharding``."""


def scatter_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    """:func:`scatter` for a layout."""
    from megatron_wlb.planning import guards

    p = config.parallel
    return scatter(
        step,
        workload.steps[step],
        guards.data_parallel_size(config, world_size),
        guards.check_micro_batches(config, world_size),
        length_multiple(p.tensor_model_parallel_size, p.context_parallel_size, p.sequence_parallel),
        SHARDINGS[config.wlb.wlb_cp_sharding],
    )


def sliced_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    """:func:`slice_up` for a layout, whose global batch says nothing then; ranks that meet in each
    pass run it alike.
    """
    from megatron_wlb.planning import guards

    p, dp_size = config.parallel, guards.data_parallel_size(config, world_size)
    multiple = length_multiple(
        p.tensor_model_parallel_size, p.context_parallel_size, p.sequence_parallel
    )
    sharding = SHARDINGS[config.wlb.wlb_cp_sharding]
    plan = slice_up(step, workload.steps[step], dp_size, multiple, sharding)
    return run_alike(plan, num_alike(config, dp_size), multiple)


def merged_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    """The longest documents on several ranks, and then :func:`slice_up` of the others; ranks that
    meet in each pass run it alike.

    In step 1 the last rank has all others.
    """
    from megatron_wlb.planning import guards

    p = config.parallel
    dp_size = guards.data_parallel_size(config, world_size)
    multiple = length_multiple(
        p.tensor_model_parallel_size, p.context_parallel_size, p.sequence_parallel
    )
    alike, every = num_alike(config, dp_size), tuple(range(dp_size))
    blocks = BLOCKS if alike < dp_size > 2 else [(every, 3), (every, 1), (every, 2)]
    longest = sorted(workload.steps[step], key=lambda d: (-d.length, d.key))[: len(blocks)]
    rest = [d for d in workload.steps[step] if d not in longest]
    others = slice_up(step, rest, 1 if step == 1 else dp_size, multiple)
    none = ((),) * (dp_size - len(others.chains))
    first: list[MicroBatchPlan] = []
    for document, (block, num_slices) in zip(longest, blocks, strict=True):
        for span in slices_of(document, num_slices):
            own = 2 * len(block) * multiple
            padded = -(-span.length // own) * own + own * (len(first) % 2)
            first.append(MicroBatchPlan(len(first), (span,), padded, 1.0, replicas=block))
    ranks, chains = [], []
    for rank, (micro_batches, numbers) in enumerate(
        zip(none + others.micro_batches, none + others.chains, strict=True)
    ):
        merged = [m for m in first if rank in m.replicas]
        later = [dataclasses.replace(m, index=m.index + len(first)) for m in micro_batches]
        ranks.append((*merged, *later))
        chains.append((len(merged), *numbers))
    plan = dataclasses.replace(others, micro_batches=tuple(ranks), chains=tuple(chains))
    return run_alike(plan, alike, multiple)


BLOCKS = [((0, 1, 2, 3), 3), ((0, 1), 1), ((2, 3), 2), ((2, 3), 1)]
"""Which of four data-parallel ranks run the longest documents, in how many slices."""


def slices_of(document: Document, num: int) -> list[Span]:
    """The whole, or slices of which one has a single token."""
    length = document.length
    cuts = {1: [], 2: [length - 1], 3: [1, length // 3 * 2]}[num]
    return [Span(document, *edge) for edge in pairwise([0, *cuts, length])]


def varying_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    """The step's documents in 2, 1, 3, … times the micro-batches of the batch size."""
    factor = (2, 1, 3)[step % 3]
    training = dataclasses.replace(
        config.training, global_batch_size=factor * config.training.global_batch_size
    )
    return scatter_for(dataclasses.replace(config, training=training), workload, world_size, step)


def num_alike(config: Config, dp_size: int) -> int:
    """How many neighbouring data-parallel ranks meet in each pass."""
    from megatron_wlb.planning.from_config import parallelism

    return dp_size if config.replicas_meet else parallelism(config, dp_size).expert_replicas


@dataclass(frozen=True)
class Changed:
    """Makes plans, and then changes them."""

    make: PlanFor
    changes: tuple[Callable[[StepPlan], StepPlan], ...]

    def __call__(self, config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
        plan = self.make(config, workload, world_size, step)
        for change in self.changes:
            plan = change(plan)
        return plan

    @property
    def __name__(self) -> str:
        return "-".join(one.__name__ for one in (self.make, *self.changes))


def half_recomputed(plan: StepPlan, what: Recomputed = LAYERS) -> StepPlan:
    """The same, ``what`` of every second micro-batch recomputed: by place, or by number of those
    that several replicas run together.
    """
    ranks = [
        tuple(
            dataclasses.replace(
                m, recomputed=(NOTHING if (m.index if m.replicas else at) % 2 else what)
            )
            for at, m in enumerate(own)
        )
        for own in plan.micro_batches
    ]
    window_bytes = 1e5 if what == HOST else 0.0
    return dataclasses.replace(plan, micro_batches=tuple(ranks), window_bytes=window_bytes)


def divided(plan: StepPlan) -> StepPlan:
    """The same, the keys and values of all slices divided over context-parallel ranks."""
    ranks = [
        tuple(dataclasses.replace(m, divided=m.slice is not None) for m in own)
        for own in plan.micro_batches
    ]
    return dataclasses.replace(plan, micro_batches=tuple(ranks))


def mlps_recomputed(plan: StepPlan) -> StepPlan:
    return half_recomputed(plan, MLPS)


def half_hosted(plan: StepPlan) -> StepPlan:
    """Every second micro-batch waits in the host's memory, in windows of unlike sizes."""
    plan = half_recomputed(plan, HOST)
    return dataclasses.replace(plan, window_bytes=[1e5, 0.0, 1e9][plan.step % 3])


def all_hosted(plan: StepPlan) -> StepPlan:
    plan = half_hosted(plan)
    ranks = [[dataclasses.replace(m, recomputed=HOST) for m in own] for own in plan.micro_batches]
    return dataclasses.replace(plan, micro_batches=tuple(map(tuple, ranks)))


recomputed_for = Changed(sliced_for, (half_recomputed,))
divided_for = Changed(sliced_for, (divided,))


def shared_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    """Samples thrown into micro-batches, where those that begin alike share what they can.

    Two of three go where the one before them in the order of the tree has gone.
    """
    from megatron_wlb.planning import guards

    dp_size = guards.data_parallel_size(config, world_size)
    documents = workload.steps[step]
    prefixes = SharedPrefixes.found(_stored(workload, step), least=1)
    random = np.random.RandomState(3000 + step)
    each = guards.check_micro_batches(config, world_size)
    bins: list[list[int]] = [[] for _ in range(dp_size * each)]
    at = 0
    for sample in prefixes.order:
        at = at if random.randint(3) else random.randint(len(bins))
        bins[at].append(sample)
    made = [
        _of_paths(config, documents, _paths(config, workload, step, own), 0, None, index)
        for index, own in enumerate(bins)
    ]
    ranks = tuple(tuple(made[at : at + each]) for at in range(0, len(made), each))
    return StepPlan(step, "samples", ranks, 0, 0)


def trees_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    """Samples that begin alike in trees over several micro-batches, cut anywhere: some to single
    rows, and where samples begin. Each has samples of two roots.
    """
    from megatron_wlb.planning import guards

    dp_size = guards.data_parallel_size(config, world_size)
    documents = workload.steps[step]
    prefixes = SharedPrefixes.found(_stored(workload, step), least=1)
    random = np.random.RandomState(4000 + step)
    cuts = random.choice(len(documents), 3 * dp_size - 1, replace=False)
    parts = np.split(np.array(prefixes.order), np.sort(cuts))
    ranks, chains, index = [], [], 0
    for rank in range(dp_size):
        own: list[MicroBatchPlan] = []
        numbers: list[int] = []
        for part in filter(len, parts[rank::dp_size]):
            paths = _paths(config, workload, step, part.tolist())
            length = sum(path.document.length for path in paths)
            num_cuts = min(length - 1, random.randint(5))
            inner = random.choice(range(1, length), num_cuts, replace=False).tolist()
            inner += [1] if num_cuts and not numbers else []
            inner += [path.first for path in paths[2:5] if num_cuts]
            edges = sorted({0, length, *inner})
            name = documents[paths[0].document.number].number
            for start, stop in pairwise(edges):
                named = tree_part(paths, start, stop)._replace(name=name)
                tree = named if len(edges) > 2 else None
                own.append(_of_paths(config, documents, paths, start, tree, index, stop))
                index += 1
            numbers.append(len(edges) - 1)
        ranks.append(tuple(own))
        chains.append(tuple(numbers))
    plan = StepPlan(step, "samples", tuple(ranks), 0, 0, tuple(chains))
    return run_alike(plan, num_alike(config, dp_size), _multiple(config))


def one_path_for(config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
    """The slices of :func:`sliced_for`, each document as a tree of one path."""
    plan = sliced_for(config, workload, world_size, step)

    def as_tree(m: MicroBatchPlan) -> MicroBatchPlan:
        if m.slice is None or len(m.spans) > 1:
            return m
        document, start, stop = m.slice
        above = ((RowRun(0, start),),) if start else ((),)
        left = (HandedState(stop, 1),) if stop < document.length else ()
        sharing = Sharing(above, tree=TreePart(document.number, start, document.length, left))
        return dataclasses.replace(m, sharing=sharing)

    ranks = []
    for own, chains in zip(plan.micro_batches, plan.chains, strict=True):
        units: list[MicroBatchPlan] = []
        at = 0
        for number in chains:  # as a whole, or not at all
            chain = own[at : at + number]
            at += number
            alone = all(len(m.spans) == 1 for m in chain)
            units += map(as_tree, chain) if alone else chain
        ranks.append(tuple(units))
    return dataclasses.replace(plan, micro_batches=tuple(ranks))


def _stored(workload: Workload, step: int) -> list[npt.NDArray[np.int64]]:
    return [workload.corpus.stored[document.number] for document in workload.steps[step]]


def _multiple(config: Config) -> int:
    p = config.parallel
    return length_multiple(
        p.tensor_model_parallel_size, p.context_parallel_size, p.sequence_parallel
    )


def _paths(config: Config, workload: Workload, step: int, own: list[int]) -> list[Path]:
    samples = _stored(workload, step)
    prefixes = SharedPrefixes.found(samples, least=1)
    if not own:
        return []
    return prefixes.paths(own, list(map(len, samples)), config.model.mtp_num_layers or 0)


def _of_paths(
    config: Config,
    documents: Sequence[Document],
    paths: list[Path],
    start: int,
    tree: TreePart | None,
    index: int,
    stop: int | None = None,
) -> MicroBatchPlan:
    """What runs some rows, of the workload's documents."""
    stop = sum(path.document.length for path in paths) if stop is None else stop
    spans, sharing = part_of(paths, start, stop)

    def known(document: Document) -> Document:
        own, offset = documents[document.number], document.offset
        return own._replace(offset=offset, length=own.length - offset)

    multiple = _multiple(config)
    padded = -(-max(stop - start, 1) // multiple) * multiple + multiple * (index % 3)
    return MicroBatchPlan(
        index,
        tuple(span._replace(document=known(span.document)) for span in spans),
        padded,
        1.0,
        SHARDINGS[config.wlb.wlb_cp_sharding],
        sharing=sharing._replace(
            uses=tuple(use._replace(document=known(use.document)) for use in sharing.uses),
            tree=tree,
        ),
    )
