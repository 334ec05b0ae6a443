"""Files of conversations -> corpora of documents some of whose tokens are targets.

A row of a parquet file, or a line of any other, which is JSONL, has ``messages``: a list of
``{"role": …, "content": …}``. A system message begins a conversation, as in Megatron-LM's
``SFTDataset``, so that a line may hold several. It may have ``conversations`` instead, of these or
of ``{"from": …, "value": …}`` (ShareGPT), or an instruction and its answer (Alpaca, Dolly), as
Megatron-LM's ``VarlenDataset`` reads them. Each conversation is one document, and what the
tokenizer says to ignore is no target. The corpus is made once and kept: the next run opens it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.corpus import Corpus, megatron_indexed_dataset, open_indexed
from megatron_wlb.data.sources import Progress, SourceCounts, json_lines, json_record
from megatron_wlb.data.targets import RUN, SUFFIX, runs_of
from megatron_wlb.errors import CorpusError
from megatron_wlb.files import open_file
from megatron_wlb.reading import one_line, shown

Conversation: TypeAlias = list[dict[str, Any]]
Tokens: TypeAlias = npt.NDArray[Any]

KEY, SHARED = "messages", "conversations"
_FIELDS = (
    ("instruction", "prompt", "query", "question"),
    ("input", "context"),
    ("output", "response", "completion", "answer"),
)
"""Names of a question, of its context, and of the answer. The first name that a line has counts."""
_COLUMNS = {KEY, SHARED, *(name for names in _FIELDS for name in names)}
_ROLES = {
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
}
"""Roles of ShareGPT's speakers; others are users."""
_NOTHING_FIRST = {"role": "system", "content": ""}
"""What begins conversations of the layouts other than ``messages``, as Megatron-LM has it."""
_VERSION = 1
_ROWS_AT_ONCE = 64
"""Rows of a block, which one process tokenizes."""
_DRAFT = ".draft."


@dataclass(frozen=True)
class Template:
    """How conversations become tokens."""

    tokenize: Callable[[Conversation], tuple[Tokens, Tokens]]
    """Tokens, and as many targets: the same tokens, or a negative number where one is none. Raises
    anything for a conversation that it cannot take."""
    pad: int | None
    """A token that is no target wherever it stands."""
    vocab_size: int
    identity: str
    """Names all that decides the tokens."""

    def document(self, conversation: Conversation) -> tuple[Tokens, npt.NDArray[np.bool_]]:
        """The tokens of a conversation, and which of them are targets."""
        tokens, targets = map(np.asarray, self.tokenize(conversation))
        return tokens, (targets >= 0) & (targets != self.pad)


class Team:
    """The processes that make a corpus together; this one is all of it.

    Those that share a run wait for each other in its three methods, in this order.
    """

    LONGEST = datetime.timedelta(days=2)
    """No process waits longer for the others, whose end torchrun sees."""
    number = 0
    """This process's own. The first one decides and joins; those from ``size`` on only wait."""
    size = 1

    def told(self, draft: str) -> str:
        """Returns the first one's ``draft``: the folder of the parts, or "" for nothing to do."""
        return draft

    def finished(self) -> None:
        """Says that the own part is written; the first one waits for all."""

    def made(self) -> None:
        """Waits until the first one has joined the parts."""


