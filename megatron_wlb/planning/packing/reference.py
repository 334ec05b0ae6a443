"""The set-up that packings are compared in: lengths of ``data.lengths.reference``, and a cost."""

from __future__ import annotations

from megatron_wlb.cost import DocumentCost
from megatron_wlb.data.lengths import REFERENCE_WINDOW

__all__ = ["REFERENCE_COST", "REFERENCE_WINDOW"]

REFERENCE_COST = DocumentCost(
    forward_linear_us=1 / REFERENCE_WINDOW,
    forward_quadratic_us=3.27 / REFERENCE_WINDOW**2,
    backward_linear_us=2 / REFERENCE_WINDOW,
    backward_quadratic_us=2 * 3.27 / REFERENCE_WINDOW**2,
)
"""LLaMA2-7B at a window of 128K on 16 GPUs (TP 8, CP 2), modelled: ``x + 3.27 x²`` of windows. The
unit does not matter to balance; backward is twice forward, so that their sum balances like the
forward that figures use."""
