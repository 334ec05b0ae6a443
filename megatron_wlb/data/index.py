"""The index of a ``.bin/.idx`` pair: the length of each document."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from megatron_wlb.errors import CorpusError
from megatron_wlb.files import open_file

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, document bounds
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}  # by type code; 6 and 7 are floats
_POINTERS_AT_ONCE = 1 << 20


def read_lengths(prefix: str) -> npt.NDArray[np.int64]:
    """The index's lengths, once its sizes are known to agree with each other and the ``.bin``."""
    path = Path(f"{prefix}.idx")

    def bad(reason: str) -> NoReturn:
        raise CorpusError(f"{path} {reason}; build the corpus anew, or copy it again")

    try:
        num_bytes, num_bin_bytes = path.stat().st_size, Path(f"{prefix}.bin").stat().st_size
        with open_file(path) as stream:
            header = stream.read(_HEADER.size)
            if not header.startswith(_MAGIC[: len(header)]):
                bad(f"is not a Megatron index (it starts with {header[:9]!r})")
            if len(header) < _HEADER.size:
                bad(f"is truncated: {num_bytes} bytes, less than its header's {_HEADER.size}")
            _, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
            if version != 1 or code not in _TOKEN_BYTES:
                bad(f"has version {version} and type code {code}, which is not an index of tokens")
            # int32 lengths, int64 pointers and document bounds; int8 modes if multimodal
            expected = _HEADER.size + 12 * num_sequences + 8 * num_bounds
            if num_bytes < expected:
                bad(f"is truncated: {num_bytes} bytes of {expected}")
            if num_bytes not in (expected, expected + num_sequences):
                bad(f"is {num_bytes} bytes long where its header says {expected}")
            if num_sequences == 0 or num_bin_bytes == 0:
                bad("has no documents")
            lengths = np.fromfile(stream, dtype="<i4", count=num_sequences).astype(np.int64)
            wrong = _wrong_pointer(stream, lengths, _TOKEN_BYTES[code])
            stream.seek(expected - 8)
            last_bound = int.from_bytes(stream.read(8), "little") if num_bounds else 0
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror or error}") from error
    if lengths.min() < 0 or last_bound != num_sequences:
        bad("is corrupt: its lengths or document bounds cannot be")
    expected = int(lengths.sum()) * _TOKEN_BYTES[code]
    if num_bin_bytes != expected:
        bad(f"says that {prefix}.bin has {expected} bytes, and it has {num_bin_bytes}")
    if wrong is not None:
        number, found, start = wrong
        bad(
            f"is corrupt: its pointer of document {number} is byte {found} of {prefix}.bin, and by "
            f"the lengths of those before it starts at {start}"
        )
    return lengths


def _wrong_pointer(
    stream: BinaryIO, lengths: npt.NDArray[np.int64], token_bytes: int
) -> tuple[int, int, int] | None:
    """The first pointer that is not where the documents before it end: its number, the byte that it
    names and the right one. ``stream`` stands at the first pointer.
    """
    start = 0
    for first in range(0, len(lengths), _POINTERS_AT_ONCE):
        ends = start + np.cumsum(lengths[first : first + _POINTERS_AT_ONCE]) * token_bytes
        starts = np.concatenate(([start], ends[:-1]))
        pointers = np.fromfile(stream, dtype="<i8", count=len(starts))
        if not np.array_equal(pointers, starts):
            at = int(np.flatnonzero(pointers != starts)[0])
            return first + at, int(pointers[at]), int(starts[at])
        start = int(ends[-1])
    return None
