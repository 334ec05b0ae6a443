"""Batches that grow in a run's first steps: Megatron's ``--rampup-batch-size``.

Planning runs ahead of Megatron's loop, so the size of a step's batch is a function of the step
alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import NamedTuple

from megatron_wlb.errors import ConfigError


class _Phase(NamedTuple):
    """Steps of one size."""

    first_step: int
    before: int
    """Windows that arrived before it."""
    size: int


@dataclass(frozen=True)
class Ramp:
    """How many windows arrive in each step, by the rule of Megatron's calculator of micro-batches.

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
        while (last := phases[-1]).size < self._after(self.samples + 1):
            grows = range(1, (self.samples - last.before) // last.size + 1)
            num = 1 + bisect_left(grows, True, key=partial(self._grown, last))
            before = last.before + num * last.size
            phases.append(_Phase(last.first_step + num, before, self._after(before)))
        return phases

    def _grown(self, phase: _Phase, num_steps: int) -> bool:
        return self._after(phase.before + num_steps * phase.size) > phase.size

    def _after(self, consumed: int) -> int:
        """The size of a batch after so many windows."""
        size = self.size
        if consumed <= self.samples:
            # In floating point, because Megatron rounds so.
            share = self.samples / ((self.size - self.start) // self.increment)
            size = self.start + int(consumed / share) * self.increment
        return size // self.multiple * self.multiple
