"""Flags of fill-in-the-middle and Megatron's tokenizers -> what rewrites documents."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.middles import Middles, RewrittenCorpus
from megatron_wlb.errors import ConfigError
from megatron_wlb.runtime.megatron_lm.fim import with_middles

SPECIAL = ("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file>")
FLAGS: dict[str, Any] = {
    "seq_length": 64,
    "wlb_long_documents": "split",
    "fim_rate": 0.5,
    "fim_spm_rate": 0.25,
    "fim_split_sample": None,
    "fim_fragment_rate": None,
    "fim_no_prefix": None,
    "fim_prefix_token": "<fim_prefix>",
    "fim_middle_token": "<fim_middle>",
    "fim_suffix_token": "<fim_suffix>",
    "fim_pad_token": "<fim_pad>",
    "fim_eod_token": "<|endoftext|>",
}


class Letters:
    """As Megatron wraps a tokenizer of Hugging Face; what it does not know is token 5."""

    vocab_size = 128 + len(SPECIAL)

    def text_to_ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def ids_to_text(self, ids: list[int], remove_special_tokens: bool = False) -> str:
        return "".join(
            chr(i) if i < 128 else "?" for i in ids if i < 128 or not remove_special_tokens
        )

    def tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [128 + SPECIAL.index(token) if token in SPECIAL else 5 for token in tokens]

    def ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [SPECIAL[i - 128] if i >= 128 else chr(i) for i in ids]


class NullTokenizer:
    """As Megatron's: it knows numbers alone."""

    vocab_size = 512


class Wrapped:
    def __init__(self, inner: Any) -> None:
        self._tokenizer, self.vocab_size = inner, inner.vocab_size


def middles_of(tokenizer: Any, **others: Any) -> Middles:
    corpora = Corpora([Corpus("a", np.array([9]), None, None)] * 2, 512, {})
    made = with_middles(corpora, argparse.Namespace(**FLAGS | others), tokenizer, 11)
    for number, corpus in enumerate(made.corpora):
        assert isinstance(corpus, RewrittenCorpus) and corpus.number == number
        whole = others.get("wlb_long_documents") == "slice"
        assert corpus.window == (None if whole else 64)
    corpus = made.corpora[0]
    assert isinstance(corpus, RewrittenCorpus)
    return corpus.middles


def test_tokens_and_rates_are_those_of_the_flags() -> None:
    middles = middles_of(Wrapped(Letters()), fim_split_sample="<file>", fim_fragment_rate=0.75)
    tokens = (middles.prefix, middles.middle, middles.suffix, middles.padding, middles.eod)
    assert tokens == (129, 130, 131, 132, 128) and middles.split == 133
    assert (middles.rate, middles.spm_rate, middles.fragment_rate) == (0.5, 0.25, 0.75)
    assert middles.seed == 11 and middles_of(Letters(), wlb_long_documents="slice").split is None
    assert middles.decode(np.array([97, 129, 98])) == "ab"


def test_no_prefix_keeps_what_starts_so() -> None:
    middles = middles_of(Letters(), fim_no_prefix="import")
    assert middles.keeps(np.array([ord(letter) for letter in "import re"]))
    assert not middles.keeps(np.array([ord(letter) for letter in "def import"]))


def test_null_tokenizer_is_cut_between_numbers() -> None:
    numbers = {f"fim_{name}_token": str(500 + n) for n, name in enumerate(("prefix", "middle"))}
    numbers |= {"fim_suffix_token": "502", "fim_pad_token": "503", "fim_eod_token": "0"}
    middles = middles_of(NullTokenizer(), **numbers, fim_rate=1.0)
    tokens = np.arange(100, 160)
    found = [middles.rewritten(tokens, [key]).tolist() for key in range(50)]
    changed = [one for one in found if one != tokens.tolist()]
    assert len(changed) > 35
    for one in changed:
        assert {500, 501, 502} == {*one} - {*tokens.tolist()}
        assert {*tokens.tolist()[:-3]} >= {*one} - {500, 501, 502} - {157, 158, 159}
    with pytest.raises(ConfigError, match="<fim_prefix> is not one of the tokenizer's 512 tokens"):
        middles_of(NullTokenizer())
    with pytest.raises(ConfigError, match="--fim-prefix-token 512 is not one"):
        middles_of(NullTokenizer(), **numbers | {"fim_prefix_token": "512"})
    with pytest.raises(ConfigError, match="--fim-no-prefix a is text, which NullTokenizer"):
        middles_of(NullTokenizer(), **numbers, fim_no_prefix="a")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"fim_suffix_token": "<suffix>"},
            "--fim-suffix-token <suffix> is not one of the tokenizer",
        ),
        ({"fim_split_sample": "<repo>", "fim_fragment_rate": 1.0}, "--fim-split-sample <repo> is"),
        ({"fim_split_sample": "<file>"}, "give --fim-fragment-rate"),
        ({"fim_rate": 1.5}, "--fim-rate 1.5 is not a probability; give 0 to 1"),
        ({"fim_spm_rate": -0.5}, "--fim-spm-rate -0.5 is not a probability"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        middles_of(Letters(), **flags)
    assert said in str(raised.value) and "\n" not in str(raised.value)
