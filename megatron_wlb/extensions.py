"""What only some runs need: found here by name, and loaded when a setting asks for it.

Nothing that every run needs is here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

EXTENSIONS = {
    # --wlb-strategies, wlb plan --strategies: a megatron_wlb.planning.extension.Extension
    "strategies": "megatron_wlb.strategies.extension:Strategies",
}
"""``MODULE:NAME`` of each."""


def load(name: str) -> Any:
    """What the table names."""
    return named(EXTENSIONS[name])


def named(place: str) -> Any:
    """What ``MODULE:NAME`` is."""
    module, _, found = place.partition(":")
    return getattr(import_module(module), found)
