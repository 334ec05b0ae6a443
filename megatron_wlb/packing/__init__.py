"""Packings: which documents run in a step, and with which others in a micro-batch."""

from __future__ import annotations

from megatron_wlb.packing.base import Limits, Packer
from megatron_wlb.packing.fixed import FixedGreedyPacker
from megatron_wlb.packing.hold import HoldPacker
from megatron_wlb.packing.metrics import Meter, PackingMetrics, measure
from megatron_wlb.packing.original import OriginalPacker
from megatron_wlb.packing.settings import (
    CUTS_AT_WINDOWS,
    PACKINGS,
    PackingSettings,
    check_shaping,
    packer,
)
from megatron_wlb.packing.solver import FixedSolverPacker
from megatron_wlb.packing.wlb import WLBPacker

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
    "PackingSettings",
    "WLBPacker",
    "check_shaping",
    "measure",
    "packer",
]
