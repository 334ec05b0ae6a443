"""Where document lengths come from when nothing is trained: a corpus, a file, a distribution.

Lengths are all that packing depends on, so this is how a packing is tried on documents that are
yet to be tokenized, or on none at all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.arrays import open_array
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.documents import DocumentStream, LongDocuments, too_long
from megatron_wlb.data.lengths import DISTRIBUTIONS, Lengths, distribution, sample_lengths
from megatron_wlb.data.ramp import Ramp
from megatron_wlb.errors import CorpusError
from megatron_wlb.files import open_file
from megatron_wlb.plan import Document
from megatron_wlb.reading import one_line

MAX_LENGTH = 2**31 - 1
"""Tokens of a document: Megatron's index counts them in an int32."""
_MAX_LINE_BYTES = 1 << 12
_MAX_PIPE_BYTES = 1 << 30
"""What is read of a pipe: some 200 million lengths."""
MIN_TO_SPLIT = 64
"""The fewest documents to split: halves of fewer would not resemble the whole."""


@dataclass(frozen=True, eq=False)
class LengthSource:
    """Lengths of stored documents, in tokens, or a distribution to draw them from."""

    title: str
    stored: Lengths | None = None
    """The documents' lengths; None where a distribution draws them."""
    distribution: str = ""
    seed_offset: int = 0
    """Added to every seed: another one is another draw."""

    @classmethod
    def of_corpora(cls, prefixes: Sequence[str]) -> LengthSource:
        """Reads all documents of ``.bin/.idx`` corpora, from their indices alone."""
        parts = [Corpus.open(prefix).lengths for prefix in prefixes]
        title = ", ".join(Path(prefix).name for prefix in prefixes)
        return cls(title, parts[0] if len(parts) == 1 else np.concatenate(parts))

    @classmethod
    def of_file(cls, path: str | Path) -> LengthSource:
        """Reads one length a line, of a pipe too, or an ``.npy`` array of one dimension.

        Raises :class:`CorpusError` for a file that is missing, empty, no such thing, or has a
        length below 1, naming it.
        """
        path = Path(path)
        try:
            lengths = _read_array(path) if path.suffix == ".npy" else _read_lines(path)
        except (OSError, ValueError) as error:  # a NUL in the path
            raise CorpusError(
                f"cannot read {path}: {one_line(error)}; give a file of lengths"
            ) from error
        return cls.of_lengths(str(path), lengths, path.name)

    @classmethod
    def of_lengths(cls, name: str, lengths: npt.NDArray[Any], title: str = "") -> LengthSource:
        """Takes one length for each document; errors call them ``name``.

        Raises :class:`CorpusError` for none, for numbers that are not whole, and for lengths that
        no document has.
        """
        if not lengths.size:
            raise CorpusError(f"{name} has no lengths; give at least one")
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
            raise CorpusError(
                f"{name} holds {lengths.dtype} of shape {lengths.shape}; give whole numbers, one "
                "for each document"
            )
        impossible = np.flatnonzero((lengths < 1) | (lengths > MAX_LENGTH))
        if impossible.size:
            first = int(impossible[0])
            raise CorpusError(
                f"{name}: length number {first + 1} is {lengths[first]} ({impossible.size} such); "
                f"lengths are 1 to {MAX_LENGTH} tokens, correct or remove it"
            )
        return cls(title or name, lengths.astype(np.int64, copy=False))

    @classmethod
    def of_distribution(cls, name: str) -> LengthSource:
        distribution(name)
        return cls(f"distribution {name}", distribution=name)

    @classmethod
    def named(cls, name: str) -> LengthSource:
        """Takes a distribution by its name, or the lengths in a file.

        Raises :class:`ConfigError` for a word that is neither, and :class:`CorpusError` as
        :meth:`of_file` does.
        """
        if name in DISTRIBUTIONS or not (os.path.exists(name) or {".", os.sep} & {*name}):
            return cls.of_distribution(name)
        return cls.of_file(name)

    @property
    def num_documents(self) -> float:
        """Number of documents that are not empty; infinite for a distribution."""
        return np.inf if self.stored is None else int(np.count_nonzero(self.stored))

    def longest(self, window: int) -> int:
        """The longest document; a distribution is cut at windows, so its longest is the window."""
        return window if self.stored is None else int(self.stored.max())

    def lengths(self, num_windows: int, *, window: int, seed: int) -> Lengths:
        """Returns all stored lengths, or draws so many windows' worth."""
        if self.stored is not None:
            return self.stored
        seed += self.seed_offset
        return sample_lengths(self.distribution, num_windows, seed=seed, window=window)

    def sampled(self, num_tokens: int, *, window: int, seed: int) -> LengthSource:
        """Samples documents that have ``num_tokens`` together, or all where there are fewer.

        It spares sorting a hundred million documents to try a few thousand.
        """
        if self.stored is None:
            return self
        random = np.random.default_rng([seed, self.seed_offset])
        count = 1024
        while 2 * count < len(self.stored):
            chosen = random.choice(len(self.stored), count, replace=False, shuffle=False)
            # Counted as short as a policy may make them.
            if int(np.minimum(self.stored[chosen], window).sum()) >= num_tokens:
                return replace(self, stored=self.stored[chosen])
            count *= 2
        return self

    def halves(self, seed: int) -> tuple[LengthSource, LengthSource]:
        """Two sources like this one without a document in common.

        Of a few documents both are all of them, in other orders.
        """
        if self.stored is None or self.num_documents < MIN_TO_SPLIT:
            return self, replace(self, seed_offset=self.seed_offset + 1)
        present = np.flatnonzero(self.stored)
        order = np.random.default_rng([seed, self.seed_offset]).permutation(present)
        first, second = np.array_split(order, 2)
        return replace(self, stored=self.stored[first]), replace(self, stored=self.stored[second])

    def stream(
        self,
        num_steps: int,
        *,
        window: int,
        longest: int,
        windows_a_step: int,
        seed: int,
        long_documents: LongDocuments,
        ramp: Ramp | None = None,
    ) -> DocumentStream:
        """Streams at least ``num_steps`` steps of documents, as training would draw them.

        Stored documents are shuffled and repeat. Drawn ones keep their order, in which they fill
        windows exactly. Documents above ``longest`` follow ``long_documents``.
        """
        drawn = self.stored is None
        step_tokens = windows_a_step * window
        source = self.sampled(num_steps * step_tokens, window=window, seed=seed)
        return DocumentStream(
            [source.lengths(num_steps * windows_a_step, window=window, seed=seed)],
            window=longest,
            step_tokens=step_tokens,
            seed=(seed + self.seed_offset) % 2**32,
            long_documents=long_documents,
            num_epochs=1 if drawn else None,
            shuffle=not drawn,
            ramp=ramp,
        )

    def check(self, *, window: int, long_documents: LongDocuments) -> None:
        """Raises :class:`CorpusError` for documents that cannot be streamed: all of them empty, or
        some too long where ``long_documents`` is ``error``.
        """
        if self.stored is None:
            return
        if not self.stored.any():
            raise CorpusError(f"{self.title}: no document has tokens; give a corpus with text")
        if long_documents == "error" and int(self.stored.max()) > window:
            raise too_long(f"{self.title}: document {self.stored.argmax()}", self.stored, window)

    def remarks(self, num_tokens: int, *, window: int, long_documents: LongDocuments) -> list[str]:
        """Says what becomes of documents where ``num_tokens`` are to be packed; often nothing."""
        if self.stored is None:
            return []
        said = []
        tokens, num_empty = int(self.stored.sum()), int(np.count_nonzero(self.stored == 0))
        if num_empty:
            said.append(f"{num_empty:,} documents without tokens are left out")
        long = self.stored[self.stored > window]
        if long.size:
            done = "cut into pieces of at most a window each"
            if long_documents == "truncate":
                lost = int((long - window).sum())
                done = f"truncated to it, which drops {lost:,} tokens ({lost / tokens:.1%})"
            elif long_documents == "slice":
                done = f"run whole, {int(long.max()):,} tokens at most, by slim packing only"
            said.append(
                f"{long.size:,} of {self.stored.size:,} documents are longer than the window of "
                f"{window:,} tokens and {done} (--long-documents {long_documents})"
            )
        if tokens < num_tokens:
            said.append(
                f"{tokens:,} tokens are fewer than the {num_tokens:,} to be packed: documents "
                "repeat, in another order each time"
            )
        return said


