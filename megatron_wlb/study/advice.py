"""The rule for what is recommended, one for every table that recommends something.

It recommends the fastest that stays within the limit of delay. Speeds are over `original`, to the
three digits that tables print. Between equals the least delay decides, then the least S_max, then
`original`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron_wlb.errors import ConfigError

T = TypeVar("T")

MAX_DELAY_STEPS = 1.0
"""The most mean delay of a token, if nothing else is asked for. WLB-LLM's is 0.5; to have about as
many tokens in every step takes more (:attr:`Packer.most_of_a_step`)."""
UNFIT = "original, which does not fit memory"
"""What gains are said to be over, where a run of `original` could not be."""
DIGITS = 3
"""Digits behind the point of speeds over `original`."""
PARTS = 4
"""Number of parts in a row that steps are divided into, to see how a gain varies."""


@dataclass(frozen=True)
class Option(Generic[T]):
    """One row of a table."""

    of: T
    work_rate: float
    """Work ÷ time, in a unit that only compares."""
    work_rate_by_part: tuple[float, ...]
    """The work rate of each part of the steps."""
    delay_steps: float
    imbalance: float
    max_tokens: int
    """Longest micro-batch."""
    sliced: bool = False
    """Whether documents run in slices."""

    def speedup(self, original: Option[T]) -> float:
        return self.work_rate / original.work_rate if original.work_rate else 1.0

    def range_over_parts(self, original: Option[T]) -> tuple[float, float] | None:
        """Lowest and highest speed-up over the parts of the steps; None for fewer than two."""
        pairs = [*zip(self.work_rate_by_part, original.work_rate_by_part, strict=False)]
        ratios = [ours / theirs for ours, theirs in pairs if theirs]
        return (min(ratios), max(ratios)) if len(ratios) > 1 else None


def steps_of(delay_steps: float) -> str:
    """A delay in words."""
    return f"{delay_steps:g} step{'s' * (delay_steps != 1)}"


def check_max_delay(max_delay_steps: float) -> None:
    """Raises :class:`ConfigError` for a limit that is none."""
    if not max_delay_steps >= 0:
        raise ConfigError(f"--max-delay is {max_delay_steps:g}; give at least 0 steps")


def recommended(
    options: Sequence[Option[T]], max_delay_steps: float, original: Option[T] | None = None
) -> Option[T] | None:
    """The fastest of ``options`` within the limit; None if all are beyond it.

    Speeds are over ``original``, or over the first option if that is not given.
    """
    base = original or options[0]
    within = [option for option in options if option.delay_steps <= max_delay_steps]
    return min(
        within, key=lambda option: (*preference(option, base), option is not original), default=None
    )


def preference(option: Option[T], base: Option[T]) -> tuple[float, ...]:
    """The key that sorts the best first; printed speeds are over ``base``."""
    return -round(option.speedup(base), DIGITS), option.delay_steps, option.max_tokens


def gain(
    option: Option[T], original: Option[T], how: str = "modelled", *, fits: bool = True
) -> str:
    """Says how much faster ``option`` is, how that varies, and where it comes from; ``fits`` is
    whether a run of ``original`` could be.
    """
    speedup = option.speedup(original)
    said = f"{speedup:.{DIGITS}f} × the work a second of {'original' if fits else UNFIT}"
    spread = option.range_over_parts(original)
    if spread is None:
        said += f", {how} (too few steps to say how that varies)"
    else:
        said += f", {how} ({spread[0]:.{DIGITS}f} to {spread[1]:.{DIGITS}f} in parts of the steps)"
    remarks = []
    if spread is not None and speedup - 1 <= spread[1] - spread[0]:
        remarks.append("which is less than it varies by, so original may do as well")
    by_balance = original.imbalance / option.imbalance
    if speedup > 1 and by_balance - 1 < 0.5 * (speedup - 1):
        cause = "the order in which micro-batches run, and on which rank,"
        if option.sliced:
            cause = "slices, with which the pipeline fills and drains sooner,"
        remarks.append(f"which comes from {cause} rather than from their balance")
    return ", ".join([said, *remarks])


def by_part(work: Iterable[float], times_us: Iterable[float]) -> tuple[float, ...]:
    """Work ÷ time of each of :data:`PARTS` parts of consecutive steps, or of each step."""
    steps = [*zip(work, times_us, strict=True)]
    num = min(PARTS, len(steps))
    rates = []
    for part in range(num):
        chosen = steps[part * len(steps) // num : (part + 1) * len(steps) // num]
        part_us = sum(us for _, us in chosen)
        rates.append(sum(done for done, _ in chosen) / part_us if part_us else 0.0)
    return tuple(rates)
