"""Attention kernels for packed documents, behind one Protocol."""

from megatron_wlb.runtime.attention.kernels.base import Demand, Segments, VarlenKernel
from megatron_wlb.runtime.attention.kernels.choose import CANDIDATES, check_kernel, choose_kernel

__all__ = [
    "CANDIDATES",
    "Demand",
    "Segments",
    "VarlenKernel",
    "check_kernel",
    "choose_kernel",
]
