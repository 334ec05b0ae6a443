"""Counts what a packing ran against what there is to run."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megatron_wlb.plan import Document


class Ledger:
    """Knows which tokens of one epoch, streamed in stored order, have run; each is to run once.

    Raises :class:`AssertionError` as soon as a token runs twice or does not exist. Memory: 8 bytes
    a document, from the start, and the pieces of cut documents until the last one has run.
    """

    def __init__(self, lengths: npt.NDArray[np.int64]) -> None:
        self._lengths = lengths
        self._left_tokens = lengths.copy()
        self._pieces: dict[int, list[Document]] = {}
        self.num_documents = 0
        """Documents that ran; pieces count."""
        self.num_tokens = 0

    def run(self, documents: Iterable[Document]) -> None:
        for document in documents:
            arrival, length = document.arrival, document.length
            self._left_tokens[arrival] -= length
            if self._left_tokens[arrival] < 0:
                raise AssertionError(f"{document} runs tokens twice")
            if length < self._lengths[arrival]:
                self._pieces.setdefault(arrival, []).append(document)
                if not self._left_tokens[arrival]:
                    check_tiles(self._pieces.pop(arrival))
            self.num_documents += 1
            self.num_tokens += length

    @property
    def lost_tokens(self) -> int:
        """Number of tokens that have not run."""
        return int(self._left_tokens.sum())


def check_tiles(pieces: list[Document]) -> None:
    """Raises :class:`AssertionError` unless they are the whole of a document, each token once."""
    offset = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset != offset:
            raise AssertionError(f"{piece} does not begin at {offset}")
        offset += piece.length
