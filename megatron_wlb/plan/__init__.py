"""The frozen values that pass between planning and running: documents, micro-batches, steps.

Everything that a training step needs to know before any tensor exists is here, in plain Python.

Ranges are half-open. Lengths are in tokens. Times are in µs and *predicted* by a cost model.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from megatron_wlb.cost.slices import NOTHING, Recomputed
from megatron_wlb.errors import PlanError
from megatron_wlb.plan.sharding.shard import Sharding
from megatron_wlb.plan.target_runs import Runs, checked, weight_of
from megatron_wlb.reading import MAX_COUNT, MAX_SIZE, shown


class Document(NamedTuple):
    """A run of tokens that attends only to itself: what the packers place.

    Usually one stored document of a corpus, whole. A stored document longer than the window may
    reach the packers as several of these (one per piece), and ``original`` packing cuts them at
    window boundaries as Megatron does. Positions start at 0 in each.

    ``arrival`` numbers what the stream gives, in its order. Pieces of one stored document may
    share it where nothing comes between them; they differ in ``offset``. So ``(arrival, offset)``
    is the order of the stream, which breaks ties and orders queues.

    It is a tuple, so that JSON takes it as it is: states of a hundred thousand waiting documents
    are lists that are copied, and written only where a checkpoint is.
    """

    corpus: int
    """The number of the run's corpus that it comes from."""
    number: int
    """The document's number in that corpus."""
    offset: int
    """First token, counted from the stored document's first token."""
    length: int
    """Number of tokens, at least 1."""
    ends: bool
    """Whether its last token is the stored document's last one, which then has no label."""
    epoch: int
    """The pass over the corpus in which it was drawn, from 0."""
    arrival: int
    """The document's number in the stream, from 0."""
    step: int
    """The step it arrives in: its delay is how far the step it runs in is from this one, which may
    be the earlier one where a packing looks ahead."""
    targets: Runs | None = None
    """Which tokens of the stored document count in the loss, and what; None: each counts 1."""

    @property
    def num_labels(self) -> int:
        """Tokens that another one follows: every one but the last of the stored document."""
        return self.length - int(self.ends)

    @property
    def num_targets(self) -> float:
        """Its tokens that count in the loss, each as much as it counts."""
        return self.weight(0, self.length)

    def weight(self, start: int, stop: int, depth: int = 0) -> float:
        """What the labels of tokens ``[start, stop)`` count together: of each the token after it,
        or ``depth`` tokens further on. Tokens of the stored document before these have numbers
        below 0.
        """
        stop = max(start, min(stop, self.num_labels - depth))
        if self.targets is None:
            return stop - start
        first = self.offset + 1 + depth
        return weight_of(self.targets, first + start, first + stop)

    @property
    def key(self) -> tuple[int, int]:
        return (self.arrival, self.offset)

    def cut(self, at: int, tail_step: int) -> tuple[Document, Document]:
        """Two documents of ``at`` and ``length - at`` tokens; the second arrives in ``tail_step``.

        The first keeps a label for its last token (the second's first token), so that cutting
        changes which tokens see each other but not which tokens are trained.
        """
        assert 0 < at < self.length, (at, self.length)
        # Not by _replace, which is three times as slow: packings cut in every step.
        common = self.epoch, self.arrival
        step, own = self.step, self.targets
        head = Document(self.corpus, self.number, self.offset, at, False, *common, step, own)
        start, rest = self.offset + at, self.length - at
        tail = Document(self.corpus, self.number, start, rest, self.ends, *common, tail_step, own)
        return head, tail

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Document:
        """Reads the list that JSON makes of a document, also one of a release that knew no
        ``targets``. Raises ``ValueError`` for any other.
        """
        corpus, number, offset, length, ends, epoch, arrival, step, *more = values
        (targets,) = more or (None,)
        numbers = corpus, number, offset, length, epoch, arrival, step
        whole = all([type(one) is int and 0 <= one <= MAX_COUNT for one in numbers])
        if not (whole and length and offset + length <= MAX_SIZE and ends in (False, True)):
            raise ValueError(f"{shown(values)} is no document")
        runs = None if targets is None else checked(targets)
        return cls(corpus, number, offset, length, bool(ends), epoch, arrival, step, runs)


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of a document: what a micro-batch runs.

    WLB-LLM runs documents whole (``0, length``). A *slice* is a part of one: it attends to the
    keys and values that the slices before it have left, too (SlimPack §4).
    """

    document: Document
    start: int
    stop: int

    @property
    def is_slice(self) -> bool:
        return self.start > 0 or self.stop < self.document.length

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def num_targets(self) -> float:
        """Tokens that count in the loss, each as much as it counts."""
        return self.document.weight(self.start, self.stop)


class RowRun(NamedTuple):
    """Rows ``[start, stop)`` of a micro-batch, or of several one behind another."""

    start: int
    stop: int


class SharedUse(NamedTuple):
    """Rows of a micro-batch that another document shares."""

    document: Document
    rows: RowRun
    place: int
    """The first one's token in the stored document."""

    def targets_ahead(self, depth: int) -> float:
        """What the labels of the rows count for the document, ``depth`` tokens further on."""
        first, (start, stop) = self.place - self.document.offset, self.rows
        return self.document.weight(first, first + stop - start, depth)


