"""Audits a ledger: each token of what has arrived ran once, or waits in the newest checkpoint.

A start of the run after step K takes back the lines of later steps that stand before it: those
steps ran, but their weights are lost. A start with weights of another folder takes back all lines.
The pieces of documents in the remaining lines are put together. A document is whole if its pieces
follow one another from its first token to its last. The stream numbers arrivals, so a document
without any piece is missed too. A checkpoint says what waits and how many documents have arrived.
After it nothing can be called lost yet.

Memory: about 600 bytes a document that ran, at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.documents import CorpusEpoch
from megatron_wlb.errors import CheckpointError, ConfigError
from megatron_wlb.planning.ledger.lines import (
    ARRIVAL,
    CORPUS,
    ENDS,
    EPOCH,
    INDEX,
    LENGTH,
    OFFSET,
    Pieces,
    decode,
    pieces_of,
    read,
)
from megatron_wlb.planning.ledger.standing import Standing, require_known
from megatron_wlb.reading import record, typed, whole_number

NAMED = 5
"""How many that are lost or twice are named."""
_MOST_CORPORA = 1 << 20
_CALLED = {"start": "iteration", "elsewhere": "is_elsewhere"}
"""What lines of a start call other than :class:`Start`."""


@dataclass(frozen=True)
class Faults:
    """What should not be: how many, and the first of them in words."""

    number: int = 0
    first: tuple[str, ...] = ()

    def __add__(self, other: Faults) -> Faults:
        return Faults(self.number + other.number, (*self.first, *other.first)[:NAMED])


@dataclass(frozen=True)
class Report:
    """What an audit found."""

    steps: int
    first_iteration: int
    last_iteration: int
    restarts: int
    rolled_back: int
    """Steps that a restart took back, and ran again."""
    skipped: int
    """Steps whose documents were taken but trained nothing, as the run was told or saw."""
    skipped_tokens: int
    documents: int
    """Stored documents of which something ran; once an epoch."""
    tokens: int
    epochs: dict[str, float]
    """Epochs that ran, by corpus."""
    dropped_tokens: int
    """Tokens that ``--wlb-long-documents truncate`` leaves out, of all epochs that have begun."""
    proven_until: int | None
    """The step of the checkpoint up to which nothing can be lost unseen; None without one."""
    waiting: int
    """Documents that have arrived, or were read ahead, and wait in the checkpoint."""
    waiting_tokens: int
    oldest_steps: int
    """How long the oldest of them waits."""
    is_torn: bool
    """Whether a crash tore the last line."""
    lost: Faults
    twice: Faults


@dataclass(frozen=True)
class _StepLine:
    """A line of a step."""

    number: int
    iteration: int
    digest: str
    tokens: int
    documents: str
    skipped: bool
    start: int
    """Which start it belongs to."""


@dataclass(frozen=True)
class Start:
    """The line of a start."""

    number: int
    iteration: int
    arrived: int
    waiting: str
    contents: dict[int, CorpusEpoch]
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that are not the default."""
    cost: dict[str, Any] | None = None
    vocab_size: int = 0
    dp_size: int = 1
    is_elsewhere: bool = False
    """Whether the run was loaded from another folder: what ran here before is another run's."""
    stood: int | None = None
    """The step of the newest checkpoint that was in the folder."""

    @classmethod
    def of(cls, number: int, values: Mapping[str, Any]) -> Start:
        """Reads a line. Raises :class:`ConfigError` for one of another form."""
        contents = {
            whole_number("contents", int(n[:20]), 0, _MOST_CORPORA): record("", CorpusEpoch, one)
            for n, one in typed("contents", values.get("contents"), dict[str, Any]).items()
        }
        read = {_CALLED.get(name, name): value for name, value in values.items()}
        known = {f.name: read[f.name] for f in fields(cls) if f.name in read}
        return record("", cls, known | {"number": number, "contents": contents})


def _pieces(history: History, number: int, text: str) -> Pieces:
    """The documents of a line."""
    try:
        pieces = decode(text)
        require_known(pieces, history.contents)
    except ValueError as error:
        raise CheckpointError(
            f"{history.path}: line {number} holds no documents ({error}); audit another run"
        ) from None
    return pieces


