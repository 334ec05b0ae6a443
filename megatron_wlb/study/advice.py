"""The rule for what is recommended, one for every table that recommends something.

It recommends the fastest that stays within the limit of delay. Speeds are over `original`, to the
three digits that tables print. Between equals the least delay decides, then the least S_max, then
`original`.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_wlb.errors import ConfigError
from megatron_wlb.simulator.trial import Outcome

MAX_DELAY_STEPS = 1.0
"""The most mean delay of a token, if nothing else is asked for. WLB-LLM's is 0.5; to have about as
many tokens in every step takes more (:attr:`Packer.most_of_a_step`)."""
DIGITS = 3
"""Digits behind the point of speeds over `original`."""


def steps_of(delay_steps: float) -> str:
    """A delay in words."""
    return f"{delay_steps:g} step{'s' * (delay_steps != 1)}"


def check_max_delay(max_delay_steps: float) -> None:
    """Raises :class:`ConfigError` for a limit that is none."""
    if not max_delay_steps >= 0:
        raise ConfigError(f"--max-delay is {max_delay_steps:g}; give at least 0 steps")


def recommended(
    outcomes: Sequence[Outcome], max_delay_steps: float, original: Outcome
) -> Outcome | None:
    """The fastest of ``outcomes`` within the limit, of those that fit memory if any does; None if
    all are beyond it.
    """
    within = [one for one in outcomes if one.delay_steps <= max_delay_steps]
    within = [one for one in within if not one.out_of_memory] or within
    return min(
        within, key=lambda one: (*preference(one, original), one is not original), default=None
    )


def nothing_fits(fastest: Outcome) -> str:
    """Says that even the fastest of what fits best does not fit memory."""
    return (
        f"Nothing that was tried fits memory: {fastest.title}, {fastest.out_of_memory}. Use more "
        "GPUs, or a larger TP, CP or PP."
    )


def preference(outcome: Outcome, base: Outcome) -> tuple[float, ...]:
    """The key that sorts the best first; printed speeds are over ``base``."""
    speed = round(outcome.speedup(base), DIGITS)
    return -speed, outcome.delay_steps, outcome.longest_tokens


def gain(outcome: Outcome, original: Outcome, name: str = "original") -> str:
    """Says how much faster an outcome is than ``original``, which is called ``name``, how that
    varies, and where it comes from.
    """
    speedup = outcome.speedup(original)
    said = f"{speedup:.{DIGITS}f} × the work a second of {name}, simulated"
    pairs = [*zip(outcome.mfu_by_part, original.mfu_by_part, strict=True)]
    ratios = [ours / theirs for ours, theirs in pairs]
    low, high = min(ratios), max(ratios)
    remarks = []
    if len(ratios) < 2:
        said += " (too few steps to say how that varies)"
    else:
        said += f" ({low:.{DIGITS}f} to {high:.{DIGITS}f} in parts of the steps)"
        if speedup - 1 <= high - low:
            remarks.append("which is less than it varies by, so original may do as well")
    if speedup > 1 and original.imbalance / outcome.imbalance - 1 < 0.5 * (speedup - 1):
        cause = "the order in which micro-batches run, and on which rank,"
        if outcome.setting.kind.slices:
            cause = "slices, with which the pipeline fills and drains sooner,"
        remarks.append(f"which comes from {cause} rather than from their balance")
    return ", ".join([said, *remarks])
