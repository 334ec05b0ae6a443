"""Files of conversations -> corpora of documents some of whose tokens are targets.

A line of a JSONL file, or a row of a parquet file, has ``messages``: a list of ``{"role": …,
"content": …}``. A system message begins a conversation, as in Megatron-LM's ``SFTDataset``, so that
a line may hold several. Each conversation is one document, and what the tokenizer says to ignore is
no target. The corpus is made once and kept: the next run opens it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.corpus import Corpus, megatron_indexed_dataset
from megatron_wlb.data.sources import Progress, SourceCounts, json_lines, json_value
from megatron_wlb.data.targets import RUN, SUFFIX, runs_of
from megatron_wlb.errors import CorpusError
from megatron_wlb.files import open_file
from megatron_wlb.reading import one_line, shown

Conversation: TypeAlias = list[dict[str, Any]]
Tokens: TypeAlias = npt.NDArray[Any]

KEY = "messages"
_VERSION = 1
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Template:
    """How conversations become tokens."""

    tokenize: Callable[[Conversation], tuple[Tokens, Tokens]]
    """Tokens, and as many targets: the same tokens, or a negative number where one is none. Raises
    anything for a conversation that it cannot take."""
    eod: int | None
    """What is appended where a conversation does not end so, and is a target; None: nothing."""
    pad: int | None
    """A token that is no target wherever it stands."""
    vocab_size: int
    identity: str
    """Names all that decides the tokens."""

    def document(self, conversation: Conversation) -> tuple[Tokens, npt.NDArray[np.bool_]]:
        """The tokens of a conversation, and which of them are targets."""
        tokens, targets = map(np.asarray, self.tokenize(conversation))
        if self.eod is not None and (not len(tokens) or tokens[-1] != self.eod):
            tokens, targets = np.append(tokens, self.eod), np.append(targets, self.eod)
        return tokens, (targets >= 0) & (targets != self.pad)


def conversation_corpus(
    path: str | os.PathLike[str],
    template: Template,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> str:
    """Returns the prefix of the corpus of a file, which it makes unless ``cache`` has it.

    ``cache`` is a folder, by default ``cache`` beside the file. Another file (by its place, size or
    time) or template has another prefix. Raises CorpusError for a file that is missing or has a
    line that is no conversation, naming it, and for a cache that cannot be written.
    """
    prefix = corpus_prefix(path, template, cache)
    with suppress(CorpusError):
        if Corpus.open(prefix).targets is not None:
            return prefix
    folder = Path(prefix).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".draft.") as draft:
            _write(Path(path), template, f"{draft}/corpus", progress)
            Path(f"{prefix}.idx").unlink(missing_ok=True)  # a corpus is whole once it is there
            for suffix in (".bin", SUFFIX, ".idx"):
                os.replace(f"{draft}/corpus{suffix}", prefix + suffix)
    except OSError as error:
        raise CorpusError(
            f"cannot write the corpus of {path} to {folder}: {error.strerror or error}; give "
            "another folder (--data-cache-path), or make room"
        ) from error
    return prefix


def corpus_prefix(
    path: str | os.PathLike[str], template: Template, cache: str | os.PathLike[str] | None = None
) -> str:
    """Where the corpus of a file is kept. Raises CorpusError for a file that is missing."""
    path = Path(path)
    try:
        open_file(path).close()
        known = path.stat()
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"cannot read {path} ({one_line(error)}); give a file of conversations: .jsonl, also "
            "compressed, or .parquet"
        ) from None
    name = f"{_VERSION} {path.resolve()} {known.st_size} {known.st_mtime_ns} {template.identity}"
    folder = Path(cache) if cache else path.parent / "cache"
    return str(folder / f"{path.stem}-{hashlib.sha256(name.encode()).hexdigest()[:16]}")


def read_conversations(path: Path, progress: Progress) -> Iterator[tuple[str, Conversation]]:
    """Each conversation of a file, and where it stands: file and line, or row.

    Raises CorpusError for a file that cannot be read, and for a line that holds no conversation.
    """
    for where, messages in _rows(path, progress):
        if not isinstance(messages, list) or not messages:
            raise CorpusError(
                f"{where}: {KEY!r} is {shown(messages)}; give a list of messages, each with a "
                "role and its content"
            )
        current: Conversation = []
        for at, message in enumerate(messages, start=1):
            role = message.get("role") if isinstance(message, dict) else None
            if not isinstance(role, str) or not isinstance(message.get("content"), str):
                raise CorpusError(
                    f"{where}: message {at} is {shown(message)}; give it a role and a text as "
                    "content"
                )
            if role == "system" and current:
                yield where, current
                current = []
            current.append(message)
        yield where, current


def _rows(path: Path, progress: Progress) -> Iterator[tuple[str, Any]]:
    """What each line or row has as messages, and where it stands; blank lines are left out."""
    read = _of_parquet if path.suffix == ".parquet" else _of_lines
    try:
        for number, (where, messages, done, total) in enumerate(read(path)):
            if number % _ROWS_AT_ONCE == 0:
                progress(f"tokenizing {path}", done, total)
            yield where, messages
    except (OSError, LookupError, ValueError, TypeError) as error:  # arrow's are some of these
        raise CorpusError(
            f"cannot read {path} ({one_line(error)}); it needs {KEY!r} in each line or row"
        ) from error


def _of_lines(path: Path) -> Iterator[tuple[str, Any, int, int]]:
    counts, size = SourceCounts(), path.stat().st_size
    for where, line in json_lines(path, counts):
        if line.strip():
            yield where, json_value(line, KEY, where), counts.bytes_read, size


def _of_parquet(path: Path) -> Iterator[tuple[str, Any, int, int]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise CorpusError(
            f"{path} is parquet, and pyarrow is not installed; install it, or give JSONL"
        ) from None
    stored, number = parquet.ParquetFile(path), 0
    for batch in stored.iter_batches(_ROWS_AT_ONCE, columns=[KEY]):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row[KEY], number, stored.metadata.num_rows


def _write(path: Path, template: Template, draft: str, progress: Progress) -> None:
    """Writes ``.bin``, ``.idx`` and targets."""
    dataset = megatron_indexed_dataset()
    dtype = dataset.DType.optimal_dtype(template.vocab_size)
    builder = dataset.IndexedDatasetBuilder(f"{draft}.bin", dtype=dtype)
    runs, number = [np.empty(0, RUN)], 0
    try:
        for where, conversation in read_conversations(path, progress):
            try:
                tokens, is_target = template.document(conversation)
            except Exception as error:  # a tokenizer and its template raise anything
                raise CorpusError(
                    f"{where}: the tokenizer's template cannot take the conversation "
                    f"({type(error).__name__}: {one_line(error)}); correct the line"
                ) from error
            if not 0 <= tokens.max(initial=-1) < template.vocab_size:
                raise CorpusError(
                    f"{where} becomes {len(tokens)} tokens up to {tokens.max(initial=-1)}, and the "
                    f"vocabulary has {template.vocab_size}; correct the line, or the tokenizer"
                )
            builder.add_document(tokens.astype(dtype), [len(tokens)])
            own = [(number, *run) for run in runs_of(is_target)]
            runs.append(np.array(own, dtype=RUN))
            number += 1
        builder.finalize(f"{draft}.idx")
    finally:
        builder.data_file.close()
    if not number:
        raise CorpusError(f"{path} has no conversations; give a file that has some")
    np.save(f"{draft}{SUFFIX}", np.concatenate(runs))
