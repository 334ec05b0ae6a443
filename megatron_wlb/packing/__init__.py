"""Packings: which documents run in a step, and with which others in a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import ConfigError
from megatron_wlb.packing.base import Limits, Packer
from megatron_wlb.packing.fixed import FixedGreedyPacker, Grouping
from megatron_wlb.packing.hold import HoldPacker
from megatron_wlb.packing.metrics import Meter, PackingMetrics, measure
from megatron_wlb.packing.original import OriginalPacker
from megatron_wlb.packing.solver import SOLVER_LIMIT, FixedSolverPacker
from megatron_wlb.packing.wlb import WLBPacker
from megatron_wlb.reading import unknown

__all__ = [
    "CUTS_AT_WINDOWS",
    "PACKINGS",
    "FixedGreedyPacker",
    "FixedSolverPacker",
    "HoldPacker",
    "Limits",
    "Meter",
    "OriginalPacker",
    "Packer",
    "PackingMetrics",
    "WLBPacker",
    "check_shaping",
    "measure",
    "packer",
]

PACKINGS = ("original", "fixed-greedy", "fixed-solver", "wlb", "hold")

CUTS_AT_WINDOWS = frozenset({"original", "fixed-greedy", "fixed-solver"})
"""Packings that take documents of any length and cut them at the windows of the stream, as Megatron
does. Cut before, at windows of their own, long documents would be cut twice and their work
understated. Their micro-batches stay windows: :func:`check_shaping`."""


def check_shaping(name: str) -> None:
    """Raises :class:`ConfigError` for a packing whose steps may not be shaped.

    Shaping makes micro-batches of any size up to S_max, so it would end fixed windows.
    """
    if name in CUTS_AT_WINDOWS:
        raise ConfigError(
            f"micro-batches of {name} packing are windows, so they cannot be shaped; use hold or "
            "wlb, or leave shaping off"
        )


def packer(
    name: str,
    *,
    num_micro_batches: int,
    window: int,
    cost: CostModel,
    max_tokens: int | None = None,
    length_multiple: int = 1,
    step_tokens: int | None = None,
    max_step_tokens: int | None = None,
    max_age: int = 12,
    queue_thresholds: Sequence[int] = (),
    tau: float = 1.0,
    delay_price: float | None = None,
    look_ahead: int = 0,
    fixed_batches: int = 1,
    fixed_grouping: Grouping = "sorted",
    solver_limit: float = SOLVER_LIMIT,
) -> Packer:
    """The packing called ``name``, empty; one of :data:`PACKINGS`.

    All settings of all packings are taken, so that a run can pass its whole configuration; each
    packing uses its own. ``max_tokens`` is two windows if not given, and rounded down to a multiple
    of ``length_multiple``, so that padding leads to no more; for the others see
    :class:`Limits`, :class:`FixedGreedyPacker`, :class:`FixedSolverPacker`, :class:`WLBPacker` and
    :class:`HoldPacker`.

    Raises :class:`ConfigError` for an unknown name (the nearest one is named) or settings that
    cannot work.
    """
    if length_multiple < 1:
        raise ConfigError(f"length_multiple is {length_multiple}; give at least 1")
    s_max = 2 * window if max_tokens is None else max_tokens
    if window <= s_max < -(-window // length_multiple) * length_multiple:
        raise ConfigError(
            f"max_tokens (S_max) {s_max} has no room for a window of {window} padded to a multiple "
            f"of {length_multiple} (TP, 2 · CP); raise it"
        )
    limits = Limits(
        num_micro_batches,
        window,
        s_max - s_max % length_multiple if s_max >= window else s_max,
        num_micro_batches * window if step_tokens is None else step_tokens,
        max_step_tokens,
        max_age,
    )
    packers: dict[str, Callable[[], Packer]] = {
        "original": lambda: OriginalPacker(limits),
        "fixed-greedy": lambda: FixedGreedyPacker(limits, cost, fixed_batches, fixed_grouping),
        "fixed-solver": lambda: FixedSolverPacker(limits, cost, fixed_batches, solver_limit),
        "wlb": lambda: WLBPacker(limits, cost, queue_thresholds),
        "hold": lambda: HoldPacker(
            limits, cost, tau, delay_price=delay_price, look_ahead=look_ahead
        ),
    }
    if name not in packers:
        raise unknown("packing", name, packers)
    return packers[name]()
