"""Whatever stands in what the project reads, it is taken, or refused in one line.

The short form of ``scripts/fuzz.py``, over the same targets.
"""

from __future__ import annotations

import os
import signal
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fuzz import Target, changes, targets

from megatron_wlb.errors import WLBError

NUM_CHANGES = 120
MAX_S = 5.0
MAX_MIB = 64
WRITTEN = ("lock", "metrics")
"""They are opened to be written."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("readers"))
    yield targets()
    os.chdir(before)


NAMES = (
    "flags", "settings", "texts", "recipe", "model", "hardware", "cost", "strategies", "index",
    "note", "lengths", "array", "sources", "tokenizer", "ledger", "state", "checkpoint", "tracker",
    "checksums", "lock", "metrics", "recording", "results",
)  # fmt: skip


def test_targets_are_all_tried(known: dict[str, Target]) -> None:
    assert tuple(known) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_right_input_is_read(name: str, known: dict[str, Target]) -> None:
    target = known[name]
    if target.file:
        Path(target.file).write_bytes(target.wrap(target.seeds[0]))
    target.read(target.seeds[0])


@pytest.mark.parametrize("name", NAMES)
def test_changed_input_is_refused_or_taken(name: str, known: dict[str, Target]) -> None:
    for data in changes(known[name], NUM_CHANGES, name):
        start_s = time.process_time()
        known[name].run(data)
        assert time.process_time() - start_s < MAX_S, data[:200]


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop", "dangling"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WRITTEN])
def test_what_is_no_file_is_refused_at_once(
    name: str, kind: str, known: dict[str, Target]
) -> None:
    target = known[name]
    if not target.file:
        return
    path = Path(target.file)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "dangling": "nowhere"}[kind])
    signal.alarm(10)  # ends the process
    try:
        target.check()
    finally:
        signal.alarm(0)
        path.rmdir() if kind == "folder" else path.unlink()
        path.write_bytes(target.wrap(target.seeds[0]))
