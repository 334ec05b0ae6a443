from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.index import write_index

from megatron_wlb.data import length_source
from megatron_wlb.data.length_source import MAX_LENGTH, LengthSource
from megatron_wlb.errors import ConfigError, CorpusError

LENGTHS = [5, 900, 3, 40, 7, 12000, 1, 63]


def of_lengths(lengths) -> LengthSource:
    return LengthSource("made up", np.array(lengths, np.int64))


def stream(source: LengthSource, num_steps: int, *, window=100, longest=100):
    return source.stream(
        num_steps, window=window, longest=longest, windows_a_step=4, seed=3, long_documents="split"
    )


def test_file_of_lines_is_read_with_blank_lines_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("5\n\n 900 \r\n3\n  \n40\n7\n12000\n1\n63")
    source = LengthSource.of_file(path)
    assert source.stored is not None and source.stored.tolist() == LENGTHS
    assert source.title == "lengths.txt" and source.longest(10) == 12000


def test_file_of_lines_is_read_up_to_one_that_is_no_length(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    lengths = list(range(1, 200))
    path.write_text("".join(f"{length}\n" for length in lengths))
    assert LengthSource.of_file(path).stored.tolist() == lengths
    path.write_text("".join(f"{length}\n" for length in lengths) + "\nten\n4\n")
    with pytest.raises(CorpusError, match="has 'ten' in line 201; give whole numbers"):
        LengthSource.of_file(path)


def test_pipe_of_lines_is_read_once_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    os.mkfifo(path)
    writer = threading.Timer(0.2, path.write_text, ["".join(f"{n}\n" for n in LENGTHS)])
    writer.start()
    assert LengthSource.of_file(path).stored.tolist() == LENGTHS
    writer.join()
    reader, end = os.pipe()  # as the shell's <(zcat lengths.gz)
    os.write(end, b"5\n7\n")
    os.close(end)
    assert LengthSource.of_file(f"/dev/fd/{reader}").stored.tolist() == [5, 7]
    os.close(reader)


def test_pipe_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_source, "_MAX_PIPE_BYTES", 1000)
    reader, end = os.pipe()
    os.write(end, b"12\n" * 400)
    with pytest.raises(CorpusError, match="a pipe of more than 1000 bytes, write what it gives"):
        LengthSource.of_file(f"/dev/fd/{reader}")
    os.close(end)
    os.close(reader)


@pytest.mark.parametrize("dtype", ["<i8", "<i4", "<u2", ">i4"])
def test_array_file_of_any_integers_is_read(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS, dtype))
    stored = LengthSource.of_file(tmp_path / "lengths.npy").stored
    assert stored.tolist() == LENGTHS and stored.dtype == np.int64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no lengths; give at least one"),
        (" \n\n", "has no lengths; give at least one"),
        ("5\n6\n1.5\n", "has '1.5' in line 3"),
        ("5 6\n", "has '5 6' in line 1"),
        ("5\n0\n-4\n", r"length number 2 is 0 \(2 such\)"),
        (f"5\n{MAX_LENGTH + 1}\n", r"length number 2 is 2147483648 \(1 such\)"),
        ("5\n99999999999999999999\n", "has '99999999999999999999' in line 2"),
        ("5\n\0\x81\n", "in line 2; give whole numbers"),
    ],
)
def test_file_of_lines_that_is_none_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(CorpusError, match=message) as caught:
        LengthSource.of_file(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1.5, 2]), "holds float64 of shape"),
        (np.ones((2, 3), np.int64), r"holds int64 of shape \(2, 3\)"),
        (np.array([], np.int64), "has no lengths"),
        (np.array([4, -1]), "length number 2 is -1"),
        (np.array([{}], dtype=object), "is not an intact .npy array"),
    ],
)
def test_array_file_of_something_else_is_refused(tmp_path: Path, array, message: str) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, array)
    with pytest.raises(CorpusError, match=message):
        LengthSource.of_file(path)


def npy(lengths: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, lengths)
    return stream.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"5\n6\n", b"\x93NUMPY\x01\x00v\x00{'descr': '<i8'", npy(np.arange(1, 100))[:-5]],
    ids=["empty", "lines", "header cut short", "array cut short"],
)
def test_array_file_that_is_corrupt_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lengths.npy"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"is not an intact \.npy array") as caught:
        LengthSource.of_file(path)
    assert "\n" not in str(caught.value)


