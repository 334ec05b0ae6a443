"""Chooses the sharding of a micro-batch: the one whose slowest rank is predicted done first.

``adaptive`` is WLB-LLM §5.3: per-sequence or per-document, whichever has the faster attention.
``hybrid`` also weighs sharding only the long documents per document, and from which length on.
Both go by :mod:`megatron_wlb.cost.attention_latency`'s predictions of one layer's attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Literal, TypeAlias, get_args

import numpy as np

from megatron_wlb.cost.attention_latency import AttentionLatency, Floats
from megatron_wlb.cost.document import imbalance
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan.sharding.shard import (
    IntArray,
    Sharding,
    checked_lengths,
    chunks_by_threshold,
    shard_arrays,
)

Mode: TypeAlias = Literal["per-sequence", "per-document", "adaptive", "hybrid"]
MODES: tuple[Mode, ...] = get_args(Mode)

_LATENCY_US = attrgetter("latency_us")
PER_SEQUENCE, PER_DOCUMENT = Sharding("per-sequence"), Sharding("per-document")

MIN_THRESHOLDS, MAX_CHUNKS = 12, 16_384
"""`hybrid` tries every length that makes at most so many chunks of short documents in all;
where there are too many, as many as that allows but at least 12, evenly spread."""

BLOCK = 8192
"""Chunks, and documents of several micro-batches, predicted together. Memory for more at once goes
back to the system each time, and to get it again takes longer than to compute."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted attention of one layer under a sharding, in µs by rank."""

    sharding: Sharding
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]

    @property
    def latency_us(self) -> float:
        """Time of the slowest rank, which the others wait for in each pass."""
        return max(self.forward_us) + max(self.backward_us)

    @property
    def forward_imbalance(self) -> float:
        """The slowest rank's forward time over the mean; 1 is perfect."""
        return imbalance(self.forward_us)

    @property
    def backward_imbalance(self) -> float:
        return imbalance(self.backward_us)


def _shares_us(latency: AttentionLatency, queries: IntArray, keys: IntArray) -> Floats:
    """``[2, chunks]``: forward and backward of each, in multiples of 2⁻²⁴ µs.

    So sums of them are exact, and the same in any order, up to minutes.
    """
    shares_us = np.empty((2, len(queries)))
    for at in range(0, len(queries), BLOCK):
        block = slice(at, at + BLOCK)
        shares_us[:, block] = latency.chunk_us(queries[block], keys[block])
    return np.rint(shares_us * 2.0**24) / 2.0**24


def predict(
    lengths: Sequence[int], cp_size: int, sharding: Sharding, latency: AttentionLatency
) -> Prediction:
    """Predicts the attention of a micro-batch, one varlen call a rank and pass."""
    ranks = shard_arrays(lengths, cp_size, sharding)
    rank = np.repeat(np.arange(cp_size), [len(rows) for rows in ranks])
    _, start, stop = np.concatenate(ranks).T
    forward, backward = (
        np.bincount(rank, us, cp_size) + call_us
        for us, call_us in zip(
            _shares_us(latency, stop - start, stop), latency.call_us, strict=True
        )
    )
    return Prediction(sharding, tuple(forward.tolist()), tuple(backward.tolist()))


def predict_each(
    rows: Sequence[Sequence[int]],
    cp_size: int,
    shardings: Sequence[Sharding],
    latency: AttentionLatency,
) -> list[list[Prediction]]:
    """Does what :func:`predict` does for each micro-batch and sharding, in about the time of one.

    ``rows`` are the lengths of micro-batches. The shardings differ in which documents are long, and
    are in ascending order of that threshold.
    """
    sizes = np.array([len(lengths) for lengths in rows])
    tokens = np.fromiter(chain.from_iterable(rows), np.int64, int(sizes.sum()))
    totals = np.array([sum(lengths) for lengths in rows])
    if np.min(tokens, initial=1) < 1 or (cp_size > 1 and np.any(totals % (2 * cp_size))):
        for lengths in rows:
            checked_lengths(lengths, cp_size)  # raises for the one that is wrong
    thresholds = [sharding.long_tokens for sharding in shardings]
    shape = len(rows), len(shardings), cp_size
    long_us, short_us = (
        [
            np.bincount(chunks.holder, us, len(rows) * len(shardings) * cp_size).reshape(shape)
            for us in _shares_us(latency, chunks.stop - chunks.start, chunks.stop)
        ]
        for chunks in chunks_by_threshold(tokens, sizes, cp_size, thresholds)
    )
    forward, backward = (
        # What is long for one threshold is so for those before it.
        (long[:, ::-1].cumsum(axis=1)[:, ::-1] + short + call_us).tolist()
        for long, short, call_us in zip(long_us, short_us, latency.call_us, strict=True)
    )
    return [
        list(map(Prediction, shardings, map(tuple, own), map(tuple, other)))
        for own, other in zip(forward, backward, strict=True)
    ]


@dataclass(frozen=True)
class Selector:
    """Chooses the sharding of each micro-batch, on every rank the same.

    The choice is the candidate with the least :attr:`Prediction.latency_us`, the first of equals.
    Raises :class:`ConfigError` for an unknown mode.
    """

    mode: Mode
    cp_size: int
    latency: AttentionLatency

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"unknown sharding {self.mode}; use one of {', '.join(MODES)}")

    def choose(self, lengths: Sequence[int]) -> Prediction:
        """The sharding for segments of such lengths (``MicroBatchPlan.lengths``)."""
        return self.choose_each([lengths])[0]

    def choose_each(self, rows: Sequence[Sequence[int]]) -> list[Prediction]:
        """The sharding of each micro-batch, of many in much less time than one by one."""
        return [min(own, key=_LATENCY_US) for own in self.predictions_each(rows)]

    def predictions_each(self, rows: Sequence[Sequence[int]]) -> list[list[Prediction]]:
        """The predictions of every candidate for each micro-batch."""
        result: list[list[Prediction]] = []
        for block in self._blocks(rows):
            candidates = self._candidates(block[0])
            for found in predict_each(block, self.cp_size, candidates, self.latency):
                result.append(found[-1:] + found[:-1])  # per-sequence comes first
        return result

    def _blocks(self, rows: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
        """Micro-batches that have the same candidates, about as many as are fast together."""
        limit = 0 if self.mode == "hybrid" else BLOCK
        first = num_documents = 0
        for at, lengths in enumerate(rows):
            num_documents += len(lengths)
            if num_documents > limit:
                yield rows[first : at + 1]
                first, num_documents = at + 1, 0
        if rows[first:]:
            yield rows[first:]

    def _candidates(self, lengths: Sequence[int]) -> list[Sharding]:
        """Candidates by ascending threshold."""
        match self.mode:
            case "per-sequence":
                return [PER_SEQUENCE]
            case "per-document":
                return [PER_DOCUMENT]
            case "adaptive":
                return [PER_DOCUMENT, PER_SEQUENCE]
            case "hybrid":
                # Above the shortest length, or all were long; up to the longest, or none was.
                distinct = np.unique(np.asarray(lengths))[1:]
                most = MAX_CHUNKS // (len(lengths) + 2 * self.cp_size)
                number = min(len(distinct), max(most, MIN_THRESHOLDS))
                at = np.linspace(0, len(distinct) - 1, number).round().astype(int)
                hybrids = [Sharding("hybrid", threshold) for threshold in distinct[at].tolist()]
                return [PER_DOCUMENT, *hybrids, PER_SEQUENCE]
