"""Attention kernels for packed documents, behind one Protocol."""

from megatron_wlb.runtime.gpt.attention.kernels.kernel import Demand, Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.kernels.selection import (
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
