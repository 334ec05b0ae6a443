"""Which packing a run takes by ``--wlb-packing auto``: the one whose steps are the fastest.

Steps of each are simulated on the run's documents, layout and ``--wlb-hardware``, as a dry run
does. Nothing is measured. All ranks come to the same.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_wlb.errors import ConfigError, WLBError
from megatron_wlb.planning.packing import kind_of
from megatron_wlb.planning.packing.settings import is_open
from megatron_wlb.settings.config import Config
from megatron_wlb.settings.packings import CHOSEN, PACKINGS
from megatron_wlb.simulator.baseline import Baseline
from megatron_wlb.simulator.forecast import Command
from megatron_wlb.simulator.trial import Steps

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
    base: Baseline
    """What gains are over."""
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
        return f"{told}. {self.base.said}"


def choose_packing(
    config: Config, num_devices: int, refusals: Callable[[str], Iterable[str]] = lambda name: ()
) -> Choice:
    """Simulates each of :data:`CANDIDATES` that ``config`` can run.

    ``refusals`` are those of others, such as Megatron's script, by the packing's name. S_max is
    what fits memory, if that is less than two windows and none is given. Raises
    :class:`ConfigError` where none can run: why `hold` cannot.
    """
    commands: dict[str, Command] = {}
    gains: dict[str, float] = {}
    refused: dict[str, ConfigError] = {}
    base: Baseline | None = None
    steps: Steps | None = None
    for name in CANDIDATES:
        try:
            for line in refusals(name):
                raise ConfigError(line)
            command = Command.of(with_packing(config, name), num_devices)
            steps = steps or command.steps
            command = dataclasses.replace(command, steps=steps)  # all share the documents
            base = base or command.baseline()
            gains[name] = command.outcome(base).speedup(base.original)
            commands[name] = command
        except ConfigError as error:
            refused[name] = error
    whole_first = sorted(CANDIDATES, key=lambda name: kind_of(name).windows)
    if not gains or base is None:
        raise refused[whole_first[0]]
    chosen, *others = (name for name in whole_first if name in gains)
    for name in others:
        if gains[name] > WORTH * gains[chosen]:
            chosen = name
    reasons = {name: str(error) for name, error in refused.items()}
    net_gain = gains[chosen] * base.net_speedup(base.original)
    return Choice(chosen, _lowered(commands[chosen]), gains, base, net_gain, reasons)


def _lowered(command: Command) -> int | None:
    """S_max where memory has room for less than the packing has by itself; None otherwise."""
    max_tokens, usual = command.setting.max_tokens, 2 * command.run.micro_batch_tokens
    return max_tokens if is_open(command.config.wlb) and max_tokens < usual else None


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
    """``config`` with the packing that :func:`choose_packing` takes, if it is still to be chosen,
    and with an S_max that fits memory, if none is given; strategies have neither. A run goes on
    with those of the settings ``saved`` in its checkpoint.

    Tells which and why, and whether stock Megatron is predicted to be faster.
    """
    wlb = config.wlb
    if not is_open(wlb):
        return config
    before, chosen = saved(), wlb.wlb_packing == CHOSEN
    packing = before.get("wlb_packing")
    if packing in PACKINGS and (chosen or packing == wlb.wlb_packing):
        taken = with_packing(config, packing, wlb.wlb_max_tokens or before["wlb_max_tokens"])
        s_max = taken.wlb.wlb_max_tokens
        of_tokens = "" if s_max is None else f", and an S_max of {s_max} tokens"
        if chosen:
            tell(f"--wlb-packing auto goes on with the checkpoint's packing, {packing}{of_tokens}")
        return taken
    if not chosen:
        try:
            lowered = _lowered(Command.of(config, num_devices))
        except WLBError:  # what is wrong, the run says itself
            lowered = None
        if lowered is not None:
            tell(f"S_max is {lowered} tokens, which fit memory; --wlb-max-tokens gives another")
        return with_packing(config, wlb.wlb_packing, lowered)
    choice = choose_packing(config, num_devices, refusals)
    tell(str(choice))
    if choice.net_gain < 1:
        tell(
            "stock Megatron with all communication overlapped that it can overlap is predicted to "
            f"be {1 / choice.net_gain:.2f} times as fast: plans turn that off; consider running "
            "without --wlb-… flags, or a layout of less TP and EP"
        )
    return with_packing(config, choice.packing, choice.max_tokens)