class History:
    """The steps of a ledger that count, in order.

    Raises :class:`CheckpointError` for a ledger that is missing, damaged, or has no start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[_StepLine] = []
        self.starts: list[Start] = []
        self.rolled_back = 0
        self.is_torn = False
        for line in read(path):
            if line is None:
                self.is_torn = True
                continue
            try:
                self._take(line.number, line.values)
            except (ConfigError, ValueError) as error:
                raise CheckpointError(
                    f"{path}: line {line.number} is not of a ledger ({error}); audit another run"
                ) from None
        if not self.starts:
            raise CheckpointError(f"{path} has no whole line; nothing is known of the run")

    def _take(self, number: int, values: Mapping[str, Any]) -> None:
        if "start" in values:
            begun = Start.of(number, values)
            while self.steps and self.steps[-1].iteration > begun.iteration:
                self.steps.pop()
                self.rolled_back += 1
            if begun.is_elsewhere and self.steps:
                self.steps.clear()
                self.starts.clear()
                self.rolled_back = 0
            if not self.steps:
                self.base = begun
            self.starts.append(begun)
        elif not self.starts:
            raise ValueError("a step before any start")
        else:
            names = ("iteration", "digest", "tokens", "documents")
            known: dict[str, Any] = {name: values[name] for name in names if name in values}
            own = {"number": number, "skipped": "skipped" in values, "start": len(self.starts) - 1}
            self.steps.append(record("", _StepLine, known | own))

    @property
    def contents(self) -> dict[int, CorpusEpoch]:
        """What each corpus gives in an epoch; the same for all starts that count."""
        return self.starts[-1].contents

    @property
    def last(self) -> int:
        """The last step that counts, or the one before the first where there is none."""
        return self.steps[-1].iteration if self.steps else self.base.iteration

    def has_taken_back(self, checkpoint: int) -> bool:
        """Whether the last start began before this checkpoint, which was in its way and which it
        has not come to again: nothing after the start is in it.
        """
        begun = self.starts[-1]
        return checkpoint == begun.stood and checkpoint > max(self.last, begun.iteration)

    def missing(self) -> Faults:
        """Steps that have no line."""
        expected, gaps = self.base.iteration, []
        for step in self.steps:
            if step.iteration > expected + 1:
                gaps.append((expected + 1, step.iteration))
            expected = max(expected, step.iteration)
        return Faults(
            sum(stop - start for start, stop in gaps),
            tuple(f"the line of step {start}" for start, _ in gaps[:NAMED]),
        )


def audit(history: History, saved: tuple[int, Mapping[str, Any]] | None) -> Report:
    """Audits the ledger of one run.

    ``saved`` are the step and the planner's state of the newest checkpoint; None where there is
    none, so that what did not run is taken for waiting.

    Raises :class:`CheckpointError` for a ledger or a state that cannot be read.
    """
    standing, until = None, None if saved is None else saved[0]
    lost, twice = history.missing(), Faults()
    parts = [_pieces(history, step.number, step.documents) for step in history.steps]
    for step, part in zip(history.steps, parts, strict=True):
        found = int(part[:, LENGTH].sum())
        if found < step.tokens:
            text = f"{step.tokens - found} tokens of step {step.iteration}, which ran {step.tokens}"
            lost += Faults(1, (text,))
    ran = np.concatenate([pieces_of(()), *parts])
    iterations = np.repeat([s.iteration for s in history.steps], list(map(len, parts))).astype(int)
    twice += _twice(ran, iterations)
    if saved is not None:
        standing, proven = Standing.of(saved[1], history.contents), iterations <= saved[0]
        told = _settled(ran[proven], iterations[proven], standing, history, saved[0])
        lost, twice = lost + told[0], twice + told[1]
    skipped = [step for step in history.steps if step.skipped]
    waiting = standing.waiting if standing else ()
    return Report(
        steps=len(history.steps),
        first_iteration=history.steps[0].iteration if history.steps else history.base.iteration,
        last_iteration=history.last,
        restarts=len(history.starts) - 1,
        rolled_back=history.rolled_back,
        skipped=len(skipped),
        skipped_tokens=sum(step.tokens for step in skipped),
        documents=int(_by_document(ran)[1].sum()),
        tokens=int(ran[:, LENGTH].sum()),
        epochs={
            epoch.name: int(ran[ran[:, CORPUS] == corpus, LENGTH].sum()) / max(epoch.num_tokens, 1)
            for corpus, epoch in history.contents.items()
        },
        dropped_tokens=sum(
            epoch.dropped_tokens * (1 + int(ran[ran[:, CORPUS] == corpus, EPOCH].max(initial=-1)))
            for corpus, epoch in history.contents.items()
        ),
        proven_until=until,
        waiting=len(waiting),
        waiting_tokens=sum(document.length for document in waiting),
        oldest_steps=max((standing.step - d.step for d in waiting), default=0) if standing else 0,
        is_torn=history.is_torn,
        lost=lost,
        twice=twice,
    )


def _settled(
    ran: Pieces, iterations: npt.NDArray[np.int64], standing: Standing, history: History, until: int
) -> tuple[Faults, Faults]:
    """What is lost or to run twice, when what waits in a checkpoint runs."""
    if until < history.base.iteration:
        raise CheckpointError(
            f"{history.path} begins after step {history.base.iteration}, but the newest checkpoint "
            f"is of step {until}; audit the folder that the run was loaded from"
        )
    lost, last = Faults(), history.last
    if until > last:
        text = f"the line of step {last + 1}, which the checkpoint of step {until} has"
        lost = Faults(until - last, (text,))
    waiting = np.concatenate([pieces_of(standing.waiting), standing.under_way])
    both = np.concatenate([ran, waiting])
    at = np.concatenate([iterations, np.full(len(waiting), -1)])
    twice = _twice(both, at, waiting_only=True)
    drawn = pieces_of(standing.drawn)
    drawn[:, ARRIVAL] = standing.arrived
    lost += _never_came(both, standing, history)
    known = np.concatenate([both, drawn])
    lost += _unfinished(known, standing, history)
    if not lost.number and not history.base.iteration:
        lost += _short_epochs(known, standing, history.contents)
    return lost, twice


def _never_came(pieces: Pieces, standing: Standing, history: History) -> Faults:
    """Arrivals of which there is no piece."""
    base, arrived, arrivals = history.base, standing.arrived, pieces[:, ARRIVAL]
    present, low, old = np.unique(arrivals), 0, np.zeros(0, np.int64)
    if base.iteration:  # what ran before this ledger begins
        low = min(base.arrived, arrived)
        waited = _pieces(history, base.number, base.waiting)[:, ARRIVAL]
        old = np.setdiff1d(waited[waited < low], present)
    present = present[(present >= low) & (present < arrived)]
    first = []
    for number in [*old.tolist(), *_absent(present, low, arrived)][:NAMED]:
        text = f"document {number} of the stream (counted from 0)"
        before = np.flatnonzero(arrivals == number - 1)
        if len(before):
            text += f", which came after {_name(pieces[before[-1]], history.contents)}"
        first.append(text)
    return Faults(len(old) + arrived - low - len(present), tuple(first))


def _absent(present: npt.NDArray[np.int64], start: int, stop: int) -> list[int]:
    """The first numbers of ``[start, stop)`` that sorted ones lack. Memory does not grow with how
    many are said to be there.
    """
    edges = np.concatenate([[start - 1], present, [stop]])
    at = np.flatnonzero(np.diff(edges) > 1)[:NAMED]
    gaps = zip(edges[at].tolist(), edges[at + 1].tolist(), strict=True)
    return list(islice(chain.from_iterable(range(a + 1, b) for a, b in gaps), NAMED))


def _unfinished(pieces: Pieces, standing: Standing, history: History) -> Faults:
    """Stored documents whose pieces do not follow one another from the first token to the last."""
    if not len(pieces):
        return Faults()
    order, is_first = _by_document(pieces)
    pieces, starts = pieces[order], np.flatnonzero(is_first)
    begins, stops = pieces[:, OFFSET], pieces[:, OFFSET] + pieces[:, LENGTH]
    faults = np.zeros(len(pieces), bool)
    # What ran before this ledger begins is not known of: parts run in any order. Of those that did
    # not run before, :func:`_never_came` misses none.
    base = history.base
    is_old = pieces[:, ARRIVAL] < (base.arrived if base.iteration else 0)
    faults[1:] = (begins[1:] > stops[:-1]) & ~is_old[:-1]
    faults[starts] = (begins[starts] > 0) & (not base.iteration)
    ends = np.append(starts[1:], len(pieces)) - 1
    limits = np.zeros(max(history.contents, default=0) + 1, np.int64)
    for corpus, epoch in history.contents.items():
        limits[corpus] = epoch.truncated
    is_open = (pieces[ends, ENDS] == 0) & (stops[ends] != limits[pieces[ends, CORPUS]])
    is_open &= ~is_old[ends]
    for blended, (epoch_number, offset) in standing.open.items():
        under_way = is_open & (stops[ends] == offset) & (pieces[ends, EPOCH] == epoch_number)
        if blended is not None:
            under_way &= pieces[ends, CORPUS] == blended
        if offset and under_way.any():  # the last to come; another one of its kind is lost
            at = np.flatnonzero(under_way)
            is_open[at[pieces[ends[at], ARRIVAL].argmax()]] = False
    texts = [
        f"tokens before {int(begins[at])} of {_name(pieces[at], history.contents)}"
        for at in islice(np.flatnonzero(faults).tolist(), NAMED)
    ]
    texts += [
        f"tokens from {int(stops[at])} on of {_name(pieces[at], history.contents)}"
        for at in islice(ends[is_open].tolist(), NAMED)
    ]
    return Faults(int(faults.sum() + is_open.sum()), tuple(texts[:NAMED]))


def _short_epochs(
    pieces: Pieces, standing: Standing, contents: Mapping[int, CorpusEpoch]
) -> Faults:
    """Epochs that have ended with other tokens than the corpus has."""
    faults = Faults()
    for corpus, epoch in contents.items():
        own = pieces[pieces[:, CORPUS] == corpus]
        if corpus not in standing.open and None not in standing.open:
            continue  # the blend leaves it out
        over = standing.open[corpus if corpus in standing.open else None][0]  # epochs that ended
        own = own[own[:, EPOCH] < over]
        begun, which = np.unique(own[:, EPOCH], return_inverse=True)
        tokens = np.bincount(which, weights=own[:, LENGTH])
        wrong = tokens != epoch.num_tokens
        found = dict(zip(begun[wrong].tolist(), map(int, tokens[wrong]), strict=True))
        number = len(found)
        if epoch.num_tokens:
            number += over - len(begun)
            found |= dict.fromkeys(_absent(begun, 0, over), 0)
        texts = [
            f"epoch {n} of {epoch.name}: {found[n]} of its {epoch.num_tokens} tokens ran"
            for n in sorted(found)[:NAMED]
        ]
        faults += Faults(number, tuple(texts))
    return faults


def _twice(
    pieces: Pieces, iterations: npt.NDArray[np.int64], *, waiting_only: bool = False
) -> Faults:
    """Pieces that begin before an earlier one of the same document ends.

    ``iterations`` says when each ran, -1 of those that wait; ``waiting_only`` counts these alone.
    """
    order, is_first = _by_document(pieces)
    pieces, iterations = pieces[order], iterations[order]
    stops, group = pieces[:, OFFSET] + pieces[:, LENGTH], np.cumsum(is_first)
    # The furthest end so far in each document: groups lie apart.
    apart = int(stops.max(initial=0)) + 1
    furthest = np.maximum.accumulate(stops + group * apart) - group * apart
    again = ~is_first
    again[1:] &= pieces[1:, OFFSET] < furthest[:-1]
    if waiting_only:
        again[1:] &= (iterations[1:] < 0) | (iterations[:-1] < 0)
    first = []
    for at in islice(np.flatnonzero(again).tolist(), NAMED):
        when = ", ".join(
            "waits in the checkpoint" if i < 0 else f"ran in step {i}"
            for i in iterations[at - 1 : at + 1].tolist()
        )
        first.append(f"{_name(pieces[at])} from token {pieces[at, OFFSET]} on: {when}")
    return Faults(int(again.sum()), tuple(first))


def _by_document(pieces: Pieces) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The order of pieces by stored document and offset, and which are a document's first in it."""
    columns = (CORPUS, EPOCH, INDEX)
    order = np.lexsort(pieces[:, (OFFSET, *reversed(columns))].T)
    documents = pieces[order][:, columns]
    is_first = np.ones(len(pieces), bool)
    is_first[1:] = (documents[1:] != documents[:-1]).any(axis=1)
    return order, is_first


def _name(piece: Any, contents: Mapping[int, CorpusEpoch] | None = None) -> str:
    corpus, epoch, index = (int(piece[at]) for at in (CORPUS, EPOCH, INDEX))
    known = contents or {}
    name = f" ({known[corpus].name})" if corpus in known else ""
    return f"document {index} of corpus {corpus}{name}, epoch {epoch}"
