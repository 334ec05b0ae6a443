"""Makes corpora in Megatron's ``.bin/.idx`` format from files."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron_wlb.data.corpus import Corpus, CorpusInfo, megatron_indexed_dataset
from megatron_wlb.data.sources import Progress, SourceCounts, Sources, find_files
from megatron_wlb.data.targets import SUFFIX
from megatron_wlb.data.tokenizer import (
    Encoder,
    bytes_encoder,
    file_encoder,
    tokenizer_settings,
    train_bpe,
)
from megatron_wlb.errors import CorpusError

logger = logging.getLogger(__name__)


def build_corpus(
    paths: Sequence[str | Path],
    prefix: str | Path,
    *,
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    json_key: str = "text",
    python_definitions: bool = False,
    exclude: Collection[str] = (),
    force: bool = False,
    reuse: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> CorpusInfo:
    """Writes the documents of ``paths`` as ``PREFIX.bin``, ``.idx`` and ``.json``: all or none.

    See :class:`~megatron_wlb.data.sources.Sources` for what a document is. ``tokenizer`` is
    ``bytes`` (256 ids), ``bpe`` (byte-level, trained on this text, of ``vocab_size`` ids) or the
    path of a ``tokenizer.json``. One EOD token is appended to each document.

    ``reuse`` keeps a corpus that was built from the same content with the same settings; ``force``
    replaces whatever is there, and removes its masks. Raises CorpusError for sources that are
    missing, unreadable or hold no text, and for a ``prefix`` that exists or cannot be written.
    """
    prefix = str(prefix)
    if prefix.endswith(("/", os.sep)) or not Path(prefix).name:
        raise CorpusError(f"prefix {prefix!r} is a folder; add a name for the files in it")
    suffixes = [".bin", ".json", ".idx"]
    if tokenizer == "bpe":
        suffixes.insert(0, ".tokenizer.json")
    outputs = [Path(prefix + suffix) for suffix in suffixes]
    masks = Path(prefix + SUFFIX)
    existing = [str(path) for path in (*outputs, masks) if os.path.lexists(path)]
    if existing and not (force or reuse):
        raise CorpusError(f"{existing[0]} exists; choose another prefix, or replace it (--force)")

    settings = tokenizer_settings(tokenizer, vocab_size)
    files = find_files(paths, exclude, skip={path.resolve() for path in (*outputs, masks)})
    sources = Sources(files, json_key, python_definitions)
    fingerprint = sources.fingerprint(settings)
    if reuse:
        with suppress(CorpusError):  # Missing or broken: as if it were another one.
            Corpus.open(prefix)
            info = CorpusInfo.load(prefix)
            if info and info.fingerprint == fingerprint and all(path.exists() for path in outputs):
                return info
    if existing and not force:
        raise CorpusError(
            f"{existing[0]} exists, broken or built from other content or settings; "
            "choose another prefix, or replace it (--force)"
        )

    try:
        with _draft_folder(Path(prefix).absolute()) as folder:
            draft = f"{folder}/draft"
            encoder = _make_encoder(tokenizer, settings, sources, draft, progress)
            counts, num_documents, num_tokens = _write(sources, encoder, draft, progress)
            met = {name: n for name, n in asdict(counts).items() if name != "bytes_read"}
            info = CorpusInfo(
                prefix=prefix,
                tokenizer=tokenizer,
                vocab_size=encoder.vocab_size,
                eod=encoder.eod,
                num_documents=num_documents,
                num_tokens=num_tokens,
                fingerprint=fingerprint,
                **met,
            )
            info.save(Path(f"{draft}.json"))
            # A corpus is whole while its .idx is there: the old one goes first, the new comes last.
            outputs[-1].unlink(missing_ok=True)
            masks.unlink(missing_ok=True)  # they are of the old text
            for suffix, path in zip(suffixes, outputs, strict=True):
                os.replace(draft + suffix, path)
    except OSError as error:
        raise CorpusError(
            f"cannot write {prefix}.bin: {error.strerror or error}; "
            "choose another folder, or make room"
        ) from error
    return info


@contextmanager
def _draft_folder(prefix: Path) -> Iterator[str]:
    """A folder beside a corpus for its files until they are whole; removes what killed builds left.

    A build locks its folder, so one that is under way elsewhere keeps its own.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    begin = f".{prefix.name}."
    for left in prefix.parent.iterdir():
        if re.fullmatch(re.escape(begin) + r"[a-z0-9_]{8}", left.name):  # as tempfile names them
            with suppress(OSError), _locked(left):
                if all(path.name.startswith("draft.") for path in left.iterdir()):
                    shutil.rmtree(left)
                    logger.warning("removed %s, which a build that was killed had left", left)
    draft = tempfile.TemporaryDirectory(dir=prefix.parent, prefix=begin)
    with draft as folder, _locked(folder, or_not=True):
        yield folder


@contextmanager
def _locked(folder: str | Path, *, or_not: bool = False) -> Iterator[None]:
    """Raises ``OSError`` where another process has the lock, or the file system has none; not with
    ``or_not``.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError) if or_not else nullcontext():
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def _make_encoder(
    tokenizer: str,
    settings: dict[str, str | int],
    sources: Sources,
    draft: str,
    progress: Progress,
) -> Encoder:
    if tokenizer == "bytes":
        return bytes_encoder()
    if tokenizer == "bpe":

        def batches() -> Iterator[list[bytes]]:
            yield from sources.batches(SourceCounts(), "counting words", progress)
            progress("choosing merges", 0, 0)  # the library does not say how far it is

        content = train_bpe(batches(), int(settings["vocab_size"]))
        Path(f"{draft}.tokenizer.json").write_text(content, encoding="utf-8")
    else:
        content = str(settings["content"])
    return file_encoder(content, tokenizer)


def _write(
    sources: Sources, encoder: Encoder, draft: str, progress: Progress
) -> tuple[SourceCounts, int, int]:
    """Write the draft's ``.bin`` and ``.idx``; what was met, documents and tokens."""
    counts, num_documents, num_tokens = SourceCounts(), 0, 0
    indexed_dataset = megatron_indexed_dataset()
    dtype = indexed_dataset.DType.optimal_dtype(encoder.vocab_size)
    builder = indexed_dataset.IndexedDatasetBuilder(f"{draft}.bin", dtype=dtype)
    try:
        for batch in sources.batches(counts, "writing tokens", progress):
            for ids in encoder.encode(batch):
                tokens = np.append(ids.astype(dtype), dtype(encoder.eod))
                builder.add_document(tokens, [len(tokens)])
                num_documents += 1
                num_tokens += len(tokens)
        builder.finalize(f"{draft}.idx")
    finally:
        builder.data_file.close()
    if num_documents == 0:
        raise CorpusError(
            f"no documents in {counts.num_files} files: {counts.num_binary_files} binary, "
            f"{counts.num_unparsable_files} unparsable, {counts.num_empty} times no text or no "
            "definition; name files with text"
        )
    return counts, num_documents, num_tokens
