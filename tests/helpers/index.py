"""Corpora of given lengths, without text: Megatron's index over tokens that are all 0."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_index(prefix: str | Path, lengths: Sequence[int]) -> None:
    """``PREFIX.idx`` of documents of so many int32 tokens, and a ``.bin`` that takes no space."""
    sizes = np.array(lengths, "<i4")
    pointers = np.concatenate([[0], 4 * np.cumsum(sizes.astype("<i8"))])
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(sizes), len(sizes) + 1))
        index.write(sizes.tobytes())
        index.write(pointers[:-1].astype("<i8").tobytes())
        index.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
    with Path(f"{prefix}.bin").open("wb") as tokens:
        tokens.truncate(int(pointers[-1]))
