"""The paper's baseline: windows of fixed length, repacked over several global batches (§3.2)."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, ClassVar, get_args

import numpy as np

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import CheckpointError
from megatron_wlb.plan import Document
from megatron_wlb.planning.packing.base import (
    Limits,
    Packer,
    load_state,
    save_state,
)
from megatron_wlb.planning.packing.original import UNSHAPED_WINDOWS, check_windows, cut_windows
from megatron_wlb.planning.packing.placement import CostTable, rank
from megatron_wlb.planning.packing.settings import Grouping, PackingSettings
from megatron_wlb.reading import (
    MOST_STEPS_AHEAD,
    reading_state,
    shown,
    typed,
    unknown,
    whole_number,
)


class FixedPacker(Packer):
    """What both fixed packings share: k global batches at a time become k · N new windows.

    As Megatron does, the stream is cut every ``window`` tokens; the pieces of k steps are then
    dealt anew to windows by :meth:`_repack`. For this, k - 1 steps are read ahead. Within the k
    steps, groups run in the order of their tokens' mean arrival. The new windows are micro-batches:
    with ``micro_batch_size`` b each has room for b windows of pieces. Where N grows, only steps of
    the same N are repacked together.
    """

    number = "fixed_batches"
    windows = True
    unshaped = UNSHAPED_WINDOWS
    unnumbered = (
        "{} packing balances windows, which other numbers of micro-batches (auto) would divide "
        "anew; use original, hold or wlb, or leave their number fixed"
    )

    def __init__(self, limits: Limits, cost: CostModel, num_batches: int = 1) -> None:
        check_windows(self.name, limits)
        whole_number("fixed_batches", num_batches, 1, MOST_STEPS_AHEAD)
        self.limits = limits
        self.look_ahead = num_batches - 1
        self._costs_us = CostTable(cost, limits)
        self._waiting: list[Document] = []  # in stream order
        self._planned: deque[list[list[Document]]] = deque()  # micro-batches of the next steps

    @classmethod
    def said(cls, settings: PackingSettings) -> Iterable[str]:
        number = settings.fixed_batches
        return (f"{number} batch" + "es" * (number > 1),)

    @abstractmethod
    def _repack(self, windows: list[list[Document]], step: int) -> list[list[list[Document]]]:
        """Repacks the same tokens into as many windows, N for each step from ``step`` on."""

    @property
    def waiting(self) -> Sequence[Document]:
        planned = (d for step in self._planned for micro_batch in step for d in micro_batch)
        return (*planned, *self._waiting)

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        """Returns the next of the repacked steps; documents may have any length."""
        self._waiting += documents
        if not self._planned:
            self._planned.extend(self._plan(step))
        return self._planned.popleft()

    def flush(self, step: int) -> list[list[Document]]:
        return self.pack((), step)

    def state_dict(self) -> dict[str, Any]:
        planned = (d for step in self._planned for micro_batch in step for d in micro_batch)
        sizes = [[len(micro_batch) for micro_batch in step] for step in self._planned]
        return {**save_state(self, waiting=self._waiting, planned=planned), "planned_sizes": sizes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Follows :meth:`Packer.load_state_dict`; settings other than N may differ.

        Steps that were planned already run as planned.
        """
        waiting, planned = load_state(self, state, "waiting", "planned")
        with reading_state("a packing"):
            sizes = typed("planned_sizes", state["planned_sizes"], list[list[int]])
        are_steps = all(len(step) in self.limits.numbers and min(step) >= 0 for step in sizes)
        if not are_steps or sum(map(sum, sizes)) != len(planned):
            raise CheckpointError(
                f"not the state of a packing (planned_sizes {shown(sizes)}); use an intact "
                "checkpoint"
            )
        documents = iter(planned)
        self._planned = deque(
            [[next(documents) for _ in range(size)] for size in step] for step in sizes
        )
        self._waiting = waiting

    def _plan(self, step: int) -> list[list[list[Document]]]:
        """Plans as many steps, up to k, as the waiting documents fill."""
        self.limits = self.limits.at(step)
        size, num_steps = self.limits.num_micro_batches, self.look_ahead + 1
        num_steps = self.limits.num_alike(step, num_steps)
        windows, self._waiting = cut_windows(self._waiting, self.limits, step, num_steps)
        num_filled = sum(map(bool, windows))
        del windows[max(size, -(-num_filled // size) * size) :]
        steps = self._repack(windows, step)
        return sorted(steps, key=lambda step: mean_arrival(chain(*step))) if steps[1:] else steps

    def _balance(self, windows: list[list[Document]]) -> list[list[Document]]:
        """Repacks tokens into as many windows of nearly equal work, in descending order of it."""
        ranking = rank([*chain(*windows)], self._costs_us)
        placement = ranking.place(len(windows), self.limits.micro_batch_tokens)
        work_us = placement.loads_us
        balanced, _ = ranking.take_each(placement)
        pieces = [*cut_into_room(placement.room, ranking.take(placement.left))]
        lengths = np.array([piece.length for _, piece in pieces], dtype=np.int64)
        for (index, piece), piece_us in zip(pieces, self._costs_us.of(lengths), strict=True):
            balanced[index].append(piece)
            work_us[index] += float(piece_us)
        order = sorted(range(len(balanced)), key=work_us.__getitem__, reverse=True)
        return [balanced[index] for index in order]


class FixedGreedyPacker(FixedPacker):
    """Balances fixed windows greedily, over ``num_batches`` global batches.

    In descending order of cost each piece goes to the least loaded window that has room (LPT). The
    few that find no room are cut to fill what room there is. The windows are then grouped into
    steps. ``sorted`` gives each step windows of like work: its imbalance is low, but steps differ.
    ``arrival`` groups those whose tokens arrived together.

    Departure from Equation 1: balanced is the predicted time of the documents, not Σ d² alone.

    Raises :class:`ConfigError` for ``num_batches`` below 1, an unknown grouping, or more tokens a
    step than N windows hold.
    """

    name: ClassVar[str] = "fixed-greedy"
    reads = frozenset({"fixed_batches", "fixed_grouping"})
    tried = (":1", ":2", ":4", ":8")

    def __init__(
        self,
        limits: Limits,
        cost: CostModel,
        num_batches: int = 1,
        grouping: Grouping = "sorted",
    ) -> None:
        super().__init__(limits, cost, num_batches)
        if grouping not in get_args(Grouping):
            raise unknown("grouping", grouping, get_args(Grouping))
        self.grouping = grouping

    @classmethod
    def make(cls, settings: PackingSettings, limits: Limits, cost: CostModel) -> FixedGreedyPacker:
        return cls(limits, cost, settings.fixed_batches, settings.fixed_grouping)

    def _repack(self, windows: list[list[Document]], step: int) -> list[list[list[Document]]]:
        windows = self._balance(windows)
        if self.grouping == "arrival":
            windows.sort(key=mean_arrival)
        size = self.limits.num_micro_batches
        return [windows[first : first + size] for first in range(0, len(windows), size)]


def cut_into_room(room: Sequence[int], left: Iterable[Document]) -> Iterator[tuple[int, Document]]:
    """Cuts ``left`` into pieces that fit, each for the window with the most room.

    All windows together have room for ``left``.
    """
    free_room = [(-tokens, index) for index, tokens in enumerate(room)]  # heap by most room
    heapify(free_room)
    for document in left:
        tail: Document | None = document
        while tail is not None:
            free, index = heappop(free_room)
            assert free < 0, "more tokens than room"
            head, tail = tail, None
            if head.length > -free:
                head, tail = head.cut(-free, head.step)
            yield index, head
            heappush(free_room, (free + head.length, index))


def mean_arrival(documents: Iterable[Document]) -> float:
    """The token-weighted mean step in which ``documents`` arrive; infinite without any."""
    steps = tokens = 0
    for document in documents:
        steps += document.length * document.step
        tokens += document.length
    return steps / tokens if tokens else float("inf")
