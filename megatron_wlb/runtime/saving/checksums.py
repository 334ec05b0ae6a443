"""Checksums of a checkpoint's files: written when it is saved, compared before it is loaded.

``wlb_checksums.txt`` in the checkpoint's folder has a line ``crc32 bytes name`` for each other
file, under a seal of these lines. Every rank reads its share, the files that it wrote itself, and
all ranks hear of what any of them finds.

CRC-32 finds any flipped byte, and misses other damage once in 4 billion times. It is no signature:
who can write the files can write their checksums. Files are read back once they are written, so
what went wrong in memory before is not found. It reads 2.3 to 3.2 GB/s a process from the page
cache (measured on a core of an AMD EPYC that others use too; blake2b makes 0.7 to 0.8).
"""

from __future__ import annotations

import logging
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron_wlb.errors import CheckpointError
from megatron_wlb.files import open_file
from megatron_wlb.reading import one_line, shown
from megatron_wlb.runtime.ranks.transfer import from_first_rank, of_all_ranks
from megatron_wlb.runtime.saving import sealed
from megatron_wlb.runtime.saving.newest import CHECKSUMS, damaged

NAME = CHECKSUMS
_PIECE_BYTES = 1 << 20
_OF_RANK = re.compile(r"__(\d+)_")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Content:
    """What is known of a file's bytes."""

    crc32: str
    num_bytes: int

    def __str__(self) -> str:
        return f"crc32 {self.crc32} of {self.num_bytes} bytes"


def write(folder: str | os.PathLike[str]) -> None:
    """Adds checksums to a checkpoint all of whose files are written; called by every rank.

    They appear whole or not at all. Raises :class:`CheckpointError` on every rank where a file
    cannot be read back, or there is no room.
    """
    root, own, failed = Path(folder), {}, None
    try:
        own = {name: _read(root / name) for name in _share(_names(root))}
    except OSError as failure:
        failed = failure
    of_ranks = of_all_ranks((own, failed))

    def write_all() -> None:
        for _, failure in of_ranks:
            if failure is not None:
                raise CheckpointError(
                    f"cannot write the checksums of {folder}: {failure}; free some room there, or "
                    "choose another folder"
                )
        _write(root, {k: v for contents, _ in of_ranks for k, v in contents.items()})

    from_first_rank(write_all)


def verify(folder: str | os.PathLike[str], *, skip: bool = False) -> bool:
    """Compares a checkpoint's files with its checksums; called by every rank.

    Returns whether they may be trusted. They are not compared with ``skip``, which trusts them, nor
    where the checkpoint has no checksums; the log says so.

    Raises:
        CheckpointError: on every rank, if a file differs, is cut short, missing or unreadable;
            names it, what was expected and found, and the checkpoint to go on from.
    """
    folder, start = Path(folder), time.monotonic()
    # Rank 0 says what there is: other machines may list the folder from a cache.
    expected = None if skip else from_first_rank(partial(_expected, folder))
    if expected is None:
        why = "--wlb-no-checksums" if skip else f"it has no {NAME}"
        _log(logging.WARNING, f"the files of {folder} are not verified: {why}")
        return skip
    damages = [_damage(folder / name, expected[name]) for name in _share(expected)]
    found = [damage for of_rank in of_all_ranks([d for d in damages if d]) for damage in of_rank]
    if found:
        more = f" (and {len(found) - 1} more of its files)" if found[1:] else ""
        raise damaged(folder, f"{found[0]}{more}")
    num_bytes, seconds = sum(c.num_bytes for c in expected.values()), time.monotonic() - start
    size = f"{len(expected)} files, {num_bytes / 1e6:.3g} MB"
    _log(logging.INFO, f"verified {folder}: {size} in {seconds:.2g} s")
    return True


def _expected(folder: Path) -> dict[str, _Content] | None:
    """The checksums that were written; None if none were."""
    try:
        text = sealed.read(folder, NAME)
        if text is None:
            return None
        split = (line.split(" ", 2) for line in text.splitlines())
        known = {name: _Content(crc32, int(size)) for crc32, size, name in split}
        for name in known:
            if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
                raise ValueError(f"{NAME} names {shown(name)}, outside the folder")
        return known
    except (CheckpointError, ValueError) as error:
        raise damaged(folder, one_line(error)) from None


def _names(folder: Path) -> Iterator[str]:
    """The files to have checksums. Asks for no file's state: ranks are many, and so are files."""

    def fail(error: OSError) -> None:
        raise error

    for root, _, names in os.walk(folder, onerror=fail):
        for name in names:
            if not name.startswith(NAME):
                yield str(Path(root, name).relative_to(folder))


def _write(folder: Path, contents: dict[str, _Content]) -> None:
    lines = (
        f"{contents[name].crc32} {contents[name].num_bytes} {name}" for name in sorted(contents)
    )
    sealed.write(folder, NAME, "\n".join(lines))


def _share(names: Iterable[str]) -> list[str]:
    """The files that this rank reads: those that it wrote (``__RANK_0.distcp``), dealt anew where
    the ranks are fewer now. Rank 0 wrote the others; those in folders of their own are spread.
    """
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def reader(name: str) -> int:
        if match := _OF_RANK.match(name):
            return int(match[1]) % num_ranks
        return zlib.crc32(name.encode()) % num_ranks if "/" in name else 0

    return sorted(name for name in names if reader(name) == rank)


def _read(path: Path) -> _Content:
    crc32, num_bytes, piece = 0, 0, memoryview(bytearray(_PIECE_BYTES))
    with open_file(path) as stream:
        while count := stream.readinto(piece):
            crc32, num_bytes = zlib.crc32(piece[:count], crc32), num_bytes + count
    return _Content(f"{crc32:08x}", num_bytes)


def _damage(path: Path, expected: _Content) -> str:
    """Says how a file differs from what was saved; nothing if it does not."""
    try:
        # The size first: it tells at once of a file that was cut short.
        if (num_bytes := path.stat().st_size) != expected.num_bytes:
            return f"{path.name} has {num_bytes} bytes, expected {expected}"
        found = _read(path)
    except FileNotFoundError:
        return f"{path.name} is missing, expected {expected}"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror}), expected {expected}"
    return f"{path.name} has {found}, expected {expected}" if found != expected else ""


def _log(level: int, message: str) -> None:
    if torch.distributed.get_rank() == 0:
        logger.log(level, message)
