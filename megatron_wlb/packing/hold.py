"""The packing that this project adds: hold back the fewest heaviest documents."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import ConfigError
from megatron_wlb.packing.base import Limits, load_state, save_state
from megatron_wlb.packing.placement import CostTable, Placement, Ranking, rank
from megatron_wlb.plan import Document

DELAY_PRICE, LOOK_AHEAD_DELAY_PRICE = 0.15, 0.45
"""Imbalance that a whole step's tokens are worth for one step of delay. Both are where the mean
imbalance comes to 1.006-1.008 on the reference lengths with 4 micro-batches of two windows; with
documents to draw on from later steps the same balance is had for less delay."""

TOLERANCE = 0.002
"""A choice that is at most so much worse than any other could be is taken: 0.2 % of a step."""
MAX_PLACEMENTS = 8
"""Where S_max binds, the best of so many choices is taken: each costs a whole placement."""
WORTH_TRYING = 0.1
"""Choices whose delay alone makes them so much worse than the best one's bound are not tried."""
WORTH_EARLY_WINDOWS = 1 / 8
"""Only documents of at least this length run before they arrive: shorter ones have no more work a
token than those at hand."""


class _Choice(NamedTuple):
    """What may run in a step: all but the heaviest, and some documents before they arrive."""

    bound: float
    """The score cannot be lower."""
    num_held: int
    early_delay: float
    """What running early delays, in steps × tokens of a mean step."""
    early: list[int]
    """Ranks."""


class _Candidate(NamedTuple):
    """A document that may run early; the lowest ones do the most work for their delay."""

    us_per_delay: float
    """Negative."""
    rank: int
    cost_us: float
    delay: float
    """If run now, in steps × tokens of a mean step."""


