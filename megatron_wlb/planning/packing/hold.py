"""The packing that this project adds: hold back the fewest heaviest documents."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document
from megatron_wlb.planning.packing.base import (
    BALANCED,
    Limits,
    Packer,
    load_state,
    save_state,
)
from megatron_wlb.planning.packing.placement import CostTable, Placement, Ranking, rank
from megatron_wlb.reading import MOST_STEPS_AHEAD, real_number, whole_number

if TYPE_CHECKING:
    from megatron_wlb.planning.packing.settings import PackingSettings


DELAY_PRICE, LOOK_AHEAD_DELAY_PRICE = 0.15, 0.45
"""Imbalance that a whole step's tokens are worth for one step of delay. Both are where the mean
imbalance comes to 1.006-1.008 on the reference lengths with 4 micro-batches of two windows, where
steps have any number of tokens; with documents to draw on from later steps the same balance is had
for less delay."""

TOLERANCE = 0.002
"""A choice that is at most so much worse than any other could be is taken: 0.2 % of a step."""
MAX_PLACEMENTS = 8
"""The number of choices that are placed where S_max binds: each costs a whole placement."""
WORTH_TRYING = 0.1
"""Choices whose delay alone makes them so much worse than the best one's bound are not tried."""
WORTH_EARLY_WINDOWS = 1 / 8
"""Only documents of at least this length run before they arrive: shorter ones have no more work a
token than those at hand."""


class _Choice(NamedTuple):
    """What may run in a step: all but the heaviest, and some documents before they arrive."""

    bound: float
    """What the score cannot be below."""
    num_held: int
    early_delay: float
    """The delay that running early adds, in steps × tokens of a mean step."""
    early: list[int]
    """Numbers of documents in :attr:`HoldPacker._heavy_ahead`."""


_Candidate: TypeAlias = tuple[int, float, float]
"""A document that may run early: its number in :attr:`HoldPacker._heavy_ahead`, its cost in µs, and
its delay if run now, in steps × tokens of a mean step."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a choice comes to."""

    score: float
    early: list[int]
    """Numbers of the documents that are to run early, as in :class:`_Choice`."""
    running: Ranking
    placement: Placement
    """Where ``running`` is placed; what is left of it had no room."""


