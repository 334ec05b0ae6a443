"""Which packing a run takes by ``--wlb-packing auto``: the one whose steps are the fastest.

:func:`~megatron_wlb.simulator.forecast.forecast` simulates steps of each on the run's documents,
layout and ``--wlb-hardware``. Nothing is measured. All ranks come to the same.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.packing import kind_of
from megatron_wlb.settings.config import Config
from megatron_wlb.settings.packings import CHOSEN, PACKINGS
from megatron_wlb.simulator.forecast import Forecast, forecast

logger = logging.getLogger(__name__)

CANDIDATES = ("original", "hold", "slim")
"""From the plainest on. `wlb` and the fixed packings are the papers'; `hold` is faster."""
WORTH = 1.02
"""By how much a packing must be faster than a plainer one, or one that cuts documents than those
that cut none."""


@dataclass(frozen=True)
class Choice:
    """A packing, and why."""

    packing: str
    max_tokens: int | None
    """S_max as memory allows it, where that is less than the packing has by itself."""
    gains: Mapping[str, float]
    """Work a second over `original`'s, simulated, for each that can run."""
    net_gain: float
    """The same for the chosen one, over `original` with all that stock Megatron may overlap."""
    refused: Mapping[str, str]
    """Why the others cannot run."""

    def __str__(self) -> str:
        gains = ", ".join(f"{name} {gain:.2f}x" for name, gain in self.gains.items())
        told = f"--wlb-packing auto takes {self.packing}: work a second (simulated) {gains}"
        if self.max_tokens is not None:
            told += f"; S_max is {self.max_tokens} tokens, which fit memory"
        for name, reason in self.refused.items():
            told += f"; not {name}: {reason.splitlines()[0]}"
        return told


def choose_packing(
    config: Config, num_devices: int, refusals: Callable[[str], Iterable[str]] = lambda name: ()
) -> Choice:
    """Simulates each of :data:`CANDIDATES` that ``config`` can run.

    ``refusals`` are those of others, such as Megatron's script, by the packing's name. S_max is
    what fits memory, if that is less than two windows and none is given. Raises
    :class:`ConfigError` where none can run: why `hold` cannot.
    """
    found: dict[str, Forecast] = {}
    refused: dict[str, ConfigError] = {}
    for name in CANDIDATES:
        try:
            for line in refusals(name):
                raise ConfigError(line)
            known = [*found.values()][:1]
            found[name] = forecast(with_packing(config, name), num_devices, known, fits=True)
        except ConfigError as error:
            refused[name] = error
    whole_first = sorted(CANDIDATES, key=lambda name: kind_of(name).windows)
    if not found:
        raise refused[whole_first[0]]
    gains = {name: one.speedup for name, one in found.items()}
    chosen, *others = (name for name in whole_first if name in gains)
    for name in others:
        if gains[name] > WORTH * gains[chosen]:
            chosen = name
    reasons = {name: str(error) for name, error in refused.items()}
    taken, wlb = found[chosen], config.wlb
    by_default = not (wlb.wlb_max_tokens or wlb.wlb_memory_gib or kind_of(chosen).windows)
    lowered = taken.max_tokens < 2 * config.training.micro_batch_size * config.data.seq_length
    max_tokens = taken.max_tokens if by_default and lowered else None
    return Choice(chosen, max_tokens, gains, taken.net_speedup, reasons)


def with_packing(config: Config, packing: str, max_tokens: int | None = None) -> Config:
    """The same settings with another packing, and with this S_max if one is given."""
    max_tokens = max_tokens or config.wlb.wlb_max_tokens
    wlb = dataclasses.replace(config.wlb, wlb_packing=packing, wlb_max_tokens=max_tokens)
    return dataclasses.replace(config, wlb=wlb)


def settled(
    config: Config,
    num_devices: int,
    refusals: Callable[[str], Iterable[str]] = lambda name: (),
    tell: Callable[[str], object] = logger.info,
    saved: Callable[[], Mapping[str, Any]] = dict,
) -> Config:
    """``config`` with the packing that :func:`choose_packing` takes, if it is still to be chosen;
    strategies have none. A run goes on with that of the settings ``saved`` in its checkpoint, and
    with their S_max unless another is given.

    Tells which and why, and whether stock Megatron is predicted to be faster.
    """
    if config.wlb.wlb_packing != CHOSEN or config.wlb.wlb_strategies is not None:
        return config
    before = saved()
    if (packing := before.get("wlb_packing")) in PACKINGS:
        taken = with_packing(config, packing, config.wlb.wlb_max_tokens or before["wlb_max_tokens"])
        s_max = taken.wlb.wlb_max_tokens
        of_tokens = "" if s_max is None else f", and an S_max of {s_max} tokens"
        tell(f"--wlb-packing auto goes on with the checkpoint's packing, {packing}{of_tokens}")
        return taken
    choice = choose_packing(config, num_devices, refusals)
    tell(str(choice))
    if choice.net_gain < 1:
        tell(
            "stock Megatron with all communication overlapped that it can overlap is predicted to "
            f"be {1 / choice.net_gain:.2f} times as fast: plans turn that off; consider running "
            "without --wlb-… flags, or a layout of less TP and EP"
        )
    return with_packing(config, choice.packing, choice.max_tokens)
