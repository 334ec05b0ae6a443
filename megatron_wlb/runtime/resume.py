"""What is said where a run that resumes is not quite the run that was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_wlb.config import flag_of


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """``--lr 0.001 there, 0.5 here; …``: the settings of ``now`` that are others in ``saved``.

    Empty where none is. A setting that ``saved`` lacks is None there.
    """
    return "; ".join(
        f"{flag_of(name)} {saved.get(name)} there, {value} here"
        for name, value in now.items()
        if saved.get(name) != value
    )
