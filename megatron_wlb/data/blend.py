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

from megatron_wlb.data.documents import (
    CorpusEpoch,
    DocumentStream,
    LongDocuments,
    LossMean,
    tokens_before,
)
from megatron_wlb.data.ramp import Ramp
from megatron_wlb.data.targets import Targets
from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.plan import Document
from megatron_wlb.reading import MAX_COUNT, reading_state, shown, whole_number


@dataclass(frozen=True)
class Blend:
    """Prefixes of corpora, and the weight of each, or None for weights by size."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> Blend:
        """Reads ``--data-path`` as Megatron does: ``A B …`` or ``WEIGHT A WEIGHT B …``.

        Raises ConfigError for a weight that is negative or not finite, or weights that are all 0.
        """
        try:
            weights = () if len(words) % 2 else tuple(map(float, words[::2]))
        except ValueError:
            weights = ()
        if not weights:
            return cls(tuple(words))
        for word, weight in zip(words[::2], weights, strict=True):
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(
                    f"--data-path has the weight {shown(word)[1:-1]}; give a number that is not "
                    "negative"
                )
        if not any(weights):
            raise ConfigError("--data-path has weights of 0 alone; give one above 0")
        return cls(tuple(words[1::2]), weights)


class BlendedStream:
    """A stream of several corpora in which each gives its weight's share of the tokens.

    Each corpus is a :class:`~megatron_wlb.data.documents.DocumentStream` with its own epochs. The
    next document is always that of the corpus which has given least of its share, that is tokens
    given ÷ weight; ties go to the first corpus. So there is one line of all tokens, in which every
    corpus has its share up to some documents. Steps are cut from it as ``DocumentStream`` cuts its
    own; a step of at least a window is never empty, and never off by more than a window.

    Megatron's ``BlendedDataset`` honours weights too, but counts fixed windows: the documents are
    the same, their order is not. Endless: corpora end their epochs at different times.
    """

    exhausted = False

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
        ramp: Ramp | None = None,
        targets: Sequence[Targets | None] = (),
        loss_mean: LossMean = "token",
    ) -> None:
        """Takes what ``DocumentStream`` takes; ``weights`` by corpus, 0 leaves one out.

        A weight means the decimal number that it prints as: 0.3 and 0.7 are 30 and 70.
        """
        shares = [Fraction(repr(float(weight))) for weight in weights]
        self._streams = {
            corpus: DocumentStream(
                [stored],
                ranges=None if ranges is None else [ranges[corpus]],
                window=window,
                step_tokens=share / sum(shares) * step_tokens,
                seed=seed,
                long_documents=long_documents,
                first_corpus=corpus,
                names=names[corpus : corpus + 1],
                ramp=ramp,
                targets=targets[corpus : corpus + 1],
                loss_mean=loss_mean,
            )
            for corpus, (stored, share) in enumerate(zip(lengths, shares, strict=True))
            if share
        }
        # Tokens given × scale compare as tokens given ÷ share do, without rounding.
        common = math.lcm(*(share.numerator for share in shares if share))
        self._scales = {
            corpus: common // shares[corpus].numerator * shares[corpus].denominator
            for corpus in self._streams
        }
        self.step_tokens = step_tokens
        self.ramp = ramp
        self.step = 0
        """The step that :meth:`next_step` gives the documents of."""
        self._drawn: list[Document] = []  # what the corpora gave for later steps
        self._num_arrived = 0
        self._position_tokens = 0  # given so far

    def next_step(self) -> list[Document]:
        """The documents that arrive in the next step, in stream order."""
        end = tokens_before(self.step + 1, self.step_tokens, self.ramp)
        # Every corpus gives its share of a step at least, so more are at hand than are needed.
        documents = self._drawn + self._draw()
        position, count = self._position_tokens, 0
        for document in documents:
            if position >= end:
                break
            position += document.length
            count += 1
        self._position_tokens, self._drawn = position, documents[count:]
        given = [self._numbered(document) for document in documents[:count]]
        self.step += 1
        return given

    @property
    def contents(self) -> dict[int, CorpusEpoch]:
        """What each corpus gives in an epoch of its own, by its number."""
        return {corpus: stream.contents[0] for corpus, stream in self._streams.items()}

    def state_dict(self) -> dict[str, Any]:
        """Where all streams and the blend of them stand, JSON-able."""
        return {
            "streams": {str(corpus): s.state_dict() for corpus, s in self._streams.items()},
            "step": self.step,
            "drawn": [*self._drawn],
            "num_arrived": self._num_arrived,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where ``state`` was taken.

        One of a release that gave each corpus's share by the step loses and repeats no document.
        Raises CheckpointError for a state of other corpora, weights or settings.
        """
        with reading_state("a blend with weights"):
            states = {int(corpus): value for corpus, value in state["streams"].items()}
            drawn = [Document.from_list(values) for values in state.get("drawn", ())]
            num_arrived = whole_number("num_arrived", state["num_arrived"], 0, MAX_COUNT)
            first = state["step"] if "step" in state else states[min(states)]["step"]
            step = whole_number("step", first, 0, MAX_COUNT)
        if states.keys() != self._streams.keys():
            raise CheckpointError(
                f"the checkpoint's blend is of corpora {sorted(states)}, this run's of "
                f"{sorted(self._streams)}; resume with the same --data-path"
            )
        for corpus, stream in self._streams.items():
            stream.load_state_dict(states[corpus])
        self._drawn, self._num_arrived, self.step = drawn, num_arrived, step
        drawn_tokens = sum(stream.position_tokens for stream in self._streams.values())
        self._position_tokens = drawn_tokens - sum(document.length for document in drawn)

    def _draw(self) -> list[Document]:
        """A step's share of every corpus, in the order of the blend."""
        drawn: list[tuple[int, int, Document]] = []
        for corpus, stream in self._streams.items():
            position, scale = stream.position_tokens, self._scales[corpus]
            for document in stream.next_step():
                drawn.append((position * scale, corpus, document))
                position += document.length
        drawn.sort(key=lambda item: item[:2])
        return [document._replace(corpus=corpus) for _, corpus, document in drawn]

    def _numbered(self, document: Document) -> Document:
        """Gives a document its number and step in the blend; ``_replace`` would take far longer."""
        arrival = self._num_arrived
        self._num_arrived += 1
        return Document(*document[:6], arrival, self.step, document.targets)
