"""Packings: which documents run in a step, and with which others in a micro-batch."""

from __future__ import annotations

from megatron_wlb.packing.base import Packer
from megatron_wlb.packing.metrics import Meter, PackingMetrics
from megatron_wlb.packing.settings import (
    CUTS_AT_WINDOWS,
    PACKINGS,
    PackingSettings,
    check_numbers,
    check_shaping,
    packer,
    reads,
    unread,
)

__all__ = [
    "CUTS_AT_WINDOWS",
    "PACKINGS",
    "Meter",
    "Packer",
    "PackingMetrics",
    "PackingSettings",
    "check_numbers",
    "check_shaping",
    "packer",
    "reads",
    "unread",
]
