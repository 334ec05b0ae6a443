"""Packings: which documents run in a step, and with which others in a micro-batch."""

from __future__ import annotations

from megatron_wlb.planning.packing.base import Packer
from megatron_wlb.planning.packing.settings import (
    PackingSettings,
    check_numbers,
    check_shaping,
    kind_of,
    numbers_by_step,
    packer,
    reads,
    simulates,
    unread,
)
from megatron_wlb.settings.packings import PACKINGS

__all__ = [
    "PACKINGS",
    "Packer",
    "PackingSettings",
    "check_numbers",
    "check_shaping",
    "kind_of",
    "numbers_by_step",
    "packer",
    "reads",
    "simulates",
    "unread",
]
