"""A cost interpolated in measured tables: attention by document, the rest by micro-batch.

``W_a`` is looked up for each document and added up; ``W_l`` is looked up once, for the tokens of
the micro-batch, as its kernels run over all of them together.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_wlb.cost.document import LEAST_US, MOST_US, Work
from megatron_wlb.cost.shape import ModelShape
from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import (
    check_names,
    listed,
    read_mapping,
    real_number,
    shown,
    truth,
    whole_number,
)

MAX_FALL = 0.1
"""How much less a longer measurement may take, as noise, before the table is refused."""

_IDENTITY = (
    "hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads", "num_query_groups",
    "kv_channels", "vocab_size", "gated",
)  # fmt: skip
"""The sizes of the model that must be the run's."""


@dataclass(frozen=True, slots=True)
class Row:
    """Measured times of ``tokens`` (a document's or a micro-batch's), in µs."""

    tokens: int
    forward_us: float
    backward_us: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Times through measured points, never falling.

    Between two points it is a power of the length (a straight line on logarithmic axes); below the
    first, proportional. A point up to 10 % under an earlier one is noise and counts as equal to it.
    """

    name: str
    tokens: tuple[int, ...]
    times_us: tuple[float, ...]
    extrapolate: bool = False

    @classmethod
    def through(cls, name: str, points: Sequence[tuple[int, float]]) -> Curve:
        """Raises :class:`ConfigError` for no points, times that are no measurement or that fall."""
        if not points:
            raise ConfigError(f"cost table {name}: no rows; measure at least one length")
        points = sorted(points)
        rising: list[float] = []
        for at, (tokens, us) in enumerate(points):
            whole_number(f"cost table {name}: tokens", tokens, 1)
            real_number(f"cost table {name}: µs for {tokens} tokens", us, LEAST_US, MOST_US)
            if at and tokens == points[at - 1][0]:
                raise ConfigError(f"cost table {name}: {tokens} tokens appear twice; keep one row")
            before_us = rising[-1] if rising else 0.0
            if us < (1 - MAX_FALL) * before_us:
                raise ConfigError(
                    f"cost table {name}: {tokens} tokens take {us:g} µs, but fewer take "
                    f"{before_us:g}; measure again on an idle machine"
                )
            rising.append(max(us, before_us))
        return cls(name, tuple(tokens for tokens, _ in points), tuple(rising))

    def __call__(self, num_tokens: int) -> float:
        """Reads µs. Raises :class:`ConfigError` beyond the longest point, unless extrapolating."""
        if num_tokens <= self.tokens[0]:
            return self.times_us[0] * num_tokens / self.tokens[0]
        at = bisect_left(self.tokens, num_tokens)
        if at == len(self.tokens):
            if not self.extrapolate:
                raise ConfigError(
                    f"cost table {self.name} ends at {self.tokens[-1]} tokens, but {num_tokens} "
                    "were asked for; measure that far, or allow it with --wlb-cost-extrapolate"
                )
            if at == 1:
                return self.times_us[0] * num_tokens / self.tokens[0]
            at -= 1
        (x0, x1), (y0, y1) = self.tokens[at - 1 : at + 1], self.times_us[at - 1 : at + 1]
        power: float = math.log(y1 / y0) / math.log(x1 / x0)
        return y0 * math.exp(power * math.log(num_tokens / x0))


@dataclass(frozen=True)
class ProfiledCost:
    """Predicted time from tables that were measured for one model and layout.

    ``document_us`` counts a document's attention and its share of ``W_l`` at the table's mean
    slope, so that documents add up; ``total_us`` reads ``W_l`` where the micro-batch is.

    Raises :class:`ConfigError` for an empty table, or times that fall as lengths grow.
    """

    model: Mapping[str, Any]
    """The sizes of the model that was measured, by the names of :class:`ModelShape`."""
    tp_size: int
    cp_size: int
    attention: tuple[Row, ...]
    """Times of all layers' core attention of single documents."""
    linear: tuple[Row, ...]
    """Times of whole micro-batches, without core attention."""
    machine: str = ""
    """The machine of the measurement."""
    extrapolate: bool = False
    """Whether lengths beyond a table's longest follow its last two rows; else they are an error."""

    def __post_init__(self) -> None:
        self._curves  # noqa: B018  # errors now, not at the first document

    @cached_property
    def _curves(self) -> tuple[Curve, Curve, Curve, Curve]:
        def curve(name: str, rows: Sequence[Row], times_us: Iterable[float]) -> Curve:
            points = list(zip((row.tokens for row in rows), times_us, strict=True))
            return replace(Curve.through(name, points), extrapolate=self.extrapolate)

        return (
            curve("linear forward", self.linear, (r.forward_us for r in self.linear)),
            curve("attention forward", self.attention, (r.forward_us for r in self.attention)),
            curve("linear backward", self.linear, (r.backward_us for r in self.linear)),
            curve("attention backward", self.attention, (r.backward_us for r in self.attention)),
        )

    @cached_property
    def _linear_us_per_token(self) -> float:
        forward, _, backward, _ = self._curves
        total_us = [f + b for f, b in zip(forward.times_us, backward.times_us, strict=True)]
        if len(total_us) == 1:
            return total_us[0] / forward.tokens[0]
        return (total_us[-1] - total_us[0]) / (forward.tokens[-1] - forward.tokens[0])

    def document_us(self, length: int) -> float:
        """Predicts one document's forward plus backward, without what every micro-batch costs."""
        _, forward, _, backward = self._curves
        return forward(length) + backward(length) + self._linear_us_per_token * length

    def total_us(self, lengths: Iterable[int]) -> float:
        """Predicts one micro-batch's forward plus backward; an empty one takes 0."""
        return self.work(lengths).total_us

    def work(self, lengths: Iterable[int]) -> Work:
        """The parts of :meth:`total_us`."""
        lengths = list(lengths)
        linear_forward, forward, linear_backward, backward = self._curves
        num_tokens = sum(lengths)
        return Work(
            linear_forward(num_tokens),
            sum(map(forward, lengths)),
            linear_backward(num_tokens),
            sum(map(backward, lengths)),
        )

    def check(self, shape: ModelShape, tp_size: int, cp_size: int) -> None:
        """Raises :class:`ConfigError` if it was measured for another model or layout."""
        check_model(self.model, shape)
        if (self.tp_size, self.cp_size) != (tp_size, cp_size):
            raise ConfigError(
                f"measured with TP {self.tp_size} and CP {self.cp_size}, but "
                f"this run has TP {tp_size} and CP {cp_size}; measure this layout"
            )

    @property
    def most_tokens(self) -> float:
        """Tokens up to which it knows documents and micro-batches."""
        return math.inf if self.extrapolate else min(c.tokens[-1] for c in self._curves)

    def check_reach(self, max_tokens: int) -> None:
        """Raises :class:`ConfigError` if documents or micro-batches of S_max are beyond its end."""
        for curve in self._curves:
            curve(max_tokens)

    def as_dict(self) -> dict[str, Any]:
        """The tables, JSON-able; inverse of :meth:`from_dict`."""
        return {**asdict(self), "model": dict(self.model)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProfiledCost:
        """Reads tables. Raises :class:`ConfigError` for a missing, unknown or impossible entry."""
        known = list(cls.__dataclass_fields__)
        check_names("cost table: ", "entry", values, known, known[:5])
        model = values["model"]
        if not isinstance(model, Mapping):
            raise ConfigError(f"cost table: model is {shown(model)}; give its sizes by name")
        return cls(
            model=dict(model),
            tp_size=whole_number("cost table: tp_size", values["tp_size"], 1),
            cp_size=whole_number("cost table: cp_size", values["cp_size"], 1),
            machine=str(values.get("machine", "")),
            extrapolate=truth("cost table: extrapolate", values.get("extrapolate", False)),
            attention=_table("attention", values["attention"]),
            linear=_table("linear", values["linear"]),
        )


def model_identity(shape: ModelShape) -> dict[str, Any]:
    """The sizes by which a measured cost is known to be this model's."""
    sizes = {name: getattr(shape, name) for name in _IDENTITY}
    if shape.reach_tokens is not None:
        sizes |= {"reach_tokens": shape.reach_tokens}
    if shape.latent is not None:
        sizes |= {"latent": asdict(shape.latent)}
    unlike = {"layers": shape.layers, "predictors": shape.predictors}
    return sizes | {name: repr(runs) for name, runs in unlike.items() if runs}


def check_model(measured: Mapping[str, Any], shape: ModelShape) -> None:
    """Raises :class:`ConfigError` if a cost that was measured for one model is to serve another."""
    if not isinstance(measured, Mapping):
        raise ConfigError(f"model is {shown(measured)}; give its sizes by name")
    identity = model_identity(shape)
    for name in (*_IDENTITY, "reach_tokens", "latent", "layers", "predictors"):
        ours, theirs = identity.get(name), measured.get(name)
        if ours != theirs:
            raise ConfigError(
                f"measured for a model with {name} {shown(theirs)}, but this one has "
                f"{shown(ours)}; measure this model, or use --wlb-cost analytic"
            )


def _table(name: str, values: object) -> tuple[Row, ...]:
    what = f"cost table: {name}"
    rows = []
    for row in listed(what, values):
        if isinstance(row, Mapping):
            row = [row.get(f.name) for f in fields(Row)]
        if len(listed(what, row)) != 3:
            raise ConfigError(f"{what} has {shown(row)}; give [tokens, forward µs, backward µs]")
        whole_number(f"{what} tokens", row[0], 1)
        forward_us = real_number(f"{what} forward_us", row[1])
        rows.append(Row(row[0], forward_us, real_number(f"{what} backward_us", row[2])))
    return tuple(rows)


def read_cost_file(path: str | Path) -> Mapping[str, Any]:
    """The mapping in a JSON or YAML file: a cost, or a fit that has one under ``cost``.

    Raises :class:`ConfigError` where there is none.
    """
    values = read_mapping(path, remedy="give the path of a JSON or YAML file")
    if not isinstance(values.get("cost", values), Mapping):
        raise ConfigError(f"{path}: cost is {shown(values['cost'])}; give coefficients by name")
    return values
