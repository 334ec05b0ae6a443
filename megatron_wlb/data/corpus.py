"""Corpora in Megatron's ``.bin/.idx`` format, read; :mod:`.build_corpus` makes them.

The format is Megatron's, so Megatron writes and reads it: this is the one module outside
``runtime/`` that imports megatron, and only once tokens are written or read (the import takes
seconds). Lengths, all that planning needs, are read without it.

One *sequence* of the index is one document here, as it is for Megatron's ``GPTDataset``.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
import warnings
import zlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.index import read_lengths
from megatron_wlb.data.targets import Targets
from megatron_wlb.errors import ConfigError, CorpusError
from megatron_wlb.reading import (
    MAX_COUNT,
    parse_mapping,
    read_text,
    record,
    shown,
    whole_number,
)

_FORMAT = "megatron-wlb corpus 1"
_MAX_INFO_BYTES = 1 << 16
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class CorpusInfo:
    """What was built, and from what; beside the corpus as ``PREFIX.json``."""

    prefix: str
    tokenizer: str
    """``bytes``, ``bpe`` (saved as ``PREFIX.tokenizer.json``) or the path of a tokenizer.json."""
    vocab_size: int
    """Token ids are below this."""
    eod: int
    """The token that ends each document."""
    num_documents: int
    num_tokens: int
    """Tokens of the corpus, with one EOD a document."""
    num_files: int
    num_binary_files: int
    num_unparsable_files: int
    num_empty: int
    num_utf8_errors: int
    fingerprint: str
    """SHA-256 over the content of the sources and all settings: equal means nothing to rebuild."""

    def save(self, path: Path) -> None:
        values = {"format": _FORMAT} | asdict(self)
        del values["prefix"]  # Or it would be wrong once the files are moved.
        path.write_text(json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, prefix: str | Path) -> CorpusInfo | None:
        """What :func:`build_corpus` noted of a corpus; None for a corpus made otherwise.

        Raises CorpusError for a note that is damaged.
        """
        path = Path(f"{prefix}.json")
        try:
            text = read_text(path, _MAX_INFO_BYTES)
        except ConfigError:
            return None
        if _FORMAT not in text:  # Somebody else's file, perhaps the text of the corpus itself.
            return None
        try:
            values = parse_mapping(text, is_json=True)
            del values["format"]
            info = record("", cls, values | {"prefix": str(prefix)})
            for name, value in vars(info).items():
                if isinstance(value, int):
                    whole_number(name, value, int(name == "vocab_size"), MAX_COUNT)
            return info
        except (ConfigError, KeyError) as error:
            raise CorpusError(f"{path} is damaged ({error}); build the corpus anew") from error


@dataclass(frozen=True, eq=False)
class Corpus:
    """A ``.bin/.idx`` pair, whoever made it, checked when opened."""

    prefix: str
    lengths: npt.NDArray[np.int64]
    """Tokens of each document, EOD included."""
    vocab_size: int | None
    """The number of token ids; None, like ``eod``, without the file ``PREFIX.json``."""
    eod: int | None
    targets: Targets | None = field(default=None, kw_only=True)
    """Which tokens are targets; None: every one."""

    @classmethod
    def open(cls, prefix: str | Path) -> Corpus:
        """Reads the index and checks it against the size of the ``.bin``, which is not read.

        Raises CorpusError for a file that is missing, damaged or does not fit the others, and for
        a corpus without documents.
        """
        prefix = str(prefix)
        for suffix in (".idx", ".bin"):
            if not os.path.isfile(prefix + suffix):  # False of names that cannot be
                raise CorpusError(f"no such corpus file: {prefix}{suffix}{_suggestion(prefix)}")
        lengths = read_lengths(prefix)
        targets, info = Targets.open(prefix, lengths), CorpusInfo.load(prefix)
        if info is None:
            return cls(prefix, lengths, None, None, targets=targets)
        found, noted = (len(lengths), int(lengths.sum())), (info.num_documents, info.num_tokens)
        if found != noted:
            raise CorpusError(
                f"{prefix}.idx has {found[0]} documents of {found[1]} tokens and {prefix}.json "
                f"says {noted[0]} of {noted[1]}: files of two corpora; build it anew"
            )
        return cls(prefix, lengths, info.vocab_size, info.eod, targets=targets)

    def tokens(self, index: int, start: int, stop: int, epoch: int = 0) -> npt.NDArray[np.int64]:
        """Tokens ``[start, stop)`` of a document, as a copy; CorpusError where there are none.

        They are the same in every ``epoch`` unless the corpus is rewritten.
        """
        if not 0 <= index < len(self.lengths):
            raise CorpusError(
                f"{self.prefix} has documents 0 to {len(self.lengths) - 1}, not {index}"
            )
        if not 0 <= start <= stop <= self.lengths[index]:
            raise CorpusError(
                f"document {index} of {self.prefix} has {self.lengths[index]} tokens, "
                f"not [{start}, {stop})"
            )
        return self._read(index, start, stop, epoch)

    def sample(self) -> str:
        """A checksum of 16 pieces of 4 KiB, spread over the ``.bin``, by which a checkpoint knows
        it again. It takes as long for any size. CorpusError where they cannot be read.
        """
        path, crc32 = Path(f"{self.prefix}.bin"), 0
        try:
            with path.open("rb") as stream:
                room = max(path.stat().st_size - _SAMPLE_BYTES, 0)
                for number in range(_NUM_SAMPLES):
                    stream.seek(room * number // (_NUM_SAMPLES - 1))
                    crc32 = zlib.crc32(stream.read(_SAMPLE_BYTES), crc32)
        except OSError as error:
            raise CorpusError(f"cannot read {path}: {error.strerror}; look at its disk") from None
        return f"{crc32:08x}"

    def open_tokens(self) -> None:
        """Opens what :meth:`tokens` reads, which imports Megatron: to be done where no other thread
        is at work.
        """
        _ = self._dataset

    def _read(self, index: int, start: int, stop: int, epoch: int) -> npt.NDArray[np.int64]:
        # A copy always: Megatron's arrays are views of a map that it closes.
        try:
            stored = self._dataset.get(index, offset=start, length=stop - start)
        except OSError as error:
            raise CorpusError(
                f"cannot read document {index} of {self.prefix}: {error.strerror or error}; look "
                "at its disk, then start the run again"
            ) from error
        return np.array(stored, dtype=np.int64)

    @cached_property
    def _dataset(self) -> Any:
        return open_indexed(self.prefix)


def parse_split(split: str, num_documents: int) -> tuple[tuple[int, int], ...]:
    """Megatron's ``--split`` as half-open ranges of documents for training, validation and test.

    The bounds are Megatron's: cumulated normalised weights times the number of documents, rounded
    half to even. Raises ConfigError for what Megatron would misread (``"99,-1,0"``) or crash on.
    """
    parts = [part.strip() for part in split.split(",")]
    numeric = all(re.fullmatch(r"\d+\.?\d*|\.\d+", part) for part in parts)
    weights = [float(part) for part in parts] if numeric else []
    if not 1 <= len(weights) <= 3 or not 0 < sum(weights) < math.inf:
        raise ConfigError(
            f"split {shown(split)} is not up to three weights for training, validation and test, "
            "at least one above 0; write it like 99,1,0"
        )
    weights += [0.0] * (3 - len(weights))
    total = np.sum(np.array(weights))
    shares = accumulate((float(weight / total) for weight in weights), initial=0.0)
    bounds = [round(share * float(num_documents)) for share in shares]
    return tuple(pairwise(bounds))


def _suggestion(prefix: str) -> str:
    """What the user may have meant, from the files that are there."""
    stem = prefix.removesuffix(".bin").removesuffix(".idx")
    if stem != prefix and os.path.isfile(f"{stem}.idx"):
        return f"; give the prefix alone: {stem}"
    others = sorted(glob.glob(f"{glob.escape(stem)}*_document.idx"))
    if others:
        return f"; did you mean {' or '.join(name.removesuffix('.idx') for name in others[:3])}?"
    return "; give the prefix of a .bin/.idx pair, or make one with 'wlb corpus build'"


def megatron_indexed_dataset() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns of GPU libraries, which no corpus needs.
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def open_indexed(prefix: str) -> Any:
    """Megatron's reader of a corpus, which logs with its rank: a command has none."""
    dataset = megatron_indexed_dataset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Could not determine rank")
        return dataset.IndexedDataset(prefix, mmap=True)
