"""What plans promise, whichever packing makes them: of each step, and of all steps of a run.

Written by what plans hold alone, and by what they are made of: nothing here asks a planner.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import pytest

from megatron_wlb.cost import Cost
from megatron_wlb.plan import Document, MicroBatchPlan, StepPlan
from megatron_wlb.planning.packing import Packer, reads
from megatron_wlb.simulator.step import Simulator


@dataclass
class Promises:
    """Is told of all documents that arrive, and sees the plan of each step in turn."""

    max_tokens: int
    multiple: int = 1
    """What lengths of micro-batches are padded to a multiple of."""
    dp_size: int = 1
    alike: int = 1
    """How many neighbouring replicas meet in each pass."""
    packer: Packer | None = None
    """Who packs whole documents or windows; None where all that arrives runs at once."""
    number: Callable[[int], int] = int
    """N of a step, where the packer alone decides."""
    dealt: bool = False
    """Whether another than the packer says which documents run together."""
    cost: Cost | None = None
    """By which documents are balanced, where that is to be looked at."""
    waits: bool = False
    """Whether context-parallel ranks wait for the slowest, which takes time besides."""
    simulator: Simulator | None = None
    limit_bytes: float = 0.0
    """What no device holds more than, by the simulator."""
    left: dict[tuple[int, int, int], list[Document]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """What has arrived and not run, by corpus, number and epoch; also parts of documents."""
    last_step: int = -1

    def give(self, documents: Iterable[Document]) -> None:
        for document in documents:
            self.left[_which(document)].append(document)

    def see(self, plan: StepPlan) -> None:
        assert plan.step > self.last_step
        self.last_step = plan.step
        self._check_ranks(plan)
        for rank, own in enumerate(plan.micro_batches):
            for m in own:
                self._check_length(plan, rank, m)
        run = _documents(plan)
        assert plan.num_tokens == sum(document.length for document in run) > 0
        assert plan.num_targets == pytest.approx(sum(document.num_targets for document in run))
        for document in run:
            self._take(document)
        self._check_time(plan, run)
        if self.simulator is not None:
            held = self.simulator.plan_memory(plan)
            assert max(one.peak_bytes for one in held) <= self.limit_bytes + 1

    def end(self) -> None:
        """Nothing waits."""
        assert not any(self.left.values())

    def _check_ranks(self, plan: StepPlan) -> None:
        """Each micro-batch is on the replicas that run it, those of several in one order."""
        ranks = plan.micro_batches
        every = {m.index: m for own in ranks for m in own}
        held = Counter(m.index for own in ranks for m in own)
        assert sorted(every) == [*range(len(every))]
        assert held == {index: len(m.replicas) or 1 for index, m in every.items()}
        assert len(ranks) == (len(plan.strategy.replicas) if plan.strategy else self.dp_size)
        for rank, own in enumerate(ranks):
            assert all(m == every[m.index] and rank in (m.replicas or (rank,)) for m in own)
            merged = [m.index for m in own if m.replicas]
            assert [m.index for m in own[: len(merged)]] == merged == sorted(merged)
            assert not merged or plan.chains[rank][0] == len(merged)
        if not plan.chains and not plan.strategy and self.packer is not None:
            numbers = {len(own) for own in ranks}
            assert len(numbers) == 1
            assert self.dealt or numbers == {self.number(plan.step) // self.dp_size}
        for first in range(0, len(ranks), self.alike) if plan.chains else ():
            group = range(first, first + self.alike)
            assert len({plan.chains[rank] for rank in group}) == 1
            assert len({tuple(m.recomputed for m in ranks[rank]) for rank in group}) == 1
            rows = zip(*(ranks[rank] for rank in group), strict=True)
            filled = [any(m.spans for m in row) for row in rows]
            assert all(filled) or filled == [False]

    def _check_length(self, plan: StepPlan, rank: int, m: MicroBatchPlan) -> None:
        most, multiple = self.max_tokens, self.multiple
        if plan.strategy:
            replica = plan.strategy.replicas[rank]
            most, multiple = replica.max_tokens, replica.scheme.length_multiple
        multiple *= 2 * len(m.replicas) or 1
        assert m.padded_length == max(1, -(-m.length // multiple)) * multiple
        assert m.padded_length <= max(most, multiple)  # what several replicas run is no less
        if self.cost is None or self.waits:
            return
        us = self.cost.total_us([span.stop for span in m.spans])
        if m.slice:
            us -= self.cost.document_us(m.slice.start)
        assert m.predicted_us * (len(m.replicas) or 1) == pytest.approx(us)

    def _take(self, document: Document) -> None:
        """Of a document whole ones run as they arrived; of windows parts do, each token once."""
        others = self.left[_which(document)]
        stop = document.offset + document.length
        holding = [d for d in others if d.offset <= document.offset and stop <= d.offset + d.length]
        assert len(holding) == 1
        (found,) = holding
        others.remove(found)
        before = document.offset - found.offset
        behind = found.length - before - document.length
        if self.packer is None or not self.packer.windows:
            assert document == found
        assert document.ends == (found.ends and not behind)
        assert document.targets == found.targets
        if before:
            others.append(found._replace(length=before, ends=False))
        if behind:
            others.append(found._replace(offset=stop, length=behind))

    def _check_time(self, plan: StepPlan, run: list[Document]) -> None:
        """Order, delay, and how full and how balanced a step is."""
        packer, step = self.packer, plan.step
        waiting = [d for some in self.left.values() for d in some if d.step <= step]
        if packer is None or plan.chains:
            assert not waiting and not plan.num_waiting
            assert all(document.step == step for document in run)
            return
        assert all(document.step <= step + packer.look_ahead for document in run)
        if packer.in_stream_order:
            rows = [[s.document for s in m.spans] for turn in zip(*plan.micro_batches, strict=True)
                    for m in turn]  # fmt: skip
            keys = [document.key for row in rows for document in row]
            assert keys == sorted(keys)
            assert all(d.key > keys[-1] for some in self.left.values() for d in some)
            assert {document.step for document in run} == {step}
        elif not self.dealt and self.alike == 1:
            for own in plan.micro_batches:  # small ones fill and drain the pipeline
                _check_rises_and_falls([m.predicted_us for m in own])
        if packer.windows:
            return
        assert plan.num_waiting == len(waiting)
        assert plan.waiting_tokens == sum(document.length for document in waiting)
        if reads(packer.name, "max_age") and not self.dealt:
            self._check_delays(plan, run, waiting)

    def _check_delays(self, plan: StepPlan, run: list[Document], waiting: list[Document]) -> None:
        assert self.packer is not None
        step, limits = plan.step, self.packer.limits.at(plan.step)
        due_step = step - limits.max_age
        micro_batches = [[span.document for span in m.spans] for m in plan]
        for document in waiting:  # beyond its time only where older ones left no room
            if document.step > due_step:
                continue
            for own in micro_batches:
                older = (d for d in own if d.step <= due_step and d.key < document.key)
                assert sum(d.length for d in older) + document.length > self.max_tokens
        cap = limits.step_cap
        if cap is not None and plan.num_tokens > cap and len(run) > 1:
            assert all(document.step <= due_step for document in run)
        if self.cost is None:
            return
        document_us = self.cost.document_us
        loads_us = [sum(document_us(d.length) for d in own) for own in micro_batches]
        for own, load_us in zip(micro_batches, loads_us, strict=True):
            # The lightest came last: then none with room for it had less work.
            others = [(document_us(d.length), d.length) for d in own if d.step > due_step]
            least_us, length = min(others, default=(load_us, 0))
            for other, other_us in zip(micro_batches, loads_us, strict=True):
                if sum(d.length for d in other) + length <= self.max_tokens:
                    assert load_us - least_us <= other_us * (1 + 1e-9) + 1e-9


def _which(document: Document) -> tuple[int, int, int]:
    return document.corpus, document.number, document.epoch


def _documents(plan: StepPlan) -> list[Document]:
    """Those of a step, each of which runs from its first token to its last on one replica, or on
    several that run all of it.
    """
    run = []
    for rank, own in enumerate(plan.micro_batches):
        chains = plan.chains[rank] if plan.chains else ()
        ends = {*accumulate(chains or [1] * len(own))}
        assert not chains or (min(chains) > 0 and max(ends) == len(own))
        under_way: tuple[Document, tuple[int, ...], int] | None = None
        for at, m in enumerate(own, 1):
            assert not any(span.is_slice for span in m.spans[1:])
            assert len(m.spans) <= 1 or not m.replicas
            if under_way is not None:
                assert m.spans and (m.spans[0].document, m.replicas, m.spans[0].start) == under_way
            else:
                assert not m.spans or not m.spans[0].start
            under_way = None
            for span in m.spans:
                assert span.start < span.stop <= span.document.length
                if span.stop < span.document.length:
                    under_way = span.document, m.replicas, span.stop
                elif m.replicas[:1] in ((), (rank,)):
                    run.append(span.document)
            assert at not in ends or under_way is None
    return run


def _check_rises_and_falls(values: list[float]) -> None:
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
