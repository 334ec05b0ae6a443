"""Plans steps: documents to :class:`~megatron_wlb.plan.StepPlan`. Read this first.

One step, planned from lengths alone::

    stream ── documents that arrive ──▶ packer ── N micro-batches ──▶ ranks ──▶ StepPlan
              (data/documents.py)       (packing/)  which run now     who runs    (plan.py)
                                                    and together      which when

Every rank plans for itself, and all come to the same plan: same corpora, settings, seed and state
give the same steps, bit for bit. ``StepPlan.digest`` lets them check.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Protocol

from megatron_wlb.cost import Cost
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.cost.slices import HOST, NOTHING, Recomputed
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan, Units
from megatron_wlb.plan.sharding.select import Prediction, Selector
from megatron_wlb.planning.greedy import Bins, small_at_ends
from megatron_wlb.planning.packing import Packer
from megatron_wlb.reading import MAX_COUNT, MOST_STEPS_AHEAD, reading_state, whole_number

logger = logging.getLogger(__name__)

BACKLOG_STEPS = 4
"""Waiting tokens, in mean steps, from which on the planner warns. On heavy-tailed lengths `wlb` and
`hold` keep about two steps' worth back at most; more means that documents arrive faster than they
run."""


class Stream(Protocol):
    """Gives documents step by step; see :class:`~megatron_wlb.data.documents.DocumentStream`."""

    step: int
    """The step that :meth:`next_step` gives the documents of."""

    @property
    def exhausted(self) -> bool:
        """Whether no more documents will come."""
        ...

    def next_step(self) -> list[Document]:
        """The documents that arrive in the next step, in stream order."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Shaping(Protocol):
    """Chooses other sizes, order or number of micro-batches.

    See :class:`~megatron_wlb.planning.balance.shaping.Shaper` and
    :class:`~megatron_wlb.planning.balance.numbers.NumberChooser`.
    """

    def shape(self, ranks: Sequence[Sequence[Sequence[Document]]]) -> list[list[list[Document]]]:
        """Returns the same documents as ``[dp_size][micro-batches of a rank][documents]``."""
        ...

    def check(self, packing: str) -> None:
        """Raises :class:`ConfigError` for a packing whose steps it may not deal anew."""
        ...


class Slicing(Protocol):
    """Cuts documents into slices; see :class:`~megatron_wlb.planning.slicing.cut.Slicer`."""

    def cut(self, documents: Sequence[Document], step: int) -> Sequence[Units]:
        """Returns what each data-parallel rank runs."""
        ...

    def settle(self, documents: Sequence[Document], step: int) -> object:
        """Does what :meth:`cut` does for later steps, and cuts nothing."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def each_rank(num_micro_batches: int, dp_size: int) -> int:
    """Counts a data-parallel rank's micro-batches. Raises :class:`ConfigError` for a remainder."""
    if num_micro_batches % dp_size:
        raise ConfigError(
            f"{num_micro_batches} micro-batches a step do not divide over {dp_size} data-parallel "
            "ranks; choose a multiple"
        )
    return num_micro_batches // dp_size


def hosting_bytes(replicas: Sequence[Units]) -> float:
    """:attr:`.StepPlan.window_bytes` of a step of such units."""
    return max((own.window_bytes for own in replicas if HOST in own.recomputed), default=0.0)


def merged_multiple(length_multiple: int, num_replicas: int) -> int:
    """What a micro-batch is padded to a multiple of that so many replicas run together; none for
    one that runs on its own. The replicas share its tokens as context-parallel ranks do.
    """
    return length_multiple * (2 * num_replicas or 1)


