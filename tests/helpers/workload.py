"""Documents and plans for tests: uneven on purpose, the same on every rank.

Plain numpy: what a step trains is known here without torch, Megatron or the packers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan
from megatron_wlb.plan.sharding import Sharding

Tokens = npt.NDArray[np.int64]
OwnLoss: TypeAlias = Callable[[Any, Any, Any], Any]
"""Losses from log-probabilities, numbers of stored documents, and places of targets in them."""


@dataclass(frozen=True)
class MemoryCorpus:
    """Stored documents in memory, read as :class:`megatron_wlb.data.corpus.Corpus` is."""

    stored: tuple[Tokens, ...]
    prefix: str = "memory"

    def open_tokens(self) -> None:
        """Opens nothing: tokens are there."""

    def tokens(self, index: int, start: int, stop: int, epoch: int = 0) -> Tokens:
        assert 0 <= start < stop <= len(self.stored[index]), (index, start, stop)
        return self.stored[index][start:stop]


@dataclass(frozen=True)
class Workload:
    """What each step trains, however it is packed."""

    corpus: MemoryCorpus
    steps: tuple[tuple[Document, ...], ...]
    vocab_size: int
    weights: tuple[npt.NDArray[np.float64], ...] | None = None
    """What each stored token counts as a label; None: 1."""
    loss: OwnLoss | None = None
    """Replaces cross-entropy; None: nothing does."""

    def examples(self, step: int) -> list[tuple[Tokens, Tokens]]:
        """``(tokens, labels)`` of each document of a step; -1 where there is no label.

        Written without :attr:`Document.num_targets`, as it is part of what tests check.
        """
        examples = []
        for document in self.steps[step]:
            stored = self.corpus.stored[document.number]
            labels = np.append(stored[1:], -1)
            run = slice(document.offset, document.offset + document.length)
            examples.append((stored[run], labels[run]))
        return examples

    def counted(self, step: int) -> list[npt.NDArray[np.float64]]:
        """What each of the labels of :meth:`examples` counts."""
        counts = []
        for document, (_, labels) in zip(self.steps[step], self.examples(step), strict=True):
            counts.append((labels >= 0).astype(np.float64))
            if self.weights is not None:
                stored = np.append(self.weights[document.number], 0)
                counts[-1] *= stored[document.offset + 1 :][: document.length]
        return counts

    def masked(self, seed: int = 0, by_sample: bool = False) -> Workload:
        """The same documents, some tokens of which are no targets, and others count differently.

        Of every seventh stored document nothing is a target. With ``by_sample`` what is left of
        each stored document counts 1 together. Plain arithmetic, token by token.
        """
        random = np.random.RandomState(seed)
        weights = []
        for number, stored in enumerate(self.corpus.stored):
            own = np.repeat(random.choice([0, 1, 0.25, 3], len(stored)), random.randint(1, 9))
            own = own[: len(stored)] * (number % 7 != 0)
            total = own[1:].sum()
            weights.append(own / total if by_sample and total else own)
        runs = [
            tuple((at, at + 1, weight) for at, weight in enumerate(own.tolist()) if weight)
            for own in weights
        ]
        steps = tuple(
            tuple(document._replace(targets=runs[document.number]) for document in documents)
            for documents in self.steps
        )
        return replace(self, steps=steps, weights=tuple(weights))


def make_workload(
    lengths_of_steps: Sequence[Sequence[int | tuple[int, ...]]], vocab_size: int, seed: int = 0
) -> Workload:
    """Random documents of the given lengths; a tuple is a stored document in several pieces."""
    random = np.random.RandomState(seed)
    stored: list[Tokens] = []
    steps = []
    for number, lengths in enumerate(lengths_of_steps):
        documents = []
        for length in lengths:
            pieces = length if isinstance(length, tuple) else (length,)
            offset = 0
            for at, piece in enumerate(pieces):
                ends = at == len(pieces) - 1
                index = len(stored)
                documents.append(Document(0, index, offset, piece, ends, 0, index, number))
                offset += piece
            stored.append(random.randint(0, vocab_size, offset))
        steps.append(tuple(documents))
    return Workload(MemoryCorpus(tuple(stored)), tuple(steps), vocab_size)


def scatter(
    step: int,
    documents: Sequence[Document],
    dp_size: int,
    num_micro_batches: int,
    multiple: int = 1,
    sharding: Sharding = Sharding(),  # noqa: B008  # frozen
) -> StepPlan:
    """Documents thrown into micro-batches at random, with everything that is awkward.

    Micro-batch 1 of the last rank is padding only (where a rank has more than one). Documents run
    in the reverse of the order in which they arrived. Some micro-batches have a tail of padding;
    all are padded to ``multiple``.
    """
    random = np.random.RandomState(1000 + step)
    bins: list[list[Document]] = [[] for _ in range(dp_size * num_micro_batches)]
    empty = (dp_size - 1) * num_micro_batches + 1 if num_micro_batches > 1 else -1
    usable = [at for at in range(len(bins)) if at != empty]
    for document in documents:
        bins[usable[random.randint(len(usable))]].append(document)
    plans = []
    for index, content in enumerate(bins):
        length = sum(d.length for d in content)
        padded = -(-max(length, 1) // multiple) * multiple + multiple * int(random.randint(3))
        spans = tuple(Span(d, 0, d.length) for d in reversed(content))
        plans.append(MicroBatchPlan(index, spans, padded, float(length**2), sharding))
    starts = range(0, len(plans), num_micro_batches)
    ranks = tuple(tuple(plans[start : start + num_micro_batches]) for start in starts)
    return StepPlan(step, "scatter", ranks, 0, 0)


def slice_up(
    step: int,
    documents: Sequence[Document],
    dp_size: int,
    multiple: int = 1,
    sharding: Sharding = Sharding(),  # noqa: B008  # frozen
) -> StepPlan:
    """Documents thrown to ranks at random, most of them in slices of awkward lengths.

    The first one of a rank begins and ends with a slice of one token, others have up to 4 slices;
    the last slice of a document takes along whole documents, which run on their own too. Numbers of
    micro-batches differ between ranks; all are padded to ``multiple``, some to more.
    """
    random = np.random.RandomState(2000 + step)
    ranks: list[list[Document]] = [[] for _ in range(dp_size)]
    for number, document in enumerate(documents):
        ranks[number % dp_size if number < 2 * dp_size else random.randint(dp_size)].append(
            document
        )
    micro_batches: list[tuple[MicroBatchPlan, ...]] = []
    chains: list[tuple[int, ...]] = []
    index = 0
    for content in ranks:
        units: list[list[Span]] = []
        numbers: list[int] = []
        for document in content:
            length, inner = document.length, range(2, document.length - 1)
            if length < 8:  # beside the document before, or on its own
                whole = Span(document, 0, length)
                if units and random.randint(3):
                    units[-1].append(whole)
                else:
                    units.append([whole])
                    numbers.append(1)
                continue
            num_cuts = random.randint(4)
            cuts = {0, length, *random.choice(inner, num_cuts, replace=False).tolist()}
            if not any(number > 1 for number in numbers):
                cuts |= {1, length - 1}
            edges = sorted(cuts)
            units += [[Span(document, *edge)] for edge in pairwise(edges)]
            numbers.append(len(edges) - 1)
        if step % 2:  # padding only
            units.append([])
            numbers.append(1)
        plans = []
        for spans in units:
            length = sum(span.length for span in spans)
            padded = -(-max(length, 1) // multiple) * multiple + multiple * int(random.randint(2))
            plans.append(MicroBatchPlan(index, tuple(spans), padded, float(length**2), sharding))
            index += 1
        micro_batches.append(tuple(plans))
        chains.append(tuple(numbers))
    return StepPlan(step, "slices", tuple(micro_batches), 0, 0, tuple(chains))


def run_alike(plan: StepPlan, alike: int, multiple: int = 1) -> StepPlan:
    """The same slices in chains that so many ranks in a row have in common.

    A chain is as long as the longest that any of them comes to next. The others run what fits of
    theirs there, one behind another, and then micro-batches without a document. Those that several
    replicas run together come first, and stay as they are.
    """
    if alike == 1:
        return plan
    ranks: list[tuple[MicroBatchPlan, ...]] = []
    chains: list[tuple[int, ...]] = []
    numbers = count(sum(map(len, plan.micro_batches)))
    for first in range(0, len(plan.micro_batches), alike):
        group = range(first, first + alike)
        queues = [deque(plan.chains[rank]) for rank in group]
        left = [deque(plan.micro_batches[rank]) for rank in group]
        own: list[list[MicroBatchPlan]] = [[] for _ in group]
        common: list[int] = []
        while any(queues):
            common.append(max(queue[0] for queue in queues if queue))
            for queue, units, made in zip(queues, left, own, strict=True):
                room = common[-1]
                while queue and queue[0] <= room:
                    room -= queue[0]
                    made += (units.popleft() for _ in range(queue.popleft()))
                made += [MicroBatchPlan(0, (), multiple, 0.0)] * room
        ranks += (
            tuple(m if m.replicas else replace(m, index=next(numbers)) for m in made)
            for made in own
        )
        chains += [tuple(common)] * alike
    return replace(plan, micro_batches=tuple(ranks), chains=tuple(chains))


def make_trees(vocab_size: int, seed: int = 7) -> Workload:
    """Samples that begin alike, in two steps: a tree of three levels, a group of answers to one
    prompt, single tokens one behind another, one that begins another, equal ones, and short ones.
    """
    random = np.random.RandomState(seed)

    def ids(length: int) -> Tokens:
        return random.randint(0, vocab_size, length)

    def below(path: Tokens, *branches: Any) -> list[Tokens]:
        """Samples of a tree: a branch is a leaf's length, or a length with branches below."""
        paths: list[Tokens] = []
        for branch in branches:
            length, *more = branch if isinstance(branch, tuple) else (branch,)
            own = np.concatenate([path, ids(length)])
            paths += below(own, *more) if more else [own]
        return paths

    none = ids(0)
    steps = [
        [
            *below(none, (9, (7, 5, 1), (11, 8, 3, 1), 2)),
            *below(none, (20, 3, 12, 7, 30, 1, 9)),
            *below(none, (6, (1, (1, (1, 1, 4)), 2), 1)),
            *below(none, 1, 2, 37),
        ],
        [
            *below(none, (25, (4, 6, 20), 9)),
            *below(none, (2, 3, 1), (1, 1, 5), 1, 18),
            *below(none, (14, 5, 5, 22)),
        ],
    ]
    for samples in steps:
        samples += [samples[0].copy(), samples[3][:-2]]
        random.shuffle(samples)
    numbers = count()
    documents = tuple(
        tuple(
            Document(0, number, 0, len(sample), True, 0, number, at)
            for sample, number in zip(samples, numbers, strict=False)
        )
        for at, samples in enumerate(steps)
    )
    stored = tuple(sample for samples in steps for sample in samples)
    return Workload(MemoryCorpus(stored), documents, vocab_size)
