"""The stream of documents that a run draws from its corpora: seeded, endless, and resumable.

Planning code: lengths in, :class:`~megatron_wlb.plan.Document` out; no token is read here.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import repeat
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.ramp import Ramp
from megatron_wlb.data.targets import SUFFIX, Targets
from megatron_wlb.errors import CheckpointError, CorpusError
from megatron_wlb.plan import Document
from megatron_wlb.plan.target_runs import Runs, by_sample
from megatron_wlb.reading import MAX_COUNT, reading_state, shown, whole_number

LossMean = Literal["token", "sample"]
"""What the loss is a mean over: targets, or stored documents, of each of which it is a mean."""
LongDocuments = Literal["split", "slice", "truncate", "error"]
"""What becomes of a stored document longer than the window. ``slice``: `slim` packing runs it
whole; its stream has a window as long as it."""

_STATE_VERSION = 1
_MOST_EPOCHS = 2**32 - 1
"""What a seed of random numbers holds."""
_POSITION = ("step", "position_tokens", "epoch", "document", "offset")


@dataclass(frozen=True)
class CorpusEpoch:
    """What a corpus gives in an epoch."""

    name: str
    num_documents: int
    """Stored documents that have tokens."""
    num_tokens: int
    """What is left where ``truncate`` drops tokens."""
    dropped_tokens: int
    truncated: int
    """Tokens after which ``truncate`` ends documents; 0: none is ended so."""


class DocumentStream:
    """Every document of every corpus once an epoch, in an order that depends on the seed alone.

    The stream is one long line of tokens. Step ``k`` receives the documents whose *first* token
    lies at stream positions ``[k · step_tokens, (k+1) · step_tokens)``, whole, so that all packings
    see the same arrivals. With ``step_tokens`` = global batch size × window a step keeps the size
    it has in Megatron.

    A stored document longer than ``window`` follows ``long_documents``: ``split`` makes pieces of
    ``window`` tokens and a last one of the remainder, each a Document that arrives by its own first
    token; ``truncate`` keeps the first ``window`` tokens and counts the others in
    ``dropped_tokens_per_epoch``; ``error`` refuses the corpus. Stored documents without tokens are
    skipped and counted in ``num_empty``.

    Order: one permutation an epoch over all corpora together, made from ``(seed, epoch)``; without
    ``shuffle``, the stored order. An epoch may end in the middle of a step. Memory: 24 bytes a
    document.
    """

    def __init__(
        self,
        lengths: Sequence[npt.NDArray[np.integer[Any]]],
        *,
        ranges: Sequence[tuple[int, int]] | None = None,
        window: int,
        step_tokens: int | Fraction,
        seed: int,
        long_documents: LongDocuments = "split",
        num_epochs: int | None = None,
        shuffle: bool = True,
        first_corpus: int = 0,
        names: Sequence[str] = (),
        ramp: Ramp | None = None,
        targets: Sequence[Targets | None] = (),
        loss_mean: LossMean = "token",
    ) -> None:
        """Takes ``lengths``, half-open ``ranges`` of documents (default: all) and ``targets``
        (default: all tokens), by corpus.

        ``num_epochs`` None never ends; ``step_tokens`` may be a fraction, for a share of a step;
        ``first_corpus`` is how errors number the first one, ``names`` what they call them all. The
        first steps of a ``ramp`` receive fewer tokens; ``step_tokens`` are those of its end.

        Raises ConfigError for a setting out of its limits, and CorpusError for lengths that cannot
        be streamed under them.
        """
        if ranges is None:
            ranges = [(0, len(corpus)) for corpus in lengths]
        whole_number("window", window, 2)
        whole_number("seed", seed, 0, 2**32 - 1)
        if num_epochs is not None:
            whole_number("num_epochs", num_epochs, 1)
        self.window = window
        self.step_tokens = step_tokens
        self.ramp = ramp
        self.seed = seed
        self.long_documents = long_documents
        self.num_epochs = num_epochs
        self.shuffle = shuffle
        self._targets = list(targets) or [None] * len(lengths)
        self._loss_mean = loss_mean
        self._names = list(names) or [f"corpus {first_corpus + n}" for n in range(len(lengths))]

        # Documents in range have one number over all corpora, their place in _lengths.
        self._ranges = ranges
        parts = [part[a:b] for part, (a, b) in zip(lengths, ranges, strict=True)]
        self._lengths = np.concatenate(parts, dtype=np.int64, casting="unsafe")
        self._first_number = np.cumsum([0] + [len(part) for part in parts])[:-1]
        self._parts = np.split(self._lengths, self._first_number[1:])
        self._first_index = np.array([start for start, _ in ranges])
        self._present = np.flatnonzero(self._lengths)

        self.num_empty = len(self._lengths) - len(self._present)
        self.num_documents = len(self._present)
        """Stored documents in an epoch."""
        if self.num_documents == 0:
            where = (f"{a}:{b} of corpus {n}" for n, (a, b) in enumerate(ranges, first_corpus))
            raise CorpusError(
                f"no documents in {', '.join(where)} ({self.num_empty} empty); "
                "use a larger corpus or another --split"
            )
        excess = np.maximum(self._lengths - window, 0)
        self.num_long = int(np.count_nonzero(excess))
        """Stored documents longer than the window."""
        if long_documents == "error" and self.num_long:
            number = int(self._lengths.argmax())
            corpus, index = (int(one[0]) for one in self._places(np.array([number])))
            place = f"document {index} of corpus {first_corpus + corpus}"
            raise too_long(place, self._lengths, window)
        truncates = long_documents == "truncate"
        self.dropped_tokens_per_epoch = int(excess.sum()) if truncates else 0
        self.tokens_per_epoch = int(self._lengths.sum()) - self.dropped_tokens_per_epoch
        self._max_tokens = window if truncates else int(self._lengths.max())

        self.step = 0
        """The step that :meth:`next_step` gives the documents of."""
        self.position_tokens = 0
        """Where the next document's first token lies in the line."""
        self.epoch = 0
        self._document = 0  # place of the next document in the epoch's order
        self._offset = 0  # tokens of it already given
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def exhausted(self) -> bool:
        return self.num_epochs is not None and self.epoch >= self.num_epochs

    def next_step(self) -> list[Document]:
        """The documents that arrive in the next step, in stream order.

        Empty once exhausted, or in a step that begins and ends inside one document.
        """
        # Behind only after an end that more epochs have moved, or steps without the stream.
        begin = tokens_before(self.step, self.step_tokens, self.ramp)
        self.position_tokens = max(self.position_tokens, math.ceil(begin))
        end = tokens_before(self.step + 1, self.step_tokens, self.ramp)
        documents: list[Document] = []
        while self.position_tokens < end and not self.exhausted:
            self._draw(end, documents)
        self.step += 1
        return documents

    @cached_property
    def contents(self) -> dict[int, CorpusEpoch]:
        """What each corpus gives in an epoch, by its number."""
        contents = {}
        for corpus, lengths in enumerate(self._parts):
            kept = np.minimum(lengths, self._max_tokens)
            tokens = int(kept.sum())
            contents[corpus] = CorpusEpoch(
                str(self._names[corpus]),
                int(np.count_nonzero(lengths)),
                tokens,
                int(lengths.sum()) - tokens,
                self.window if self.long_documents == "truncate" else 0,
            )
        return contents

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as a few JSON-able numbers, and the settings it depends on."""
        position = (self.step, self.position_tokens, self.epoch, self._document, self._offset)
        return {
            "version": _STATE_VERSION,
            **dict(zip(_POSITION, position, strict=True)),
            "settings": self._settings,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken; ``num_epochs`` may differ.

        Raises CheckpointError, and changes nothing, for a state of another corpus or of other
        settings, naming what differs.
        """
        with reading_state("a document stream"):
            version, saved = state["version"], dict(state["settings"])
            position = [whole_number(name, state[name], 0, MAX_COUNT) for name in _POSITION]
        if version != _STATE_VERSION:
            raise CheckpointError(
                f"document stream state of version {shown(version)}, not {_STATE_VERSION}; "
                "resume with the release that saved it"
            )
        ours = self._settings
        differing = self._other_corpora(saved.get("corpora"))
        differing += [
            f"{name} {_readable(saved.get(name))} there and {_readable(ours.get(name))} here"
            for name in {**ours, **saved}
            if name != "corpora" and _readable(saved.get(name)) != _readable(ours.get(name))
        ]
        if differing:
            raise CheckpointError(
                f"the checkpoint's document stream is another: {'; '.join(differing)}; "
                "resume with the same corpora and settings"
            )
        step, position_tokens, epoch, document, offset = position
        # A step ends within a document of its end.
        stop = tokens_before(step, self.step_tokens, self.ramp) + self._max_tokens
        outside = epoch > _MOST_EPOCHS or position_tokens > stop
        if outside or document >= self.num_documents or offset >= self._max_tokens:
            raise CheckpointError(
                f"document stream state {dict(zip(_POSITION, position, strict=True))} lies outside "
                f"the {self.num_documents} documents; use an intact checkpoint"
            )
        self.step, self.position_tokens, self.epoch = step, position_tokens, epoch
        self._document, self._offset = document, offset

    def _other_corpora(self, saved: Any) -> list[str]:
        """Says which corpora differ from those of a state, and in what."""
        ours: list[str] = self._settings["corpora"]
        if not isinstance(saved, list) or len(saved) != len(ours):
            number = len(saved) if isinstance(saved, list) else 0
            return [f"{number} corpora there and {len(ours)} here ({', '.join(self._names)})"]
        differing = []
        for name, then, now in zip(self._names, saved, ours, strict=True):
            # The range, the lengths, and the masks if there are any.
            there, here = str(then).split("/"), now.split("/")
            if there[0] != here[0]:
                differing.append(f"documents {there[0]} of {name} there and {here[0]} here")
            elif there[:2] != here[:2]:
                differing.append(f"{name} has other documents {here[0]} there and here")
            elif there != here:
                alone = "masks there alone" if there[2:] else "masks here alone"
                masks = "other masks there and here" if there[2:] and here[2:] else alone
                differing.append(f"{name} has {masks} ({SUFFIX})")
        return differing

    def _draw(self, end: int | Fraction, documents: list[Document]) -> None:
        """Appends what begins before stream position ``end`` of some documents of this epoch."""
        position, offset, window, step = self.position_tokens, self._offset, self.window, self.step
        expected = (end - position) * self.num_documents // self.tokens_per_epoch
        numbers = self._epoch_order()[self._document :][: expected + 16]
        corpora, indices = self._places(numbers)
        stored = self._lengths[numbers]
        arrival = self.epoch * self.num_documents + self._document
        kept_tokens = np.minimum(stored, self._max_tokens)
        runs = self._runs(corpora, indices, np.minimum(kept_tokens + 1, stored))
        if not offset and 1 <= kept_tokens.min(initial=1) <= kept_tokens.max(initial=1) <= window:
            # None is cut: all that begin before the end at once, ten times as fast.
            begins = position + kept_tokens.cumsum() - kept_tokens
            num = int(np.searchsorted(begins, math.ceil(end)))
            sizes = kept_tokens[:num]
            columns = zip(
                corpora.tolist(), indices.tolist(), repeat(0), sizes.tolist(),
                (sizes == stored[:num]).tolist(), repeat(self.epoch),
                range(arrival, arrival + num), repeat(step),
                runs,
            )  # fmt: skip
            make: Any = tuple.__new__  # what _make calls, which is three times as slow
            documents.extend(map(make, repeat(Document), columns))
            self.position_tokens = position + int(sizes.sum())
            self.epoch, self._document = divmod(arrival + num, self.num_documents)
            return
        for corpus, index, length, kept, own in zip(
            *(column.tolist() for column in (corpora, indices, stored, kept_tokens)),
            runs,
            strict=False,  # of endless ones
        ):
            while offset < kept and position < end:
                size = min(window, kept - offset)
                ends = offset + size == length
                documents.append(
                    Document(corpus, index, offset, size, ends, self.epoch, arrival, step, own)
                )
                offset += size
                position += size
            if offset < kept:
                break
            offset = 0
            arrival += 1
        self.position_tokens, self._offset = position, offset
        self.epoch, self._document = divmod(arrival, self.num_documents)

    def _runs(self, *columns: npt.NDArray[np.int64]) -> Iterator[Runs | None]:
        """The targets of documents of these corpora and numbers, of which so many tokens are read
        or predicted.
        """
        if not any(self._targets) and self._loss_mean == "token":
            return repeat(None)

        def weighed(corpus: int, index: int, length: int) -> Runs | None:
            targets = self._targets[corpus]
            own = None if targets is None else targets.of(index)
            return own if self._loss_mean == "token" else by_sample(own, length)

        return map(weighed, *(column.tolist() for column in columns))

    def _epoch_order(self) -> npt.NDArray[np.int64]:
        """The numbers of the epoch's documents in the order in which they are drawn."""
        if not self.shuffle or self.num_documents == 1:  # one has no order, and many epochs
            return self._present
        if self._order is None or self._order[0] != self.epoch:
            # RandomState, because NumPy guarantees its streams for ever; those of Generator may
            # change with a release, and a resumed run would then see other documents.
            random = np.random.RandomState([self.seed, self.epoch])
            self._order = self.epoch, random.permutation(self._present)
        return self._order[1]

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Everything that decides which documents come when."""
        size = self.step_tokens
        corpora = []
        for part, (start, stop), targets in zip(
            self._parts, self._ranges, self._targets, strict=True
        ):
            digest = hashlib.sha256(part.astype("<i8").tobytes()).hexdigest()[:16]
            trained = "" if targets is None else f"/targets {targets.digest}"
            corpora.append(f"{start}:{stop}/{digest}{trained}")
        return {
            "corpora": corpora,
            "window": self.window,
            "step_tokens": int(size) if size == int(size) else str(size),
            "seed": self.seed,
            "long_documents": self.long_documents,
            "shuffle": self.shuffle,
            **({} if self._loss_mean == "token" else {"--wlb-loss-mean": self._loss_mean}),
            **({"batch size": f"ramps up {self.ramp.title}"} if self.ramp else {}),
        }

    def _places(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
        """The corpus of each of these documents, and its number there."""
        corpora = np.searchsorted(self._first_number, numbers, side="right") - 1
        return corpora, numbers - self._first_number[corpora] + self._first_index[corpora]


def too_long(where: str, lengths: npt.NDArray[np.int64], window: int) -> CorpusError:
    """The error for documents longer than the window, of which the longest is ``where``."""
    return CorpusError(
        f"{where} has {lengths.max()} tokens, above the window of {window} "
        f"({np.count_nonzero(lengths > window)} documents are); enlarge the window, or let long "
        "documents be 'split' or 'truncate'd"
    )


def tokens_before(step: int, step_tokens: int | Fraction, ramp: Ramp | None) -> int | Fraction:
    """Tokens that arrive before ``step``, each having ``step_tokens`` from the ramp's end on."""
    if ramp is None:
        return step * step_tokens
    return ramp.before(step) * Fraction(step_tokens) / ramp.sizes[-1]


def _readable(setting: Any) -> Any:
    """Rounds fractions to twelve digits: 0.3 is not exact as a binary number."""
    if isinstance(setting, int | str) and not isinstance(setting, bool):
        with contextlib.suppress(ValueError, ZeroDivisionError, OverflowError):
            return f"{float(Fraction(setting)):.12g}"
    return setting if isinstance(setting, bool | str) else shown(setting)
