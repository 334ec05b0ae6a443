"""Megatron-LM's ``--fim-*`` flags and tokenizer -> how documents are rewritten as they are read."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.middles import IntArray, Middles, RewrittenCorpus
from megatron_wlb.errors import ConfigError

_RATES = ("rate", "spm_rate", "fragment_rate")


def with_middles(corpora: Corpora, args: argparse.Namespace, tokenizer: Any, seed: int) -> Corpora:
    """``corpora`` as ``--fim-data`` reads them. Those with targets of their own stay as they are:
    these are places of tokens.

    Raises :class:`ConfigError` for a rate that is not a probability, and for a token that the
    tokenizer does not have.
    """
    vocab_size = int(tokenizer.vocab_size)
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    middles = _middles(args, _Numbers() if "Null" in type(inner).__name__ else inner, vocab_size)
    window = None if args.wlb_long_documents == "slice" else args.seq_length
    rewritten = [
        RewrittenCorpus.of(corpus, replace(middles, seed=seed), number, window)
        if corpus.targets is None
        else corpus
        for number, corpus in enumerate(corpora.corpora)
    ]
    return replace(corpora, corpora=rewritten)


class _Numbers:
    """Takes numbers for tokens, and a list of them for a text.

    A NullTokenizer has them for words, and these cut in two would be other tokens.
    """

    def text_to_ids(self, text: list[int]) -> list[int]:
        return text

    def ids_to_text(self, ids: list[int]) -> list[int]:
        return ids

    def tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return list(map(int, tokens))

    def ids_to_tokens(self, ids: list[int]) -> list[str]:
        return list(map(str, ids))


def _middles(args: argparse.Namespace, tokenizer: Any, vocab_size: int) -> Middles:
    for name in _RATES:
        rate = getattr(args, f"fim_{name}")
        if rate is not None and not 0 <= rate <= 1:
            flag = f"--fim-{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {rate:g} is not a probability; give 0 to 1")
    split, kept = args.fim_split_sample, args.fim_no_prefix
    if split is not None and args.fim_fragment_rate is None:
        raise ConfigError(
            f"--fim-split-sample {split} makes fragments, but no flag says how many change; "
            "give --fim-fragment-rate"
        )
    if kept is not None and isinstance(tokenizer, _Numbers):
        raise ConfigError(
            f"--fim-no-prefix {kept} is text, which NullTokenizer does not have; leave it out"
        )
    prefix, middle, suffix, padding, eod = (
        _token(tokenizer, vocab_size, f"--fim-{name}-token", getattr(args, f"fim_{name}_token"))
        for name in ("prefix", "middle", "suffix", "pad", "eod")
    )
    decode = _decoder(tokenizer)
    middles = Middles(
        prefix=prefix,
        middle=middle,
        suffix=suffix,
        padding=padding,
        eod=eod,
        rate=args.fim_rate,
        spm_rate=args.fim_spm_rate,
        decode=decode,
        encode=tokenizer.text_to_ids,
        split=None if split is None else _token(tokenizer, vocab_size, "--fim-split-sample", split),
        fragment_rate=args.fim_fragment_rate or 0.0,
    )
    if kept is None:
        return middles
    return replace(middles, keeps=lambda part: decode(part).startswith(kept))


def _token(tokenizer: Any, vocab_size: int, flag: str, name: str) -> int:
    """The tokenizer's number of a token. What it does not know it may take for another one."""
    try:
        (token,) = tokenizer.tokens_to_ids([name])
        if 0 <= token < vocab_size and tokenizer.ids_to_tokens([token]) == [name]:
            return int(token)
    except (LookupError, TypeError, ValueError):
        pass
    raise ConfigError(
        f"{flag} {name} is not one of the tokenizer's {vocab_size} tokens; add it to the "
        "tokenizer, or name one that it has"
    )


def _decoder(tokenizer: Any) -> Callable[[IntArray], Any]:
    decode = tokenizer.ids_to_text
    if "remove_special_tokens" in inspect.signature(decode).parameters:
        decode = functools.partial(decode, remove_special_tokens=True)
    return lambda ids: decode(ids.tolist())
