"""Several corpora in one stream, each with its share of the tokens.

Planning code, as :mod:`megatron_wlb.data.documents` is: lengths in, documents out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.documents import DocumentStream, LongDocuments
from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.plan import Document


@dataclass(frozen=True)
class Blend:
    """Prefixes of corpora, and the weight of each, or None for weights by size."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> Blend:
        """Reads ``--data-path`` as Megatron does: ``A B …`` or ``WEIGHT A WEIGHT B …``.

        Raises:
            ConfigError: a weight that is negative or not finite, or weights that are all 0.
        """
        try:
            weights = tuple(map(float, words[::2]))
        except ValueError:
            return cls(tuple(words))
        if not words or len(words) % 2:
            return cls(tuple(words))
        for word, weight in zip(words[::2], weights, strict=True):
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(
                    f"--data-path has the weight {word}; give a number that is not negative"
                )
        if not any(weights):
            raise ConfigError("--data-path has weights of 0 alone; give one above 0")
        return cls(tuple(words[1::2]), weights)


class BlendedStream:
    """Documents of several corpora, of which each gives its weight's share of the tokens.

    Each corpus is a :class:`~megatron_wlb.data.documents.DocumentStream` of its own, with its own
    epochs. In step ``k`` it gives the documents whose first token lies at positions
    ``[k · share, (k+1) · share)`` of its line, with ``share`` = weight ÷ Σ weights × step_tokens,
    exactly: so every step has every corpus's share, give or take one document, and the mean of a
    step is ``step_tokens``. Inside a step the corpora alternate by how much of their share they
    have given.

    Megatron's ``BlendedDataset`` honours weights too, but counts fixed windows and draws one after
    another; the documents are the same, their order is not. A corpus that is smaller than its share
    is passed over again, in another order, as there.

    Endless: corpora end their epochs at different times.
    """

    def __init__(
        self,
        lengths: Sequence[npt.NDArray[np.integer[Any]]],
        weights: Sequence[float],
        *,
        ranges: Sequence[tuple[int, int]] | None = None,
        window: int,
        step_tokens: int,
        seed: int,
        long_documents: LongDocuments = "split",
        names: Sequence[str] = (),
    ) -> None:
        """As of ``DocumentStream``; ``weights`` by corpus, 0 leaves one out."""
        if len(weights) != len(lengths):
            raise ConfigError(f"{len(weights)} weights for {len(lengths)} corpora")
        total = sum(map(Fraction, weights))
        self._streams = {
            corpus: DocumentStream(
                [lengths[corpus]],
                ranges=None if ranges is None else [ranges[corpus]],
                window=window,
                step_tokens=Fraction(weight) / total * step_tokens,
                seed=seed,
                long_documents=long_documents,
                first_corpus=corpus,
                names=names[corpus : corpus + 1],
            )
            for corpus, weight in enumerate(weights)
            if weight
        }
        self._arrivals = dict.fromkeys(self._streams, -1)  # of each corpus's last document
        self._num_arrived = 0

    @property
    def exhausted(self) -> bool:
        """Never."""
        return False

    def next_step(self) -> list[Document]:
        """The documents that arrive in the next step, in stream order."""
        arrived: list[tuple[float, int, Document]] = []
        for corpus, stream in self._streams.items():
            position = float(stream.position_tokens - stream.step * stream.step_tokens)
            for document in stream.next_step():
                arrived.append((position / float(stream.step_tokens), corpus, document))
                position += document.length
        arrived.sort(key=lambda item: item[:2])
        return [self._numbered(corpus, document) for _, corpus, document in arrived]

    def state_dict(self) -> dict[str, Any]:
        """Where all streams stand, and the weights, JSON-able."""
        return {
            "streams": {str(corpus): s.state_dict() for corpus, s in self._streams.items()},
            "arrivals": {str(corpus): number for corpus, number in self._arrivals.items()},
            "num_arrived": self._num_arrived,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where ``state`` was taken.

        Raises CheckpointError for a state of other corpora, weights or settings.
        """
        try:
            states = {int(corpus): value for corpus, value in state["streams"].items()}
            arrivals = {int(corpus): int(value) for corpus, value in state["arrivals"].items()}
            num_arrived = int(state["num_arrived"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"not the state of a blend with weights ({error!r}); resume with the --data-path "
                "that it was saved with"
            ) from None
        if states.keys() != self._streams.keys() or arrivals.keys() != self._streams.keys():
            raise CheckpointError(
                f"the checkpoint's blend is of corpora {sorted(states)}, this run's of "
                f"{sorted(self._streams)}; resume with the same --data-path"
            )
        for corpus, stream in self._streams.items():
            stream.load_state_dict(states[corpus])
        self._arrivals, self._num_arrived = arrivals, num_arrived

    def _numbered(self, corpus: int, document: Document) -> Document:
        """With the corpus's number, and an arrival that is unique over all of them.

        Made anew field by field: ``dataclasses.replace`` takes several times as long.
        """
        if document.offset == 0:
            self._arrivals[corpus] = self._num_arrived
            self._num_arrived += 1
        d, arrival = document, self._arrivals[corpus]
        return Document(corpus, d.index, d.offset, d.length, d.ends, d.epoch, arrival, d.step)
