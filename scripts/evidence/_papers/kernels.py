"""WLB-LLM's Figures 7 and 10: what operations take by document length, and attention by queries.

The paper measured both; its figures' numbers are in the pictures alone. Here they are *modelled*:
by rates of the machine, and attention by whole tiles, or by the table of ``wlb profile`` where the
hardware has one. :class:`SlowShort` is a kernel as Figure 10 says it of the authors': one that
reaches less where few queries share keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np

from _papers.paper import Effort, K, scenario
from megatron_wlb.cost.attention_latency import (
    AttentionLatency,
    Floats,
    Ints,
    forward_flops,
    pairs,
)
from megatron_wlb.planning.run import Run

LENGTHS = tuple(number * K for number in (1, 4, 8, 16, 32, 64, 128))
QUERIES = (16, 32, 64, 128, 192, 256, 512, 1024)
KEYS = 8 * K
"""Keys that the queries of Figure 10 attend to; the paper's are in the picture alone."""
FEW_QUERIES = 256
"""From so many on blocks of queries share keys by TMA multicast (§5.2)."""


@dataclass(frozen=True)
class SlowShort:
    """A kernel that reaches a share of its rate for chunks of fewer than :data:`FEW_QUERIES`."""

    latency: AttentionLatency
    rate: float

    @property
    def call_us(self) -> tuple[float, float]:
        return self.latency.call_us

    def chunk_us(self, queries: Ints, keys: Ints) -> tuple[Floats, Floats]:
        longer = np.where(queries < FEW_QUERIES, 1 / self.rate, 1.0)
        forward, backward = self.latency.chunk_us(queries, keys)
        return longer * forward, longer * backward


@dataclass(frozen=True)
class SlowShortRun(Run):
    """A run whose attention is slow for short chunks."""

    rate: float = 1.0

    @classmethod
    def of(cls, run: Run, rate: float) -> SlowShortRun:
        values = {field.name: getattr(run, field.name) for field in fields(run)}
        return cls(**values, rate=rate)

    @cached_property
    def _latency(self) -> AttentionLatency:
        return SlowShort(super()._latency, self.rate)


class Operations(NamedTuple):
    """Forward of one layer for one document, in times of attention at 4,096 tokens."""

    attention: float
    matrix: float
    collectives: float
    elementwise: float
    hidden: float
    """The collectives, where products overlap them (§6)."""

    @property
    def linear(self) -> float:
        """The paper's *Total Linear*."""
        return self.matrix + self.collectives + self.elementwise


def figure_7(effort: Effort) -> dict[int, Operations]:
    """By document length: 7B on 16 GPUs, as TP 8 and PP 2; the paper does not say its layout."""
    layout = 8, 1, 2, 1
    base = scenario("7b", 128 * K, layout, 1, effort.hardware)
    layer = base.model.layer()
    hidden = scenario("7b", 128 * K, layout, 1, effort.hardware, overlapped=True).model.layer()
    unit_us, *attention_us = _forward_us(base, [4 * K, *LENGTHS])
    return {
        length: Operations(
            us / unit_us,
            layer.matrix_us * length / unit_us,
            layer.tp_us * length / unit_us,
            layer.elementwise_us * length / unit_us,
            hidden.tp_us * length / unit_us,
        )
        for length, us in zip(LENGTHS, attention_us, strict=True)
    }


def _forward_us(run: Run, lengths: Sequence[int]) -> list[float]:
    """Attention's forward of whole documents, alone."""
    tokens = np.array(lengths)
    result: list[float] = run._latency.chunk_us(tokens, tokens)[0].tolist()
    return result


class Kernel(NamedTuple):
    """Attention's forward of some queries."""

    latency: float
    """Over that of 128 queries."""
    tflops: float
    """10¹² FLOP/s of the pairs that are needed."""


def figure_10(effort: Effort, keys: int = KEYS) -> dict[int, Kernel]:
    """By queries that attend to ``keys`` keys, theirs the last: 7B with TP 8."""
    run = scenario("7b", 128 * K, (8, 1, 1, 1), 1, effort.hardware)
    heads = run.shape.num_attention_heads // run.parallelism.tp_size

    def forward_us(queries: int) -> float:
        return float(run._latency.chunk_us(np.array(queries), np.array(keys))[0])

    unit_us = forward_us(128)
    return {
        queries: Kernel(
            forward_us(queries) / unit_us,
            forward_flops(
                heads, run.shape.kv_channels, float(pairs(np.array(queries), np.array(keys)))
            )
            / forward_us(queries)
            / 1e6,
        )
        for queries in QUERIES
    }
