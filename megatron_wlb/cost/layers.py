"""What a model is a list of: layers, of parts of a kind each, and the precision of operations.

A part reads the residual stream and adds to it. It has a norm, a matrix product from the hidden
state to ``columns`` numbers, its own work, and a product from ``rows`` numbers to the hidden state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, TypeAlias

from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import real_number, truth, whole_number

MOST, MOST_LAYERS = 2**31 - 1, 10_000
"""Sizes above them are mistakes, and planning would not come to an end with them."""


def check_sizes(sizes: Any) -> None:
    """Raises :class:`ConfigError` if a field is no size, share or flag that a model can have."""
    for f in fields(sizes):
        name, value = f.name, getattr(sizes, f.name)
        if f.type == "bool":
            truth(name, value)
        elif f.type == "float":
            real_number(name, value, 0, 1)
        elif name == "reach_tokens":
            whole_number(name, 1 if value is None else value, 1, MOST)
        elif f.type == "int":
            least = 0 if name in ("learned_positions", "shared_hidden_size") else 1
            whole_number(name, value, least, MOST_LAYERS if name == "num_layers" else MOST)


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


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention. Raises :class:`ConfigError` for heads that groups do not divide."""

    num_attention_heads: int
    num_query_groups: int
    """Key/value heads; equal to ``num_attention_heads`` without grouped-query attention."""
    kv_channels: int
    """Dimension of one head."""
    qkv_bias: bool = False
    qk_norm: bool = False
    rotary_percent: float = 1.0
    reach_tokens: int | None = None
    """The most keys that a query sees, its own the last, with a sliding window; None: all of its
    document up to its own."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"model shape: {self.num_attention_heads} attention heads do not divide into "
                f"{self.num_query_groups} query groups; give a divisor"
            )

    @property
    def query_size(self) -> int:
        """Numbers of a token's query, all heads."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_size(self) -> int:
        """Numbers of a token's key, and of its value."""
        return self.num_query_groups * self.kv_channels

    @property
    def columns(self) -> int:
        return self.query_size + 2 * self.key_size

    @property
    def rows(self) -> int:
        return self.query_size

    @property
    def matrix_numbers(self) -> int:
        """Weights that a token passes, for each number of the hidden state."""
        return self.columns + self.rows

    @property
    def elementwise_numbers(self) -> int:
        """Read and written a token: q, k, v taken out of one tensor, rotated, normalised."""
        times = (self.rotary_percent > 0) + self.qk_norm
        return 2 * self.columns + times * 2 * (self.query_size + self.key_size)


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-latent attention, which Megatron calls so. Raises :class:`ConfigError` for
    values that are wider than keys.
    """

    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    """None: queries are projected at once."""

    def __post_init__(self) -> None:
        check_sizes(self)
        whole_number("q_lora_rank", self.q_lora_rank or 1, 1, MOST)
        if self.v_head_dim > self.key_dim:
            raise ConfigError(
                f"model shape: v_head_dim {self.v_head_dim} is above a key's "
                f"{self.key_dim} (qk_head_dim + qk_pos_emb_head_dim); give at most that"
            )

    @property
    def key_dim(self) -> int:
        """Numbers of a query's head and of a key's."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def numbers(self) -> int:
        """A token's latent and the key that heads share: what CP ranks exchange."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Attention):
    """Multi-latent attention, of as many key/value heads as query heads. ``kv_channels`` is
    :attr:`Latent.key_dim`; norms are the latents'.
    """

    latent: Latent

    @property
    def query_size(self) -> int:
        """Numbers of a token's query and value in the mean, all heads: FLOPs go by them."""
        return self.num_attention_heads * (self.latent.key_dim + self.latent.v_head_dim) // 2

    @property
    def key_size(self) -> int:
        """Numbers of a token's key and value in the mean."""
        return self.query_size

    @property
    def columns(self) -> int:
        """What the hidden state is projected down to; without a rank, whole queries."""
        queries = self.latent.q_lora_rank or self.num_attention_heads * self.latent.key_dim
        return queries + self.latent.numbers

    @property
    def rows(self) -> int:
        return self.num_attention_heads * self.latent.v_head_dim

    @property
    def up_weights(self) -> int:
        """Weights that project latents up to keys and values."""
        heads = self.num_attention_heads * (self.latent.qk_head_dim + self.latent.v_head_dim)
        return self.latent.kv_lora_rank * heads

    @property
    def inner_weights(self) -> int:
        """All weights that neither take nor give the hidden state."""
        queries = self.num_attention_heads * self.latent.key_dim
        return (self.latent.q_lora_rank or 0) * queries + self.up_weights

    @property
    def elementwise_numbers(self) -> int:
        """Read and written a token: queries and keys put together, values copied, latents
        normalised.
        """
        heads = self.num_attention_heads * (2 * self.latent.key_dim + self.latent.v_head_dim)
        return 2 * (heads + self.latent.numbers + (self.latent.q_lora_rank or 0))


