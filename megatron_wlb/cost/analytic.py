"""What a document costs, as a function of its length: ``linear · d + quadratic · d²`` µs.

This is WLB-LLM's Equation 2: ``W_l`` (matrix products, element-wise operations, collectives) grows
with the tokens of a micro-batch, ``W_a`` (causal attention) with the square of each document.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from megatron_wlb.errors import ConfigError


class CostModel(Protocol):
    """What packers and the planner ask of a cost: µs that grow with a document's length."""

    def document_us(self, length: int) -> float:
        """Forward plus backward of one document, without what every micro-batch costs."""
        ...

    def total_us(self, lengths: Iterable[int]) -> float:
        """Forward plus backward of one micro-batch; of an empty one as well."""
        ...


@dataclass(frozen=True, slots=True)
class DocumentCost:
    """Predicted time of one document, forward and backward apart, in µs.

    The paper balances forward times; the two passes have different shares of attention, so this
    balances their sum.

    Raises :class:`ConfigError` if a coefficient is negative or not finite, or if documents cost
    nothing at all.
    """

    forward_linear_us: float
    """µs a token."""
    forward_quadratic_us: float
    """µs a token²."""
    backward_linear_us: float
    """µs a token."""
    backward_quadratic_us: float
    """µs a token²."""
    micro_batch_us: float = 0.0
    """What a micro-batch takes besides its documents, forward plus backward."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"document cost: {name} is {value}, but must be finite and not negative; "
                    "measure again or correct it"
                )
        if self.document_us(1) == 0:
            raise ConfigError(
                "document cost: all coefficients are 0, so nothing can be balanced; "
                "give at least one positive coefficient"
            )

    def forward_us(self, length: int) -> float:
        return (self.forward_linear_us + self.forward_quadratic_us * length) * length

    def backward_us(self, length: int) -> float:
        return (self.backward_linear_us + self.backward_quadratic_us * length) * length

    def document_us(self, length: int) -> float:
        """Forward plus backward."""
        linear_us = self.forward_linear_us + self.backward_linear_us
        quadratic_us = self.forward_quadratic_us + self.backward_quadratic_us
        return (linear_us + quadratic_us * length) * length

    def total_us(self, lengths: Iterable[int]) -> float:
        """Forward plus backward of a micro-batch of such documents."""
        return self.micro_batch_us + sum(map(self.document_us, lengths))

    def as_dict(self) -> dict[str, float]:
        """JSON-able; inverse of :meth:`from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DocumentCost:
        """Raises :class:`ConfigError` for a missing, unknown or non-numeric coefficient."""
        known = [f.name for f in fields(cls)]
        for name, value in values.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1) or known
                raise ConfigError(f"document cost: unknown coefficient {name}; use {near[0]}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"document cost: {name} is {value!r}; give a number of µs")
        missing = [name for name in known[:4] if name not in values]
        if missing:
            raise ConfigError(f"document cost: coefficient {missing[0]} is missing; add it")
        return cls(**{name: float(value) for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a dense GPT that its FLOPs depend on, by Megatron's names."""

    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads; equal to ``num_attention_heads`` without grouped-query attention."""
    kv_channels: int
    """Dimension of one head."""
    vocab_size: int
    """Rows of the LM head, padding included."""
    gated: bool
    """Whether the MLP has a gate (SwiGLU): three matrices instead of two."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "gated" and value < 1:
                raise ConfigError(f"model shape: {name} is {value}; give at least 1")

    @property
    def linear_parameters(self) -> int:
        """Weights that every token is multiplied with: all layers' and the LM head's."""
        heads = 2 * self.num_attention_heads + 2 * self.num_query_groups  # Q, output; K, V
        attention = self.hidden_size * self.kv_channels * heads
        mlp = (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size
        return self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size

    @property
    def linear_flops(self) -> int:
        """Of one token, forward: a multiplication and an addition a weight."""
        return 2 * self.linear_parameters

    def attention_flops(self, length: int) -> int:
        """Of one document, forward: QKᵀ and PV over the causal half of ``length²`` pairs."""
        return self.num_layers * 2 * self.num_attention_heads * self.kv_channels * length**2


def analytic_cost(
    shape: ModelShape,
    *,
    attention_tflops: float,
    linear_tflops: float,
    num_devices: int = 1,
    micro_batch_us: float = 0.0,
) -> DocumentCost:
    """The cost that ``shape``'s FLOPs take at the given rates; good for balance before measuring.

    Rates are what one device achieves, in 10¹² FLOP/s; ``num_devices`` share each layer (TP × CP).
    Backward takes twice the forward's linear work and 2.5 times its attention work (flash
    attention computes the scores again). Collectives and element-wise operations are not modelled:
    choose ``linear_tflops`` lower to account for them.
    """
    for name, value in (
        ("attention_tflops", attention_tflops),
        ("linear_tflops", linear_tflops),
        ("num_devices", num_devices),
    ):
        if not value > 0:
            raise ConfigError(f"analytic cost: {name} is {value}; give a positive number")
    linear_us = shape.linear_flops / (linear_tflops * num_devices * 1e6)
    quadratic_us = shape.attention_flops(1) / (attention_tflops * num_devices * 1e6)
    return DocumentCost(linear_us, quadratic_us, 2 * linear_us, 2.5 * quadratic_us, micro_batch_us)