class Planner:
    """Plans one step after another: which rank runs which documents in which order.

    ``dp_size`` ranks run N/dp_size micro-batches each. ``length_multiple`` is what a micro-batch's
    length has to be divisible by (TP with sequence parallel, 2 · CP · TP with context parallel);
    padding goes to the tail and is masked. ``selector`` chooses how each micro-batch is divided
    over context-parallel ranks; None is for one rank. ``shaping`` reshapes each packed step;
    ``slicing`` cuts each step's documents into as many micro-batches as it likes. ``experts`` are
    groups of replicas that run micro-batches of the same place together.

    Raises :class:`ConfigError` if N is not divisible by ``dp_size``, S_max not by
    ``length_multiple`` or that not by 2 · CP, or for a packing that ``shaping`` refuses.
    """

    def __init__(
        self,
        stream: Stream,
        packer: Packer,
        cost: Cost,
        *,
        dp_size: int,
        length_multiple: int = 1,
        shaping: Shaping | None = None,
        slicing: Slicing | None = None,
        selector: Selector | None = None,
        experts: ExpertGroups | None = None,
    ) -> None:
        for name, value in (("dp_size", dp_size), ("length_multiple", length_multiple)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; give at least 1")
        for num_micro_batches in packer.limits.numbers:
            each_rank(num_micro_batches, dp_size)
        if shaping is not None:
            shaping.check(packer.name)
        if selector and length_multiple % (2 * selector.cp_size):
            raise ConfigError(
                f"length_multiple {length_multiple} is not divisible by 2 · CP = "
                f"{2 * selector.cp_size}; give a multiple of that"
            )
        if packer.limits.max_tokens % length_multiple:
            raise ConfigError(
                f"max_tokens (S_max) {packer.limits.max_tokens} is no multiple of "
                f"{length_multiple}, so padding may lead above it; give the packer the same "
                "length_multiple"
            )
        self.stream = stream
        self.packer = packer
        self.cost = cost
        self.dp_size = dp_size
        self.length_multiple = length_multiple
        self.shaping = shaping
        self.slicing = slicing
        self.selector = selector
        self.experts = experts
        self.step = 0
        """The step that :meth:`next_plan` plans next."""
        self._steps_read = 0  # steps that the stream has given; more where the packer looks ahead
        self._warn_above_tokens = BACKLOG_STEPS * packer.limits.step_tokens

    @property
    def num_waiting(self) -> int:
        """Documents that have arrived and wait."""
        return len(self.packer.waiting)

    def next_plan(self) -> StepPlan | None:
        """Plans the next step; None when the stream is exhausted and no document waits.

        It has tokens, unless nothing waits and the stream gives no document without being
        exhausted, which a stream of at least a window a step does not. With ``slicing``, such
        steps are left out.
        """
        packed = self._next_documents()
        if packed is None:
            return None
        chains: tuple[tuple[int, ...], ...] = ()
        window_bytes = 0.0
        if self.slicing is not None:
            units = self.slicing.cut(list(chain.from_iterable(packed)), self.step)
            ranks = self._units(units)
            chains = tuple(tuple(replica.chains) for replica in units)
            window_bytes = hosting_bytes(units)
        else:
            ranks = self._ranks(list(map(_whole, packed)))
        num_waiting, waiting_tokens = self._waiting()
        plan = StepPlan(
            step=self.step,
            packing=self.packer.name,
            micro_batches=tuple(map(tuple, ranks)),
            num_waiting=num_waiting,
            waiting_tokens=waiting_tokens,
            chains=chains,
            window_bytes=window_bytes,
        )
        self.step += 1
        return plan

    def skip(self) -> None:
        """Goes past a step, which the stream must have, and leaves out what no later one needs.

        Later plans are as they are after :meth:`next_plan`.
        """
        packed = self._next_documents()
        assert packed is not None
        if self.slicing is not None:
            self.slicing.settle(list(chain.from_iterable(packed)), self.step)
        self._waiting()
        self.step += 1

    def plans(self, num: int) -> Iterator[StepPlan]:
        """Plans ``num`` steps, which the stream must have."""
        for _ in range(num):
            plan = self.next_plan()
            assert plan is not None
            yield plan

    def state_dict(self) -> dict[str, Any]:
        """Everything that later plans depend on, JSON-able."""
        return {
            "step": self.step,
            "steps_read": self._steps_read,
            "packer": self.packer.state_dict(),
            "stream": self.stream.state_dict(),
            **({"slicing": self.slicing.state_dict()} if self.slicing else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken.

        ``dp_size``, ``length_multiple`` and the packer's look-ahead may differ. In a state of
        strategies, which hold nothing back, there is no packer's.

        Raises :class:`CheckpointError` for a state of another stream, packing or N.
        """
        with reading_state("a planner"):
            step = whole_number("step", state["step"], 0, MAX_COUNT)
            steps_read = whole_number(
                "steps_read", state["steps_read"], 0, step + MOST_STEPS_AHEAD + 1
            )
            packer, stream = state["packer"], state["stream"]
        if packer is not None:
            self.packer.load_state_dict(packer)
        if self.slicing is not None:
            self.slicing.load_state_dict(state.get("slicing", {}))
        self.stream.load_state_dict(stream)
        self.step, self._steps_read = step, steps_read

    def _next_documents(self) -> list[list[Document]] | None:
        """As :meth:`_packed`; leaves out steps in which no document arrives.

        Sliced documents may be longer than a step, so that the next one begins some steps later.
        """
        packed = self._packed()
        while self.slicing is not None and packed is not None and not any(packed):
            self.step += 1
            packed = self._packed()
        return packed

    def _packed(self) -> list[list[Document]] | None:
        """The step's documents as the packer places them; None where there is no step."""
        was_exhausted = self.stream.exhausted
        documents = self._read()
        if not was_exhausted or (self._steps_read > self.step and self.packer.waiting):
            return self.packer.pack(documents, self.step)
        return self.packer.flush(self.step) if self.packer.waiting else None

    def _read(self) -> list[Document]:
        """Reads the stream up to the step that the packer looks ahead to."""
        documents: list[Document] = []
        if self._steps_read < self.step and not self.stream.exhausted:
            # Steps have passed since its end, which more epochs have moved.
            self._steps_read = self.stream.step = self.step
        while self._steps_read <= self.step + self.packer.look_ahead and not self.stream.exhausted:
            documents += self.stream.next_step()
            self._steps_read += 1
        return documents

    def _ranks(self, packed: Sequence[Sequence[Span]]) -> list[list[MicroBatchPlan]]:
        """Deals micro-batches out to data-parallel ranks, in running order."""
        micro_batches = self._sharded(
            [self._micro_batch(index, spans) for index, spans in enumerate(packed)]
        )
        if self.packer.in_stream_order:
            ranks = [micro_batches[rank :: self.dp_size] for rank in range(self.dp_size)]
        else:
            ranks = deal(micro_batches, self.dp_size, self.experts)
        if self.shaping is None:
            return ranks
        shaped = self.shaping.shape(
            [[[span.document for span in m.spans] for m in rank] for rank in ranks]
        )
        return self._numbered([list(map(_whole, rank)) for rank in shaped])

    def _numbered(self, ranks: Sequence[Sequence[Sequence[Span]]]) -> list[list[MicroBatchPlan]]:
        every = self._sharded(
            [self._micro_batch(n, spans) for n, spans in enumerate(chain.from_iterable(ranks))]
        )
        left = iter(every)
        return [list(islice(left, len(rank))) for rank in ranks]

    def _units(self, units: Sequence[Units]) -> list[list[MicroBatchPlan]]:
        """Micro-batches of each rank; those that several run together are one and the same."""
        shared: dict[Span, int] = {}
        every: list[MicroBatchPlan] = []
        ranks = []
        for own in units:
            indices = []
            again = own.recomputed or [NOTHING] * len(own.spans)
            for spans, replicas, recomputed in zip(own.spans, own.replicas, again, strict=True):
                index = shared.setdefault(spans[0], len(every)) if replicas else len(every)
                if index == len(every):
                    cut = own.divided and bool(spans) and spans[0].is_slice
                    every.append(self._micro_batch(index, spans, replicas, recomputed, cut))
                indices.append(index)
            ranks.append(indices)
        every = self._sharded(every)
        return [[every[index] for index in indices] for indices in ranks]

    def _micro_batch(
        self,
        index: int,
        spans: Sequence[Span],
        replicas: tuple[int, ...] = (),
        again: Recomputed = NOTHING,
        divided: bool = False,
    ) -> MicroBatchPlan:
        num_tokens = sum([stop - start for _, start, stop in spans])
        multiple = merged_multiple(self.length_multiple, len(replicas))
        multiples = max(1, -(-num_tokens // multiple))
        predicted_us = self.cost.total_us([span.stop for span in spans])
        if spans and spans[0].start:
            predicted_us -= self.cost.document_us(spans[0].start)
        return MicroBatchPlan(
            index=index,
            spans=tuple(spans),
            padded_length=multiples * multiple,
            predicted_us=predicted_us / (len(replicas) or 1),
            replicas=replicas,
            recomputed=again,
            divided=divided,
        )

    def _sharded(self, micro_batches: list[MicroBatchPlan]) -> list[MicroBatchPlan]:
        """Chooses the sharding of each, if there are context-parallel ranks."""
        if self.selector is None:
            return micro_batches
        # Over several replicas both halves of a slice's tokens are of like work.
        own = [m for m in micro_batches if not m.replicas]
        chosen = iter(self.selector.choose_each([m.lengths for m in own]))
        return [m if m.replicas else self._with(m, next(chosen)) for m in micro_batches]

    def _with(self, micro_batch: MicroBatchPlan, chosen: Prediction) -> MicroBatchPlan:
        """Adds the sharding, and the time that all wait for the rank with the slowest attention.

        The cost has each rank do 1/CP of the attention; the slowest one does more. Of a slice's
        attention to the slices before it, each rank has about the same.
        """
        work = self.cost.work([stop - start for _, start, stop in micro_batch.spans])
        waiting_us = work.forward_attention_us * (chosen.forward_imbalance - 1)
        waiting_us += work.backward_attention_us * (chosen.backward_imbalance - 1)
        return MicroBatchPlan(  # not by replace, which takes longer than to choose
            index=micro_batch.index,
            spans=micro_batch.spans,
            padded_length=micro_batch.padded_length,
            predicted_us=micro_batch.predicted_us + waiting_us,
            sharding=chosen.sharding,
            recomputed=micro_batch.recomputed,
            divided=micro_batch.divided,
        )

    def _waiting(self) -> tuple[int, int]:
        """The documents that wait after the step, and their tokens.

        Warns of many once, and again each time that they have doubled.
        """
        waiting = [d for d in self.packer.waiting if d.step <= self.step]  # not those read ahead
        num_tokens = sum([document.length for document in waiting])
        # In stream order nothing is held back: what waits is the rest of a document under way.
        if num_tokens > self._warn_above_tokens and not self.packer.in_stream_order:
            logger.warning(
                "%s, step %d: %d documents with %d tokens wait, %.1f steps' worth; if this goes on "
                "growing, raise S_max (--wlb-max-tokens)%s or lower --wlb-max-age",
                self.packer.name,
                self.step,
                len(waiting),
                num_tokens,
                num_tokens / self.packer.limits.step_tokens,
                ", --wlb-max-step-tokens" if self.packer.limits.max_step_tokens else "",
            )
            self._warn_above_tokens = 2 * num_tokens
        return len(waiting), num_tokens


def _whole(documents: Iterable[Document]) -> list[Span]:
    return [Span(document, 0, document.length) for document in documents]


def assign(
    micro_batches: Sequence[MicroBatchPlan],
    dp_size: int,
    together: int = 1,
    time_us: Callable[[MicroBatchPlan], float] = attrgetter("predicted_us"),
) -> list[list[MicroBatchPlan]]:
    """Gives each rank equally many micro-batches, with nearly equal sums of predicted time.

    In descending order of time each goes to the rank with the least so far that still has a place;
    ties by lowest index, so that all ranks agree. Where so many neighbours run ``together``, what
    they run at once takes the time of the slowest. So as many next to each other in that order go
    to one group at once, the first of them to its rank with the least.
    """
    ranks: list[list[MicroBatchPlan]] = [[] for _ in range(dp_size)]
    loads_us = [0.0] * dp_size
    firsts = range(0, dp_size, together)
    groups = Bins(((0.0, first) for first in firsts), places=len(micro_batches) // dp_size)
    ordered = sorted(micro_batches, key=lambda m: (-time_us(m), m.index))
    for at in range(0, len(ordered), together):
        row = ordered[at : at + together]
        first = groups.place(time_us(row[0]))
        assert first is not None  # There are as many places.
        own = sorted(range(first, first + together), key=loads_us.__getitem__)
        for micro_batch, rank in zip(row, own, strict=True):
            ranks[rank].append(micro_batch)
            loads_us[rank] += time_us(micro_batch)
    return ranks


def deal(
    micro_batches: Sequence[MicroBatchPlan], dp_size: int, experts: ExpertGroups | None = None
) -> list[list[MicroBatchPlan]]:
    """Assigns micro-batches to replicas, and orders those of each.

    Where replicas exchange tokens with experts, those of the same place are of like work, but for
    what experts do, which is even as it is. All replicas of a group run their places in one order:
    that of :func:`run_order`, by mean times.
    """
    if experts is None:
        return [run_order(rank) for rank in assign(micro_batches, dp_size)]
    size = experts.num_replicas

    def own_us(m: MicroBatchPlan) -> float:
        return experts.own_us(m.predicted_us, m.padded_length)

    ranks = assign(micro_batches, dp_size, size, own_us)
    ordered: list[list[MicroBatchPlan]] = []
    for first in range(0, dp_size, size):
        group = ranks[first : first + size]
        sums_us = [sum(m.predicted_us for m in row) for row in zip(*group, strict=True)]
        places = small_at_ends(sorted(range(len(sums_us)), key=lambda at: (sums_us[at], -at)))
        ordered += [[rank[at] for at in places] for rank in group]
    return ordered


def run_order(micro_batches: Sequence[MicroBatchPlan]) -> list[MicroBatchPlan]:
    """Orders micro-batches by :func:`.small_at_ends`, ties by index."""
    return small_at_ends(sorted(micro_batches, key=lambda m: (m.predicted_us, m.index)))
