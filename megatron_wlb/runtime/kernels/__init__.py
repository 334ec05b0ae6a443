"""Attention kernels for packed documents, behind one Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from megatron_wlb.runtime.kernels.sdpa import sdpa_varlen


class VarlenKernel(Protocol):
    """Causal attention of packed documents, each attending only to itself.

    Args:
        query: ``[T, H, D]``, the documents one after another.
        key: ``[T, G, D]`` with ``H % G == 0`` (grouped-query attention).
        value: ``[T, G, D]``.
        lengths: tokens of each document, on the host; ``sum(lengths) == T``.
        scale: factor of the scores before the softmax.

    Returns:
        ``[T, H, D]``.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: Sequence[int],
        scale: float,
    ) -> torch.Tensor: ...


KERNELS: dict[str, VarlenKernel] = {"sdpa": sdpa_varlen}
