"""Batches that grow in a run's first steps, by Megatron's two rules.

Planning runs ahead of Megatron's loop, so the size of a step's batch is a function of the step
alone.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from operator import itemgetter
from typing import ClassVar, NamedTuple

from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import shown


class _Phase(NamedTuple):
    """Steps of one size."""

    first_step: int
    before: int
    """Windows that arrived before it."""
    size: int


class Ramp(ABC):
    """How many windows arrive in each step, as Megatron's calculators of micro-batches have it."""

    flag: ClassVar[str]
    """The flag that asks for it."""

    @property
    @abstractmethod
    def _end(self) -> int:
        """The windows after which, one more arrived, batches grow no more."""

    @abstractmethod
    def _after(self, consumed: int) -> int:
        """The size of a batch after so many windows; it never falls."""

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
        phases = [_Phase(0, 0, self._after(0))]
        while (last := phases[-1]).size < self._after(self._end + 1):
            grows = range(1, (self._end - last.before) // last.size + 1)
            num = 1 + bisect_left(grows, True, key=partial(self._grown, last))
            before = last.before + num * last.size
            phases.append(_Phase(last.first_step + num, before, self._after(before)))
        return phases

    def _grown(self, phase: _Phase, num_steps: int) -> bool:
        return self._after(phase.before + num_steps * phase.size) > phase.size


@dataclass(frozen=True)
class LinearRamp(Ramp):
    """``--rampup-batch-size START INCREMENT SAMPLES``, up to Megatron-LM 0.17.

    The batch has ``start`` windows at first, and ``increment`` more each time that an equal share
    of ``samples`` windows has arrived, up to ``size``.

    Raises :class:`ConfigError` for numbers from which Megatron makes no batches.
    """

    start: int
    increment: int
    samples: int
    size: int
    multiple: int = 1
    """Each batch is rounded down to a multiple of it, as ``--decrease-batch-size-if-needed`` does.
    """
    flag: ClassVar[str] = "--rampup-batch-size"

    def __post_init__(self) -> None:
        given = f"--rampup-batch-size {self.start} {self.increment} {self.samples}"
        least = {"start": self.start, "increment": self.increment, "samples": self.samples}
        for name, value in least.items():
            if value < 1:
                raise ConfigError(f"{given} has a {name} of {value}; give at least 1")
        more = self.size - self.start
        if more <= 0 or more % self.increment:
            raise ConfigError(
                f"{given} does not lead to --global-batch-size {self.size}; let that be the start "
                "and some increments, or leave the ramp out"
            )
        if self.start < self.multiple:
            raise ConfigError(
                f"{given} begins below --micro-batch-size × DP = {self.multiple}, so its first "
                "batch would be rounded down to nothing; begin with more"
            )

    def __str__(self) -> str:
        rounded = f" by {self.multiple}" if self.multiple > 1 else ""
        return f"{self.start} {self.increment} {self.samples} to {self.size}{rounded}"

    @property
    def _end(self) -> int:
        return self.samples

    def _after(self, consumed: int) -> int:
        size = self.size
        if consumed <= self.samples:
            # In floating point, because Megatron rounds so.
            share = self.samples / ((self.size - self.start) // self.increment)
            size = self.start + int(consumed / share) * self.increment
        return size // self.multiple * self.multiple


_ENTRY = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([KMBT]?):(\d{1,9})", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class StepRamp(Ramp):
    """``--step-batch-size-schedule "TOKENS:WINDOWS …"``, from Megatron-LM 0.18 on."""

    thresholds: tuple[tuple[int, int], ...]
    """Windows from which on, arrived before a step, the step has so many; the first from 0 on."""
    flag: ClassVar[str] = "--step-batch-size-schedule"

    @classmethod
    def parse(cls, text: str, window: int) -> StepRamp:
        """Reads the flag, of which tokens may end in K, M, B or T (10³ to 10¹²).

        Raises :class:`ConfigError` for what Megatron makes nothing of, and for batches that shrink.
        """
        given, steps = f'{cls.flag} "{shown(text)[1:-1]}"', []
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
        return cls(tuple(steps))

    def __str__(self) -> str:
        return " ".join(f"{size} from {before}" for before, size in self.thresholds)

    @property
    def _end(self) -> int:
        return self.thresholds[-1][0] - 1

    def _after(self, consumed: int) -> int:
        at = bisect_right(self.thresholds, consumed, key=itemgetter(0)) - 1
        return self.thresholds[at][1]
