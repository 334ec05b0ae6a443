"""Documents' bytes -> token ids: plain bytes, byte-level BPE trained here, or a tokenizer.json."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_wlb.errors import ConfigError, CorpusError
from megatron_wlb.reading import MAX_RECORD_BYTES, one_line, read_text

DEFAULT_VOCAB_SIZE = 8192
EOD_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>")
"""What ends a document in a ``tokenizer.json``: the first of these that it has."""

Batches = Iterator[list[bytes]]


@dataclass(frozen=True)
class Encoder:
    """A tokenizer ready to run: a batch of documents in, one array of token ids each out."""

    vocab_size: int
    """Token ids are below this."""
    eod: int
    """The token that ends a document; ``encode`` does not append it."""
    encode: Callable[[list[bytes]], Iterable[npt.NDArray[Any]]]


def tokenizer_settings(tokenizer: str, vocab_size: int | None) -> dict[str, str | int]:
    """All that decides the token ids besides the text, checked, defaults filled in.

    Raises ConfigError for a vocabulary size that is too small or that the tokenizer cannot take,
    CorpusError for a tokenizer file that cannot be read.
    """
    if vocab_size is not None and tokenizer != "bpe":
        raise ConfigError(f"a vocabulary size is for tokenizer bpe only, not for {tokenizer}")
    if tokenizer == "bytes":
        return {"tokenizer": tokenizer}
    if tokenizer == "bpe":
        vocab_size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
        if vocab_size < 257:
            raise ConfigError(f"vocabulary size {vocab_size} is below 257, 256 bytes and one EOD")
        return {"tokenizer": tokenizer, "vocab_size": vocab_size}
    try:
        return {"tokenizer": "file", "content": read_text(tokenizer, MAX_RECORD_BYTES)}
    except ConfigError as error:
        raise CorpusError(
            f"cannot read tokenizer {tokenizer} ({error}); "
            "give bytes, bpe or the path of a tokenizer.json"
        ) from error


def bytes_encoder() -> Encoder:
    """Makes each byte a token: 256 ids. EOD is 0, the NUL byte; one in a text becomes a space."""
    spaced = bytes.maketrans(b"\0", b" ")
    return Encoder(
        256, 0, lambda batch: (np.frombuffer(data.translate(spaced), np.uint8) for data in batch)
    )


def train_bpe(batches: Batches, vocab_size: int) -> str:
    """A ``tokenizer.json`` (its text) of byte-level BPE trained on ``batches``.

    The same text gives the same tokenizer. Its vocabulary is smaller than asked for where the text
    has too few distinct pairs.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKENS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The library would hold up Ctrl-C until it is done, so the main thread waits in Python, and an
    # interrupt ends the text. What it makes of the text by then ends with the process. A signal
    # that another thread gets wakes nobody: the main thread looks for it.
    interrupted, trained = threading.Event(), Future[None]()

    def texts() -> Iterator[list[str]]:
        for batch in batches:
            if interrupted.is_set():
                raise InterruptedError
            yield _decode(batch)

    def train() -> None:
        try:
            tokenizer.train_from_iterator(texts(), trainer)
            trained.set_result(None)
        except BaseException as error:
            trained.set_exception(error)

    threading.Thread(target=train, name="train-bpe", daemon=True).start()
    try:
        while not trained.done():
            wait([trained], timeout=0.2)
        trained.result()
    except BaseException:
        interrupted.set()
        raise
    return str(tokenizer.to_str(pretty=True))


def file_encoder(content: str, name: str) -> Encoder:
    """The encoder of a ``tokenizer.json`` whose text is ``content``.

    Invalid UTF-8 becomes U+FFFD. Truncation and padding are turned off. Text that spells a special
    token does not become one. Raises CorpusError for a file that is no tokenizer, or has no EOD;
    encoding does for a text that it cannot encode.
    """
    from tokenizers import Tokenizer

    written = "give one that the tokenizers library has written"
    with _told(f"{name} is not a tokenizer.json", written):
        tokenizer = Tokenizer.from_str(content)
    eods = [eod for eod in map(tokenizer.token_to_id, EOD_TOKENS) if eod is not None]
    if not eods:
        raise CorpusError(
            f"tokenizer {name} has none of {', '.join(EOD_TOKENS)} to end a document with; "
            "add one of them to it"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True

    def encode(batch: list[bytes]) -> Iterator[npt.NDArray[Any]]:
        with _told(f"tokenizer {name} cannot encode a text", "give one that knows every byte"):
            encodings = tokenizer.encode_batch_fast(_decode(batch), add_special_tokens=False)
        for encoding in encodings:
            yield np.array(encoding.ids, dtype=np.int32)

    # Ids may have holes, so the number of tokens would be too few.
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return Encoder(vocab_size, eods[0], encode)


@contextlib.contextmanager
def _told(what: str, remedy: str) -> Iterator[None]:
    """Makes CorpusError of what the library raises. A panic of Rust is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CorpusError(f"{what} ({one_line(error)}); {remedy}") from error


def _decode(batch: list[bytes]) -> list[str]:
    return [data.decode("utf-8", "replace") for data in batch]
