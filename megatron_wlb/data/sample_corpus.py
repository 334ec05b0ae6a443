"""Samples in memory as a corpus: what a trainer has at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.arrays import array_of
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.errors import CorpusError


@dataclass(frozen=True, eq=False)
class SampleCorpus(Corpus):
    """Documents whose tokens are in memory."""

    stored: Sequence[npt.NDArray[np.int64]]

    @classmethod
    def of(cls, samples: Sequence[npt.ArrayLike]) -> SampleCorpus:
        """Takes the token ids of each sample, ``[length]``.

        Raises :class:`CorpusError` for samples that are none, or no lists of whole numbers.
        """
        arrays = [array_of(sample) for sample in samples]
        for number, array in enumerate(arrays):
            if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
                raise CorpusError(
                    f"sample {number} holds {array.dtype} of shape {array.shape}; give a list of "
                    "token ids"
                )
        lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        if not len(lengths):
            raise CorpusError("a batch has no samples; give at least one")
        stored = [array.astype(np.int64, copy=False) for array in arrays]
        return cls("samples", lengths, None, None, stored)

    def open_tokens(self) -> None:
        """Opens nothing: tokens are there."""

    def _read(self, index: int, start: int, stop: int, epoch: int) -> npt.NDArray[np.int64]:
        return self.stored[index][start:stop].copy()
