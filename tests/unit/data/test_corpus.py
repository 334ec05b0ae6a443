from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.data.build_corpus import build_corpus
from megatron_wlb.data.corpus import Corpus, CorpusInfo, open_indexed, parse_split
from megatron_wlb.data.targets import write_targets
from megatron_wlb.data.tokenizer import file_encoder
from megatron_wlb.errors import ConfigError, CorpusError

TEXTS = [b"one\n", b"two and more\n", "drei, größer\n".encode(), b"x"]


@pytest.fixture(scope="session")
def megatron_datasets() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.datasets.blended_megatron_dataset_config
        import megatron.core.datasets.indexed_dataset
    return megatron.core.datasets  # type: ignore[no-any-return]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_bytes(text)
    return folder


@pytest.fixture
def prefix(tmp_path: Path, megatron_datasets: Any) -> Path:
    """A corpus of documents of 3, 1, 0 and 5 tokens as Megatron's own tools leave it."""
    path = tmp_path / "theirs_text_document"
    write_corpus(megatron_datasets, path, [[7, 8, 9], [70000], [], [1, 2, 3, 4, 5]])
    return path


def write_corpus(megatron_datasets: Any, prefix: Path, documents: list[list[int]]) -> None:
    builder = megatron_datasets.indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin")
    for tokens in documents:
        builder.add_document(np.array(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


# Building


def test_build_writes_what_megatron_reads_with_one_eod_a_document(
    texts: Path, tmp_path: Path, megatron_datasets: Any
) -> None:
    prefix = str(tmp_path / "new" / "folder" / "c")
    info = build_corpus([texts], prefix)
    dataset = open_indexed(prefix)
    assert [bytes(document.tolist()) for document in dataset] == [text + b"\0" for text in TEXTS]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert (info.num_documents, info.num_tokens) == (4, sum(map(len, TEXTS)) + 4)
    assert (info.tokenizer, info.vocab_size, info.eod, info.num_files) == ("bytes", 256, 0, 4)
    assert CorpusInfo.load(prefix) == info
    assert list_names(Path(prefix).parent) == ["c.bin", "c.idx", "c.json"]
    corpus = Corpus.open(prefix)
    assert (corpus.vocab_size, corpus.eod) == (256, 0)


def test_build_with_bpe_saves_a_tokenizer_that_reads_the_text_back(
    texts: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    info = build_corpus([texts], tmp_path / "c", tokenizer="bpe", vocab_size=270)
    tokenizer = Tokenizer.from_file(str(tmp_path / "c.tokenizer.json"))
    corpus = Corpus.open(tmp_path / "c")
    assert corpus.vocab_size == info.vocab_size == tokenizer.get_vocab_size()
    for index, text in enumerate(TEXTS):
        *tokens, last = corpus.tokens(index, 0, int(corpus.lengths[index])).tolist()
        assert last == info.eod and info.eod not in tokens
        assert tokenizer.decode(tokens) == text.decode()

    again = build_corpus(
        [texts], tmp_path / "d", tokenizer=str(tmp_path / "c.tokenizer.json"), json_key="other"
    )
    assert (tmp_path / "d.bin").read_bytes() == (tmp_path / "c.bin").read_bytes()
    assert (again.eod, again.vocab_size) == (info.eod, info.vocab_size)


def test_build_writes_wide_ids_for_a_large_vocabulary(tmp_path: Path, texts: Path) -> None:
    build_corpus([texts], tmp_path / "c", tokenizer="bpe", vocab_size=260)
    content = json.loads((tmp_path / "c.tokenizer.json").read_text())
    content["model"]["vocab"]["<|endoftext|>"] = 100_000
    content["added_tokens"][0]["id"] = 100_000
    (tmp_path / "wide.json").write_text(json.dumps(content))
    info = build_corpus([texts], tmp_path / "d", tokenizer=str(tmp_path / "wide.json"))
    corpus = Corpus.open(tmp_path / "d")
    assert info.eod == corpus.tokens(0, 0, int(corpus.lengths[0]))[-1] == 100_000
    assert file_encoder(json.dumps(content), "wide").vocab_size == corpus.vocab_size == 100_001


def test_build_reads_jsonl_and_counts_what_it_skips(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(b'{"body": "ab"}\n{"body": ""}\n{"body": "cde"}\n')
    (tmp_path / "in/b").write_bytes(b"\0\1")
    (tmp_path / "in/c.py").write_bytes(b"def broken(:\n")
    (tmp_path / "in/d.py").write_bytes(b"# coding: latin-1\n\ndef f():\n    return '\xff'\n")
    info = build_corpus([tmp_path / "in"], tmp_path / "c", json_key="body", python_definitions=True)
    assert Corpus.open(tmp_path / "c").lengths.tolist() == [3, 4, 25]
    counts = (info.num_files, info.num_binary_files, info.num_unparsable_files)
    assert counts == (4, 1, 1)
    assert (info.num_empty, info.num_utf8_errors) == (1, 1)


def test_build_ends_a_document_nowhere_but_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a\\u0000b"}\n{"text": "c"}\n')
    (tmp_path / "x.txt").write_bytes(b"d" * 8192 + b"\0")
    info = build_corpus([tmp_path / "x.jsonl", tmp_path / "x.txt"], tmp_path / "c")
    corpus = Corpus.open(tmp_path / "c")
    for index, length in enumerate(corpus.lengths):
        ends = corpus.tokens(index, 0, length) == info.eod
        assert ends.nonzero()[0].tolist() == [length - 1]


@pytest.mark.parametrize(
    ("paths", "out", "complaint"),
    [
        (["nowhere"], "c", "no such file or folder: nowhere"),
        (["empty"], "c", "no files in empty"),
        (["binary"], "c", "no documents in 1 files: 1 binary, 0 unparsable, 0 times"),
        (["bad.jsonl"], "c", r"bad\.jsonl:2 is not valid JSON"),
        (["texts"], "out/", "'out/' is a folder; add a name"),
        (["texts"], "binary/c", r"cannot write binary/c\.bin: .*; choose another folder"),
    ],
)
def test_build_that_fails_says_why_and_leaves_nothing(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    paths: list[str],
    out: str,
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\0")
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "fine"}\n{"text": \n')
    before = list_names(tmp_path)
    with pytest.raises(CorpusError, match=complaint) as caught:
        build_corpus(paths, out)
    assert "\n" not in str(caught.value)
    assert list_names(tmp_path) == before


@contextlib.contextmanager
def limit_file_bytes(num_bytes: int) -> Iterator[None]:
    """Makes writing any larger file fail, as on a full disk; for as short as can be, because
    pytest's own output may be a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("tokenizer", "num_bytes"), [("bytes", 10_000), ("bpe", 1_000)])
def test_build_on_a_full_disk_says_so_and_keeps_the_old_corpus(
    texts: Path, tmp_path: Path, tokenizer: str, num_bytes: int
) -> None:
    old = build_corpus([texts], tmp_path / "c")
    (texts / "large").write_bytes(b"0123456789" * 3000)
    before = list_names(tmp_path)
    with (
        pytest.raises(CorpusError, match=r"cannot write .*c\.bin: File too large; .*make room"),
        limit_file_bytes(num_bytes),
    ):
        build_corpus([texts], tmp_path / "c", tokenizer=tokenizer, force=True)
    assert list_names(tmp_path) == before
    assert Corpus.open(tmp_path / "c").lengths.sum() == old.num_tokens


@pytest.mark.parametrize("task", ["counting words", "choosing merges", "writing tokens"])
def test_build_interrupted_keeps_the_old_corpus(texts: Path, tmp_path: Path, task: str) -> None:
    old = build_corpus([texts], tmp_path / "c")
    (texts / "more").write_bytes(b"more")
    before = list_names(tmp_path)

    def interrupt(now: str, *_: int) -> None:
        if now == task:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_corpus([texts], tmp_path / "c", tokenizer="bpe", force=True, progress=interrupt)
    assert list_names(tmp_path) == before
    assert len(Corpus.open(tmp_path / "c").lengths) == old.num_documents


def test_build_removes_what_killed_builds_of_it_left(
    texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing of another build under way, nor what only looks alike."""
    for name in (".c.abc_ef12/draft.bin", ".c.backup_1/mine", ".c.old/draft.bin"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    others = []

    def meanwhile(*_: Any) -> None:
        if not others:
            others.append("under way")
            others[0] = build_corpus([texts], tmp_path / "c", force=True)

    build_corpus([texts], tmp_path / "c", force=True, progress=meanwhile)
    assert others and Corpus.open(tmp_path / "c")
    assert list_names(tmp_path)[:2] == [".c.backup_1", ".c.old"]
    (said,) = caplog.messages
    assert said.startswith(f"removed {tmp_path}/.c.abc_ef12, ")


def test_build_that_fails_between_its_files_leaves_no_index(texts: Path, tmp_path: Path) -> None:
    build_corpus([texts], tmp_path / "c")
    (tmp_path / "c.json").unlink()
    (tmp_path / "c.json").mkdir()  # cannot be replaced by a file
    (texts / "0.txt").write_bytes(b"One\n")  # Old index and new tokens would fit in size.
    with pytest.raises(CorpusError, match=r"cannot write .*c\.bin: Is a directory"):
        build_corpus([texts], tmp_path / "c", force=True)
    with pytest.raises(CorpusError, match=r"no such corpus file: .*c\.idx"):
        Corpus.open(tmp_path / "c")


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json", ".targets.npy"])
def test_build_replaces_what_is_there_only_when_forced(
    texts: Path, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"c{suffix}"
    path.write_text("precious")
    with pytest.raises(CorpusError, match=rf"c\{suffix} exists; choose .* \(--force\)"):
        build_corpus([texts], tmp_path / "c")
    assert path.read_text() == "precious"
    build_corpus([texts], tmp_path / "c", force=True)
    corpus = Corpus.open(tmp_path / "c")
    assert (len(corpus.lengths), corpus.targets) == (4, None)


def test_build_reuses_what_was_built_from_the_same_content(texts: Path, tmp_path: Path) -> None:
    first = build_corpus([texts], tmp_path / "c", reuse=True)
    write_targets(tmp_path / "c", [np.ones(n) for n in Corpus.open(tmp_path / "c").lengths])
    built_ns = (tmp_path / "c.bin").stat().st_mtime_ns
    assert build_corpus([texts], tmp_path / "c", reuse=True) == first
    assert (tmp_path / "c.bin").stat().st_mtime_ns == built_ns
    assert Corpus.open(tmp_path / "c").targets is not None

    (tmp_path / "c.bin").write_bytes(b"cut short")
    with pytest.raises(CorpusError, match="exists, broken or built from other content"):
        build_corpus([texts], tmp_path / "c", reuse=True)
    assert build_corpus([texts], tmp_path / "c", reuse=True, force=True) == first

    (texts / "0.txt").write_bytes(b"One\n")
    with pytest.raises(CorpusError, match="exists, broken or built from other content"):
        build_corpus([texts], tmp_path / "c", reuse=True)
    second = build_corpus([texts], tmp_path / "c", reuse=True, force=True)
    assert second.fingerprint != first.fingerprint
    assert Corpus.open(tmp_path / "c").targets is None


# Reading


def test_open_reads_a_corpus_of_megatrons_own_tools(prefix: Path) -> None:
    corpus = Corpus.open(prefix)
    assert corpus.lengths.tolist() == [3, 1, 0, 5] and corpus.lengths.dtype == np.int64
    assert (corpus.prefix, corpus.vocab_size, corpus.eod) == (str(prefix), None, None)
    assert corpus.tokens(3, 1, 4).tolist() == [2, 3, 4]
    assert corpus.tokens(1, 0, 1).tolist() == [70000]
    assert corpus.tokens(0, 2, 2).tolist() == [] == corpus.tokens(2, 0, 0).tolist()
    tokens = corpus.tokens(0, 0, 3)
    assert tokens.dtype == np.int64 and tokens.flags.owndata


@pytest.mark.parametrize(
    ("index", "start", "stop"), [(4, 0, 0), (-1, 0, 1), (0, -1, 2), (0, 1, 4), (0, 2, 1)]
)
def test_tokens_never_gives_those_of_another_document(
    prefix: Path, index: int, start: int, stop: int
) -> None:
    with pytest.raises(CorpusError, match=r"has documents 0 to 3, not|has 3 tokens, not \["):
        Corpus.open(prefix).tokens(index, start, stop)


def test_tokens_that_cannot_be_read_are_one_line(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    corpus = Corpus.open(prefix)
    corpus.open_tokens()
    monkeypatch.setattr(type(corpus._dataset), "get", fail)
    with pytest.raises(CorpusError, match=r"cannot read document 1 of .*: Input/output error; "):
        corpus.tokens(1, 0, 1)


def test_sample_knows_a_corpus_again_of_any_size(tmp_path: Path) -> None:
    corpus = Corpus(str(tmp_path / "c"), np.array([1]), None, None)
    for num_bytes in (0, 1, 5000, 1_000_000):
        content = np.random.RandomState(0).bytes(num_bytes)
        (tmp_path / "c.bin").write_bytes(content)
        sample = corpus.sample()
        assert corpus.sample() == sample
        (tmp_path / "c.bin").write_bytes(bytes(byte ^ 1 for byte in content))
        assert (corpus.sample() == sample) == (num_bytes == 0)
        (tmp_path / "c.bin").write_bytes(content[:-1] + b"another end")  # which it reads too
        assert corpus.sample() != sample
    (tmp_path / "c.bin").unlink()
    with pytest.raises(CorpusError, match=r"cannot read .*c\.bin: No such file"):
        corpus.sample()


def test_open_does_not_import_megatron(prefix: Path) -> None:
    code = (
        "import sys; from megatron_wlb.data.corpus import Corpus; Corpus.open(sys.argv[1]);"
        "sys.exit(any(name in sys.modules for name in ('megatron', 'torch', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code, prefix], check=False).returncode == 0


def test_open_names_the_missing_file_and_what_was_perhaps_meant(prefix: Path) -> None:
    for wrong in (f"{prefix}.bin", f"{prefix}.idx"):
        with pytest.raises(CorpusError, match=rf"{wrong}\.idx; give the prefix alone: {prefix}$"):
            Corpus.open(wrong)
    with pytest.raises(CorpusError, match=rf"theirs\.idx; did you mean {prefix}\?$"):
        Corpus.open(prefix.with_name("theirs"))
    with pytest.raises(CorpusError, match=r"no such corpus file: nothing\.idx; .*wlb corpus build"):
        Corpus.open("nothing")
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(CorpusError, match=rf"no such corpus file: {prefix}\.bin"):
        Corpus.open(prefix)


def test_open_refuses_an_index_cut_anywhere_or_with_a_tail(prefix: Path) -> None:
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CorpusError, match=rf"is truncated: {size} bytes"):
            Corpus.open(prefix)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorpusError, match="bytes long where its header says"):
        Corpus.open(prefix)


@pytest.mark.parametrize(
    ("offset", "field", "complaint"),
    [
        (0, b"TNTIDX\0\0\0", "is not a Megatron index"),
        (9, struct.pack("<Q", 2), "has version 2 and type code 4"),
        (17, struct.pack("<B", 7), "type code 7, which is not an index of tokens"),
        (17, struct.pack("<B", 5), "says that .* has 72 bytes, and it has 36"),
        (34, struct.pack("<ii", -3, 7), "is corrupt"),
        (34, struct.pack("<i", 4), "says that .* has 40 bytes, and it has 36"),
        (34 + 4 * 12 + 4 * 8, struct.pack("<q", 3), "is corrupt"),
    ],
)
def test_open_says_what_is_wrong_with_an_index(
    prefix: Path, offset: int, field: bytes, complaint: str
) -> None:
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()
    path.write_bytes(whole[:offset] + field + whole[offset + len(field) :])
    with pytest.raises(CorpusError, match=complaint):
        Corpus.open(prefix)


@pytest.mark.parametrize(
    ("number", "pointer", "start"),
    [
        # Of documents that start at bytes 0, 12, 16 and 16.
        (0, 4, 0),
        (1, 0, 12),
        (1, 13, 12),  # in the middle of a token
        (1, -12, 12),
        (2, 4000, 16),  # beyond the end
        (3, 12, 16),
        (3, 17, 16),  # the last one, by one byte
    ],
)
def test_open_refuses_a_pointer_that_lengths_contradict(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, number: int, pointer: int, start: int
) -> None:
    path = Path(f"{prefix}.idx")
    whole, offset = path.read_bytes(), 34 + 4 * 4 + 8 * number
    path.write_bytes(whole[:offset] + struct.pack("<q", pointer) + whole[offset + 8 :])
    complaint = (
        rf"pointer of document {number} is byte {pointer} of {prefix}\.bin, .* at {start}; build"
    )
    for at_once in (1, 3, 4, 1 << 20):
        monkeypatch.setattr("megatron_wlb.data.index._POINTERS_AT_ONCE", at_once)
        with pytest.raises(CorpusError, match=complaint):
            Corpus.open(prefix)
        path.write_bytes(whole)
        assert Corpus.open(prefix).lengths.tolist() == [3, 1, 0, 5]
        path.write_bytes(whole[:offset] + struct.pack("<q", pointer) + whole[offset + 8 :])


@pytest.mark.filterwarnings("ignore:Could not determine rank:UserWarning")
def test_open_takes_a_corpus_that_megatron_joined(
    prefix: Path, tmp_path: Path, megatron_datasets: Any
) -> None:
    other, joined = tmp_path / "other", tmp_path / "joined"
    write_corpus(megatron_datasets, other, [[11, 12], [13]])
    builder = megatron_datasets.indexed_dataset.IndexedDatasetBuilder(f"{joined}.bin")
    for path in (prefix, other, prefix):
        builder.add_index(str(path))
    builder.finalize(f"{joined}.idx")
    corpus = Corpus.open(joined)
    assert corpus.lengths.tolist() == [3, 1, 0, 5, 2, 1, 3, 1, 0, 5]
    assert corpus.tokens(4, 0, 2).tolist() == [11, 12]
    assert corpus.tokens(9, 0, 5).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_bytes", [0, 35, 37])
def test_open_refuses_a_bin_of_another_size(prefix: Path, num_bytes: int) -> None:
    Path(f"{prefix}.bin").write_bytes(bytes(num_bytes))
    with pytest.raises(CorpusError, match=r"has no documents|has 36 bytes, and it has"):
        Corpus.open(prefix)


def test_open_refuses_files_of_two_corpora(texts: Path, tmp_path: Path) -> None:
    build_corpus([texts], tmp_path / "c")
    build_corpus([texts / "0.txt"], tmp_path / "d")
    (tmp_path / "d.json").rename(tmp_path / "c.json")
    with pytest.raises(CorpusError, match=r"has 4 documents of .* says 1 of 5: files of two"):
        Corpus.open(tmp_path / "c")


def test_open_takes_only_its_own_json_and_refuses_a_damaged_one(
    texts: Path, tmp_path: Path
) -> None:
    build_corpus([texts], tmp_path / "c")
    path = tmp_path / "c.json"
    text = path.read_text()
    path.write_text('{"text": "somebody else\'s"}')
    assert Corpus.open(tmp_path / "c").vocab_size is None
    for damaged in (text[:-3], text.replace('"eod"', '"end"')):
        path.write_text(damaged)
        with pytest.raises(CorpusError, match=r"c\.json is damaged .* build the corpus anew"):
            Corpus.open(tmp_path / "c")


# Split


weights = st.integers(0, 1000).map(str) | st.integers(0, 9999).map(lambda n: f".{n:04}")


@settings(max_examples=200)
@given(
    st.lists(weights, min_size=1, max_size=3).filter(lambda texts: any(map(float, texts))),
    st.integers(0, 10_000_000),
)
def test_parse_split_gives_the_ranges_that_megatron_gives(
    megatron_datasets: Any, texts: list[str], num_documents: int
) -> None:
    config = megatron_datasets.blended_megatron_dataset_config
    split = ",".join(texts)
    matrix = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    ranges = parse_split(split, num_documents)
    assert ranges[0][0] == 0 and ranges[2][1] == num_documents
    for (start, stop), book_ends in zip(ranges, matrix, strict=True):
        if book_ends is None:
            assert start == stop
        else:
            bounds = (round(share * float(num_documents)) for share in book_ends)
            assert (start, stop) == tuple(bounds)


@pytest.mark.parametrize(
    "split", ["", "0,0,0", "1,2,3,4", "99,-1,0", "a,b", "1..2,1", "nan", "1;2"]
)
def test_parse_split_refuses_what_megatron_would_misread(split: str) -> None:
    with pytest.raises(ConfigError, match="write it like 99,1,0"):
        parse_split(split, 10)
