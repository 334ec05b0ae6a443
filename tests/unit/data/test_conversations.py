"""Conversations become documents and targets, once; what is none is refused with its line."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_wlb.data.conversations import Team, Template, conversation_corpus
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.errors import CorpusError

ROLES = {"system": 250, "user": 251, "assistant": 252}


def tokenize(conversation: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """A token for the role, then bytes; answers alone are targets."""
    tokens: list[int] = []
    targets: list[int] = []
    for message in conversation:
        own = [ROLES[message["role"]], *message["content"].encode()]
        tokens += own
        targets += own if message["role"] == "assistant" else [-100] * len(own)
    return np.array(tokens), np.array(targets)


TEMPLATE = Template(tokenize, pad=120, vocab_size=256, identity="bytes")


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


LINES = [
    [said("system", "be short"), said("user", "a?"), said("assistant", "b, x")],
    [said("user", "c?"), said("assistant", "d"), said("user", "e?"), said("assistant", "f")],
    [said("system", "1"), said("user", "2"), said("system", "3"), said("assistant", "4")],
]


def write(path: Path, lines: list[Any]) -> Path:
    text = "".join(json.dumps({"id": 1, "messages": line}) + "\n" for line in lines) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize(
    "name", ["chats.jsonl", "chats.jsonl.gz", "CHATS.JSONL", "chats.json", "chats.json.gz", "chats"]
)
def test_conversations_are_documents_with_targets(tmp_path: Path, name: str) -> None:
    twice = [said("system", "5"), *LINES[0]]
    prefix = conversation_corpus(write(tmp_path / name, [*LINES, twice]), TEMPLATE)
    corpus = Corpus.open(prefix)
    # A system message begins another.
    split = [LINES[0], LINES[1], LINES[2][:2], LINES[2][2:], twice[:1], LINES[0]]
    assert len(corpus.lengths) == len(split)
    assert corpus.targets is not None
    for number, conversation in enumerate(split):
        tokens, targets = tokenize(conversation)
        expected = tokens.tolist()
        stored = corpus.tokens(number, 0, len(expected))
        assert stored.tolist() == expected
        trained = np.zeros(len(expected), bool)
        for start, stop, weight in corpus.targets.of(number):
            trained[start:stop] = weight == 1
        # "x" (120) is the padding.
        assert trained.tolist() == [*((targets >= 0) & (targets != 120))]


class Threads(Team):
    """Threads in place of processes, that wait for each other at a barrier."""

    def __init__(self, number: int, size: int, barrier: threading.Barrier, told: list[str]) -> None:
        self.number, self.size, self._barrier, self._told = number, size, barrier, told

    def told(self, draft: str) -> str:
        if self.number == 0:
            self._told.append(draft)
        self._barrier.wait()
        return self._told[-1]

    def finished(self) -> None:
        self._barrier.wait()

    def made(self) -> None:
        self._barrier.wait()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize(("size", "processes"), [(2, 2), (3, 5), (7, 7)])
def test_a_team_makes_the_corpus_that_one_process_does(
    tmp_path: Path, suffix: str, size: int, processes: int
) -> None:
    random = np.random.RandomState(1)
    lines = [
        [said("user", "a" * random.randint(1, 20)), said("assistant", str(n)), *LINES[n % 3]]
        for n in range(300)  # some blocks of 64, of which 7 processes have none
    ]
    path = tmp_path / f"chats{suffix}"
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.table({"messages": lines}), path)
    else:
        write(path, lines)
    alone = conversation_corpus(path, TEMPLATE, tmp_path / "alone")
    barrier, told = threading.Barrier(processes, timeout=60), list[str]()
    with ThreadPoolExecutor(processes) as pool:
        members = [Threads(n, size, barrier, told) for n in range(processes)]
        folder = tmp_path / "together"
        made = [
            pool.submit(conversation_corpus, path, TEMPLATE, folder, team=one) for one in members
        ]
        (prefix,) = {one.result() for one in made}
    for ending in (".bin", ".idx", ".targets.npy"):
        assert Path(prefix + ending).read_bytes() == Path(alone + ending).read_bytes()
    assert {one.name for one in folder.iterdir()} == {
        Path(prefix).name + ending for ending in (".bin", ".idx", ".targets.npy")
    }
    assert conversation_corpus(path, TEMPLATE, folder, team=Threads(0, 1, threading.Barrier(1), []))


def test_corpus_is_made_once_of_each_content_and_template(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", LINES)
    calls = []

    def counting(conversation: list[dict[str, Any]]) -> Any:
        calls.append(conversation)
        return tokenize(conversation)

    template = dataclasses.replace(TEMPLATE, tokenize=counting)
    first = conversation_corpus(path, template, tmp_path / "kept")
    assert (conversation_corpus(path, template, tmp_path / "kept"), len(calls)) == (first, 4)
    assert Path(first).parent == tmp_path / "kept"
    other = dataclasses.replace(template, identity="others")
    assert conversation_corpus(path, other, tmp_path / "kept") != first
    os.utime(path, ns=(1, 1))
    assert conversation_corpus(path, template, tmp_path / "kept") != first
    assert len(calls) == 12
    # Half of one is made anew.
    Path(f"{first}.targets.npy").unlink()
    os.utime(path)
    again = conversation_corpus(path, template, tmp_path / "kept")
    Path(f"{again}.targets.npy").write_bytes(b"")
    assert conversation_corpus(path, template, tmp_path / "kept") == again
    assert Corpus.open(again).targets is not None
    assert [p.name for p in (tmp_path / "kept").iterdir() if p.name.startswith(".")] == []


def test_corpus_that_another_run_has_made_meanwhile_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", LINES)
    made = []

    def slowly(conversation: list[dict[str, Any]]) -> Any:
        if not made:  # the other run is done before this one's first conversation
            made.append(conversation_corpus(path, TEMPLATE))
            made.extend(Path(made[0] + ending).stat().st_ino for ending in (".bin", ".idx"))
        return tokenize(conversation)

    prefix = conversation_corpus(path, dataclasses.replace(TEMPLATE, tokenize=slowly))
    found = (Path(prefix + ending).stat().st_ino for ending in (".bin", ".idx"))
    assert [prefix, *found] == made


def test_run_that_dies_as_it_mends_a_corpus_leaves_none(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", LINES)
    masks = Path(conversation_corpus(path, TEMPLATE) + ".targets.npy")
    masks.unlink()
    masks.mkdir()  # cannot be replaced by a file
    with pytest.raises(CorpusError, match="Is a directory"):
        conversation_corpus(path, TEMPLATE)
    masks.rmdir()
    with pytest.raises(CorpusError, match=r"no such corpus file: .*\.idx"):
        Corpus.open(str(masks).removesuffix(".targets.npy"))


def test_what_killed_runs_left_goes_when_they_are_surely_gone(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", LINES)
    conversation_corpus(path, TEMPLATE)
    folders = [tmp_path / "cache" / f".draft.{name}" for name in ("dead", "at-work", "begins")]
    for folder, *days in zip(folders, (9, 9, 1), (7, 1, 1), strict=True):
        folder.mkdir()
        (folder / "0.bin").touch()
        for written, ago in zip((folder, folder / "0.bin"), days, strict=True):
            os.utime(written, (time.time() - ago * 24 * 3600,) * 2)
    conversation_corpus(path, TEMPLATE)  # also where nothing is to be made
    assert [folder.exists() for folder in folders] == [False, True, True]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [', ["not valid JSON", "correct the line"]),
        ("[1]", ["JSON list, not an object"]),
        ('{"text": "a"}', ["has no key 'messages'", "['text']"[1:-1]]),
        ('{"messages": []}', ["the messages are []", "give a list, each with"]),
        ('{"messages": null}', ["the messages are None"]),
        ('{"conversations": [3]}', ["message 1 is 3"]),
        ('{"conversations": []}', ["the messages are []"]),
        (
            '{"conversations": [{"from": "gpt"}]}',
            ["message 1 is {'from': 'gpt'}", "texts as from and value"],
        ),
        (
            '{"conversations": [{"from": "system", "value": ""}, {"value": "a"}]}',
            ["message 2 is {'value': 'a'}", "texts as from"],
        ),
        ('{"prompt": "a"}', ["has no key 'messages'", "an instruction and its output"]),
        ('{"prompt": ["a"], "output": "b"}', ["prompt is ['a']", "give a text"]),
        ('{"prompt": "a", "input": 3, "output": "b"}', ["input is 3", "give a text"]),
        ('{"messages": "hello"}', ["the messages are 'hello'"]),
        ('{"messages": [{"content": "a"}]}', ["message 1 is", "texts as role and content"]),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', ["message 1 is", "texts as role"]),
        (
            '{"messages": [{"role": "tool", "content": "a"}]}',
            ["template cannot", "KeyError: 'tool'"],
        ),
    ],
)
def test_what_is_no_conversation_is_one_line_with_its_place(
    tmp_path: Path, line: str, words: list[str]
) -> None:
    path = write(tmp_path / "chats.jsonl", LINES)
    path.write_text(path.read_text() + line + "\n" + path.read_text())
    with pytest.raises(CorpusError) as error:
        conversation_corpus(path, TEMPLATE)
    text = str(error.value)
    assert all(word in text for word in (f"{path}:5", *words)), text
    assert "\n" not in text
    assert [p.suffix for p in tmp_path.rglob("*") if p.is_file()] == [".jsonl"]


def test_file_without_conversations_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    with pytest.raises(CorpusError, match="give a file of conversations"):
        conversation_corpus(path, TEMPLATE)
    path.write_text("\n\n")
    with pytest.raises(CorpusError, match="has no conversations"):
        conversation_corpus(path, TEMPLATE)
    small = dataclasses.replace(TEMPLATE, vocab_size=100)
    with pytest.raises(CorpusError, match=r":1 becomes 17 tokens up to 252, .* has 100"):
        conversation_corpus(write(tmp_path / "chats.jsonl", LINES), small)


def test_other_layouts_are_conversations_that_an_empty_system_message_begins(
    tmp_path: Path,
) -> None:
    rows = [
        {"conversations": [{"from": "Human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"from": "system", "value": "s"}, {"from": "bing", "value": "c"}]},
        {"conversations": [said("user", "a?"), said("assistant", "b")]},
        {"instruction": "d", "input": "e", "output": "f", "id": 4},
        {"question": "g", "context": "", "prompt": "", "answer": "h"},
    ]
    expected = [
        [said("system", ""), said("user", "a?"), said("assistant", "b")],
        [said("system", "s"), said("assistant", "c")],
        [said("system", ""), said("user", "a?"), said("assistant", "b")],
        [said("system", ""), said("user", "d\n\ne"), said("assistant", "f")],
        [said("system", ""), said("user", "g"), said("assistant", "h")],
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Path(conversation_corpus(path, TEMPLATE))
    plain = Path(conversation_corpus(write(tmp_path / "chats.jsonl", expected), TEMPLATE))
    for ending in (".bin", ".targets.npy"):
        assert Path(f"{found}{ending}").read_bytes() == Path(f"{plain}{ending}").read_bytes()


def test_rows_of_parquet_are_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"messages": LINES, "id": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "chats.parquet")
    rows = Corpus.open(conversation_corpus(tmp_path / "chats.parquet", TEMPLATE))
    lines = Corpus.open(conversation_corpus(write(tmp_path / "chats.jsonl", LINES), TEMPLATE))
    assert rows.lengths.tolist() == lines.lengths.tolist()
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "texts.parquet")
    with pytest.raises(CorpusError, match=r"texts\.parquet has no column 'messages'"):
        conversation_corpus(tmp_path / "texts.parquet", TEMPLATE)
