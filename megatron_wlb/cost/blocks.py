"""What the operations of a layer are made of on one rank: sizes, norms, matrix products.

:mod:`megatron_wlb.cost.activations` makes a model of them, :mod:`megatron_wlb.cost.parts` the parts
of its layers. The legend is that of the former.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_wlb.cost.execution import Executed
from megatron_wlb.cost.layers import Precisions
from megatron_wlb.cost.tape import Operation
from megatron_wlb.cost.workspace import FP32


@dataclass(frozen=True, slots=True)
class Blocks(Executed):
    """Sizes and operations on a rank, of the layer at hand."""

    precisions: Precisions | None = None
    """The precisions of the layer at hand."""

    @property
    def bytes(self) -> Precisions:
        return self.precisions or Precisions.same(self.element_bytes)

    @property
    def elementwise(self) -> int:
        return self.bytes.elementwise.element_bytes

    @property
    def fused(self) -> bool:
        return self.execution.kernels == "fused"

    @property
    def residual_numbers(self) -> float:
        return self.shape.hidden_size / self.parallelism.sequence_shards

    @property
    def hidden(self) -> float:
        """Bytes of a hidden state where sequence parallelism spreads it."""
        return self.elementwise * self.residual_numbers

    @property
    def gathered(self) -> float:
        """Bytes of a hidden state of all tokens, as matrix products give it."""
        return float(self.elementwise * self.shape.hidden_size)

    def quantised(self, numbers: float) -> float:
        """Bytes of a product's input in fewer bits, as it is and transposed; 0 in those it has."""
        matrix = self.bytes.matrix.element_bytes
        return 2.0 * matrix * numbers if matrix < self.elementwise else 0.0

    @property
    def collective(self) -> float:
        """What sequence parallelism needs beside a matrix product's input and output."""
        spread = self.parallelism.sequence_shards > 1
        return self.bytes.collective.element_bytes * self.shape.hidden_size if spread else 0.0

    @property
    def keeps_residual(self) -> bool:
        """Torch's RMSNorm keeps an fp32 copy of a bf16 input instead of the input."""
        return self.fused or not self.shape.rms_norm or self.elementwise == FP32

    def weight(self, rows: int, columns: int) -> int:
        return self.element_bytes * rows * columns // self.parallelism.tp_size

    def norm(self, name: str, numbers: float, *, num_rows: float = 1.0) -> Operation:
        """A norm of ``numbers`` in ``num_rows`` rows a token, without its input and output."""
        e, statistics = self.elementwise, FP32 * num_rows
        if not self.shape.rms_norm:
            return Operation(name, 2 * statistics, backward=2 * e * numbers)
        if self.fused:
            return Operation(name, statistics, backward=2 * e * numbers)
        normalised = FP32 * numbers
        copy = FP32 * numbers if e != FP32 else 0.0
        # Its backward is several operations, each with a result of its own.
        return Operation(name, normalised + copy + statistics, backward=(e + 4 * FP32) * numbers)

    @property
    def dropout_mask(self) -> float:
        """Torch's CPU keeps the mask as numbers, a fused kernel as a byte each."""
        if not self.shape.dropout:
            return 0.0
        return self.residual_numbers if self.fused else self.hidden

    def into(self, name: str, product: float, columns: int, *, bias: bool) -> Operation:
        """A matrix product from the hidden state to ``product`` bytes, which are kept."""
        taken = self.quantised(self.shape.hidden_size)
        gradient = self.quantised(columns / self.parallelism.tp_size)
        return Operation(
            name,
            product,
            forward=self.collective + (product if bias else 0.0) + taken,
            backward=self.hidden + product + self.gathered + self.collective + taken + gradient,
            weight_bytes=self.weight(self.shape.hidden_size, columns),
        )

    def out_of(self, name: str, product: float, rows: int) -> Operation:
        """A matrix product from ``product`` bytes, which are kept, to the hidden state.

        Its output's gradient is that of the residual path.
        """
        return Operation(
            name,
            product,
            forward=self.gathered + self.quantised(rows / self.parallelism.tp_size),
            backward=self.hidden
            + self.collective
            + product
            + self.quantised(self.shape.hidden_size),
            weight_bytes=self.weight(rows, self.shape.hidden_size),
        )
