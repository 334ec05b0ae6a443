"""A ledger's lines give back what was written, and say where they are damaged."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from helpers.soak import Soak
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost import DocumentCost
from megatron_wlb.errors import CheckpointError
from megatron_wlb.plan import Document
from megatron_wlb.planning.ledger.lines import (
    ENDS,
    LENGTH,
    NAME,
    OFFSET,
    decode,
    encode,
    pieces_of,
    pieces_of_plan,
    read,
    seal,
)
from megatron_wlb.planning.ledger.writer import StepLedger

NUMBERS = st.integers(0, 2**40) | st.integers(0, 300)


@settings(max_examples=200)
@given(st.lists(st.builds(Document, *[NUMBERS] * 4, st.booleans(), *[NUMBERS] * 3)))
def test_ledger_line_gives_back_its_documents(documents: list[Document]) -> None:
    pieces = pieces_of(documents)
    assert np.array_equal(decode(encode(pieces)), pieces)
    expected = sorted((d.arrival, d.offset, d.corpus, d.number, d.length) for d in documents)
    assert sorted(pieces[:, [6, 3, 0, 2, 4]].tolist()) == list(map(list, expected))


@pytest.mark.parametrize("text", ["no base64", "AAAA", encode(pieces_of([]))[:-4] + "AAA="])
def test_ledger_documents_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)


def test_slices_of_a_document_are_one_piece() -> None:
    cost = DocumentCost(1, 0.1, 2, 0.25, micro_batch_us=5)
    soak = Soak(
        "slim, in few units", ((7, 40, 3, 5, 25),), None, 1, "split", 40, 2, 80, None, 12, cost,
        1, 0, "--pipeline-model-parallel-size 2",
    )  # fmt: skip
    plan = soak.planner().next_plan()
    assert plan is not None
    assert any(micro_batch.slice for micro_batch in plan), "nothing is cut"
    pieces = pieces_of_plan(plan)
    assert len(pieces) == len(list(plan.documents))
    assert pieces[:, OFFSET].tolist() == [0] * len(pieces)
    assert sorted(pieces[:, LENGTH]) == sorted(d.length for d in plan.documents)
    assert pieces[:, ENDS].all()


def written(folder: Path, num: int = 4) -> bytes:
    (folder / NAME).write_bytes(b"".join(seal({"iteration": n}) for n in range(num)))
    return (folder / NAME).read_bytes()


def test_torn_last_line_counts_as_not_written(tmp_path: Path) -> None:
    content = written(tmp_path)
    start = content.rstrip(b"\n").rfind(b"\n") + 1
    for stop in range(start + 1, len(content)):
        (tmp_path / NAME).write_bytes(content[:stop])
        *whole, last = read(tmp_path / NAME)
        assert [line.values["iteration"] for line in whole if line] == [0, 1, 2]
        assert last is None


def test_torn_line_is_cut_off_where_a_run_goes_on(tmp_path: Path) -> None:
    content = written(tmp_path)
    for torn in (b"", b"1234", b"\0" * 200_000, content[:9]):
        (tmp_path / NAME).write_bytes(content + torn)
        StepLedger(tmp_path).close()
        assert (tmp_path / NAME).read_bytes() == content
    (tmp_path / NAME).write_bytes(b"torn at the very start")
    StepLedger(tmp_path).close()
    assert (tmp_path / NAME).read_bytes() == b""


def test_changed_line_in_the_middle_is_named(tmp_path: Path) -> None:
    content = written(tmp_path)
    second = content.index(b"\n") + 1
    for at, bit in itertools.product((second, second + 12), range(8)):
        changed = bytearray(content)
        changed[at] ^= 1 << bit
        (tmp_path / NAME).write_bytes(changed)
        with pytest.raises(CheckpointError, match=f"line 2, from byte {second} on, is damaged"):
            list(read(tmp_path / NAME))


def test_ledger_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(seal({"version": 2, "start": 0}))
    with pytest.raises(CheckpointError, match="version 2, not 1"):
        list(read(tmp_path / NAME))


def test_ledger_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(CheckpointError, match="give --wlb-no-ledger"):
        StepLedger(tmp_path)
