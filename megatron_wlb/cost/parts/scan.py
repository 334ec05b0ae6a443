"""What layers have in common that carry a state through a document, and have no keys."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from megatron_wlb.cost.layers import Part, check_sizes
from megatron_wlb.cost.workspace import FP32

if TYPE_CHECKING:
    from megatron_wlb.cost.blocks import Blocks
    from megatron_wlb.cost.shape import Parallelism


class Scan(Part):
    """Projections, a convolution, and a recurrence over a document's tokens in chunks.

    Context-parallel ranks exchange all tokens for a share of the heads, twice.
    """

    __slots__ = ()
    chunk: ClassVar[int]
    """Tokens that the kernels take at once; they write the state behind each chunk."""

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    @abstractmethod
    def convolved(self) -> int:
        """Numbers of a token that the convolution takes."""

    @property
    @abstractmethod
    def taps(self) -> int:
        """Tokens that the convolution takes."""

    @property
    def handed(self) -> int:
        """Tokens whose inputs to the convolution a slice hands on, as its kernel takes them."""
        return self.taps

    @property
    @abstractmethod
    def state_numbers(self) -> int:
        """A state of a document, all heads."""

    @property
    def inner_weights(self) -> int:
        """The convolution's."""
        return self.taps * self.convolved

    def state_bytes(self, on: Blocks) -> float:
        """A state in fp32, and the inputs that the convolution takes of the slice before."""
        halo = on.elementwise * self.handed * self.convolved
        return (FP32 * self.state_numbers + halo) / on.parallelism.tp_size

    @property
    def chunk_numbers(self) -> int:
        """Numbers of 16 bits, a token, in which the states behind chunks are written and read."""
        return self.state_numbers * FP32 // self.chunk

    def sent_numbers(self, p: Parallelism) -> float:
        return (self.columns + self.rows) / p.tp_size / p.cp_size

    def copied_numbers(self, p: Parallelism) -> float:
        return 2 * self.sent_numbers(p)
