"""Batches that grow in a run's first steps, by Megatron's two rules.

Planning runs ahead of Megatron's loop, so the size of a step's batch is a function of the step
alone.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import shown

LINEAR, SCHEDULE = "--rampup-batch-size", "--step-batch-size-schedule"

_ENTRY = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([KMBT]?):(\d{1,9})", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class _Phase(NamedTuple):
    """Steps of one size."""

    first_step: int
    before: int
    """Windows that arrived before it."""
    size: int


@dataclass(frozen=True)
class Ramp:
    """How many windows arrive in each step, as Megatron's calculators of micro-batches have it."""

    flag: str
    """The flag that asks for it."""
    title: str
    thresholds: tuple[tuple[int, int], ...]
    """Windows from which on, arrived before a step, the step has so many; the first from 0 on."""

    @classmethod
    def linear(cls, start: int, increment: int, samples: int, size: int, multiple: int = 1) -> Ramp:
        """``--rampup-batch-size START INCREMENT SAMPLES``, up to Megatron-LM 0.17.

        The batch has ``start`` windows at first, and ``increment`` more each time that an equal
        share of ``samples`` windows has arrived, up to ``size``. Each batch is rounded down to a
        ``multiple``, as ``--decrease-batch-size-if-needed`` does.

        Raises :class:`ConfigError` for numbers from which Megatron makes no batches.
        """
        given = f"{LINEAR} {start} {increment} {samples}"
        least = {"start": start, "increment": increment, "samples": samples}
        for name, value in least.items():
            if value < 1:
                raise ConfigError(f"{given} has a {name} of {value}; give at least 1")
        if size <= start or (size - start) % increment:
            raise ConfigError(
                f"{given} does not lead to --global-batch-size {size}; let that be the start "
                "and some increments, or leave the ramp out"
            )
        if start < multiple:
            raise ConfigError(
                f"{given} begins below --micro-batch-size × DP = {multiple}, so its first "
                "batch would be rounded down to nothing; begin with more"
            )
        # In floating point, because Megatron rounds so.
        share = samples / ((size - start) // increment)

        def after(arrived: int) -> int:
            grown = start + int(arrived / share) * increment if arrived <= samples else size
            return grown // multiple * multiple

        sizes = sorted({one // multiple * multiple for one in range(start, size + 1, increment)})
        # Where several sizes begin together, the last of them stays.
        thresholds = {bisect_left(range(samples + 2), one, key=after): one for one in sizes}
        rounded = f" by {multiple}" if multiple > 1 else ""
        title = f"{start} {increment} {samples} to {size}{rounded}"
        return cls(LINEAR, title, tuple(thresholds.items()))

    @classmethod
    def schedule(cls, text: str, window: int) -> Ramp:
        """``--step-batch-size-schedule "TOKENS:WINDOWS …"``, from Megatron-LM 0.18 on.

        Tokens may end in K, M, B or T (10³ to 10¹²). Raises :class:`ConfigError` for what Megatron
        makes nothing of, and for batches that shrink.
        """
        given, steps = f'{SCHEDULE} "{shown(text)[1:-1]}"', []
        for word in text.replace(",", " ").split():
            match = _ENTRY.fullmatch(word)
            if match is None:
                raise ConfigError(
                    f'{given} has "{shown(word)[1:-1]}"; give TOKENS:WINDOWS, such as 0:768 '
                    "250B:1536"
                )
            tokens, unit, size = match.groups()
            steps.append((int(float(tokens) * _UNITS[unit.upper()]) // window, int(size)))
        steps.sort()
        if not steps or steps[0][0] != 0:
            raise ConfigError(f"{given} does not begin at 0 tokens; say how batches begin")
        for (before, smaller), (then, larger) in pairwise(steps):
            if before == then or smaller >= larger:
                raise ConfigError(
                    f"{given} goes from {smaller} windows at sample {before} to {larger} at "
                    f"{then}; let batches grow, each time later"
                )
        if not steps[0][1]:
            raise ConfigError(f"{given} begins with batches of nothing; give at least 1")
        title = " ".join(f"{size} from {before}" for before, size in steps)
        return cls(SCHEDULE, title, tuple(steps))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Windows of a step, in ascending order."""
        return tuple(phase.size for phase in self._phases)

    def windows(self, step: int) -> int:
        """Windows that arrive in ``step``."""
        return self._phase(step).size

    def before(self, step: int) -> int:
        """Windows that arrive before ``step``: Megatron's consumed samples."""
        phase = self._phase(step)
        return phase.before + (step - phase.first_step) * phase.size

    def _phase(self, step: int) -> _Phase:
        return self._phases[bisect_right(self._phases, step, key=itemgetter(0)) - 1]

    @cached_property
    def _phases(self) -> list[_Phase]:
        """Phases in order; the last one has no end."""
        phases = [_Phase(0, 0, self.thresholds[0][1])]
        for arrived, size in self.thresholds[1:]:
            first_step, before, smaller = phases[-1]
            num_steps = max(0, -(-(arrived - before) // smaller))
            if not num_steps:  # A step has passed two thresholds.
                phases.pop()
            phases.append(_Phase(first_step + num_steps, before + num_steps * smaller, size))
        return phases