def _read_array(path: Path) -> Lengths:
    try:
        return np.array(open_array(path))
    except ValueError as error:
        _refuse(path, str(error))


def _read_lines(path: Path) -> Lengths:
    def numbers(stream: BinaryIO) -> Iterator[int]:
        lines = iter(partial(stream.readline, _MAX_LINE_BYTES), b"")
        left = math.inf if stream.seekable() else _MAX_PIPE_BYTES
        for number, line in enumerate(lines, start=1):
            left -= len(line)
            if left < 0:
                raise ValueError(
                    f"it is a pipe of more than {_MAX_PIPE_BYTES} bytes, write what it gives into "
                    "a file"
                )
            if text := line.strip():
                try:
                    value = int(text)
                    if value.bit_length() > 63:
                        raise ValueError
                    yield value
                except ValueError:
                    shown = text[:40].decode("utf-8", "backslashreplace")
                    _refuse(path, f"has {shown!r} in line {number}")

    with open_file(path, or_pipe=True) as stream:
        return np.fromiter(numbers(stream), np.int64)


def _refuse(path: Path, reason: str) -> NoReturn:
    raise CorpusError(
        f"{path} {reason}; give whole numbers, one length a line, or an .npy array of one dimension"
    )


def sample_steps(
    source: LengthSource,
    num: int,
    *,
    window: int,
    windows_a_step: int,
    seed: int,
    long_documents: LongDocuments = "split",
) -> list[list[Document]]:
    """The documents of so many steps, of which each has some."""
    stream = source.stream(
        num,
        window=window,
        longest=window,
        windows_a_step=windows_a_step,
        seed=seed,
        long_documents=long_documents,
    )
    found: list[list[Document]] = []
    while len(found) < num and not stream.exhausted:
        if documents := stream.next_step():
            found.append(documents)
    return found
