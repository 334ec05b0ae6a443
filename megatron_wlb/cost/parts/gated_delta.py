"""A gated delta net: a state of each document, and no keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_wlb.cost.layers import Divided
from megatron_wlb.cost.parts.scan import Scan
from megatron_wlb.cost.tape import Operation
from megatron_wlb.cost.workspace import FP32

if TYPE_CHECKING:
    from megatron_wlb.cost.blocks import Blocks
    from megatron_wlb.cost.execution import Executed
    from megatron_wlb.cost.shape import Parallelism


@dataclass(frozen=True, slots=True)
class GatedDelta(Scan):
    """A gated delta net; its kernels are those of ``fla``."""

    chunk = 64

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    @property
    def convolved(self) -> int:
        """Numbers of a token's query, key and value, all heads."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.rows

    @property
    def columns(self) -> int:
        """And the output's gate, and two numbers a head."""
        return self.convolved + self.rows + 2 * self.linear_num_value_heads

    @property
    def rows(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def state_numbers(self) -> int:
        return self.rows * self.linear_key_head_dim

    @property
    def taps(self) -> int:
        return self.linear_conv_kernel_dim

    @property
    def state_products(self) -> int:
        """As Megatron counts it: four products with the state."""
        return 4 * self.state_numbers

    @property
    def elementwise_numbers(self) -> int:
        """Read and written a token: the convolution, norms of queries and keys, the gated norm,
        and the state behind each chunk.
        """
        return 6 * self.convolved + 6 * self.rows + self.chunk_numbers

    def num_kernels(self, p: Parallelism) -> int:
        return 20

    def divided(self, p: Parallelism) -> Divided:
        yield "linear_num_key_heads", self.linear_num_key_heads, "TP × CP", p.tp_size * p.cp_size

    def parameters(self, on: Executed) -> int:
        divided = self.inner_weights + 2 * self.linear_num_value_heads
        norm = self.linear_value_head_dim * on.shape.norm_vectors
        return self.matrix_parameters(on, bias=False) + divided // on.parallelism.tp_size + norm

    def operations(self, on: Blocks) -> list[Operation]:
        """Lists the operations from the norm's output to the second product."""
        tp_size, e = on.parallelism.tp_size, on.elementwise
        convolved, rows = self.convolved / tp_size, self.rows / tp_size
        heads = self.linear_num_value_heads / tp_size
        # Queries and keys are repeated for each value head before the recurrence.
        taken = heads * (2 * self.linear_key_head_dim + self.linear_value_head_dim)
        # States behind chunks, and what these take and give of keys and values.
        chunks = e * self.state_numbers / self.chunk / tp_size if on.fused else 0.0
        return [
            on.into("in", e * self.columns / tp_size, self.columns, bias=False),
            Operation(
                "convolution",
                e * convolved,
                backward=on.hidden + 2 * e * convolved,
                weight_bytes=on.element_bytes * self.inner_weights // tp_size,
            ),
            Operation(
                "recurrence",
                e * (taken + rows + self.chunk * heads) + 2 * FP32 * heads,
                forward=chunks + e * taken,
                backward=on.hidden + 2 * chunks + 3 * e * taken,
                state=self.state_bytes(on),
            ),
            Operation("gated norm", FP32 * heads, backward=on.hidden + 2 * e * rows),
            on.out_of("out", e * rows, self.rows),
        ]
