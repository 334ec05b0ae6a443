"""Batches that grow in a run's first steps, by Megatron's ``--step-batch-size-schedule``.

Planning runs ahead of Megatron's loop, so the size of a step's batch is a function of the step
alone.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import shown

SCHEDULE = "--step-batch-size-schedule"

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

    title: str
    thresholds: tuple[tuple[int, int], ...]
    """Windows from which on, arrived before a step, the step has so many; the first from 0 on."""

    @classmethod
    def schedule(cls, text: str, window: int) -> Ramp:
        """``--step-batch-size-schedule "TOKENS:WINDOWS …"``.

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
        return cls(title, tuple(steps))

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