def conversation_corpus(
    path: str | os.PathLike[str],
    template: Template,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress = lambda what, done, total: None,
    team: Team | None = None,
) -> str:
    """Returns the prefix of the corpus of a file, which it makes unless ``cache`` has it.

    ``cache`` is a folder, by default ``cache`` beside the file. Another file (by its place, size or
    time) or template has another prefix. Each process of a ``team`` calls it alike and tokenizes a
    share; the corpus is that of one process. Raises CorpusError for a file that is missing or has a
    line that is no conversation, naming it, and for a cache that cannot be written.
    """
    path, team = Path(path), team or Team()
    prefix = corpus_prefix(path, template, cache)
    folder, index = Path(prefix).parent, Path(f"{prefix}.idx")
    try:
        with contextlib.ExitStack() as stack:
            draft = ""
            if team.number == 0:
                _remove_left_drafts(folder)
                had_index = os.path.lexists(index)  # looked for first, as another run may be as far
                if not _is_there(prefix):
                    if had_index:
                        index.unlink(missing_ok=True)  # with it a corpus is whole
                    folder.mkdir(parents=True, exist_ok=True)
                    made = tempfile.TemporaryDirectory(dir=folder, prefix=_DRAFT)
                    draft = stack.enter_context(made)
            draft = team.told(draft)
            if draft:
                if team.number < team.size:
                    _write_part(path, template, Path(draft), team, progress)
                team.finished()
                if team.number == 0:
                    _merge(path, template, Path(draft), team.size)
                    # Another run may have made the same meanwhile, and read it already.
                    for suffix in () if _is_there(prefix) else (".bin", SUFFIX, ".idx"):
                        os.replace(f"{draft}/corpus{suffix}", prefix + suffix)
                team.made()
    except OSError as error:
        raise CorpusError(
            f"cannot write the corpus of {path} to {folder}: {error.strerror or error}; give "
            "another folder (--data-cache-path), or make room"
        ) from error
    return prefix


def _is_there(prefix: str) -> bool:
    with suppress(CorpusError):
        return Corpus.open(prefix).targets is not None
    return False


def _remove_left_drafts(folder: Path) -> None:
    """Removes what runs that were killed have left: nothing was written to it for so long that each
    process of theirs has given up waiting for the others.
    """
    for left in folder.glob(f"{_DRAFT}*"):
        with suppress(OSError):  # another run removes it, or it is another user's
            newest_s = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if time.time() - newest_s > 2 * Team.LONGEST.total_seconds():
                shutil.rmtree(left)


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


def read_conversations(
    path: Path, progress: Progress, number: int = 0, size: int = 1
) -> Iterator[tuple[int, str, Conversation]]:
    """Each conversation of a file's every ``size``-th block of rows, from the ``number``-th on: the
    block's number, where it stands (file and line, or row), and the conversation.

    Raises CorpusError for a file that cannot be read, and for a line that holds no conversation.
    """
    for block, where, row in _rows(path, progress, number, size):
        messages = _messages(row, where)
        if not isinstance(messages, list) or not messages:
            raise CorpusError(
                f"{where}: the messages are {shown(messages)}; give a list, each with a role and "
                "its content"
            )
        current: Conversation = []
        for at, message in enumerate(messages, start=1):
            role = message.get("role") if isinstance(message, dict) else None
            if not isinstance(role, str) or not isinstance(message.get("content"), str):
                fields = ("role", "content") if KEY in row else ("from", "value")
                raise CorpusError(
                    f"{where}: message {at} is {shown(message)}; give it texts as {fields[0]} and "
                    f"{fields[1]}"
                )
            if role == "system" and current:
                yield block, where, current
                current = []
            elif at == 1 and role != "system" and KEY not in row:
                current.append(_NOTHING_FIRST)
            current.append(message)
        yield block, where, current


def _messages(row: dict[str, Any], where: str) -> Any:
    """What a line has as messages; a turn that is none stays as it is."""
    if KEY in row:
        return row[KEY]
    if SHARED in row:
        turns = row[SHARED]
        return [_message(turn) for turn in turns] if isinstance(turns, list) else turns
    if not all(any(name in row for name in names) for names in (_FIELDS[0], _FIELDS[2])):
        raise CorpusError(
            f"{where} has no key {KEY!r} (it has {shown([*row])[1:-1]}); give messages, "
            f"{SHARED}, or an instruction and its output"
        )
    texts = []
    for names in _FIELDS:
        name = next((name for name in names if row.get(name)), names[0])
        texts.append(row.get(name) or "")
        if not isinstance(texts[-1], str):
            raise CorpusError(f"{where}: {name} is {shown(texts[-1])}; give a text")
    asked, more, answer = texts
    return [
        {"role": "user", "content": f"{asked}\n\n{more}" if more else asked},
        {"role": "assistant", "content": answer},
    ]


def _message(turn: Any) -> Any:
    """The message of a turn of ShareGPT."""
    match turn:
        case {"from": str(speaker), "value": str(text)}:
            return {"role": _ROLES.get(speaker.lower(), "user"), "content": text}
    return turn


