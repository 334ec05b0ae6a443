from __future__ import annotations

import bz2
import gzip
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_wlb.data.sources import SourceCounts, Sources, find_files, python_definitions
from megatron_wlb.errors import CorpusError


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def read(*paths: Path, **settings: object) -> tuple[list[bytes], SourceCounts]:
    counts = SourceCounts()
    return list(Sources(paths, **settings).documents(counts)), counts  # type: ignore[arg-type]


def test_find_files_walks_in_sorted_order_and_leaves_out_what_is_hidden(tmp_path: Path) -> None:
    names = ["b.txt", "a.txt", "z/1", "c/2", "c/skip/3", ".git/4", ".env", "__pycache__/5", "c/.6"]
    write(tmp_path, dict.fromkeys(names, b"x"))
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    found = find_files([tmp_path], exclude=["skip"], skip=[(tmp_path / "z/1").resolve()])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a.txt", "b.txt", "c/2"]


def test_find_files_takes_named_files_as_they_are_even_hidden_ones(tmp_path: Path) -> None:
    write(tmp_path, {".notes": b"x", ".cache/a": b"y"})
    paths = [tmp_path / ".cache", tmp_path / ".notes"]
    assert find_files(paths) == [tmp_path / ".cache/a", tmp_path / ".notes"]


def test_find_files_refuses_a_missing_path_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no such file or folder: .*/nowhere"):
        find_files([tmp_path / "nowhere"])
    write(tmp_path, {"text": b"x", "sub/.hidden": b"x"})
    with pytest.raises(CorpusError, match=r"no files in .*/sub, hidden"):
        find_files([tmp_path / "text", tmp_path / "sub"])


def test_documents_are_whole_files_except_binary_and_empty_ones_which_are_counted(
    tmp_path: Path,
) -> None:
    late_nul = b"x" * 8192 + b"\0"
    write(
        tmp_path,
        {"1": b"one\n", "2": b"a\0b", "3": b" \n\t", "4": b"", "5": b"caf\xe9", "6": late_nul},
    )
    documents, counts = read(*(tmp_path / str(i) for i in range(1, 7)))
    assert documents == [b"one\n", b"caf\xe9", late_nul]
    assert counts == SourceCounts(
        num_files=6,
        num_binary_files=1,
        num_empty=2,
        num_utf8_errors=1,
        bytes_read=4 + 3 + 3 + 0 + 4 + 8193,
    )


def test_documents_of_a_jsonl_file_are_its_lines(tmp_path: Path) -> None:
    lines = (
        b'{"text": "a\\n\xc3\xa9"}\r\n\n{"text": ""}\n'
        b'{"text": "\\ud800", "id": 3}\n{"text":"b\xff"}'
    )
    write(tmp_path, {"x.jsonl": lines})
    documents, counts = read(tmp_path / "x.jsonl")
    assert documents[0] == "a\né".encode()
    assert len(documents) == 3
    assert documents[2].decode(errors="replace").strip("\ufffd") == "b"
    assert (counts.num_empty, counts.num_utf8_errors) == (2, 2)
    assert counts.bytes_read == len(lines)


def test_documents_of_a_jsonl_file_may_be_null_and_come_after_a_byte_order_mark(
    tmp_path: Path,
) -> None:
    lines = b'\xef\xbb\xbf{"text": "a"}\n{"text": null}\n{"text": "\xef\xbb\xbfb"}\n'
    write(tmp_path, {"x.jsonl": lines, "x.txt": b"\xef\xbb\xbfc"})
    documents, counts = read(tmp_path / "x.jsonl", tmp_path / "x.txt")
    assert documents == [b"a", b"\xef\xbb\xbfb", b"c"]
    assert (counts.num_empty, counts.bytes_read) == (1, len(lines) + 4)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_documents_of_compressed_jsonl_are_those_of_the_lines(tmp_path: Path, suffix: str) -> None:
    lines = b'\xef\xbb\xbf{"text": "a"}\n\n' + b'{"text": "bc"}\n' * 50_000
    write(tmp_path, {"x.jsonl": lines, f"x.jsonl{suffix}": COMPRESS[suffix](lines)})
    packed = tmp_path / f"x.jsonl{suffix}"
    documents, counts = read(packed)
    assert (documents, counts.num_empty) == (read(tmp_path / "x.jsonl")[0], 1)
    assert counts.bytes_read == packed.stat().st_size


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"?" + data])
def test_documents_name_a_compressed_file_that_is_damaged_and_the_line_before(
    tmp_path: Path, suffix: str, damage: Callable[[bytes], bytes]
) -> None:
    write(tmp_path, {f"x.jsonl{suffix}": damage(COMPRESS[suffix](b'{"text": "a"}\n' * 9))})
    with pytest.raises(CorpusError, match=rf"x\.jsonl\{suffix} after line \d \(.+\); unpack it"):
        read(tmp_path / f"x.jsonl{suffix}")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python has zstd from 3.14 on")
