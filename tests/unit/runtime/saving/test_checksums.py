"""Checksums of checkpoints: what was changed is found, and told on every rank alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.gloo import GlooPool

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving import checksums, newest

FILES = {
    ".metadata": 700,
    "common.pt": 3_000,
    "metadata.json": 41,
    "__0_0.distcp": 1,
    "__1_0.distcp": (1 << 20) + 13,  # two pieces
    "__1_1.distcp": 0,
    "__2_0.distcp": 9_000,  # of a rank that is not there when 2 load
    "mp_rank_00_001/model_optim_rng.pt": 5_000,
    "file with spaces": 77,
}

# Cases, run in gloo ranks.


def write(folder: str) -> None:
    checksums.write(folder)


def verify(folder: str, skip: bool = False) -> tuple[str, list[str], list[str]]:
    """What came of it, the files that this rank read, and what it logged."""
    read, logged = [], []
    original = checksums._read

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    def noted(path: Path) -> checksums._Content:
        read.append(str(path.relative_to(folder)))
        return original(path)

    keep = Keep()
    checksums._read = noted
    checksums.logger.addHandler(keep)
    level, checksums.logger.level = checksums.logger.level, logging.INFO
    try:
        result = str(checksums.verify(folder, skip=skip))
    except CheckpointError as error:
        result = str(error)
    finally:
        checksums._read = original
        checksums.logger.removeHandler(keep)
        checksums.logger.level = level
    return result, read, logged


def outcome(gloo: GlooPool, folder: Path, num_ranks: int = 2) -> str:
    """Of verifying: the same on all ranks."""
    results = {result for result, _, _ in gloo.run(num_ranks, verify, str(folder))}
    assert len(results) == 1, results
    return results.pop()


@pytest.fixture
def saved(gloo: GlooPool, tmp_path: Path) -> Path:
    """A checkpoint with checksums, which 3 ranks wrote."""
    folder = tmp_path / "iter_0000012"
    for number, (name, num_bytes) in enumerate(FILES.items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes((number * 31 + i * i) % 251 for i in range(num_bytes)))
    gloo.run(3, write, str(folder))
    return folder


def flip(path: Path, at: int = -1) -> None:
    """One bit of a byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap_with_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_unchanged_checkpoint_passes_and_each_file_is_read_once(
    num_ranks: int, saved: Path, gloo: GlooPool
) -> None:
    answers = gloo.run(num_ranks, verify, str(saved))
    assert {result for result, _, _ in answers} == {"True"}
    assert sorted(name for _, read, _ in answers for name in read) == sorted(FILES)
    assert all("__1_0.distcp" in read for _, read, _ in answers[1:2]), "its writer reads it"
    (line,) = (line for _, _, logged in answers for line in logged)
    assert f"verified {saved}: {len(FILES)} files" in line


CASES = [
    pytest.param(name, damage, id=f"{name}-{damage.__name__}")
    for name, num_bytes in FILES.items()
    for damage in (flip, cut, Path.unlink, swap_with_folder)
    if num_bytes or damage not in (flip, cut)
]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_damaged_file_is_named_on_every_rank(
    name: str, damage: Callable[[Path], None], saved: Path, gloo: GlooPool
) -> None:
    path, num_bytes = saved / name, FILES[name]
    found = checksums._read(path)
    damage(path)
    message = outcome(gloo, saved)
    expected = f"expected crc32 {found.crc32} of {num_bytes} bytes"
    for fragment in (
        f"{saved} is damaged: {path.name} ",
        expected,
        "there is no checkpoint before",
    ):
        assert fragment in message
    if damage is flip:
        assert f"has crc32 {checksums._read(path).crc32} of {num_bytes} bytes" in message
    else:
        assert any(words in message for words in ("is missing", " bytes, ", "cannot be read"))


def test_several_damaged_files_are_counted(saved: Path, gloo: GlooPool) -> None:
    for name in ("common.pt", "__1_0.distcp", "__2_0.distcp"):
        flip(saved / name)
    assert "(and 2 more of its files)" in outcome(gloo, saved)


def test_any_flipped_byte_of_the_checksums_is_found(saved: Path, gloo: GlooPool) -> None:
    original = (saved / checksums.NAME).read_bytes()
    for at in {0, 5, 6, 14, *range(0, len(original), 29), len(original) - 1}:
        (saved / checksums.NAME).write_bytes(
            original[:at] + bytes([original[at] ^ 4]) + original[at + 1 :]
        )
        message = outcome(gloo, saved)
        assert f"{saved} is damaged: {checksums.NAME} has crc32" in message, (at, message)


@pytest.mark.parametrize("skip", [False, True])
def test_checkpoint_that_is_not_verified_loads_and_the_log_says_so_once(
    skip: bool, saved: Path, gloo: GlooPool
) -> None:
    flip(saved / "common.pt")
    if not skip:
        (saved / checksums.NAME).unlink()
    answers = gloo.run(2, verify, str(saved), skip)
    assert [(result, read) for result, read, _ in answers] == [(str(skip), [])] * 2
    (line,) = (line for _, _, logged in answers for line in logged)
    assert f"files of {saved} are not verified" in line
    assert ("--wlb-no-checksums" if skip else "it has no wlb_checksums.txt") in line


def test_file_that_cannot_be_read_back_is_told_and_leaves_the_checksums_before(
    saved: Path, gloo: GlooPool
) -> None:
    before = (saved / checksums.NAME).read_bytes()
    (saved / "__1_9.distcp").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"cannot write the checksums .*__1_9.distcp"):
        gloo.run(2, write, str(saved))
    assert (saved / checksums.NAME).read_bytes() == before
    assert not list(saved.glob("*.partial"))


def test_remedy_is_the_newest_checkpoint_before_that_is_whole(tmp_path: Path) -> None:
    """Iterations are compared as numbers."""
    for number in (4, 8, 10, 12, 16, 9_999_999, 10_000_000, 10_000_005):
        (tmp_path / f"iter_{number:07d}").mkdir()
    (tmp_path / "iter_backup").mkdir()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    cases = {12: 10, 10_000_005: 10_000_000, 10_000_000: 9_999_999}
    for damaged, before in cases.items():
        remedy = newest.remedy(tmp_path / f"iter_{damaged:07d}")
        assert remedy.endswith(f"write {before} into {tracker}")
    for number in (4, 8, 16):
        (tmp_path / f"iter_{number:07d}" / checksums.NAME).touch()
    assert newest.remedy(tmp_path / "iter_0000012").endswith(f"write 8 into {tracker}")
    assert "there is no checkpoint before it" in newest.remedy(tmp_path / "iter_0000004")
