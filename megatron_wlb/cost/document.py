"""The interface of a cost, and the plainest one: ``linear · d + quadratic · d²`` µs.

This is WLB-LLM's Equation 2: ``W_l`` (matrix products, element-wise operations, collectives) grows
with the tokens of a micro-batch, ``W_a`` (causal attention) with the square of each document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import check_names, real_number

LEAST_US, MOST_US = 1e-12, 1e12
"""Limits of a time that is given or measured: sums of more than eleven days overflow."""


def imbalance(times_us: Sequence[float]) -> float:
    """``max · N / Σ`` of times (WLB-LLM §3.2); 1 is perfect, as are no times at all."""
    total_us = sum(times_us)
    return max(times_us) * len(times_us) / total_us if total_us else 1.0


class CostModel(Protocol):
    """What packers and the planner ask of a cost: µs that grow with a document's length."""

    def document_us(self, length: int) -> float:
        """Predicts one document's forward plus backward, without what every micro-batch costs."""
        ...

    def total_us(self, lengths: Iterable[int]) -> float:
        """Predicts one micro-batch's forward plus backward, also of an empty one."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """The parts of a micro-batch's time, in µs: W_l and W_a of each pass."""

    forward_linear_us: float
    forward_attention_us: float
    backward_linear_us: float
    backward_attention_us: float
    overhead_us: float = 0.0
    """What both passes take whatever the documents are."""

    @property
    def total_us(self) -> float:
        return self.forward_us + self.backward_us + self.overhead_us

    @property
    def forward_us(self) -> float:
        return self.forward_linear_us + self.forward_attention_us

    @property
    def backward_us(self) -> float:
        return self.backward_linear_us + self.backward_attention_us


class Cost(CostModel, Protocol):
    """A cost that can also be taken apart and stored: what a run plans with."""

    def work(self, lengths: Iterable[int]) -> Work:
        """The parts of ``total_us``."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Writes the cost, JSON-able; :func:`megatron_wlb.cost.cost_from_dict` is the inverse."""
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
    """Time that a micro-batch takes besides its documents, forward plus backward."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            real_number(f"document cost: {name}", value, 0, MOST_US)
        if self.document_us(1) < LEAST_US:
            raise ConfigError(
                "document cost: all coefficients are 0, so nothing can be balanced; "
                f"give at least one of {LEAST_US} µs"
            )

    def forward_us(self, length: int) -> float:
        return (self.forward_linear_us + self.forward_quadratic_us * length) * length

    def backward_us(self, length: int) -> float:
        return (self.backward_linear_us + self.backward_quadratic_us * length) * length

    def document_us(self, length: int) -> float:
        """Predicts one document's forward plus backward."""
        linear_us = self.forward_linear_us + self.backward_linear_us
        quadratic_us = self.forward_quadratic_us + self.backward_quadratic_us
        return (linear_us + quadratic_us * length) * length

    def total_us(self, lengths: Iterable[int]) -> float:
        """Predicts the forward plus backward of a micro-batch of such documents."""
        return self.micro_batch_us + sum(map(self.document_us, lengths))

    def work(self, lengths: Iterable[int]) -> Work:
        """Predicts the parts of :meth:`total_us`."""
        lengths = list(lengths)
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        return Work(
            self.forward_linear_us * tokens,
            self.forward_quadratic_us * squares,
            self.backward_linear_us * tokens,
            self.backward_quadratic_us * squares,
            self.micro_batch_us,
        )

    def as_dict(self) -> dict[str, float]:
        """The coefficients, JSON-able; inverse of :meth:`from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DocumentCost:
        """Reads coefficients. Raises :class:`ConfigError` for a missing, unknown or wrong one."""
        known = [f.name for f in fields(cls)]
        check_names("document cost: ", "coefficient", values, known, known[:4])
        return cls(**{n: real_number(f"document cost: {n}", v) for n, v in values.items()})


@dataclass(frozen=True, slots=True)
class WithoutDocuments(DocumentCost):
    """What documents cost in a stage without layers and ends: nothing, which balances nothing."""

    forward_linear_us: float = 0.0
    forward_quadratic_us: float = 0.0
    backward_linear_us: float = 0.0
    backward_quadratic_us: float = 0.0

    def __post_init__(self) -> None:
        assert not self.document_us(1)
