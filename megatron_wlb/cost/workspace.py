"""Memory in which attention kernels work in their backward pass, beside gradients.

Read from the packages' sources, not measured:

* ``flash-attn-2``: flash-attn 2.8, ``csrc/flash_attn/flash_api.cpp``, ``mha_varlen_bwd``. An fp32
  sum of the queries' gradients (``dq_accum``) and ``softmax_d``, with 128 rows more for each
  document; where several query heads share a key, gradients of keys and values for every query
  head (``dk_expanded``, ``dv_expanded``) before they are added up. torch's own varlen attention is
  the same code (``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``).
  TransformerEngine runs flash-attn or cuDNN, which has the same three
  (cudnn-frontend, ``node/scaled_dot_product_flash_attention.h``, ``CompositeSDPABackwardNode``).
* ``flash-attn-3``: ``hopper/flash_api.cpp``, ``mha_bwd``. ``dq_accum``, ``softmax_d`` and
  ``softmax_lse_log2``, with up to a block of rows more for each document; where query heads share
  a key, fp32 sums for every key/value head (``dk_accum``, ``dv_accum``).

Kernels that run document by document (``sdpa``, ``torch-cpu``) have none here. With a deterministic
backward pass flash-attn 2 keeps several of the fp32 sums; that is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

FP32, INT64 = 4, 8

PADDING_ROWS = 128
"""Rows that a kernel adds to each document, to run whole blocks without a check."""


class Workspace(NamedTuple):
    """Bytes of a kernel call on one rank."""

    row_bytes: float
    """A query, or a row of padding."""
    key_bytes: float
    """A key."""
    key_row_bytes: float = 0.0
    """A key, or a row of padding."""

    def total(self, num_queries: float, num_keys: float, num_documents: float) -> float:
        padding = PADDING_ROWS * num_documents
        return (
            self.row_bytes * (num_queries + padding)
            + self.key_bytes * num_keys
            + self.key_row_bytes * (num_keys + padding)
        )


def _flash_2(heads: float, groups: float, head_dim: int, element_bytes: int) -> Workspace:
    rounded = -(-head_dim // 32) * 32 if head_dim <= 192 else 256
    expanded = 2 * element_bytes * heads * head_dim if heads != groups else 0.0
    return Workspace(FP32 * heads * (rounded + 1), expanded)


def _flash_3(heads: float, groups: float, head_dim: int, element_bytes: int) -> Workspace:
    del element_bytes
    rounded = next((size for size in (64, 96, 128, 192) if head_dim <= size), 256)
    sums = 2 * FP32 * groups * rounded if heads != groups else 0.0
    return Workspace(FP32 * heads * (rounded + 2), 0.0, sums)


WORKSPACES: Mapping[str, Callable[[float, float, int, int], Workspace]] = {
    "flash-attn-3": _flash_3,
    "torch": _flash_2,
    "flash-attn-2": _flash_2,
    "transformer-engine": _flash_2,
}
"""By the name of ``--wlb-attention-kernel``, from a rank's query heads, its key/value heads, their
dimension and the bytes of an element."""
