"""The lines of a ledger: a checksum and JSON each, with a step's documents in a few bytes.

``FOLDER/wlb_ledger.txt`` grows by a line a step and one at each start of the run. A line is
``CRC32 JSON``. In it ``documents`` are columns of numbers, of each document seven, sorted by
arrival: variable-length integers, deflated, in base64. A crash may tear the last line, which then
counts as not written.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.files import open_file
from megatron_wlb.plan import Document, StepPlan
from megatron_wlb.reading import MAX_COUNT, one_line, parse_mapping, shown

NAME = "wlb_ledger.txt"
VERSION = 1

Pieces: TypeAlias = npt.NDArray[np.int64]
"""``[n, 7]``: each row is tokens ``[OFFSET, OFFSET + LENGTH)`` of a document; columns below."""
CORPUS, EPOCH, INDEX, OFFSET, LENGTH, ENDS, ARRIVAL = range(7)
_DEFLATE_LEVEL = 1
"""Higher ones save 2 % and take thrice the time: most bytes are of random numbers."""
_NUMBER_BYTES = 9
"""The most bytes of a number: 63 bits."""
_FREE_PIECES = 128
"""Pieces that any text may hold. Of more, each takes a character at least, as all differ."""


@dataclass(frozen=True)
class Line:
    """A line that is whole."""

    number: int
    """From 1."""
    values: dict[str, Any]


def pieces_of(documents: Iterable[Document]) -> Pieces:
    """The documents, sorted by arrival."""
    return _sorted(
        (d.corpus, d.epoch, d.number, d.offset, d.length, d.ends, d.arrival) for d in documents
    )


def pieces_of_plan(plan: StepPlan) -> Pieces:
    """What a step runs, span by span; slices that follow one another are one piece."""
    pieces = _sorted(
        (d.corpus, d.epoch, d.number, d.offset + start, stop - start,
         d.ends and stop == d.length, d.arrival)
        for micro_batch in plan for d, start, stop in micro_batch.spans
    )  # fmt: skip
    if not plan.chains or len(pieces) < 2:
        return pieces
    stops = pieces[:, OFFSET] + pieces[:, LENGTH]
    follows = pieces[1:, OFFSET] == stops[:-1]
    for column in (CORPUS, EPOCH, INDEX, ARRIVAL):
        follows &= pieces[1:, column] == pieces[:-1, column]
    first = np.flatnonzero(np.append(True, ~follows))
    last = np.append(first[1:], len(pieces)) - 1
    merged = pieces[first]
    merged[:, LENGTH] = np.add.reduceat(pieces[:, LENGTH], first)
    merged[:, ENDS] = pieces[last, ENDS]
    return merged


def _sorted(rows: Iterable[tuple[int, ...]]) -> Pieces:
    pieces = np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, 7)
    return pieces[np.lexsort((pieces[:, OFFSET], pieces[:, ARRIVAL]))]


def encode(pieces: Pieces) -> str:
    """Packs pieces that are sorted by arrival."""
    columns = pieces.T.copy()
    columns[ARRIVAL, 1:] = np.diff(pieces[:, ARRIVAL])
    packed = zlib.compress(_varints(columns.ravel()), _DEFLATE_LEVEL)
    return base64.b64encode(packed).decode()


def decode(text: str) -> Pieces:
    """Unpacks what :func:`encode` made, in memory in proportion to the text.

    Raises ``ValueError`` for anything else.
    """
    most_bytes = 7 * _NUMBER_BYTES * (len(text) + _FREE_PIECES)
    inflate = zlib.decompressobj()
    try:
        packed = inflate.decompress(base64.b64decode(text, validate=True), most_bytes)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflate.eof:
        raise ValueError(f"{len(text)} characters hold no end within {most_bytes} bytes")
    columns = _integers(packed).reshape(7, -1)
    if columns[ARRIVAL].sum(dtype=float) > MAX_COUNT or columns.max(initial=0) > MAX_COUNT:
        raise ValueError(f"a number is above {MAX_COUNT}")
    columns[ARRIVAL] = columns[ARRIVAL].cumsum()
    return columns.T


def _varints(values: npt.NDArray[np.int64]) -> bytes:
    """Seven bits a byte, the lowest first; all bytes of a number but its last have the eighth."""
    assert not len(values) or values.min() >= 0
    numbers = values.astype(np.uint64)
    sizes = np.ones(len(numbers), np.int64)
    for bits in range(7, 63, 7):
        sizes += numbers >> np.uint64(bits) > 0
    starts = sizes.cumsum() - sizes
    packed = np.empty(int(sizes.sum()), np.uint8)
    for byte in range(int(sizes.max(initial=0))):
        has = sizes > byte
        value = numbers[has] >> np.uint64(7 * byte) & np.uint64(127)
        packed[starts[has] + byte] = value | np.where(sizes[has] > byte + 1, 128, 0).astype("u8")
    return packed.tobytes()


def _integers(packed: bytes) -> npt.NDArray[np.int64]:
    read = np.frombuffer(packed, np.uint8)
    lasts = np.flatnonzero(read < 128)
    if not len(lasts):
        return np.zeros(0, np.int64)
    starts = np.append(0, lasts[:-1] + 1)
    if int((lasts - starts).max()) >= _NUMBER_BYTES:
        raise ValueError(f"a number has more than {_NUMBER_BYTES} bytes")
    places = np.arange(lasts[-1] + 1) - np.repeat(starts, lasts - starts + 1)
    bits = (read[: lasts[-1] + 1] & 127).astype(np.int64) << 7 * places
    return np.add.reduceat(bits, starts)


def seal(values: dict[str, Any]) -> bytes:
    """Makes a line."""
    body = json.dumps(values, separators=(",", ":"))
    return f"{zlib.crc32(body.encode()):08x} {body}\n".encode()


def _unseal(line: bytes) -> dict[str, Any] | None:
    """Reads a line; None where it is none, or was changed. Raises :class:`ConfigError` and
    ``ValueError`` for one that holds no values.
    """
    crc32, _, body = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or crc32 != b"%08x" % zlib.crc32(body):
        return None
    return parse_mapping(body.decode(), is_json=True)


def read(path: Path) -> Iterator[Line | None]:
    """All lines in order, and None at the end where the last one is torn.

    Raises :class:`CheckpointError` for a file that cannot be read, a line before the last that is
    damaged or of a later version, and one that holds no values.
    """
    torn, at_byte = "", 0
    try:
        with open_file(path) as stream:
            for number, line in enumerate(stream, start=1):
                if torn:
                    raise CheckpointError(torn)
                try:
                    values = _unseal(line)
                except (ConfigError, ValueError) as error:
                    raise CheckpointError(
                        f"{path}: line {number} is not of a ledger ({error}); audit another run"
                    ) from None
                if values is None:
                    torn = (
                        f"{path}: line {number}, from byte {at_byte} on, is damaged (its checksum "
                        "differs); the lines after it prove nothing without it"
                    )
                elif values.get("version", VERSION) != VERSION:
                    raise CheckpointError(
                        f"{path}: line {number} is of version {shown(values['version'])}, not "
                        f"{VERSION}; "
                        "audit with the release that wrote it"
                    )
                else:
                    yield Line(number, values)
                at_byte += len(line)
    except (OSError, ValueError) as error:  # a NUL in the path
        raise CheckpointError(
            f"cannot read {path}: {one_line(error)}; give the folder of a --save"
        ) from None
    if torn:
        yield None
