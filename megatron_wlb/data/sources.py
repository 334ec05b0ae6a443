"""Files and folders -> the bytes of documents, one at a time, nothing dropped uncounted."""

from __future__ import annotations

import ast
import codecs
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from megatron_wlb.errors import CorpusError
from megatron_wlb.files import open_file
from megatron_wlb.reading import one_line, shown

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes of the files read so far, and their bytes in all."""

_BINARY_PROBE_BYTES = 8192
_BATCH_BYTES = 1 << 20
_LIBRARIES = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "compression.zstd"}
"""What unpacks files, by their suffix. Python has zstd from 3.14 on."""
_JSON_LINES = (".jsonl", *(f".jsonl{suffix}" for suffix in _LIBRARIES))
_MAX_DOCUMENT_BYTES = 2**31 - 2  # The index counts a document's tokens in an int32; one is EOD.


@dataclass
class SourceCounts:
    """What one pass over the files met."""

    num_files: int = 0
    """Files read, those that follow included."""
    num_binary_files: int = 0
    """Files skipped for a NUL byte in their first 8 KiB."""
    num_unparsable_files: int = 0
    """Python files skipped because they do not parse (only when cut into definitions)."""
    num_empty: int = 0
    """Files, or lines of a JSONL file, skipped because they hold null or no text but white space
    (or no definition, where Python files are cut into definitions)."""
    num_utf8_errors: int = 0
    """Documents whose bytes are not valid UTF-8."""
    bytes_read: int = 0


@dataclass(frozen=True)
class Sources:
    """The files of a corpus and how each becomes documents.

    A ``.jsonl`` file is one document a line, under ``json_key``, also where it is compressed
    (``.jsonl.gz``, ``.bz2``, ``.xz``, ``.zst``); every other file is one document, except that
    with ``python_definitions`` each top-level function or class of a ``.py`` file is one, with its
    decorators and the comment lines right above it. A byte order mark is no text.
    """

    files: Sequence[Path]
    json_key: str = "text"
    python_definitions: bool = False

    def documents(self, counts: SourceCounts) -> Iterator[bytes]:
        """Each document's bytes, in file order; ``counts`` is kept up to date.

        Raises CorpusError for a file that cannot be read and for a bad JSONL line, naming both.
        """
        for path in self.files:
            counts.num_files += 1
            read = self._json_lines if _kind(path) in _JSON_LINES else self._whole
            try:
                yield from read(path, counts)
            except OSError as error:
                _unreadable(path, error)

    def batches(self, counts: SourceCounts, task: str, progress: Progress) -> Iterator[list[bytes]]:
        """:meth:`documents`, about a MiB at a time, telling ``progress`` between them."""
        total = sum(path.stat().st_size for path in self.files if path.exists())
        batch: list[bytes] = []
        size = 0
        for document in self.documents(counts):
            batch.append(document)
            size += len(document)
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
                progress(task, counts.bytes_read, total)
        if batch:
            yield batch
        progress(task, counts.bytes_read, total)

    def fingerprint(self, settings: Mapping[str, str | int]) -> str:
        """SHA-256 over the content of the files, how they are read, and the tokenizer's settings.

        Names and dates of the files do not count; their order and kind do.
        """
        kinds = [_kind(path) for path in self.files]
        how = [kinds, self.json_key, self.python_definitions, sorted(settings.items())]
        sha = hashlib.sha256(json.dumps(how).encode())
        for path in self.files:
            try:
                with path.open("rb") as stream:
                    sha.update(hashlib.file_digest(stream, "sha256").digest())
            except OSError as error:
                _unreadable(path, error)
        return sha.hexdigest()

    def _whole(self, path: Path, counts: SourceCounts) -> Iterator[bytes]:
        data = path.read_bytes()
        counts.bytes_read += len(data)
        if b"\0" in data[:_BINARY_PROBE_BYTES]:
            counts.num_binary_files += 1
            return
        data = data.removeprefix(codecs.BOM_UTF8)
        documents = [data]
        if self.python_definitions and path.suffix == ".py":
            try:
                documents = python_definitions(data)
            except (SyntaxError, ValueError, RecursionError, MemoryError):  # what ast.parse raises
                counts.num_unparsable_files += 1
                return
            if not documents:
                counts.num_empty += 1
        for document in documents:
            yield from _checked(document, str(path), counts)

    def _json_lines(self, path: Path, counts: SourceCounts) -> Iterator[bytes]:
        for where, line in json_lines(path, counts):
            text = json_value(line, self.json_key, where) if line.strip() else ""
            if not isinstance(text, str | None):
                raise CorpusError(
                    f"{where}: {self.json_key!r} is a {type(text).__name__}, not a string; "
                    "name the key that holds the text"
                )
            yield from _checked((text or "").encode("utf-8", "surrogatepass"), where, counts)


def json_lines(path: Path, counts: SourceCounts) -> Iterator[tuple[str, str]]:
    """Each line of a JSONL file, also a compressed one, and where it stands; tells ``counts`` how
    far it is.
    """
    before = counts.bytes_read
    with open_file(path) as stored:
        for number, line in _lines(path, stored):
            counts.bytes_read = before + stored.tell()  # of what is stored, which has a size
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            # Stray bytes and lone \ud800 escapes go through as bytes that are not UTF-8.
            yield f"{path}:{number}", line.decode("utf-8", "surrogateescape")


def json_value(line: str, key: str, where: str) -> Any:
    """What a line of JSON has under ``key``. Raises CorpusError where it has no such thing."""
    record = json_record(line, where, key)
    if key not in record:
        raise CorpusError(
            f"{where} has no key {key!r} (it has {shown([*record])[1:-1]}); "
            "name the key that holds the text"
        )
    return record[key]


def json_record(line: str, where: str, key: str) -> dict[str, Any]:
    """The object of a line of JSON. Raises CorpusError where it is none, and asks for a ``key``."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"{where} is not valid JSON ({one_line(error)}); correct the line"
        ) from error
    if not isinstance(record, dict):
        raise CorpusError(
            f"{where} is a JSON {type(record).__name__}, not an object; "
            f'each line must be like {{"{key}": …}}'
        )
    return record


