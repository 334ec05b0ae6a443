"""Fill-in-the-middle: parts of documents whose middle comes last, as Megatron-LM's ``--fim-data``
makes them while it reads.

A text is cut at two characters into prefix, middle and suffix. The model reads ``PREFIX prefix
SUFFIX suffix MIDDLE middle`` (PSM) or ``PREFIX SUFFIX suffix MIDDLE prefix middle`` (SPM), where
names in capitals are tokens of their own. Departures from Megatron-LM's ``GPTFIMDataset``:

- Each window of a document is rewritten for itself, not each part of a sample: which documents
  share a micro-batch changes no token. Where slices run documents whole, so is the rewriting.
- Chance depends on seed, document, window and epoch, not on the order of reading: every rank, every
  span and a resumed run read the same. An evaluation reads the same each time.
- A part keeps its length, so that plans, made of lengths, hold, and ends stay where they are: the
  suffix loses its end where there is no room, and padding follows the middle where there is some.
  Megatron-LM cuts and pads whole samples. A part with a suffix that is too short for that stays as
  it is.
- Marks between empty parts are kept. Megatron-LM drops them.
- A tokenizer without a text (``NullTokenizer``) is cut between tokens. There Megatron-LM fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.corpus import Corpus

IntArray = npt.NDArray[np.int64]

_WINDOWS_KEPT = 8
"""Context-parallel ranks and slices read a window in parts."""


@dataclass(frozen=True)
class Middles:
    """How parts of documents are rewritten. Rates are probabilities, the first five are tokens."""

    prefix: int
    middle: int
    suffix: int
    padding: int
    eod: int
    """What ends a part."""
    rate: float
    """How likely a part is rewritten, or its fragments may be."""
    spm_rate: float
    """How likely what is rewritten is SPM."""
    decode: Callable[[IntArray], Any]
    """Tokens to something that can be cut: a text, or a list."""
    encode: Callable[[Any], Sequence[int]]
    split: int | None = None
    """A token that divides a part into fragments, each rewritten for itself."""
    fragment_rate: float = 0.0
    """How likely a fragment is rewritten."""
    keeps: Callable[[IntArray], bool] = lambda part: False
    """Whether a part must stay as it is."""
    seed: int = 0

    def rewritten(self, tokens: IntArray, key: Sequence[int]) -> IntArray:
        """As many tokens, rewritten by chance that depends on the seed and ``key`` alone."""
        # RandomState, because NumPy guarantees its streams for ever.
        random = np.random.RandomState([self.seed, *key])
        return _each_part(tokens, self.eod, lambda part: self._part(part, random))

    def _part(self, part: IntArray, random: np.random.RandomState) -> IntArray:
        if self.split is None or self.split not in part:
            return self._permuted(part, self.rate, random)
        if random.random_sample() >= self.rate:
            return part
        return _each_part(
            part, self.split, lambda one: self._permuted(one, self.fragment_rate, random)
        )

    def _permuted(self, part: IntArray, rate: float, random: np.random.RandomState) -> IntArray:
        if random.random_sample() >= rate or self.keeps(part):
            return part
        text = self.decode(part)
        first, second = sorted(random.randint(0, len(text) + 1, size=2).tolist())
        spm = random.random_sample() < self.spm_rate
        pieces = text[:first], text[first:second], text[second:]
        prefix, middle, suffix = (list(self.encode(piece)) if piece else [] for piece in pieces)
        room = len(part) - 3 - len(prefix) - len(middle)
        if room < 0 or (suffix and not room):
            return part
        suffix = suffix[:room]
        if spm:
            found = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            found = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.array(found + [self.padding] * (len(part) - len(found)), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class RewrittenCorpus(Corpus):
    """A stored corpus, each window of whose documents is rewritten once it is read."""

    middles: Middles
    number: int
    """Its number among the run's corpora."""
    window: int | None
    """None rewrites documents whole."""

    @classmethod
    def of(
        cls, corpus: Corpus, middles: Middles, number: int, window: int | None
    ) -> RewrittenCorpus:
        stored = corpus.prefix, corpus.lengths, corpus.vocab_size, corpus.eod
        return cls(*stored, middles, number, window)

    def _read(self, index: int, start: int, stop: int, epoch: int) -> IntArray:
        length = int(self.lengths[index])
        size = self.window or max(1, length)
        firsts = range(start // size * size, stop, size)
        windows = [self._window(index, first, min(first + size, length), epoch) for first in firsts]
        read = np.concatenate([np.empty(0, np.int64), *windows])
        return read[start - start // size * size :][: stop - start]

    @cached_property
    def _window(self) -> Callable[[int, int, int, int], IntArray]:
        @lru_cache(_WINDOWS_KEPT)
        def window(index: int, start: int, stop: int, epoch: int) -> IntArray:
            stored = super(RewrittenCorpus, self)._read(index, start, stop, epoch)
            return self.middles.rewritten(stored, [self.number, index, start, epoch])

        return window


def _each_part(tokens: IntArray, mark: int, change: Callable[[IntArray], IntArray]) -> IntArray:
    """A copy in which what is between marks is changed; the marks stay."""
    changed = tokens.copy()
    for before, after in pairwise([-1, *np.flatnonzero(tokens == mark).tolist(), len(tokens)]):
        if after > before + 1:
            changed[before + 1 : after] = change(tokens[before + 1 : after])
    return changed
