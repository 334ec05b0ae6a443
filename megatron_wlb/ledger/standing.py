"""What a planner's saved state says of documents: how many have arrived, and which wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_wlb.data.documents import CorpusEpoch
from megatron_wlb.errors import CheckpointError
from megatron_wlb.ledger.lines import Pieces, decode, pieces_of
from megatron_wlb.plan import Document


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
        try:
            stream = state["stream"]
            waiting = tuple(_documents(state["packer"] or {}))
            under_way = decode(state["under_way"]) if "under_way" in state else pieces_of(())
            if "streams" in stream:
                opened: dict[int | None, tuple[int, int]] = {
                    int(corpus): (own["epoch"], own["offset"])
                    for corpus, own in stream["streams"].items()
                }
                arrived = int(stream["num_arrived"])
                drawn = tuple(map(Document.from_list, stream.get("drawn", ())))
            else:
                opened = {None: (stream["epoch"], stream["offset"])}
                each = sum(epoch.num_documents for epoch in contents.values())
                begun = int(stream["offset"] > 0)
                arrived = stream["epoch"] * each + stream["document"] + begun
                drawn = ()
            return cls(int(state["step"]), arrived, waiting, drawn, under_way, opened)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"not the state of a planner ({error!r}); use an intact checkpoint"
            ) from None


def _documents(packer: Mapping[str, Any]) -> Iterator[Document]:
    """The documents in a packer's state, whatever its lists are called."""
    for values in packer.values():
        if isinstance(values, list | tuple):
            for item in values:
                # Other lists of eight have no truth value in the midst.
                if isinstance(item, list | tuple) and len(item) == 8 and isinstance(item[4], bool):
                    yield Document.from_list(item)
