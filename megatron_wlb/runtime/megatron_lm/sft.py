"""Megatron-LM's ``--sft``: files and its tokenizer of conversations -> corpora."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import logging
import time
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megatron_wlb.data.conversations import Team, Template, conversation_corpus
from megatron_wlb.errors import ConfigError
from megatron_wlb.runtime.compat import hooks
from megatron_wlb.runtime.ranks import watchdog

_LOGGER = logging.getLogger(__name__)
_FILES = itertools.count()
_MOST_RANKS = 64
"""Tokenize: each reads the whole file."""
_LOG_S = 10.0
_DECIDE = ("_prompt_config", "chat_template", "special_tokens_map", "split_special_tokens")
"""What decides a conversation's tokens beside the tokenizer of texts, in any of its layers."""


def with_conversations(
    blend: tuple[list[str], Any], args: argparse.Namespace, tokenizer: Any
) -> tuple[list[str], Any]:
    """The same blend, of the corpora of files of conversations. All ranks call it alike.

    Raises :class:`ConfigError` for a tokenizer that knows no conversations, and
    :class:`CorpusError` as :func:`conversation_corpus` and where a rank does not see the corpora.
    """
    template = _template(args, tokenizer)
    cache, (paths, weights) = args.data_cache_path, blend
    prefixes = []
    for path in paths:
        watchdog.at(f"the corpus of {path}", is_slow=True)
        prefixes.append(conversation_corpus(path, template, cache, _Log(), _Ranks()))
    return prefixes, weights


class _Ranks(Team):
    """The ranks of the run, which wait for each other at its store."""

    def __init__(self) -> None:
        self.number, self.size = dist.get_rank(), min(dist.get_world_size(), _MOST_RANKS)
        # A file may be named twice. All ranks come to each of them in one order.
        name = f"megatron_wlb/conversations/{next(_FILES)}"
        self._store = PrefixStore(name, dist.distributed_c10d._get_default_store())

    def told(self, draft: str) -> str:
        if self.number == 0:
            self._store.set("draft", draft)
        self._store.wait(["draft"], self.LONGEST)
        return str(self._store.get("draft").decode())

    def finished(self) -> None:
        self._store.set(f"part {self.number}", "")
        if self.number == 0:
            self._store.wait([f"part {n}" for n in range(self.size)], self.LONGEST)

    def made(self) -> None:
        if self.number == 0:
            self._store.set("made", "")
        self._store.wait(["made"], self.LONGEST)


class _Log:
    """Says now and then how far it is."""

    def __init__(self) -> None:
        self._said = self._begin = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said >= _LOG_S:
            self._said = now
            rest = (total - done) * (now - self._begin) / max(done, 1)
            _LOGGER.info("%s: %.0f %%, %.0f s left", what, 100 * done / max(total, 1), rest)


def _template(args: argparse.Namespace, tokenizer: Any) -> Template:
    if not hasattr(tokenizer, "tokenize_conversation"):
        raise ConfigError(
            "--sft needs a tokenizer of conversations, and --tokenizer-type "
            f"{args.tokenizer_type} is not one; give SFTTokenizer, with --tokenizer-model and "
            "--sft-tokenizer-prompt-format"
        )
    prompts = args.sft_tokenizer_prompt_format in hooks.adapter().trains_prompts
    if prompts:
        _LOGGER.info(
            "--sft-tokenizer-prompt-format %s trains every token, of prompts too, as Megatron-LM "
            "does; see docs/fine-tuning.md", args.sft_tokenizer_prompt_format,
        )  # fmt: skip

    def tokenize(conversation: list[dict[str, Any]]) -> Any:
        return tokenizer.tokenize_conversation(
            conversation, return_target=True, add_generation_prompt=False
        )

    return Template(
        tokenize,
        tokenizer.pad,
        int(tokenizer.vocab_size),
        _identity(args, tokenizer, prompts),
    )


def _identity(args: argparse.Namespace, tokenizer: Any, prompts: bool) -> str:
    """Names what decides tokens and targets: the tokenizer's content, not only its place."""
    layers = [tokenizer]  # Megatron wraps it once or twice, and transformers wraps Rust's
    while (inner := getattr(layers[-1], "_tokenizer", None)) is not None:
        layers.append(inner)
    to_str = getattr(inner := layers[-1], "to_str", None)
    content = to_str() if to_str else repr(sorted(inner.get_vocab().items()))
    said = [getattr(layer, name, None) for layer in layers for name in _DECIDE]
    sha = hashlib.sha256(content.encode())
    sha.update(repr((tokenizer.eod, tokenizer.pad, said, prompts)).encode())
    return f"{args.sft_tokenizer_prompt_format} {sha.hexdigest()}"