class HandedState(NamedTuple):
    """The state of a layer before a ``row`` of a document or tree, which micro-batches hand on."""

    row: int
    takers: int
    """Documents that go on from there."""


class TreePart(NamedTuple):
    """The part of a tree of documents that a micro-batch runs; others, before and behind it in its
    chain, run the rest.
    """

    name: int
    """The number of its first document."""
    start: int
    """The first row."""
    length: int
    """Rows of the whole tree."""
    left: tuple[HandedState, ...] = ()
    """What later micro-batches take of it."""


class Sharing(NamedTuple):
    """What documents of a micro-batch share. Empty: nothing."""

    above: tuple[tuple[RowRun, ...], ...] = ()
    """``[spans]``: the rows that hold what each span's document has before it, in order: its own
    earlier tokens, and those that it shares with other documents, with which its stored document
    begins. Of a document that shares, ``offset`` is the first token of its own. Rows are those of
    the :attr:`tree`, or of the micro-batch."""
    uses: tuple[SharedUse, ...] = ()
    """Documents that share rows of the micro-batch, and run their own elsewhere or further on."""
    tree: TreePart | None = None
    """Whose rows it runs, if several micro-batches do."""

    def places(self, spans: Sequence[Span]) -> tuple[int, ...]:
        """See :attr:`MicroBatchPlan.places`."""
        if not self.above:
            return tuple([span.start for span in spans])
        pairs = zip(spans, self.above, strict=True)
        return tuple([s.start + s.document.offset if above else 0 for s, above in pairs])

    def branches(self, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """Tokens before each span that has rows above it, and its own."""
        pairs = zip(self.places(spans), spans, strict=True) if self.above else ()
        return [(before, span.length) for before, span in pairs if before]

    @property
    def rows_before(self) -> int:
        """Rows that micro-batches before have run, and this one's attend to."""
        if self.tree is None:
            return 0
        number = reached = 0
        for start, stop in sorted({rows for above in self.above for rows in above}):
            stop = min(stop, self.tree.start)
            number, reached = number + max(0, stop - max(start, reached)), max(reached, stop)
        return number

    @property
    def said(self) -> str:
        """All that ranks must agree on."""
        uses = [(use.document.number, *use.rows, use.place) for use in self.uses]
        return f" {self.above}{self.tree}{uses}" if self.above else ""


NO_SHARING = Sharing()


@dataclass(frozen=True)
class MicroBatchPlan:
    """One micro-batch: its spans one after another, then padding at the tail only.

    At most the first span is a slice; whole documents follow it. Documents that begin alike may
    share what they have in common: see :attr:`sharing`. In a part of a tree the first span and the
    last may be parts of samples.
    """

    index: int
    """Number within the step over all data-parallel ranks, ``0 … N-1``."""
    spans: tuple[Span, ...]
    padded_length: int
    """Length of the tensors, in tokens, over all TP and CP ranks; padding is masked out."""
    predicted_us: float
    """Predicted forward plus backward time of the whole model, padding not counted; its share of
    that on each of ``replicas``."""
    sharding: Sharding = Sharding()  # noqa: RUF009  # frozen
    """How its tokens are divided over context-parallel ranks, if there are several."""
    replicas: tuple[int, ...] = ()
    """Data-parallel ranks that run it together: their context-parallel ranks are one group for it
    (DP-Merge, SlimPack §4). Empty: the rank that has it, alone."""
    recomputed: Recomputed = NOTHING
    divided: bool = False
    """Whether context-parallel ranks divide the keys and values of its slice's document, and
    gather them for each slice; else each has all of them."""
    sharing: Sharing = NO_SHARING
    """What its documents share with each other, or with those of other micro-batches."""

    @cached_property
    def length(self) -> int:
        """Number of tokens without padding."""
        return sum([stop - start for _, start, stop in self.spans])

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Length of each attention segment; the padding at the tail is one of its own."""
        lengths = [stop - start for _, start, stop in self.spans]
        padding = self.padded_length - sum(lengths)
        return (*lengths, padding) if padding else tuple(lengths)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """``[spans]``: how many tokens each one's document has before it, on its whole path."""
        return self.sharing.places(self.spans)

    @cached_property
    def prefixes(self) -> tuple[int, ...]:
        """Keys before each attention segment's own: of slices before it, or that it shares."""
        return self.places + (0,) * (len(self.lengths) - len(self.spans))

    @property
    def samples(self) -> tuple[int, ...]:
        """Numbers of the documents that it runs, or runs a slice of: in their corpus, or in the
        lengths that :func:`megatron_wlb.plan_batch` was given.
        """
        return tuple(span.document.number for span in self.spans)

    @property
    def slice(self) -> Span | None:
        """The part of a document that it runs, if it runs one, and not one of a tree."""
        first = self.spans[0] if self.spans and self.sharing.tree is None else None
        return first if first and first.is_slice else None

    @cached_property
    def num_targets(self) -> float:
        """Tokens that count in the loss, each as much as it counts; those that several documents
        share once for each.
        """
        return self.targets_ahead(0)

    def targets_ahead(self, depth: int) -> float:
        """What labels ``depth`` tokens further on than those of :attr:`num_targets` count."""
        own = sum(span.document.weight(span.start, span.stop, depth) for span in self.spans)
        return own + sum(use.targets_ahead(depth) for use in self.sharing.uses)


class Units(NamedTuple):
    """What one replica runs in a step, before it is planned: whole documents, or slices."""

    spans: Sequence[Sequence[Span]]
    """``[micro-batches][spans]``, in the order of their forward passes."""
    replicas: Sequence[tuple[int, ...]] = ()
    """``[micro-batches]``: see :attr:`MicroBatchPlan.replicas`; of slices."""
    chains: Sequence[int] = ()
    """See :attr:`StepPlan.chains`."""
    recomputed: Sequence[Recomputed] = ()
    """``[micro-batches]``: see :attr:`MicroBatchPlan.recomputed`; nothing is if not given."""
    divided: bool = False
    """:attr:`MicroBatchPlan.divided` of all slices."""
    sharing: Sequence[Sharing] = ()
    """``[micro-batches]``: see :attr:`MicroBatchPlan.sharing`; nothing is shared if not given."""
    window_bytes: float = 0.0
    """See :attr:`StepPlan.window_bytes`; 0: none of them may wait in the host's memory."""


class Layouts(Protocol):
    """The layouts of a step's replicas where they are unlike: a strategy. As text it says all."""

    @property
    def replicas(self) -> Sequence[Any]:
        """One for each list of micro-batches."""
        ...

    @property
    def key(self) -> str:
        """All that ranks must agree on."""
        ...


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step, over all data-parallel ranks. Every rank computes the same one."""

    step: int
    packing: str
    micro_batches: tuple[tuple[MicroBatchPlan, ...], ...]
    """``[dp_size][num_micro_batches]``, in the order in which each rank runs them. Ranks that run
    one together have it first, and each has it. With a ``strategy`` it is ``[replicas][…]``: as
    many as each likes, also none."""
    num_waiting: int
    """Documents that have arrived but run in a later step."""
    waiting_tokens: int
    chains: tuple[tuple[int, ...], ...] = ()
    """``[dp_size][chains]``: how many micro-batches, one after another, run the slices of one
    document, or of several, one behind another; 1 for one that runs whole documents only. Ranks
    that meet in each pass have the same. Their backward passes run last to first: the order is
    :func:`megatron_wlb.cost.schedule.order.sliced`. Empty, also for one replica of a strategy:
    Megatron's own schedule."""
    strategy: Layouts | None = None
    """The layout of each replica in this step. None: all have the run's own, which is equal."""
    window_bytes: float = 0.0
    """The part of a device's memory for what is on its way to the host. There is as much for what
    comes back (:mod:`megatron_wlb.cost.schedule.hosting`). 0 where no micro-batch waits there."""

    def __post_init__(self) -> None:
        if self.strategy and len(self.strategy.replicas) != len(self.micro_batches):
            raise PlanError(
                f"step {self.step} has micro-batches of {len(self.micro_batches)} replicas, but "
                f"its strategy {self.strategy} has {len(self.strategy.replicas)}; give a list to "
                "each, empty where one rests"
            )

    def alone(self, number: int) -> StepPlan:
        """What the ``number``-th replica of the ``strategy`` runs, as if it were all."""
        own = slice(number, number + 1)
        chains = self.chains[own] if any(self.chains[own]) else ()
        return replace(self, micro_batches=self.micro_batches[own], chains=chains, strategy=None)

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        """All micro-batches, rank by rank; each once."""
        for rank, micro_batches in enumerate(self.micro_batches):
            yield from (m for m in micro_batches if m.replicas[:1] in ((), (rank,)))

    @property
    def documents(self) -> Iterator[Document]:
        """Each once, where its first token runs."""
        for micro_batch in self:
            for span in micro_batch.spans:
                if not span.start:
                    yield span.document

    @cached_property
    def num_tokens(self) -> int:
        return sum(m.length for m in self)

    @cached_property
    def padding_tokens(self) -> int:
        return sum(m.padded_length - m.length for m in self)

    @cached_property
    def num_targets(self) -> float:
        """The loss normaliser: Σ token losses of the step is divided by this, once."""
        return sum(m.num_targets for m in self)

    def targets_ahead(self, depth: int) -> float:
        """What labels ``depth`` tokens further on count."""
        return sum(m.targets_ahead(depth) for m in self)

    @cached_property
    def imbalance(self) -> float:
        """``max · N / Σ`` of the predicted micro-batch times (WLB-LLM §3.2); 1 is perfect."""
        costs = [m.predicted_us for m in self]
        total = sum(costs)
        return max(costs) * len(costs) / total if total else 1.0

    @cached_property
    def num_merged(self) -> int:
        """Documents that several data-parallel ranks run together (DP-Merge)."""
        return sum(not span.start for m in self if m.replicas for span in m.spans)

    @cached_property
    def delay_steps(self) -> float:
        """Token-weighted mean of |this step - step of arrival| over the documents that run."""
        if not self.num_tokens:
            return 0.0
        delayed = sum(d.length * abs(self.step - d.step) for d in self.documents)
        return delayed / self.num_tokens

    @cached_property
    def shardings(self) -> Mapping[str, int]:
        """Number of micro-batches of each kind of sharding."""
        return Counter(m.sharding.kind for m in self)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything that must be equal on all ranks, as 64 hex digits."""
        layout = f" {self.strategy.key}" if self.strategy else ""
        hosts = f" {self.window_bytes}" if self.window_bytes else ""
        said = f"{self.step} {self.packing}{self.chains or ''}{layout}{hosts}"
        sha = hashlib.sha256(said.encode())
        for rank, micro_batches in enumerate(self.micro_batches):
            for m in micro_batches:
                sha.update(struct.pack("<4q", rank, m.index, m.padded_length, len(m.spans)))
                again = ("", " recomputed MLPs", " recomputed", " hosted")[m.recomputed]
                said = again + " divided" * m.divided + m.sharing.said
                sha.update(f"{m.sharding}{m.replicas or ''}{said}".encode())
                for s in m.spans:
                    d = s.document
                    sha.update(
                        struct.pack(
                            "<8q", d.corpus, d.number, d.offset, d.length, d.ends, d.epoch,
                            s.start, s.stop,
                        )
                    )  # fmt: skip
                    if d.targets is not None:
                        sha.update(repr(d.targets).encode())
        return sha.hexdigest()