class HoldPacker(Packer):
    """Runs every document at once but the few that are too heavy for the others to balance.

    Held back are the ``k`` heaviest documents at hand, ``W_1 ≥ W_2 ≥ …``: the others, placed on the
    least loaded micro-batches (LPT), then have an imbalance of about
    ``max(1, N · W_{k+1} ÷ Σ_{j>k} W_j)``. It is the k with the lowest

        score = max(τ, imbalance) + delay_price · (tokens that wait ÷ tokens of a mean step)

    ``tau`` is the imbalance below which nothing is gained: 1 balances as well as is worth its
    delay, infinity holds nothing back.

    With ``look_ahead`` K, heavy documents that arrive up to K steps later may run now, beside heavy
    ones at hand that would have to wait otherwise: those with the most work for their tokens ×
    steps first, as long as they improve the score. Running early counts as delay.

    * Documents that have waited ``max_age`` steps are placed first, oldest first. Others up to the
      weight of the heaviest of them may then run as well: they do not make the step longer.
    * Above ``limits.max_step_tokens`` the lightest documents are held back too (but not due ones).
      Its default is 1.05 mean steps: while heavy documents wait, light ones that waited take their
      place, so steps have about as many tokens (standard deviation ÷ mean 0.10 to 0.14 on the
      built-in distributions, 0.27 to 0.58 without).
    * At least one document runs, even if that has yet to arrive.

    Choices are tried in order of their bounds, and the first that is within ``TOLERANCE`` of the
    next one's bound is taken: most often the first.

    Raises :class:`ConfigError` for ``tau`` below 1, a negative ``delay_price`` or ``look_ahead``.
    """

    name: ClassVar[str] = "hold"
    most_of_a_step = 1.05
    reads = BALANCED | {"tau", "delay_price", "look_ahead"}
    number = "look_ahead"
    least = 0

    def __init__(
        self,
        limits: Limits,
        cost: CostModel,
        tau: float = 1.0,
        *,
        delay_price: float | None = None,
        look_ahead: int = 0,
    ) -> None:
        if not tau >= 1:
            raise ConfigError(f"--wlb-hold-tau is {tau}; give at least 1, which is perfect balance")
        whole_number("look_ahead", look_ahead, 0, MOST_STEPS_AHEAD)
        if delay_price is None:
            delay_price = LOOK_AHEAD_DELAY_PRICE if look_ahead else DELAY_PRICE
        real_number("delay_price", delay_price)
        self.limits = limits
        self.tau = tau
        self.delay_price = delay_price
        self.look_ahead = look_ahead
        self._costs_us = CostTable(cost, limits)
        self._held: list[Document] = []
        # Yet to arrive, in stream order: those that may run early, and those too short for it.
        self._heavy_ahead: list[Document] = []
        self._light_ahead: list[Document] = []

    @classmethod
    def make(cls, settings: PackingSettings, limits: Limits, cost: CostModel) -> HoldPacker:
        s = settings
        return cls(limits, cost, s.tau, delay_price=s.delay_price, look_ahead=s.look_ahead)

    @classmethod
    def said(cls, settings: PackingSettings) -> Iterable[str]:
        if settings.tau != 1:
            yield f"tau {settings.tau:g}"
        if settings.delay_price is not None:
            yield f"price {settings.delay_price:g}"
        if settings.look_ahead:
            yield f"look-ahead {settings.look_ahead}"
        if settings.max_step_tokens == 0:
            yield "any step"

    @property
    def waiting(self) -> Sequence[Document]:
        return (*self._held, *self._heavy_ahead, *self._light_ahead)

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        self.limits = self.limits.at(step)
        self.limits.check(documents)
        present = self._held + self._arrived(documents, step)
        if not present and self.waiting:
            present = self._arrived((), min(document.step for document in self.waiting))
        best = self._choose(present, step)
        micro_batches, left = best.running.take_each(best.placement)
        if best.early:
            early = set(best.early)
            self._heavy_ahead = [d for i, d in enumerate(self._heavy_ahead) if i not in early]
        self._held = [document for document in left if document.step <= step]
        self._give_back([document for document in left if document.step > step])
        return micro_batches

    def flush(self, step: int) -> list[list[Document]]:
        self.limits = limits = self.limits.at(step)
        ranking = rank(self.waiting, self._costs_us, step - limits.max_age)
        placement = ranking.place(limits.num_micro_batches, limits.max_tokens, limits.step_cap)
        micro_batches, self._held = ranking.take_each(placement)
        self._heavy_ahead, self._light_ahead = [], []
        return micro_batches

    def state_dict(self) -> dict[str, Any]:
        ahead = sorted(self._heavy_ahead + self._light_ahead, key=_key)
        return save_state(self, held=self._held, ahead=ahead)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Follows :meth:`Packer.load_state_dict`; settings other than N may differ."""
        held, ahead = load_state(self, state, "held", "ahead")
        self.limits.check(held + ahead)
        self._held, self._heavy_ahead, self._light_ahead = held, [], []
        self._read_ahead(ahead)

    def _arrived(self, documents: Sequence[Document], step: int) -> list[Document]:
        """Collects the documents that have arrived by ``step``, read ahead or given now."""
        arrived = []
        for ahead in (self._heavy_ahead, self._light_ahead):
            count = bisect_right(ahead, step, key=_step)
            arrived += ahead[:count]
            del ahead[:count]
        count = bisect_right(documents, step, key=_step)
        self._read_ahead(documents[count:])
        return [*arrived, *documents[:count]]

    def _read_ahead(self, documents: Sequence[Document]) -> None:
        shortest = WORTH_EARLY_WINDOWS * self.limits.window
        self._heavy_ahead += [d for d in documents if d.length >= shortest]
        self._light_ahead += [d for d in documents if d.length < shortest]

    def _give_back(self, documents: Sequence[Document]) -> None:
        """Keeps the documents that have yet to arrive and did not run after all."""
        if documents:
            self._read_ahead(documents)
            self._heavy_ahead.sort(key=_key)
            self._light_ahead.sort(key=_key)

    def _choose(self, present: list[Document], step: int) -> _Outcome:
        """Finds the best choice."""
        ranking = rank(present, self._costs_us, step - self.limits.max_age)
        candidates = self._candidates(step)
        apart = max(1, self.limits.num_micro_batches // 16)
        tried: list[int] = []
        best: _Outcome | None = None
        # Most often the first few choices are enough: others have bounds above the limit.
        for margin, is_last in ((TOLERANCE, False), (WORTH_TRYING, True)):
            choices = sorted(self._choices(ranking, candidates, margin))
            limit = math.inf if is_last else choices[0].bound + margin
            for choice in choices:
                enough = min(choice.bound, limit) + TOLERANCE
                if best and (best.score <= enough or len(tried) == MAX_PLACEMENTS):
                    return best
                if choice.bound > limit:
                    break
                if any(abs(choice.num_held - other) < apart for other in tried):
                    continue  # Where S_max binds, a neighbour is hardly better.
                outcome = self._place(ranking, choice)
                if best is None or outcome.score < best.score:
                    best = outcome
                tried.append(choice.num_held)
            if best and best.score <= limit + TOLERANCE:
                break
        assert best  # There is always a first choice.
        return best

    def _candidates(self, step: int) -> list[_Candidate]:
        """Ranks what may run early: the most work for its delay first."""
        if not self._heavy_ahead:
            return []
        lengths = np.array([document.length for document in self._heavy_ahead])
        steps = np.array([document.step for document in self._heavy_ahead])
        costs_us = self._costs_us.of(lengths)
        delays = lengths * (steps - step) / self.limits.step_tokens
        order = np.argsort(-costs_us / delays, kind="stable")
        columns = order.tolist(), costs_us[order].tolist(), delays[order].tolist()
        return [*zip(*columns, strict=True)]

    def _choices(
        self, ranking: Ranking, candidates: list[_Candidate], margin: float
    ) -> Iterator[_Choice]:
        """Makes a choice for each number of documents to hold back, from 0 on.

        Until delay alone makes further ones worse by ``margin`` than the best one's bound.
        """
        limits, price, num_due = self.limits, self.delay_price, ranking.num_due
        num_micro_batches, step_tokens = limits.num_micro_batches, limits.step_tokens
        stride = max(1, num_micro_batches // 64)
        costs_us, lengths = ranking.costs_us, ranking.lengths
        too_many_tokens = int(lengths.sum()) - limits.token_cap
        heaviest_due_us = max(costs_us[:num_due].tolist(), default=0.0)
        ahead_us = sum([cost_us for _, cost_us, _ in candidates])
        total_us = float(costs_us.sum())
        held_tokens = 0
        best_bound = math.inf
        for first in range(num_due, max(num_due + 1, len(costs_us)), stride):
            waiting = max(held_tokens, too_many_tokens) / step_tokens
            least = num_micro_batches * heaviest_due_us / ((total_us + ahead_us) or 1.0)
            if max(self.tau, least) + price * waiting > best_bound + margin:
                return
            heaviest_us = max([heaviest_due_us, *costs_us[first : first + 1].tolist()])
            total_us = max(total_us, heaviest_us)  # a sum that rounding may have brought below
            early, early_us, early_delay = (
                self._early(candidates, heaviest_us, total_us) if candidates else ([], 0.0, 0.0)
            )
            imbalance = num_micro_batches * heaviest_us / ((total_us + early_us) or 1.0)
            bound = max(self.tau, imbalance) + price * (waiting + early_delay)
            yield _Choice(bound, first - num_due, early_delay, early)
            best_bound = min(best_bound, bound)
            total_us -= sum(costs_us[first : first + stride].tolist())
            held_tokens += sum(lengths[first : first + stride].tolist())

    def _early(
        self, candidates: list[_Candidate], heaviest_us: float, total_us: float
    ) -> tuple[list[int], float, float]:
        """Picks what is worth running early beside others of ``total_us``; its cost and delay.

        Each brings more balance than its delay costs; none is heavier than the heaviest.
        """
        needed_us, price = self.limits.num_micro_batches * heaviest_us, self.delay_price
        early: list[int] = []
        present_us, sum_delay = total_us, 0.0
        for number, cost_us, delay in candidates:
            if needed_us * cost_us <= price * delay * present_us**2:
                break
            with_us = present_us + cost_us
            if cost_us <= heaviest_us and with_us <= needed_us:
                gain = needed_us / present_us - needed_us / with_us
                if gain > price * delay:
                    early.append(number)
                    present_us, sum_delay = with_us, sum_delay + delay
        return early, present_us - total_us, sum_delay

    def _place(self, ranking: Ranking, choice: _Choice) -> _Outcome:
        """Places what is due, then the others as the choice says and the cap allows."""
        limits, num_due, num_present = self.limits, ranking.num_due, len(ranking.documents)
        running = ranking.without(num_due, num_due + choice.num_held)
        if choice.early:
            early = [self._heavy_ahead[number] for number in choice.early]
            running = running.beside(early, self._costs_us)
        placement = running.place(limits.num_micro_batches, limits.max_tokens, limits.step_cap)
        capacity = limits.num_micro_batches * limits.max_tokens
        waiting_tokens = int(ranking.lengths.sum()) - (capacity - sum(placement.room))
        if choice.early:
            has_room = placement.index_of < limits.num_micro_batches
            waiting_tokens += int(running.lengths[has_room & (running.order >= num_present)].sum())
        delay = choice.early_delay + waiting_tokens / limits.step_tokens
        score = max(self.tau, placement.imbalance) + self.delay_price * delay
        return _Outcome(score, choice.early, running, placement)


def _step(document: Document) -> int:
    return document.step


def _key(document: Document) -> tuple[int, int]:
    return document.key
