"""A Mamba-2 layer: a state of each document, and no keys."""

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
class Mamba(Scan):
    """A Mamba-2 layer; its kernels are those of ``mamba_ssm``."""

    chunk = 128
    taps = 4  # for which Megatron has no flag

    mamba_num_heads: int
    mamba_head_dim: int
    mamba_state_dim: int
    mamba_num_groups: int

    @property
    def rows(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def convolved(self) -> int:
        """Numbers of a token that the convolution takes: x, B and C."""
        return self.rows + 2 * self.mamba_num_groups * self.mamba_state_dim

    @property
    def columns(self) -> int:
        """And the gate, and a step a head."""
        return self.rows + self.convolved + self.mamba_num_heads

    @property
    def handed(self) -> int:
        return self.taps - 1

    @property
    def state_numbers(self) -> int:
        return self.rows * self.mamba_state_dim

    @property
    def state_products(self) -> int:
        """As Megatron counts it: seven FLOPs for each number of a channel's state."""
        return 7 * self.state_numbers // 2

    @property
    def elementwise_numbers(self) -> int:
        """Read and written a token: the convolution, gate and norm, and the state behind each
        chunk.
        """
        return 4 * self.convolved + 6 * self.rows + self.chunk_numbers

    def num_kernels(self, p: Parallelism) -> int:
        return 15

    def divided(self, p: Parallelism) -> Divided:
        yield "mamba_num_heads", self.mamba_num_heads, "TP × CP", p.tp_size * p.cp_size
        yield "mamba_num_groups", self.mamba_num_groups, "TP", p.tp_size

    def parameters(self, on: Executed) -> int:
        # The taps' biases, the step's bias, decay and skip of each head, and the norm.
        divided = self.inner_weights + self.convolved + 3 * self.mamba_num_heads + self.rows
        return self.matrix_parameters(on, bias=False) + divided // on.parallelism.tp_size

    def operations(self, on: Blocks) -> list[Operation]:
        """Lists the operations from the norm's output to the second product.

        The fused kernel keeps its input alone, and computes the rest again. A slice runs the
        convolution and the scan one by one, which keep theirs.
        """
        tp_size, e = on.parallelism.tp_size, on.elementwise
        columns, rows = self.columns / tp_size, self.rows / tp_size
        chunks = FP32 * self.state_numbers / self.chunk / tp_size if on.fused else 0.0
        return [
            on.into("in", e * columns, self.columns, bias=False),
            Operation(
                "scan",
                e * rows + FP32 * self.mamba_num_heads / tp_size,
                forward=2 * chunks,
                backward=on.hidden + 2 * e * columns + 3 * chunks,
                apart=e * (2 * self.convolved / tp_size + rows),
                state=self.state_bytes(on),
                weight_bytes=on.element_bytes * self.inner_weights // tp_size,
            ),
            Operation("norm", FP32 / tp_size, backward=on.hidden + 2 * e * rows),
            on.out_of("out", e * rows, self.rows),
        ]