def test_missing_file_and_unknown_distribution_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"cannot read .*none: No such file"):
        LengthSource.of_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="unknown distribution slimpak; did you mean slimpack"):
        LengthSource.of_distribution("slimpak")


def test_corpora_are_joined_and_a_truncated_index_is_refused(tmp_path: Path) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    write_index(first, LENGTHS)
    write_index(second, [9, 0, 8])
    source = LengthSource.of_corpora([first, second])
    assert source.stored.tolist() == [*LENGTHS, 9, 0, 8] and source.title == "a, b"
    index = Path(first + ".idx")
    index.write_bytes(index.read_bytes()[:-9])
    with pytest.raises(CorpusError, match=r"a\.idx is truncated: 193 bytes of 202"):
        LengthSource.of_corpora([second, first])


def test_stream_of_stored_documents_is_shuffled_and_repeats() -> None:
    whole = stream(of_lengths(LENGTHS), 100, longest=12000)
    seen = [d for _ in range(100) for d in whole.next_step()]
    assert sorted(d.length for d in seen[: len(LENGTHS)]) == sorted(LENGTHS)
    assert [d.length for d in seen[: len(LENGTHS)]] != LENGTHS
    assert len(seen) > len(LENGTHS)
    split = stream(of_lengths(LENGTHS), 100)
    assert max(d.length for _ in range(100) for d in split.next_step()) == 100


def test_sample_is_of_distinct_documents_with_enough_tokens() -> None:
    lengths = np.random.default_rng(0).permutation(np.arange(1, 200_001))
    source = of_lengths(lengths)
    sample = source.sampled(10_000_000, window=1000, seed=4)
    assert len(sample.stored) < 50_000 and len(np.unique(sample.stored)) == len(sample.stored)
    assert np.minimum(sample.stored, 1000).sum() >= 10_000_000
    # As good as the whole: the mean of uniform lengths is known to half a percent or so.
    assert sample.stored.mean() == pytest.approx(100_000, rel=0.03)
    again = source.sampled(10_000_000, window=1000, seed=4)
    assert (sample.stored == again.stored).all()
    assert source.sampled(10**12, window=10**6, seed=4) is source


def test_halves_have_no_document_in_common() -> None:
    source = of_lengths([0, 0, *range(1, 1002)])
    first, second = source.halves(seed=5)
    assert not set(first.stored.tolist()) & set(second.stored.tolist())
    assert sorted([*first.stored.tolist(), *second.stored.tolist()]) == list(range(1, 1002))
    # Lengths are spread over both, so neither half is the beginning of the corpus.
    assert first.stored.mean() == pytest.approx(second.stored.mean(), rel=0.1)


def test_check_refuses_what_training_would() -> None:
    of_lengths([0, 100]).check(window=100, long_documents="error")
    of_lengths([101]).check(window=100, long_documents="split")
    LengthSource.of_distribution("magi").check(window=100, long_documents="error")
    with pytest.raises(
        CorpusError, match=r"document 2 has 900 tokens, above the window of 100 \(2"
    ):
        of_lengths([5, 101, 900]).check(window=100, long_documents="error")
    with pytest.raises(CorpusError, match="no document has tokens"):
        of_lengths([0, 0]).check(window=100, long_documents="split")


def test_remarks_say_what_is_done_with_the_documents() -> None:
    source = of_lengths([0, 50, 100, 300])
    assert of_lengths([50, 100]).remarks(150, window=100, long_documents="split") == []
    empty, long, few = source.remarks(451, window=100, long_documents="split")
    assert empty == "1 documents without tokens are left out"
    assert "1 of 4 documents are longer than the window of 100 tokens and cut into" in long
    assert "450 tokens are fewer than the 451 to be packed" in few
    truncated = source.remarks(1, window=100, long_documents="truncate")[1]
    assert "which drops 200 tokens (44.4%) (--long-documents truncate)" in truncated
    assert (
        LengthSource.of_distribution("magi").remarks(10**9, window=9, long_documents="split") == []
    )