def test_documents_name_a_file_whose_compression_this_python_lacks(tmp_path: Path) -> None:
    write(tmp_path, {"x.jsonl.zst": b"\x28\xb5\x2f\xfd"})
    with pytest.raises(CorpusError, match=r"x\.jsonl\.zst after line 0 .*compression.*; unpack it"):
        read(tmp_path / "x.jsonl.zst")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", "is not valid JSON"),
        (b'"text"', "is a JSON str, not an object"),
        (b'{"content": "x", "id": 1}', r"no key 'text' \(it has 'content', 'id'\)"),
        (b'{"text": ["x"]}', "'text' is a list, not a string"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_documents_name_file_and_line_of_a_bad_jsonl_line(
    tmp_path: Path, line: bytes, complaint: str
) -> None:
    write(tmp_path, {"x.jsonl": b'{"text": "fine"}\n' + line})
    with pytest.raises(CorpusError, match=rf"x\.jsonl:2.*{complaint}"):
        read(tmp_path / "x.jsonl")


def test_python_definitions_are_top_level_with_decorators_and_comments_above() -> None:
    source = (
        b"# -*- coding: latin-1 -*-\nimport os\n\n# far\n\n# near \xe9\n# nearer\n@cache\n"
        b"def one():\r\n    def inner(): pass\n    return '\x0c'\n\nX = 1\nasync def two(): pass\n"
        b"class Three:\n    def method(self): '\\d'"
    )
    assert python_definitions(source) == [
        b"# near \xe9\n# nearer\n@cache\ndef one():\r\n    def inner(): pass\n    return '\x0c'\n",
        b"async def two(): pass\n",
        b"class Three:\n    def method(self): '\\d'",
    ]


def test_python_definitions_option_counts_files_without_any_and_unparsable_ones(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        {
            "a.py": b"def f(): pass\n\ndef g(): return 1\n",
            "b.py": b"def f(:\n",
            "c.py": b"X = 1\n",
            "d.txt": b"def h(): pass\n",
        },
    )
    documents, counts = read(*sorted(tmp_path.iterdir()), python_definitions=True)
    assert documents == [b"def f(): pass\n", b"def g(): return 1\n", b"def h(): pass\n"]
    assert (counts.num_unparsable_files, counts.num_empty, counts.num_files) == (1, 1, 4)


def test_batches_hold_every_document_in_order_and_tell_the_progress(tmp_path: Path) -> None:
    sizes = [700_000, 500_000, 30, 2_000_000, 1]
    files = [tmp_path / f"{i}" for i in range(len(sizes))]
    for i, (path, size) in enumerate(zip(files, sizes, strict=True)):
        path.write_bytes(bytes([65 + i]) * size)
    told: list[tuple[str, int, int]] = []
    batches = list(
        Sources(files).batches(SourceCounts(), "reading", lambda *args: told.append(args))
    )
    assert [[len(document) for document in batch] for batch in batches] == [
        [700_000, 500_000], [30, 2_000_000], [1]
    ]  # fmt: skip
    total = sum(sizes)
    assert told == [
        ("reading", 1_200_000, total), ("reading", total - 1, total), ("reading", total, total)
    ]  # fmt: skip


def test_fingerprint_follows_content_order_kind_and_settings_but_not_names(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"1", "b.txt": b"2", "x/c.txt": b"1", "d.py": b"1", "e.txt": b"12"})

    def fingerprint(*names: str, tokenizer: str = "bytes", **settings: object) -> str:
        sources = Sources([tmp_path / name for name in names], **settings)  # type: ignore[arg-type]
        return sources.fingerprint({"tokenizer": tokenizer})

    base = fingerprint("a.txt", "b.txt")
    assert fingerprint("x/c.txt", "b.txt") == base
    others = {
        fingerprint("b.txt", "a.txt"),
        fingerprint("d.py", "b.txt"),
        fingerprint("e.txt"),
        fingerprint("a.txt", "b.txt", json_key="body"),
        fingerprint("a.txt", "b.txt", python_definitions=True),
        fingerprint("a.txt", "b.txt", tokenizer="bpe"),
    }
    assert len(others) == 6 and base not in others
