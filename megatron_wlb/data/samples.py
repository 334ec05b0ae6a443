"""Samples in memory as a corpus: what a trainer has at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.corpus import Corpus


@dataclass(frozen=True, eq=False)
class SampleCorpus(Corpus):
    """Documents whose tokens are in memory."""

    stored: Sequence[npt.NDArray[np.int64]]

    @classmethod
    def of(cls, samples: Sequence[npt.ArrayLike]) -> SampleCorpus:
        """Takes the token ids of each sample, ``[length]``."""
        stored = [np.asarray(sample, dtype=np.int64) for sample in samples]
        lengths = np.array([len(sample) for sample in stored], dtype=np.int64)
        return cls("samples", lengths, None, None, stored)

    def open_tokens(self) -> None:
        """Opens nothing: tokens are there."""

    def _read(self, index: int, start: int, stop: int, epoch: int) -> npt.NDArray[np.int64]:
        return self.stored[index][start:stop].copy()