class _WithoutAttention:
    """What a part says of attention that has none."""

    __slots__ = ()
    query_size: ClassVar[int] = 0
    key_size: ClassVar[int] = 0
    kv_channels: ClassVar[int] = 0
    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    reach_tokens: ClassVar[int | None] = None


@dataclass(frozen=True, slots=True)
class FeedForward(_WithoutAttention):
    """A dense MLP."""

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
    def matrix_numbers(self) -> int:
        """Weights that a token passes, for each number of the hidden state."""
        return self.columns + self.rows

    @property
    def elementwise_numbers(self) -> int:
        """Read and written a token by the activation function."""
        return self.columns + self.rows


@dataclass(frozen=True, slots=True)
class Experts(_WithoutAttention):
    """A router and experts, of which a token passes ``topk``, beside a shared one that all pass.

    ``columns`` and ``rows`` are the shared expert's: tensor parallelism divides it as a dense MLP.
    Raises :class:`ConfigError` for more experts a token than there are.
    """

    num_experts: int
    topk: int
    expert_hidden_size: int
    """MLP size of one expert."""
    gated: bool
    shared_hidden_size: int = 0
    """MLP size of the shared expert; 0 without one."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.topk > self.num_experts:
            raise ConfigError(
                f"model shape: a token passes {self.topk} experts, but there are "
                f"{self.num_experts}; give at most that"
            )

    @property
    def _matrices(self) -> int:
        return 2 if self.gated else 1

    @property
    def columns(self) -> int:
        return self._matrices * self.shared_hidden_size

    @property
    def rows(self) -> int:
        return self.shared_hidden_size

    @property
    def expert_columns(self) -> int:
        """Columns of one expert's first product."""
        return self._matrices * self.expert_hidden_size

    @property
    def expert_numbers(self) -> int:
        """Weights of one expert for each number of the hidden state."""
        return self.expert_columns + self.expert_hidden_size

    @property
    def matrix_numbers(self) -> int:
        """Weights that a token passes, for each number of the hidden state."""
        return self.num_experts + self.columns + self.rows + self.routed_numbers

    @property
    def routed_numbers(self) -> int:
        """Weights that it passes in experts, which other ranks may have."""
        return self.topk * self.expert_numbers

    @property
    def elementwise_numbers(self) -> int:
        """Read and written a token by the router's softmax and the shared expert's activation."""
        return 2 * self.num_experts + self.columns + self.rows

    @property
    def routed_elementwise_numbers(self) -> int:
        """Read and written a token by its experts' activations."""
        return self.routed_numbers


Part: TypeAlias = Attention | FeedForward | Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """Parts one after another. Raises :class:`ConfigError` without any."""

    parts: tuple[Part, ...]
    precisions: Precisions | None = None
    """Its operations' formats; that of training (bf16, fp32) if not given."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("a layer has 0 parts; give at least 1")

    @property
    def matrix_numbers(self) -> int:
        """Weights of its matrix products that a token passes, for each number of the hidden
        state.
        """
        return sum(part.matrix_numbers for part in self.parts)

    @property
    def experts(self) -> Iterator[Experts]:
        """Its parts that have experts."""
        return (part for part in self.parts if isinstance(part, Experts))

    @property
    def latents(self) -> Iterator[LatentAttention]:
        """Its parts that have multi-latent attention."""
        return (part for part in self.parts if isinstance(part, LatentAttention))

    @property
    def inner_weights(self) -> int:
        """Weights of its matrix products besides, which neither take nor give the hidden state."""
        return sum(part.inner_weights for part in self.latents)

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
