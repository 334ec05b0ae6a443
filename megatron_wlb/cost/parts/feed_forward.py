"""A dense MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_wlb.cost.layers import Divided, Part, check_sizes
from megatron_wlb.cost.tape import Operation

if TYPE_CHECKING:
    from megatron_wlb.cost.blocks import Blocks
    from megatron_wlb.cost.shape import Parallelism


@dataclass(frozen=True, slots=True)
class FeedForward(Part):
    """A dense MLP."""

    is_mlp: ClassVar[bool] = True

    ffn_hidden_size: int
    gated: bool
    """Whether it has a gate (SwiGLU): three matrices instead of two."""

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def columns(self) -> int:
        return (2 if self.gated else 1) * self.ffn_hidden_size

    @property
    def rows(self) -> int:
        return self.ffn_hidden_size

    @property
    def elementwise_numbers(self) -> int:
        """Read and written a token by the activation function."""
        return self.columns + self.rows

    def divided(self, p: Parallelism) -> Divided:
        yield "ffn_hidden_size", self.ffn_hidden_size, "TP", p.tp_size

    def operations(self, on: Blocks) -> list[Operation]:
        """Lists the operations from the norm's output to the second product."""
        tp_size, e = on.parallelism.tp_size, on.elementwise
        f, columns = self.rows / tp_size, self.columns / tp_size
        return [
            on.into("fc1", e * columns, self.columns, bias=on.shape.linear_bias),
            Operation(
                "activation",
                # Torch keeps SiLU's output and its factor.
                2 * e * f if self.gated and not on.fused else 0.0,
                backward=on.hidden + e * (columns + f),
            ),
            on.out_of("fc2", on.bytes.matrix.element_bytes * f, self.rows),
        ]
