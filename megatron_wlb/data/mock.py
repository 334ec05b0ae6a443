"""Random tokens in documents of given lengths, to time training without a corpus.

Nothing is stored. A token depends on the seed, its document and its place there alone, so that
every rank, every slice of a document and a resumed run read the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError

LENGTHS = "reference"
"""Where lengths come from if nobody says."""
MOST_WINDOWS = 1 << 15
MOST_TOKENS = 1 << 32
"""What is drawn of a distribution at most: its documents are an epoch."""
_TOKENS_A_COUNT = 4


@dataclass(frozen=True, eq=False)
class MockCorpus(Corpus):
    """A corpus that is not there: lengths, and tokens that are made when they are read.

    ``vocab_size`` and ``eod`` are known always: ``eod`` ends each document and is nowhere else, as
    in a corpus.
    """

    seed: int

    @classmethod
    def of(
        cls,
        lengths: str | None,
        *,
        window: int,
        seed: int,
        vocab_size: int,
        eod: int | None = None,
    ) -> MockCorpus:
        """Takes lengths of a distribution, cut at windows, or those of a file.

        ``eod`` is the last token of the vocabulary if not given, as Megatron's NullTokenizer has
        it. Raises :class:`ConfigError` for an unknown distribution or a vocabulary below 2, and
        :class:`~megatron_wlb.errors.CorpusError` for a file that holds no lengths.
        """
        if vocab_size < 2:
            raise ConfigError(
                f"--mock-data has a vocabulary of {vocab_size}; give the tokenizer's, which has a "
                "token besides the end of documents"
            )
        source = cls.source(lengths)
        num_windows = max(1, min(MOST_WINDOWS, MOST_TOKENS // window))
        return cls(
            f"mock data ({source.title})",
            source.lengths(num_windows, window=window, seed=seed),
            vocab_size,
            vocab_size - 1 if eod is None else eod,
            seed,
        )

    @staticmethod
    def source(lengths: str | None) -> LengthSource:
        """Where lengths come from. Raises the errors of :meth:`of` for lengths that are none."""
        return LengthSource.named(lengths or LENGTHS)

    def sample(self) -> str:
        """Nothing: lengths and seed say all, and are compared."""
        return ""

    def open_tokens(self) -> None:
        """Opens nothing: tokens are made."""

    def _read(self, index: int, start: int, stop: int, epoch: int) -> npt.NDArray[np.int64]:
        assert self.vocab_size is not None and self.eod is not None
        # A generator that counts gives any token without those before it, and its stream is one
        # that NumPy guarantees for ever.
        count, skipped = divmod(start, _TOKENS_A_COUNT)
        numbers = np.random.Philox(key=[self.seed, index], counter=count)
        drawn = numbers.random_raw(skipped + stop - start)[skipped:] % (self.vocab_size - 1)
        tokens = drawn.astype(np.int64)
        tokens += tokens >= self.eod
        if stop == self.lengths[index]:
            tokens[stop - start - 1 :] = self.eod
        return tokens
