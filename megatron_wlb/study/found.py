"""What a search of layouts has found: what can run, what cannot, and what is best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from megatron_wlb.cost import Parallelism, Recompute
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.baseline import Baseline
from megatron_wlb.simulator.trial import Outcome
from megatron_wlb.study.advice import preference

Why: TypeAlias = Literal["topology", "divisibility", "batch and schedule", "memory"]
DEFAULT_WINDOWS = 2.0
"""S_max in windows with which layouts are refined, where it fits."""


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot run."""

    parallelism: Parallelism
    num_micro_batches: int
    recompute: Recompute
    why: Why
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A layout that can run, by the coarse pass."""

    scenario: Run
    max_tokens: int
    """The largest S_max that fits."""
    mfu: float
    """The MFU of even micro-batches of an average mix of documents, or of the first steps in
    slices; only ranks layouts."""
    slices: bool = False
    """Whether it is a layout for slices."""

    @property
    def place(self) -> tuple[Parallelism, int]:
        """The layout and N: slices have another memory limit there than whole documents."""
        return self.scenario.parallelism, self.scenario.num_micro_batches

    @property
    def layout(self) -> Hashable:
        return self.place, self.scenario.recompute

    @property
    def windows(self) -> float:
        """S_max that layouts are refined with, in windows."""
        return min(DEFAULT_WINDOWS, self.max_tokens / self.scenario.window)


@dataclass(frozen=True)
class Choice:
    """A layout with a packing and an S_max, simulated over many steps."""

    candidate: Candidate
    outcome: Outcome

    @property
    def fits(self) -> bool:
        return not self.outcome.out_of_memory


@dataclass(frozen=True)
class Search:
    """What was found."""

    ranked: tuple[Choice, ...]
    """By :func:`~megatron_wlb.study.advice.preference`, so the fastest first; those above the
    limit of delay come after all others, and those that ran out of memory last."""
    candidates: tuple[Candidate, ...]
    """Every layout that can run, by the coarse pass, fastest first; the first were refined."""
    rejected: tuple[Rejected, ...]
    max_delay: float
    base: Baseline
    """What gains of the best are over: `original` in the same layout."""

    @property
    def best(self) -> Choice:
        return self.ranked[0]

    @cached_property
    def num_simulated(self) -> int:
        """Layouts with their N and recomputation that were simulated with documents."""
        return len({choice.candidate.layout for choice in self.ranked})

    @cached_property
    def original(self) -> Choice | None:
        """The fastest with `original` packing that fits."""
        return _original(self.ranked)

    def is_beside(self, choice: Choice) -> bool:
        """Whether it has the layout and the batch of the best, so that gains are over ``base``."""
        return choice.candidate.place == self.best.candidate.place

    @cached_property
    def layouts(self) -> list[Choice]:
        """The best of each layout with its N and recomputation."""
        return first_of_each(self.ranked, lambda choice: choice.candidate.layout)

    @cached_property
    def of_each(self) -> list[Choice]:
        """The best that was simulated with each packing, in whichever layout."""
        return first_of_each(self.ranked, lambda choice: choice.outcome.title)

    @cached_property
    def packings(self) -> list[Choice]:
        """The other packings on the best layout, each with its best S_max of those tried."""
        here = filter(self.is_beside, self.ranked)
        return first_of_each(here, lambda choice: choice.outcome.title)[1:]


def ranked(choices: Sequence[Choice], max_delay: float) -> list[Choice]:
    """Ranks choices: what fits first, then what keeps the limit, then the fastest."""
    base = (_original(choices) or max(choices, key=lambda c: c.outcome.mfu)).outcome

    def order(choice: Choice) -> tuple[object, ...]:
        outcome = choice.outcome
        return (
            not choice.fits,
            outcome.delay_steps > max_delay,
            preference(outcome, base),
            not outcome.setting.is_plain,
            outcome.setting.max_tokens,
            _order(choice.candidate.scenario),
            outcome.title,
        )

    return sorted(choices, key=order)


def coarse_order(candidate: Candidate) -> tuple[object, ...]:
    return -candidate.mfu, _order(candidate.scenario)


def first_of_each(choices: Iterable[Choice], kind: Callable[[Choice], Hashable]) -> list[Choice]:
    first: dict[Hashable, Choice] = {}
    for choice in choices:
        first.setdefault(kind(choice), choice)
    return [*first.values()]


def _original(choices: Sequence[Choice]) -> Choice | None:
    plain = [c for c in choices if c.outcome.setting.is_plain and c.fits]
    return max(plain, key=lambda choice: choice.outcome.mfu, default=None)


def _order(scenario: Run) -> tuple[int, ...]:
    """Settles ties: the simplest layout first."""
    p = scenario.parallelism
    sizes = p.pp_size, p.vpp_size, p.cp_size, p.tp_size, p.ep_size, scenario.num_micro_batches
    return *sizes, p.stage_layers is not None


def by_reason(rejected: Sequence[Rejected]) -> dict[str, int]:
    """Number of rejected layouts by reason, most first."""
    return dict(Counter(str(one.why) for one in rejected).most_common())
