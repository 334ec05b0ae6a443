"""Megatron on a CPU: whether it is asked for, and is on."""

from __future__ import annotations

import torch

from megatron_wlb.errors import ConfigError

_installed = False


def installed() -> bool:
    """Whether this process runs under the emulation."""
    return _installed


def note(is_on: bool) -> None:
    """Says so: :mod:`megatron_wlb.runtime.emulation.cpu` does."""
    global _installed
    _installed = is_on


def device_for(requested: str) -> str:
    """``cuda`` or ``cpu``; for ``auto`` ``cuda`` wherever there is a GPU.

    Raises :class:`ConfigError` if a GPU was asked for where there is none.
    """
    has_gpu = torch.cuda.is_available()
    if requested == "cuda" and not has_gpu:
        raise ConfigError(
            "--wlb-device is cuda, but torch sees no GPU; use --wlb-device cpu to run under the "
            "CPU emulation"
        )
    if requested == "auto":
        return "cuda" if has_gpu else "cpu"
    return requested
