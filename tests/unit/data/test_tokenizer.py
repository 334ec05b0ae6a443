from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from megatron_wlb.data.tokenizer import (
    bytes_encoder,
    file_encoder,
    tokenizer_settings,
    train_bpe,
)
from megatron_wlb.errors import ConfigError, CorpusError

TEXTS = [
    b"def area(width, height):\n    return width * height\n" * 5,
    "Ärger über <|endoftext|> und </s>, naïve café 🙂\n".encode(),
    b"width height width " * 40,
]


@pytest.fixture(scope="module")
def bpe() -> str:
    return train_bpe(iter([TEXTS[:1], TEXTS[1:]]), 300)


def test_bytes_encoder_gives_the_bytes_themselves_but_no_end_of_document() -> None:
    encoder = bytes_encoder()
    data = bytes(range(256))
    assert [ids.tolist() for ids in encoder.encode([data, b"a"])] == [[32, *data[1:]], [97]]
    assert (encoder.vocab_size, encoder.eod) == (256, 0)


def test_train_bpe_is_deterministic_and_of_the_size_asked_for_or_less(bpe: str) -> None:
    assert train_bpe(iter([TEXTS]), 300) == bpe
    assert file_encoder(bpe, "bpe").vocab_size == 300
    assert file_encoder(train_bpe(iter([[b"abab"]]), 300), "bpe").vocab_size < 300


def test_file_encoder_loses_no_text_and_makes_no_special_token_of_it(bpe: str) -> None:
    encoder = file_encoder(bpe, "bpe")
    tokenizer = Tokenizer.from_str(bpe)
    for text, ids in zip(TEXTS, encoder.encode(TEXTS), strict=True):
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text.decode()
        assert encoder.eod not in ids
        assert ids.max() < encoder.vocab_size
    assert len(next(iter(encoder.encode(TEXTS[2:])))) < len(TEXTS[2]) / 3


def test_file_encoder_turns_off_truncation_padding_and_begin_tokens(bpe: str) -> None:
    tokenizer = Tokenizer.from_str(bpe)
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=4096)
    cut = file_encoder(tokenizer.to_str(), "x").encode(TEXTS)
    whole = file_encoder(bpe, "x").encode(TEXTS)
    assert all(np.array_equal(a, b) for a, b in zip(cut, whole, strict=True))


def test_file_encoder_finds_the_end_of_document_or_says_what_it_looked_for(bpe: str) -> None:
    content = json.loads(bpe)
    assert content["added_tokens"][0]["content"] == "<|endoftext|>"
    content["added_tokens"] = []
    content["model"]["vocab"]["</s>"] = 777  # Ids with a hole: not the number of tokens.
    del content["model"]["vocab"]["<|endoftext|>"]
    encoder = file_encoder(json.dumps(content), "x")
    assert (encoder.eod, encoder.vocab_size) == (777, 778)
    del content["model"]["vocab"]["</s>"]
    with pytest.raises(CorpusError, match=r"x has none of <\|endoftext\|>, </s>"):
        file_encoder(json.dumps(content), "x")


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": 3}'])
def test_file_encoder_refuses_what_is_no_tokenizer(content: str) -> None:
    with pytest.raises(CorpusError, match=r"^x is not a tokenizer\.json \([^\n]*\); give"):
        file_encoder(content, "x")


def test_tokenizer_settings_check_before_anything_runs(tmp_path: Path) -> None:
    assert tokenizer_settings("bpe", None) == {"tokenizer": "bpe", "vocab_size": 8192}
    with pytest.raises(ConfigError, match="size 256 is below 257"):
        tokenizer_settings("bpe", 256)
    with pytest.raises(ConfigError, match="for tokenizer bpe only, not for bytes"):
        tokenizer_settings("bytes", 512)
    with pytest.raises(CorpusError, match=r"cannot read tokenizer BPE .* give bytes, bpe or"):
        tokenizer_settings("BPE", None)
    path = tmp_path / "t.json"
    path.write_text("{}")
    assert tokenizer_settings(str(path), None)["content"] == "{}"


INTERRUPTED = """
import os, signal, threading, time
from megatron_wlb.data.tokenizer import train_bpe

def batches():
    yield [b"the same, the same"]
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # the main thread is not woken
    time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    train_bpe(batches(), 300)
except KeyboardInterrupt:
    os._exit(7)
"""


def test_interrupt_does_not_wait_for_the_library() -> None:
    """It may be at work for minutes on what it has read."""
    assert subprocess.run([sys.executable, "-c", INTERRUPTED], timeout=30).returncode == 7