def _rows(
    path: Path, progress: Progress, number: int, size: int
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Each line or row, and where it stands; blank lines are left out."""
    read = _of_parquet if path.suffix.lower() == ".parquet" else _of_lines
    try:
        for at, (block, where, row, done, total) in enumerate(read(path, number, size)):
            if at % _ROWS_AT_ONCE == 0:
                progress(f"tokenizing {path}", done, total)
            yield block, where, row
    except (OSError, LookupError, ValueError, TypeError) as error:  # arrow's are some of these
        raise CorpusError(f"cannot read {path} ({one_line(error)}); copy it again") from error


def _of_lines(path: Path, number: int, size: int) -> Iterator[tuple[int, str, Any, int, int]]:
    counts, stored = SourceCounts(), path.stat().st_size
    for at, (where, line) in enumerate(json_lines(path, counts)):
        block = at // _ROWS_AT_ONCE
        if block % size == number and line.strip():
            yield block, where, json_record(line, where, KEY), counts.bytes_read, stored


def _of_parquet(path: Path, number: int, size: int) -> Iterator[tuple[int, str, Any, int, int]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise CorpusError(
            f"{path} is parquet, and pyarrow is not installed; install it, or give JSONL"
        ) from None
    stored, row = parquet.ParquetFile(path), 0
    has = [name for name in stored.schema_arrow.names if name in _COLUMNS]
    if not has:
        raise CorpusError(
            f"{path} has no column {KEY!r} (it has {shown(stored.schema_arrow.names)[1:-1]}); give "
            f"messages, {SHARED}, or an instruction and its output"
        )
    for block, batch in enumerate(stored.iter_batches(_ROWS_AT_ONCE, columns=has)):
        if block % size == number:
            for at, found in enumerate(batch.to_pylist(), start=row + 1):
                yield block, f"{path}, row {at}", found, at, stored.metadata.num_rows
        row += batch.num_rows


def _write_part(
    path: Path, template: Template, draft: Path, team: Team, progress: Progress
) -> None:
    """Writes the documents and targets of this process's blocks, and how many each block has."""
    dataset = megatron_indexed_dataset()
    dtype = dataset.DType.optimal_dtype(template.vocab_size)
    part = draft / str(team.number)
    builder = dataset.IndexedDatasetBuilder(f"{part}.bin", dtype=dtype)
    runs, blocks, number = [np.empty(0, RUN)], list[int](), 0
    try:
        for block, where, conversation in read_conversations(
            path, progress, team.number, team.size
        ):
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
            blocks.append(block)
            number += 1
        builder.finalize(f"{part}.idx")
    finally:
        builder.data_file.close()
    np.save(f"{part}{SUFFIX}", np.concatenate(runs))
    np.save(f"{part}.blocks.npy", np.array(blocks, dtype=np.int64))


def _merge(path: Path, template: Template, draft: Path, size: int) -> None:
    """Joins the parts, block by block, to ``corpus.bin``, ``.idx`` and its targets."""
    dataset = megatron_indexed_dataset()
    dtype = dataset.DType.optimal_dtype(template.vocab_size)
    blocks = [np.load(draft / f"{n}.blocks.npy") for n in range(size)]
    order = np.argsort(np.concatenate(blocks), kind="stable")  # a block is of one part
    if not len(order):
        raise CorpusError(f"{path} has no conversations; give a file that has some")
    firsts = np.cumsum([0, *map(len, blocks)])
    parts = {n: open_indexed(str(draft / str(n))) for n in range(size) if len(blocks[n])}
    builder = dataset.IndexedDatasetBuilder(f"{draft}/corpus.bin", dtype=dtype)
    try:
        for document in order.tolist():
            part = int(np.searchsorted(firsts, document, side="right")) - 1
            tokens = parts[part][document - int(firsts[part])]
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(f"{draft}/corpus.idx")
    finally:
        builder.data_file.close()
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    runs = [np.load(f"{draft}/{n}{SUFFIX}") for n in range(size)]
    for first, own in zip(firsts.tolist(), runs, strict=False):
        own["document"] = places[first + own["document"]]
    joined = np.concatenate(runs)
    np.save(f"{draft}/corpus{SUFFIX}", joined[np.argsort(joined["document"], kind="stable")])