@dataclass(frozen=True, slots=True)
class _AtHand:
    """What a step may run."""

    ranking: Ranking
    rest: Sequence[int]
    """Ranks of documents that are neither due nor read ahead."""
    candidates: list[_Candidate]
    due_tokens: int
    rest_tokens: int
    step: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a choice comes to."""

    score: float
    early: list[int]
    """Ranks of what is to run early."""
    held: list[int]
    """Ranks of what is held back."""
    running: Ranking
    placement: Placement
    """Of ``running``; what is left of it had no room."""


class HoldPacker:
    """Runs every document at once but the few that are too heavy for the others to balance.

    A step takes at least as long as its heaviest document, and at best its mean micro-batch. So
    what is worth holding back are the ``k`` heaviest documents at hand, ``W_1 ≥ W_2 ≥ …``, for some
    k: the others, placed on the least loaded micro-batches (LPT), then have an imbalance of about
    ``max(1, N · W_{k+1} ÷ Σ_{j>k} W_j)``. Balance is weighed against delay: the k with the lowest

        score = max(τ, imbalance) + delay_price · (tokens that wait ÷ tokens of a mean step)

    No queues and no thresholds: what is heavy depends on what else is at hand. Held documents run
    as soon as enough of their like have arrived. ``tau`` is the imbalance below which nothing is
    gained: 1 balances as well as is worth its delay, infinity holds nothing back.

    With ``look_ahead`` K, heavy documents that arrive up to K steps later may run now, beside heavy
    ones at hand that would have to wait otherwise: those with the most work for their tokens ×
    steps first, as long as they improve the score. Running early counts as delay.

    * Documents that have waited ``max_age`` steps are placed first, oldest first. Others up to the
      weight of the heaviest of them may then run as well: they do not make the step longer.
    * Above ``limits.max_step_tokens`` the lightest documents are held back too (but not due ones):
      they are the easiest to balance later.
    * At least one document runs, even if that has yet to arrive.

    The bound is reached where S_max does not bind and documents are many, so that one placement is
    enough for most steps: choices are tried in order of their bounds, and the first that is within
    ``TOLERANCE`` of the next one's bound is taken.

    Raises :class:`ConfigError` for ``tau`` below 1, a negative ``delay_price`` or ``look_ahead``.
    """

    name: ClassVar[str] = "hold"
    in_stream_order: ClassVar[bool] = False

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
            raise ConfigError(f"tau is {tau}; give at least 1, which is perfect balance")
        if look_ahead < 0:
            raise ConfigError(f"look_ahead is {look_ahead}; give at least 0")
        if delay_price is None:
            delay_price = LOOK_AHEAD_DELAY_PRICE if look_ahead else DELAY_PRICE
        if not delay_price >= 0:
            raise ConfigError(f"delay_price is {delay_price}; give at least 0")
        self.limits = limits
        self.tau = tau
        self.delay_price = delay_price
        self.look_ahead = look_ahead
        self._costs_us = CostTable(cost, limits)
        self._held: list[Document] = []
        self._ahead: list[Document] = []  # yet to arrive, in stream order

    @property
    def waiting(self) -> Sequence[Document]:
        return (*self._held, *self._ahead)

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        self.limits.check(documents)
        self._ahead += documents
        present = self._held + self._arrived(step)
        if not present and self._ahead:
            present = self._arrived(self._ahead[0].step)
        at_hand = self._at_hand(present, step)
        best = self._choose(at_hand)
        left = at_hand.ranking.take(best.held) + best.running.take(best.placement.left)
        self._held = [document for document in left if document.step <= step]
        self._give_back(at_hand.ranking.take(best.early), [d for d in left if d.step > step])
        return best.running.take_each(best.placement.micro_batches)

    def flush(self, step: int) -> list[list[Document]]:
        limits = self.limits
        ranking = rank(self.waiting, self._costs_us, step - limits.max_age)
        placement = ranking.place(limits.num_micro_batches, limits.max_tokens)
        self._held, self._ahead = ranking.take(placement.left), []
        return ranking.take_each(placement.micro_batches)

    def state_dict(self) -> dict[str, Any]:
        return save_state(self, held=self._held, ahead=self._ahead)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Packer.load_state_dict`; all settings but N may differ from the saved run's."""
        held, ahead = load_state(self, state, "held", "ahead")
        self.limits.check(held + ahead)
        self._held, self._ahead = held, ahead

    def _arrived(self, step: int) -> list[Document]:
        """Takes from the documents read ahead those that have arrived by ``step``."""
        count = bisect_right(self._ahead, step, key=lambda document: document.step)
        arrived = self._ahead[:count]
        del self._ahead[:count]
        return arrived

    def _at_hand(self, present: list[Document], step: int) -> _AtHand:
        shortest, step_tokens = WORTH_EARLY_WINDOWS * self.limits.window, self.limits.step_tokens
        ahead = [document for document in self._ahead if document.length >= shortest]
        ranking = rank(present + ahead, self._costs_us, step - self.limits.max_age)
        lengths, num_due = ranking.lengths, ranking.num_due
        rest: Sequence[int] = range(num_due, len(lengths))
        candidates = []
        if ahead:
            for number in rest:
                if ranking.order[number] >= len(present):
                    arrival = ranking.documents[ranking.order[number]].step
                    cost_us, delay = (
                        ranking.costs_us[number],
                        lengths[number] * (arrival - step) / step_tokens,
                    )
                    candidates.append(_Candidate(-cost_us / delay, number, cost_us, delay))
            candidates.sort()
            rest = [number for number in rest if ranking.order[number] < len(present)]
        due_tokens = sum(lengths[:num_due])
        ahead_tokens = sum([document.length for document in ahead])
        rest_tokens = sum(lengths) - due_tokens - ahead_tokens
        return _AtHand(ranking, rest, candidates, due_tokens, rest_tokens, step)

    def _give_back(self, early: list[Document], left: list[Document]) -> None:
        """Takes from the documents read ahead what ran early; puts back what had been taken."""
        keys = {document.key for document in early}
        back = [document for document in left if document.key not in keys]
        back.sort(key=lambda document: document.key)
        ran = keys - {document.key for document in left}
        if ran:
            shortest = WORTH_EARLY_WINDOWS * self.limits.window
            self._ahead = [d for d in self._ahead if d.length < shortest or d.key not in ran]
        self._ahead[:0] = back

    def _choose(self, at_hand: _AtHand) -> _Outcome:
        """The best that was found."""
        apart = max(1, self.limits.num_micro_batches // 16)
        tried: list[int] = []
        best: _Outcome | None = None
        # Most often the first few choices are enough: others have bounds above the limit.
        for margin, is_last in ((TOLERANCE, False), (WORTH_TRYING, True)):
            choices = sorted(self._choices(at_hand, margin))
            limit = math.inf if is_last else choices[0].bound + margin
            for choice in choices:
                enough = min(choice.bound, limit) + TOLERANCE
                if best and (best.score <= enough or len(tried) == MAX_PLACEMENTS):
                    return best
                if choice.bound > limit:
                    break
                if any(abs(choice.num_held - other) < apart for other in tried):
                    continue  # Where S_max binds, a neighbour is hardly better.
                outcome = self._place(at_hand, choice)
                if best is None or outcome.score < best.score:
                    best = outcome
                tried.append(choice.num_held)
            if best and best.score <= limit + TOLERANCE:
                break
        assert best  # There is always a first choice.
        return best

    def _choices(self, at_hand: _AtHand, margin: float) -> Iterator[_Choice]:
        """Numbers of documents to hold back, from 0 on.

        Until delay alone makes further ones worse by ``margin`` than the best one's bound.
        """
        limits, price = self.limits, self.delay_price
        num_micro_batches, step_tokens = limits.num_micro_batches, limits.step_tokens
        stride = max(1, num_micro_batches // 64)
        ranking, rest, candidates = at_hand.ranking, at_hand.rest, at_hand.candidates
        too_many_tokens = at_hand.due_tokens + at_hand.rest_tokens - limits.token_cap
        heaviest_due_us = max(ranking.costs_us[: ranking.num_due], default=0.0)
        ahead_us = sum([candidate.cost_us for candidate in candidates])
        total_us = sum(ranking.costs_us) - ahead_us
        held_tokens = 0
        best_bound = math.inf
        for num_held in range(0, max(1, len(rest)), stride):
            waiting = max(held_tokens, too_many_tokens) / step_tokens
            least = num_micro_batches * heaviest_due_us / ((total_us + ahead_us) or 1.0)
            if max(self.tau, least) + price * waiting > best_bound + margin:
                return
            heaviest_us = heaviest_due_us
            if rest:
                heaviest_us = max(heaviest_due_us, ranking.costs_us[rest[num_held]])
            total_us = max(total_us, heaviest_us)  # a sum that rounding may have brought below
            early, early_us, early_delay = (
                self._early(candidates, heaviest_us, total_us) if candidates else ([], 0.0, 0.0)
            )
            imbalance = num_micro_batches * heaviest_us / ((total_us + early_us) or 1.0)
            bound = max(self.tau, imbalance) + price * (waiting + early_delay)
            yield _Choice(bound, num_held, early_delay, early)
            best_bound = min(best_bound, bound)
            for number in rest[num_held : num_held + stride]:
                total_us -= ranking.costs_us[number]
                held_tokens += ranking.lengths[number]

    def _early(
        self, candidates: list[_Candidate], heaviest_us: float, total_us: float
    ) -> tuple[list[int], float, float]:
        """What of ``candidates`` is worth running beside others of ``total_us``; its cost, delay.

        As long as the heaviest document makes the step longer than its mean micro-batch, and one
        more brings more balance than its delay costs. None is heavier than the heaviest.
        """
        needed_us = self.limits.num_micro_batches * heaviest_us
        early: list[int] = []
        sum_us = sum_delay = 0.0
        for _, number, cost_us, delay in candidates:
            present_us = total_us + sum_us
            if needed_us * cost_us <= self.delay_price * delay * present_us**2:
                break
            with_us = present_us + cost_us
            if cost_us <= heaviest_us and with_us <= needed_us:
                gain = needed_us / present_us - needed_us / with_us
                if gain > self.delay_price * delay:
                    early.append(number)
                    sum_us, sum_delay = sum_us + cost_us, sum_delay + delay
        return early, sum_us, sum_delay

    def _place(self, at_hand: _AtHand, choice: _Choice) -> _Outcome:
        """Places what is due, then the others as the choice says and the cap allows."""
        limits, ranking, rest = self.limits, at_hand.ranking, at_hand.rest
        chosen, held = rest[choice.num_held :], [*rest[: choice.num_held]]
        tokens, cap = at_hand.due_tokens + at_hand.rest_tokens, limits.max_step_tokens
        if choice.early:
            chosen = sorted([*chosen, *choice.early])
            tokens += sum([ranking.lengths[number] for number in choice.early])
        if cap is not None and tokens > cap:
            chosen, too_many = _within(chosen, ranking.lengths, cap, at_hand.due_tokens)
            held += too_many
        if isinstance(chosen, range) and not ranking.num_due:
            running = ranking.without_heaviest(choice.num_held)
        else:
            running = ranking.only([*range(ranking.num_due), *chosen])
        placement = running.place(limits.num_micro_batches, limits.max_tokens)
        waiting = running.take(placement.left)
        held_tokens = sum([ranking.lengths[number] for number in held])
        held_tokens += sum([d.length for d in waiting if d.step <= at_hand.step])
        delay = choice.early_delay + held_tokens / limits.step_tokens
        score = max(self.tau, placement.imbalance) + self.delay_price * delay
        return _Outcome(score, choice.early, held, running, placement)


def _within(
    ranks: Sequence[int], lengths: Sequence[int], cap: int, tokens: int
) -> tuple[list[int], list[int]]:
    """Those of ``ranks`` that fit under ``cap`` besides ``tokens``, but at least one; the others.

    From the heaviest on.
    """
    fits: list[int] = []
    too_many: list[int] = []
    for number in ranks:
        if tokens + lengths[number] <= cap or not tokens:
            fits.append(number)
            tokens += lengths[number]
        else:
            too_many.append(number)
    return fits, too_many
