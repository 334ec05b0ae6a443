"""Whatever stands in what the project reads, it is taken, or refused in one line.

The short form of ``scripts/evidence/fuzz.py``, over the same targets.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fuzz import Target, changes, targets

NUM_CHANGES = 120
MAX_S = 5.0
MAX_MIB = 64
Targets = dict[str, Target]
WRITTEN = ("lock", "metrics")
"""They are opened to be written."""
PIPED = ("lengths",)
"""They may come from a pipe."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Targets]:
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("readers"))
    yield targets()
    os.chdir(before)


NAMES = (
    "flags", "settings", "texts", "recipe", "model", "hardware", "cost", "strategies", "index",
    "conversations", "masks", "note", "lengths", "array", "sources", "packed", "tokenizer",
    "ledger", "state",
    "checkpoint", "tracker", "checksums", "lock", "metrics", "recording", "results",
)  # fmt: skip


def test_targets_are_all_tried(known: Targets) -> None:
    assert tuple(known) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_right_input_is_read(name: str, known: Targets) -> None:
    target = known[name]
    if target.file:
        Path(target.file).write_bytes(target.wrap(target.seeds[0]))
    target.read(target.seeds[0])


@pytest.mark.parametrize("name", NAMES)
def test_changed_input_is_refused_or_taken(name: str, known: Targets) -> None:
    for data in changes(known[name], NUM_CHANGES, name):
        start_s = time.process_time()
        known[name].run(data)
        assert time.process_time() - start_s < MAX_S, data[:200]


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop", "dangling"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WRITTEN])
def test_what_is_no_file_is_refused_at_once(name: str, kind: str, known: Targets) -> None:
    target = known[name]
    if not target.file or (kind == "pipe" and name in PIPED):
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


BOMB = base64.b64encode(zlib.compress(bytes(1 << 27))).decode()
HUGE = (1 << 53) - 1
DUMB = json.dumps(
    {"model": {"vocab": {"<|endoftext|>": 0}, "type": "WordLevel", "unk_token": "[UNK]"}}
).encode()


class Calls:
    """Pickled, it makes a folder when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("called",)


def changed_step(known: Targets, **values: Any) -> bytes:
    """A ledger of a start and a step that says other values."""
    start, step, *_ = known["ledger"].seeds[0].split(b"\n")
    return b"\n".join([start, json.dumps(json.loads(step) | values).encode(), b""])


def changed_start(known: Targets, **values: Any) -> bytes:
    start, *rest = known["ledger"].seeds[0].split(b"\n")
    return b"\n".join([json.dumps(json.loads(start) | values).encode(), *rest, b""])


def changed_state(known: Targets, **values: Any) -> bytes:
    state = json.loads(known["state"].seeds[0])
    stream = {name: values.pop(name) for name in ("epoch", "position_tokens") if name in values}
    return json.dumps(state | values | {"stream": state["stream"] | stream}).encode()


def changed_plans(known: Targets, sizes: list[Any]) -> bytes:
    """A state of ``fixed-greedy`` with other sizes of what it planned."""
    states = map(json.loads, known["state"].seeds[:-1])
    state = next(one for one in states if one["packer"]["packing"] == "fixed-greedy")
    return json.dumps(
        state | {"packer": state["packer"] | {"planned_sizes": sizes, "planned": []}}
    ).encode()


def npy(shape: str) -> bytes:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)


HOSTILE: dict[str, tuple[str, Callable[[Targets], bytes]]] = {
    "deflated documents": ("ledger", lambda k: changed_step(k, documents=BOMB)),
    "deflated documents that wait": (
        "ledger", lambda k: changed_start(k, start=3, arrived=9, waiting=BOMB),
    ),
    "ledger of nested lists": ("ledger", lambda _: b'{"start": ' + b"[" * 100_000 + b"\n"),
    "ledger of a huge number": ("ledger", lambda k: changed_step(k, iteration=10**400)),
    "ledger of an endless start": ("ledger", lambda k: changed_start(k, arrived=HUGE)),
    "ledger of many corpora": ("ledger", lambda k: changed_start(k, contents={str(HUGE): {}})),
    "ledger of another kind": ("ledger", lambda k: changed_step(k, tokens="12", digest=3)),
    "deflated documents under way": ("state", lambda k: changed_state(k, under_way=BOMB)),
    "state of a late epoch": ("state", lambda k: changed_state(k, epoch=HUGE)),
    "state of a late position": ("state", lambda k: changed_state(k, position_tokens=HUGE)),
    "state that has read far ahead": ("state", lambda k: changed_state(k, steps_read=HUGE)),
    "state of a late step": ("state", lambda k: changed_state(k, step=HUGE, steps_read=HUGE)),
    "state of an infinite step": ("state", lambda k: changed_state(k, step=float("inf"))),
    "state of steps that are no lists": ("state", lambda k: changed_plans(k, [None])),
    "state of less than no documents": ("state", lambda k: changed_plans(k, [[-1, 1]])),
    "tokenizer that knows no byte": ("tokenizer", lambda _: DUMB),
    "state of nested lists": ("state", lambda _: b'{"step": ' + b"[" * 100_000),
    "pickle of a far place": ("checkpoint", lambda _: b"\x80\x02}r\xff\xff\xff\x7f."),
    "pickle of many bytes": ("checkpoint", lambda _: b"\x80\x05\x96" + bytes(4) + b"\x01\0\0\0."),
    "pickle of tuples in tuples": (
        "checkpoint", lambda _: b"\x80\x02}K\x01" + b"2\x86" * 60 + b"K\x01s.",
    ),
    "pickle that calls": ("checkpoint", lambda _: pickle.dumps(Calls())),
    "array that claims much": ("array", lambda _: npy("(1000000000000,)")),
    "array that claims less than nothing": ("array", lambda _: npy("(-3,)")),
    "index that claims much": (
        "index", lambda _: struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 1 << 60, 1 << 60),
    ),
    "lengths above what is": ("lengths", lambda _: b"1000000000000\n"),
    "lengths below nothing": ("lengths", lambda _: b"-3\n"),
    "no lengths": ("lengths", lambda _: b""),
    "lengths without an end of line": ("lengths", lambda _: b"1" * (1 << 22)),
    "checksums of a device": ("checksums", lambda _: b"00000000 0 /dev/zero"),
    "checksums of a file outside": ("checksums", lambda _: b"00000000 0 ../../etc/passwd"),
    "checksums of a name with a NUL": ("checksums", lambda _: b"00000000 0 a\0b"),
    "tracker of thousands of digits": ("tracker", lambda _: b"9" * 5000),
    "split of infinite weights": ("texts", lambda _: b"9" * 400),
    "schedule of thousands of digits": ("texts", lambda _: b"0:" + b"9" * 5000),
    "number behind zeros": ("texts", lambda _: b"hold:000000001" + b"9" * 30),
    "lock of nested lists": ("lock", lambda _: b"[" * 60_000),
    "word of several lines": ("flags", lambda _: b'a b\r{"a":\x1b' * 2000),
}  # fmt: skip
"""What would take memory or time without a bound, or raise another error."""


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_input_takes_little_memory_and_time(case: str, known: Targets) -> None:
    name, make = HOSTILE[case]
    data, target = make(known), known[name]
    tracemalloc.start()
    start_s = time.process_time()
    try:
        target.run(data)
        peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    assert time.process_time() - start_s < 2 * MAX_S  # tracing itself takes some
    assert peak_mib < MAX_MIB
    assert not Path("called").exists()
    if target.file:
        Path(target.file).write_bytes(target.wrap(target.seeds[0]))
