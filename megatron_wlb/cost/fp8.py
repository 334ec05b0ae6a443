"""FP8 as TransformerEngine trains in it: the lengths it needs, and what its products cost.

Read from TransformerEngine 2.9 to 2.11 and Megatron-LM, not measured. The products of
layers take FP8 and give the dtype of training. Attention, norms, residuals, the LM head, gradients
and collectives are counted in the dtype of training, though some recipes gather inputs in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from megatron_wlb.cost.layers import Precision

Recipe: TypeAlias = Literal["delayed", "tensorwise", "blockwise", "mxfp8", "custom"]


class RowMultiples(NamedTuple):
    """What the tokens of a rank must be a multiple of where they enter a product."""

    whole: int
    spread: int
    """The same where sequence parallelism spreads them, and they are quantised before they are
    gathered."""


ROWS: Mapping[str, RowMultiples] = {
    "delayed": RowMultiples(16, 16),
    "tensorwise": RowMultiples(16, 16),
    "blockwise": RowMultiples(16, 128),
    "mxfp8": RowMultiples(32, 32),
    "custom": RowMultiples(128, 128),
}
"""By ``--fp8-recipe``. In the gradient of weights tokens are what is summed over, and cuBLAS takes
whole 16 bytes of a row (``CanonicalizeGemmInput`` in ``common/gemm/cublaslt_gemm.cu``). Blocks that
are gathered must be whole ones (``assert_dim_for_all_gather``), and MXFP8 has whole blocks only
(``MXFP8Quantizer.make_empty``). Of a recipe of the user's own nothing is known, so it gets the most
of all."""


def row_multiple(recipe: str, *, spread: bool) -> int:
    """What a rank's tokens are a multiple of between layers; ``spread`` by sequence parallelism."""
    rows = ROWS[recipe]
    return rows.spread if spread else rows.whole


def fp8_products(recipe: str, *, param_gather: bool, element_bytes: int) -> Precision:
    """The precision of matrix products; ``element_bytes`` are of the dtype of training.

    A weight is there in FP8 twice, as it is and transposed, from one step to the next; without
    ``param_gather`` its original is there besides. With delayed scaling the projection keeps a
    quantised copy of attention's output, which attention keeps too; with others it keeps that one.
    """
    return Precision(
        element_bytes=1,
        peak="fp8_peak_tflops",
        share="fp8_linear_share",
        weight_bytes=2 if param_gather else element_bytes + 2,
        keeps_copies=recipe == "delayed",
        rows=ROWS[recipe],
    )
