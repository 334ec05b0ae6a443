"""Attention kernels for packed documents, behind one Protocol."""

from megatron_wlb.runtime.gpt.attention.kernels.base import Demand, Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.kernels.choose import (
    CANDIDATES,
    ChosenKernel,
    agreed_kernel,
    check_kernel,
    choose_kernel,
)

__all__ = [
    "CANDIDATES",
    "ChosenKernel",
    "Demand",
    "Segments",
    "VarlenKernel",
    "agreed_kernel",
    "check_kernel",
    "choose_kernel",
]
