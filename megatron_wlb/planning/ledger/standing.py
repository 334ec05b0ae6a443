"""What a planner's saved state says of documents: how many have arrived, and which wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_wlb.data.documents import CorpusEpoch
from megatron_wlb.plan import Document
from megatron_wlb.planning.ledger.lines import CORPUS, LENGTH, OFFSET, Pieces, decode, pieces_of
from megatron_wlb.reading import MAX_COUNT, MAX_SIZE, reading_state, whole_number


@dataclass(frozen=True)
class Standing:
    """Where a run stands after a step."""

    step: int
    """The step that is planned next."""
    arrived: int
    """Arrivals are numbered from 0 to this."""
    waiting: tuple[Document, ...]
    """Documents that have arrived, or were read ahead, and have not run."""
    drawn: tuple[Document, ...]
    """Documents that a blend has drawn for later steps; they have no number yet."""
    under_way: Pieces
    """Documents of a step that was planned but had not run."""
    open: Mapping[int | None, tuple[int, int]]
    """The epoch of the document that is under way, and tokens of it that were drawn: by corpus of a
    blend, or None for all corpora together."""

    @classmethod
    def of(cls, state: Mapping[str, Any], contents: Mapping[int, CorpusEpoch]) -> Standing:
        """Reads a planner's ``state_dict()``.

        Raises :class:`CheckpointError` for something else.
        """
        with reading_state("a planner"):
            stream = state["stream"]
            waiting = tuple(_documents(state["packer"] or {}))
            under_way = decode(state["under_way"]) if "under_way" in state else pieces_of(())
            if "streams" in stream:
                opened: dict[int | None, tuple[int, int]] = {
                    int(corpus): (_number(own, "epoch"), _number(own, "offset"))
                    for corpus, own in stream["streams"].items()
                }
                arrived = _number(stream, "num_arrived")
                drawn = tuple(map(Document.from_list, stream.get("drawn", ())))
            else:
                epoch, offset = _number(stream, "epoch"), _number(stream, "offset")
                opened = {None: (epoch, offset)}
                each = sum(epoch.num_documents for epoch in contents.values())
                arrived = epoch * each + _number(stream, "document") + int(offset > 0)
                drawn = ()
            pieces = (pieces_of((*waiting, *drawn)), under_way)
            require_known(np.concatenate(pieces), contents)
            whole_number("arrived", arrived, 0, MAX_COUNT)
            return cls(_number(state, "step"), arrived, waiting, drawn, under_way, opened)


def require_known(pieces: Pieces, contents: Mapping[int, CorpusEpoch]) -> None:
    """Raises ``ValueError`` for pieces of corpora other than these, or with impossible tokens."""
    for corpus in np.unique(pieces[:, CORPUS]).tolist():
        if corpus not in contents:
            raise ValueError(f"there is no corpus {corpus}")
    if len(pieces) and int((pieces[:, OFFSET] + pieces[:, LENGTH]).max()) > MAX_SIZE:
        raise ValueError(f"a document has more than {MAX_SIZE} tokens")


def _number(values: Mapping[str, Any], name: str) -> int:
    return whole_number(name, values[name], 0, MAX_COUNT)


def _documents(packer: Mapping[str, Any]) -> Iterator[Document]:
    """The documents in a packer's state, whatever its lists are called."""
    for values in packer.values():
        if isinstance(values, list | tuple):
            for item in values:
                # Other lists as long have no truth value in the midst; the targets are missing in
                # states of a release that knew none.
                known = isinstance(item, list | tuple) and len(item) in (8, 9)
                if known and isinstance(item[4], bool):
                    yield Document.from_list(item)