def _kind(path: Path) -> str:
    """A file's suffix. JSONL has that of its compression behind it."""
    return next((kind for kind in _JSON_LINES if path.name.endswith(kind)), path.suffix)


def _lines(path: Path, stored: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Each line of a JSONL file, unpacked, with its number."""
    library, number = _LIBRARIES.get(path.suffix.lower()), 0
    try:
        lines = import_module(library).open(stored) if library else stored
        for number, line in enumerate(lines, start=1):
            yield number, line
    except Exception as error:  # Each library has its own, and not every Python has each library.
        raise CorpusError(
            f"cannot read {path} after line {number} ({one_line(error)}); "
            "unpack it, or copy it again"
        ) from error


def find_files(
    paths: Sequence[str | Path], exclude: Collection[str] = (), skip: Collection[Path] = ()
) -> list[Path]:
    """All files of ``paths``, folders walked recursively in sorted order, files before folders.

    Hidden files and folders, ``__pycache__``, folders named in ``exclude`` and the files in
    ``skip`` (absolute) are left out, links to folders are not followed. Raises CorpusError for a
    path that does not exist, and for a folder without any file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            found = [file for file in _walk(path, exclude) if file.resolve() not in skip]
            if not found:
                raise CorpusError(
                    f"no files in {path}, hidden and excluded ones aside; name a folder with text"
                )
            files.extend(found)
        else:
            raise CorpusError(f"no such file or folder: {path}")
    return files


def _walk(root: Path, exclude: Collection[str]) -> Iterator[Path]:
    def fail(error: OSError) -> NoReturn:
        _unreadable(Path(error.filename or root), error)

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name != "__pycache__" and name not in exclude
        )
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():  # Not a socket or a broken link.
                yield path


def python_definitions(source: bytes) -> list[bytes]:
    """The source of each top-level function and class, byte for byte.

    Raises what ``ast.parse`` does where the source is not Python of this interpreter's version.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The source's own, such as invalid escapes.
        body = ast.parse(source).body
    lines = source.splitlines(keepends=True)
    definitions = []
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min(item.lineno for item in (node, *node.decorator_list)) - 1
        while first > 0 and lines[first - 1].startswith(b"#"):
            first -= 1
        definitions.append(b"".join(lines[first : node.end_lineno]))
    return definitions


def _checked(document: bytes, where: str, counts: SourceCounts) -> Iterator[bytes]:
    if not document.strip():
        counts.num_empty += 1
        return
    if len(document) > _MAX_DOCUMENT_BYTES:
        raise CorpusError(
            f"{where} is {len(document)} bytes long and Megatron's index holds documents of up to "
            f"{_MAX_DOCUMENT_BYTES}; cut it into several"
        )
    try:
        document.decode()
    except UnicodeDecodeError:
        counts.num_utf8_errors += 1
    yield document


def _unreadable(path: Path, error: OSError) -> NoReturn:
    raise CorpusError(f"cannot read {path}: {error.strerror or error}") from error
