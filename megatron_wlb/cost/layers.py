"""A model is a list of layers, a layer a list of parts; and the precision of their operations.

The kinds of parts are in :mod:`megatron_wlb.cost.parts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import MAX_SIZE, MOST_LAYERS, real_number, truth, whole_number

if TYPE_CHECKING:
    from megatron_wlb.cost.blocks import Blocks
    from megatron_wlb.cost.execution import Executed
    from megatron_wlb.cost.shape import Parallelism
    from megatron_wlb.cost.tape import Operation


def check_sizes(sizes: Any) -> None:
    """Raises :class:`ConfigError` if a field is no size, share or flag that a model can have.

    Fields go by their types. A size may be 0 if that is its default.
    """
    for f in fields(sizes):
        name, value = f.name, getattr(sizes, f.name)
        if f.type == "bool":
            truth(name, value)
        elif f.type == "float":
            real_number(name, value, 0, 1)
        elif f.type == "int | None":
            whole_number(name, 1 if value is None else value, 1, MAX_SIZE)
        elif f.type == "int":
            least = 0 if f.default == 0 else 1
            whole_number(name, value, least, MOST_LAYERS if name == "num_layers" else MAX_SIZE)


@dataclass(frozen=True, slots=True)
class Precision:
    """How an operation takes its numbers, and which rate of the machine is its peak.

    Raises :class:`ConfigError` for bytes that no number has.
    """

    element_bytes: int
    peak: str = "peak_tflops"
    """Figure of the hardware file, for an operation that is bound by FLOPs."""
    share: str = "linear_share"
    """Figure of the hardware file: the share of that peak that matrix products reach."""
    weight_bytes: int | None = None
    """Bytes of a weight of matrix products with all its copies; those of training if not given."""
    keeps_copies: bool = False
    """Whether matrix products keep copies of inputs that are kept by others too."""
    rows: tuple[int, int] = (1, 1)
    """What the tokens of a rank must be a multiple of that enter matrix products: whole ones, and
    those that sequence parallelism spreads."""

    def __post_init__(self) -> None:
        whole_number("precision: element_bytes", self.element_bytes, 1, 8)


@dataclass(frozen=True, slots=True)
class Precisions:
    """The precision of each kind of operation."""

    matrix: Precision
    attention: Precision
    elementwise: Precision
    collective: Precision

    @classmethod
    @cache
    def same(cls, element_bytes: int) -> Precisions:
        """One precision for all, as in training without a format of fewer bits."""
        return cls(*[Precision(element_bytes)] * 4)


Divided: TypeAlias = Iterator[tuple[str, int, str, int]]
"""Sizes that ranks divide: name, size, by which parallelism, over how many ranks."""


class Part(ABC):
    """A part of a layer: one kind, with all that time, memory and FLOPs depend on.

    It reads the residual stream and adds to it. It has a norm, a matrix product from the hidden
    state to ``columns`` numbers, its own work, and a product from ``rows`` numbers to the hidden
    state. Tensor parallelism divides both. What follows without a body of its own is zero of a kind
    that has no attention, no latents and no routing. A new kind is a frozen dataclass.
    """

    __slots__ = ()

    is_mlp: ClassVar[bool] = False
    """Whether it is a dense MLP, which slices may compute once more in backward."""

    @property
    def query_size(self) -> int:
        """Numbers of a token's query, all heads: FLOPs of attention go by them."""
        return 0

    @property
    def key_size(self) -> int:
        """Numbers of a token's key, and of its value."""
        return 0

    @property
    def reach_tokens(self) -> int | None:
        """The most keys that a query sees, with a sliding window."""
        return None

    @property
    def up_weights(self) -> int:
        """Weights that a CP rank passes for all tokens, and once more in backward."""
        return 0

    @property
    def inner_weights(self) -> int:
        """Weights that a token passes and that neither take nor give the hidden state."""
        return 0

    @property
    def state_products(self) -> int:
        """Numbers that a token is multiplied with and that are no weights: those of a document's
        state.
        """
        return 0

    def routed_weights(self, hidden_size: int) -> int:
        """Weights that a token passes on ranks of a router's choice."""
        return 0

    @property
    def routed_elementwise_numbers(self) -> int:
        """Read and written a token there."""
        return 0

    @property
    @abstractmethod
    def columns(self) -> int: ...

    @property
    @abstractmethod
    def rows(self) -> int: ...

    def weights(self, hidden_size: int) -> int:
        """All weights that a token passes in matrix products."""
        return hidden_size * (self.columns + self.rows) + self.inner_weights

    @property
    @abstractmethod
    def elementwise_numbers(self) -> int:
        """Read and written a token, over TP, by what is neither norm nor residual."""

    def product_numbers(self, hidden_size: int, p: Parallelism) -> float:
        """Numbers a token that matrix products take and give on a rank."""
        return 2 * hidden_size + (self.columns + self.rows) / p.tp_size if self.columns else 0.0

    def num_kernels(self, p: Parallelism) -> int:
        """Kernels of its forward: norm, two products, their casts, what is between, the addition
        to the residual stream. About what TransformerEngine's layers launch, not counted.
        """
        return 10

    @abstractmethod
    def operations(self, on: Blocks) -> list[Operation]:
        """What runs from the norm's output to the second product, with the bytes that it keeps."""

    @abstractmethod
    def divided(self, p: Parallelism) -> Divided:
        """What a layout must divide."""

    def parameters(self, on: Executed) -> int:
        """Parameters on one rank without those of :meth:`routed_parameters`, and without the norm
        of the residual stream.
        """
        return self.matrix_parameters(on, bias=on.shape.linear_bias)

    def matrix_parameters(self, on: Executed, *, bias: bool) -> int:
        """Parameters of both products; ``bias`` is whether the first has one."""
        h, tp_size = on.shape.hidden_size, on.parallelism.tp_size
        total = h * (self.columns + self.rows) // tp_size + (self.columns // tp_size if bias else 0)
        return total + (h if on.shape.linear_bias and self.columns else 0)

    def routed_parameters(self, on: Executed) -> int:
        """Parameters on one rank that a router chooses among."""
        return 0

    def sent_numbers(self, p: Parallelism) -> float:
        """Numbers a token that a rank sends to other CP ranks."""
        return 0.0

    def copied_numbers(self, p: Parallelism) -> float:
        """Numbers a token, of all CP ranks, that a rank reads and writes to order them."""
        return 0.0

    def head_groups(self, tp_size: int, asked: int | None) -> int | None:
        """How many head groups that exchange has; None for a part without one."""
        return None

    def dispatched_numbers(self, p: Parallelism, hidden_size: int) -> tuple[int, float, float]:
        """Copies of a token that go to routed ranks, the numbers that a rank sends of them, and
        those that it copies to order them.
        """
        return 0, 0.0, 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    """Parts one after another. Raises :class:`ConfigError` without any."""

    parts: tuple[Part, ...]
    precisions: Precisions | None = None
    """Its operations' formats; that of training (bf16, fp32) if not given."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("a layer has 0 parts; give at least 1")

    def weights(self, hidden_size: int) -> int:
        """All weights of its matrix products that a token passes."""
        return sum(part.weights(hidden_size) for part in self.parts)

    @property
    def inner_weights(self) -> int:
        """Weights of its matrix products besides, which neither take nor give the hidden state."""
        return sum(part.inner_weights for part in self.parts)

    @property
    def state_products(self) -> int:
        """Numbers of states that a token is multiplied with."""
        return sum(part.state_products for part in self.parts)

    @property
    def query_size(self) -> int:
        """Numbers of a token's queries."""
        return sum(part.query_size for part in self.parts)

    @property
    def windowed_query_size(self) -> int:
        """Numbers of a token's queries in attention of a sliding window."""
        return sum(part.query_size for part in self.parts if part.reach_tokens is not None)

    @property
    def key_size(self) -> int:
        """Numbers of a token's keys."""
        return sum(part.key_size for part in self.parts)


Runs: TypeAlias = tuple[tuple[int, Layer], ...]
"""Layers in order: how many equal ones, and what they are."""


def slices(runs: Runs, counts: Iterable[int]) -> Iterator[Runs]:
    """The next so many layers, for each count."""
    rest = list(reversed(runs))
    for count in counts:
        taken = []
        while count:
            num, layer = rest.pop()
            taken.append((min(num, count), layer))
            if num > count:
                rest.append((num - count, layer))
            count -= taken[-1][0]
        yield tuple(taken)
