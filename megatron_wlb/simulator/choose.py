"""Which packing a run takes by ``--wlb-packing auto``: the one whose steps are the fastest.

:func:`~megatron_wlb.simulator.forecast.forecast` simulates steps of each on the run's documents,
layout and ``--wlb-hardware``. Nothing is measured. All ranks come to the same.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from megatron_wlb.errors import ConfigError
from megatron_wlb.settings.config import Config
from megatron_wlb.settings.packings import CHOSEN
from megatron_wlb.simulator.forecast import Forecast, forecast

logger = logging.getLogger(__name__)

CANDIDATES = ("original", "hold", "slim")
"""From the plainest on. `wlb` and the fixed packings are the papers'; `hold` is faster."""
WORTH = 1.02
"""By how much a packing must be faster than those before it."""


@dataclass(frozen=True)
class Choice:
    """A packing, and why."""

    packing: str
    gains: Mapping[str, float]
    """Work a second over `original`'s, simulated, for each that can run."""
    net_gain: float
    """The same for the chosen one, over `original` with all that stock Megatron may overlap."""
    refused: Mapping[str, str]
    """Why the others cannot run."""

    def __str__(self) -> str:
        gains = ", ".join(f"{name} {gain:.2f}x" for name, gain in self.gains.items())
        told = f"--wlb-packing auto takes {self.packing}: work a second (simulated) {gains}"
        for name, reason in self.refused.items():
            told += f"; not {name}: {reason.splitlines()[0]}"
        return told


def choose_packing(
    config: Config, num_devices: int, refusals: Callable[[str], Iterable[str]] = lambda name: ()
) -> Choice:
    """Simulates each of :data:`CANDIDATES` that ``config`` can run.

    ``refusals`` are those of others, such as Megatron's script, by the packing's name. Raises
    :class:`ConfigError` where none can run: why `original` cannot.
    """
    found: dict[str, Forecast] = {}
    refused: dict[str, ConfigError] = {}
    for name in CANDIDATES:
        try:
            for line in refusals(name):
                raise ConfigError(line)
            found[name] = forecast(with_packing(config, name), num_devices, [*found.values()][:1])
        except ConfigError as error:
            refused[name] = error
    if not found:
        raise refused[CANDIDATES[0]]
    gains = {name: one.speedup for name, one in found.items()}
    chosen = next(iter(gains))
    for name, gain in gains.items():
        if gain > WORTH * gains[chosen]:
            chosen = name
    reasons = {name: str(error) for name, error in refused.items()}
    return Choice(chosen, gains, found[chosen].net_speedup, reasons)


def with_packing(config: Config, packing: str) -> Config:
    """The same settings with another packing."""
    return dataclasses.replace(config, wlb=dataclasses.replace(config.wlb, wlb_packing=packing))


def settled(
    config: Config,
    num_devices: int,
    refusals: Callable[[str], Iterable[str]] = lambda name: (),
    tell: Callable[[str], object] = logger.info,
) -> Config:
    """``config`` with the packing that :func:`choose_packing` takes, if it is still to be chosen;
    strategies have none.

    Tells which and why, and whether stock Megatron is predicted to be faster.
    """
    if config.wlb.wlb_packing != CHOSEN or config.wlb.wlb_strategies is not None:
        return config
    choice = choose_packing(config, num_devices, refusals)
    tell(str(choice))
    if choice.net_gain < 1:
        tell(
            "stock Megatron with all communication overlapped that it can overlap is predicted to "
            f"be {1 / choice.net_gain:.2f} times as fast: plans turn that off; consider running "
            "without --wlb-… flags, or a layout of less TP and EP"
        )
    return with_packing(config, choice.packing)
