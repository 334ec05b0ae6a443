"""What a corpus's documents are like: the distribution of their lengths, and where the work is.

WLB-LLM's Figure 3 of any documents. Counted by length, so that a hundred million documents take no
more than their lengths do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.lengths import Lengths
from megatron_wlb.errors import CorpusError

WINDOW_FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 1.0)
PERCENTILES = (50, 90, 99, 99.9)
_MOST_TO_COUNT = 1 << 24
"""Longest document up to which an array of counts by length is small."""


@dataclass(frozen=True, slots=True)
class LengthPart:
    """Some of the documents, by their lengths."""

    documents: int
    documents_share: float
    tokens: int
    tokens_share: float
    attention_share: float
    """Share of the causal attention of all documents: :func:`attention_work`."""


@dataclass(frozen=True, eq=False)
class LengthStatistics:
    """Statistics of the documents that are not empty."""

    lengths: Lengths
    """The lengths that occur, ascending."""
    counts: npt.NDArray[np.int64]
    """How many documents have each length."""
    num_empty: int
    window: int | None = None
    """Longer documents are trained in pieces of at most so many tokens."""

    @classmethod
    def of(cls, lengths: Lengths, window: int | None = None) -> LengthStatistics:
        """Counts the lengths. Raises :class:`CorpusError` if all are empty."""
        if not lengths.size or not lengths.max():
            raise CorpusError("no document has tokens; give a corpus with text")
        if int(lengths.max()) <= _MOST_TO_COUNT:
            by_length = np.bincount(lengths)
            distinct = np.flatnonzero(by_length)
            counts = by_length[distinct]
        else:
            distinct, counts = np.unique(lengths, return_counts=True)
        some, num_empty = distinct > 0, int(counts[distinct == 0].sum())
        lengths, counts = (part[some].astype(np.int64) for part in (distinct, counts))
        return cls(lengths, counts, num_empty, window)

    @property
    def documents(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int((self.lengths * self.counts).sum())

    @property
    def longest(self) -> int:
        return int(self.lengths[-1])

    def percentile(self, percent: float) -> float:
        """A percentile of the lengths, as ``numpy.percentile`` has it."""
        last = np.cumsum(self.counts) - 1  # number of the last document of each length
        place = percent / 100 * (self.documents - 1)
        below, above = self.lengths[np.searchsorted(last, [np.floor(place), np.ceil(place)])]
        return float(below + (above - below) * (place - np.floor(place)))

    def part(self, start: float = 0, stop: float = np.inf) -> LengthPart:
        chosen = (self.lengths >= start) & (self.lengths < stop)
        lengths, counts = self.lengths[chosen], self.counts[chosen]
        documents, tokens = int(counts.sum()), int((lengths * counts).sum())
        return LengthPart(
            documents,
            documents / self.documents,
            tokens,
            tokens / self.tokens,
            float(self._work[chosen].sum() / self._work.sum()),
        )

    @cached_property
    def _work(self) -> npt.NDArray[np.float64]:
        return attention_work(self.lengths, self.window) * self.counts

    def histogram(self) -> list[tuple[int, int, LengthPart]]:
        """Documents of ``start`` to below ``stop`` tokens, by powers of two."""
        first, last = int(self.lengths[0]).bit_length() - 1, self.longest.bit_length() - 1
        edges = [2**exponent for exponent in range(first, last + 2)]
        return [(start, stop, self.part(start, stop)) for start, stop in pairwise(edges)]

    def as_dict(self, window: int) -> dict[str, Any]:
        """All of the above, JSON-able, and the documents at or above fractions of the window."""
        return {
            "documents": self.documents,
            "empty_documents": self.num_empty,
            "tokens": self.tokens,
            "mean": self.tokens / self.documents,
            "percentiles": {f"p{p:g}": self.percentile(p) for p in PERCENTILES},
            "longest": self.longest,
            "window": window,
            "longer_than_window": self.part(window + 1).documents,
            "at_least": [
                {"windows": fraction, "length": int(fraction * window), **asdict(part)}
                for fraction, part in self.at_least(window)
            ],
            "histogram": [
                {"start": start, "stop": stop, **asdict(part)}
                for start, stop, part in self.histogram()
            ],
        }

    def at_least(self, window: int) -> Iterable[tuple[float, LengthPart]]:
        return [(fraction, self.part(fraction * window)) for fraction in WINDOW_FRACTIONS]


def attention_work(lengths: npt.ArrayLike, window: int | None) -> npt.NDArray[np.float64]:
    """Squares of documents' lengths. With a window, a longer document counts piece by piece."""
    whole = np.asarray(lengths, dtype=np.float64)
    if window is None:
        return whole**2
    pieces, rest = np.divmod(whole, window)
    work: npt.NDArray[np.float64] = pieces * float(window) ** 2 + rest**2
    return work
