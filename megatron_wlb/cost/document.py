"""The interface of a cost, and the plainest one: ``linear · d + quadratic · d²`` µs.

This is WLB-LLM's Equation 2: ``W_l`` (matrix products, element-wise operations, collectives) grows
with the tokens of a micro-batch, ``W_a`` (causal attention) with the square of each document.
Layers of a sliding window, which WLB-LLM does not have, compute less: see :func:`unseen`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, runtime_checkable

from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import real_number, record, whole_number

LEAST_US, MOST_US = 1e-12, 1e12
"""Limits of a time that is given or measured: sums of more than eleven days overflow."""
ROUNDING = 1e-9
"""By how much sums of the same numbers may differ."""


def imbalance(times_us: Sequence[float]) -> float:
    """``max · N / Σ`` of times (WLB-LLM §3.2); 1 is perfect, as are no times at all."""
    total_us = sum(times_us)
    return max(times_us) * len(times_us) / total_us if total_us else 1.0


def unseen(length: int, reach_tokens: int | None) -> int:
    """The part of a document's ``length²`` that is left out if a query sees ``reach_tokens`` keys.

    Half of ``length²`` are the pairs of causal attention: Σ over queries of the tokens up to each.
    With a reach it is Σ of the lesser of both, so half of ``length² - (length - reach)²``.
    """
    beyond = 0 if reach_tokens is None else max(0, length - reach_tokens)
    return beyond * beyond


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


@runtime_checkable
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
    forward_unseen_us: float = 0.0
    """The part of ``forward_quadratic_us`` that layers with a sliding window save, µs a token² of
    :func:`unseen`."""
    backward_unseen_us: float = 0.0
    reach_tokens: int | None = None
    """The most keys that a query sees in these layers."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "reach_tokens":
                whole_number(f"document cost: {name}", 1 if value is None else value, 1)
            else:
                real_number(f"document cost: {name}", value, 0, MOST_US)
        for sign in ("forward", "backward"):
            saved, whole = (getattr(self, f"{sign}_{of}_us") for of in ("unseen", "quadratic"))
            if saved > whole * (1 + ROUNDING) or (saved and self.reach_tokens is None):
                raise ConfigError(
                    f"document cost: {sign}_unseen_us is {saved}; give at most "
                    f"{sign}_quadratic_us, {whole}, and reach_tokens with it"
                )
        if self.document_us(1) < LEAST_US:
            raise ConfigError(
                "document cost: all coefficients are 0, so nothing can be balanced; "
                f"give at least one of {LEAST_US} µs"
            )

    def forward_us(self, length: int) -> float:
        quadratic_us = (self.forward_linear_us + self.forward_quadratic_us * length) * length
        return quadratic_us - self.forward_unseen_us * unseen(length, self.reach_tokens)

    def backward_us(self, length: int) -> float:
        quadratic_us = (self.backward_linear_us + self.backward_quadratic_us * length) * length
        return quadratic_us - self.backward_unseen_us * unseen(length, self.reach_tokens)

    def document_us(self, length: int) -> float:
        """Predicts one document's forward plus backward."""
        linear_us = self.forward_linear_us + self.backward_linear_us
        quadratic_us = self.forward_quadratic_us + self.backward_quadratic_us
        whole_us = (linear_us + quadratic_us * length) * length
        if self.reach_tokens is None:
            return whole_us
        saved_us = self.forward_unseen_us + self.backward_unseen_us
        return whole_us - saved_us * unseen(length, self.reach_tokens)

    def total_us(self, lengths: Iterable[int]) -> float:
        """Predicts the forward plus backward of a micro-batch of such documents."""
        return self.micro_batch_us + sum(map(self.document_us, lengths))

    def work(self, lengths: Iterable[int]) -> Work:
        """Predicts the parts of :meth:`total_us`."""
        lengths = list(lengths)
        tokens = sum(lengths)
        forward_us, backward_us = self.attention_us(
            sum(length * length for length in lengths),
            sum(unseen(length, self.reach_tokens) for length in lengths),
        )
        return Work(
            self.forward_linear_us * tokens,
            forward_us,
            self.backward_linear_us * tokens,
            backward_us,
            self.micro_batch_us,
        )

    def attention_us(self, squares: Any, saved: Any) -> tuple[Any, Any]:
        """Both passes' attention of documents, by the sums of their ``length²`` and
        :func:`unseen`; numbers or arrays.
        """
        return (
            self.forward_quadratic_us * squares - self.forward_unseen_us * saved,
            self.backward_quadratic_us * squares - self.backward_unseen_us * saved,
        )

    def scaled(self, *shares: float) -> DocumentCost:
        """Multiplies the coefficients, in their order. No saving exceeds the time it is part of."""
        names = [f.name for f in fields(self)][:-1]
        us = {n: share * getattr(self, n) for share, n in zip(shares, names, strict=True)}
        for sign in ("forward", "backward"):
            saved, whole = f"{sign}_unseen_us", f"{sign}_quadratic_us"
            us[saved] = min(us[saved], us[whole])
        of_documents = any(share for n, share in us.items() if n != "micro_batch_us")
        made = DocumentCost if of_documents else WithoutDocuments
        return made(**us, reach_tokens=self.reach_tokens)

    def as_dict(self) -> dict[str, float]:
        """The coefficients, JSON-able; inverse of :meth:`from_dict`."""
        values = asdict(self)
        return values if self.reach_tokens else {name: values[name] for name in list(values)[:5]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DocumentCost:
        """Reads coefficients. Raises :class:`ConfigError` for a missing, unknown or wrong one."""
        return record("document cost: ", cls, values)


@dataclass(frozen=True, slots=True)
class WithoutDocuments(DocumentCost):
    """What documents cost in a stage without layers and ends: nothing, which balances nothing."""

    forward_linear_us: float = 0.0
    forward_quadratic_us: float = 0.0
    backward_linear_us: float = 0.0
    backward_quadratic_us: float = 0.0

    def __post_init__(self) -> None:
        assert not self.document_us(1)
