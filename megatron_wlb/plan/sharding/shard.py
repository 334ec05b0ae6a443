"""Shards a micro-batch: which of its tokens each context-parallel rank holds.

A sharding cuts the micro-batch into 2·CP *slots* of equally many tokens; rank k holds the slots k
and 2·CP-1-k, early and late ones alike, because late tokens attend to more. The shardings differ
in what a slot is made of::

    per-sequence   one piece of the whole micro-batch, documents cut where it falls
    per-document   the slot's piece of every document
    hybrid         the slot's piece of every long document, then one piece of the short ones

A rank's local tokens lie in the order of the micro-batch, so neighbouring pieces become one chunk.

Legend: ``n`` = 2·CP slots, ``D`` documents (attention segments), ``T`` tokens of the micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from megatron_wlb.errors import PlanError

Kind: TypeAlias = Literal["per-sequence", "per-document", "per-document-remainder", "hybrid"]
IntArray: TypeAlias = npt.NDArray[np.int64]

KINDS: tuple[Kind, ...] = get_args(Kind)

NEVER_LONG = sys.maxsize
"""A length that no document has."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a micro-batch is divided over context-parallel ranks.

    ``per-document-remainder`` is §5.1 of WLB-LLM to the letter, for comparison; ``hybrid`` is its
    future work (§8). ``threshold``, in tokens, is of `hybrid` alone: documents of at least so many
    are sharded per document, the rest per sequence.

    Raises :class:`PlanError` for an unknown kind, or a threshold where none belongs.
    """

    kind: Kind = "per-sequence"
    threshold: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"unknown sharding {self.kind}; use one of {', '.join(KINDS)}")
        if self.threshold < 0 or (self.threshold and self.kind != "hybrid"):
            raise PlanError(
                f"sharding {self.kind} with a threshold of {self.threshold} tokens; only hybrid "
                "has one, of at least 0"
            )

    @property
    def long_tokens(self) -> int:
        """Documents of at least so many tokens are sharded per document, the rest per sequence."""
        return {"hybrid": self.threshold, "per-sequence": NEVER_LONG}.get(self.kind, 0)

    def __str__(self) -> str:
        return f"{self.kind}({self.threshold})" if self.kind == "hybrid" else self.kind


def shard_arrays(lengths: Sequence[int], cp_size: int, sharding: Sharding) -> tuple[IntArray, ...]:
    """Puts every token in exactly one chunk, ``sum(lengths) / cp_size`` tokens on every rank.

    Returns, for each rank, ``[num_chunks, 3]`` rows of segment, start and stop in local order,
    which is that of the micro-batch. No chunk is empty, and no two of a rank touch. Segments are
    those of ``MicroBatchPlan.lengths``: the padding at the tail is one of its own. A chunk's
    queries attend to keys ``[0, stop)`` of its segment, causally (bottom-right aligned).

    Departures from §5.1 in `per-document`: the r tokens of a document that do not divide by 2·CP
    (the paper's e_i lacks its ``× 2·CP``) are not handed out as r single rows, each of which
    would cost a kernel a whole tile. They lengthen r of its pieces by one token; which ones goes
    round from document to document, over short ones too, so that the slots come out equal without
    padding, and the chunks of a long document do not depend on the threshold.

    Raises :class:`PlanError` if a length is below 1, or the total not divisible by ``2 · cp_size``
    (one rank takes any total).
    """
    document_tokens = checked_lengths(lengths, cp_size)
    if sharding.kind == "per-document-remainder":
        chunks = _with_round_robin(document_tokens, cp_size)
    else:
        sizes = np.array([len(document_tokens)])
        groups = chunks_by_threshold(document_tokens, sizes, cp_size, [sharding.long_tokens])
        chunks = _in_order(_together(*groups), document_tokens)
    limits = np.searchsorted(chunks.holder, np.arange(1, cp_size))
    return tuple(np.split(np.stack([chunks.segment, chunks.start, chunks.stop], axis=1), limits))


def checked_lengths(lengths: Sequence[int], cp_size: int) -> IntArray:
    """The lengths as an array.

    Raises :class:`PlanError` as :func:`shard_arrays` does.
    """
    if cp_size < 1:
        raise PlanError(f"context parallelism over {cp_size} ranks; give at least 1")
    document_tokens = np.asarray(lengths, dtype=np.int64)
    if np.min(document_tokens, initial=1) < 1:
        raise PlanError(f"a segment of {document_tokens.min()} tokens; each needs at least 1")
    num_tokens = int(document_tokens.sum())
    if cp_size > 1 and num_tokens % (2 * cp_size):
        raise PlanError(
            f"{num_tokens} tokens do not divide into {2 * cp_size} slots of {cp_size} "
            "context-parallel ranks; pad the micro-batch at its tail to a multiple"
        )
    return document_tokens


class Chunks(NamedTuple):
    """Chunks as arrays alike: tokens ``[start, stop)`` of a segment, and what holds them."""

    segment: IntArray
    start: IntArray
    stop: IntArray
    holder: IntArray


def chunks_by_threshold(
    document_tokens: IntArray, sizes: IntArray, cp_size: int, thresholds: Sequence[int]
) -> tuple[Chunks, Chunks]:
    """Chunks of long and of short documents, for the hybrids with these ascending thresholds.

    ``document_tokens`` are those of micro-batches one after another, ``sizes`` the documents of
    each. What holds the chunks is ``(m · thresholds + i) · CP + rank`` for the m-th micro-batch and
    the i-th threshold, from 0. A long document has the same chunks whatever the threshold, so they
    are there once, for the last one that finds it long. They are not in local order. Per document
    is a threshold of 0, per sequence one out of reach.
    """
    num_slots, num_cases = 2 * cp_size, len(thresholds)
    slots = np.arange(num_slots)
    rank = np.minimum(slots, slots[::-1])
    last = np.searchsorted(thresholds, document_tokens, side="right") - 1  # -1: long for none
    stops = np.cumsum(document_tokens)
    ends = np.concatenate([[0], stops])[np.cumsum(sizes)]
    totals = np.diff(ends, prepend=0)
    stops -= np.repeat(ends - totals, sizes)  # in its micro-batch
    case = np.repeat(np.arange(len(sizes)) * num_cases, sizes)

    which = np.flatnonzero(last >= 0)
    stop = _per_document(document_tokens, stops, which, num_slots)
    held = case + last
    # [micro-batches, thresholds, n]: of documents long for one, the tokens in a slot or before it.
    place = held[which] * num_slots + slots[:, None]
    filled = np.bincount(place.reshape(-1), stop.reshape(-1), len(sizes) * num_cases * num_slots)
    filled = filled.reshape(-1, num_cases, num_slots)[:, ::-1].cumsum(axis=1)[:, ::-1]
    long = _two_a_rank(which, stop)
    long = long._replace(holder=held[long.segment] * cp_size + long.holder)

    # One case's short documents after another's, each in the free part of its slots.
    slot_stops = _dealt(totals, num_slots).T[:, None] - filled.astype(np.int64)
    slot_stops = slot_stops.reshape(-1, num_slots)
    slot_stops[1:] += slot_stops[:-1, -1:].cumsum(axis=0)
    number, which = np.nonzero(last < np.arange(num_cases)[:, None])
    if len(sizes) > 1:
        which = which[np.argsort(case[which] + number, kind="stable")]
    short = _per_sequence(document_tokens, which, slot_stops.reshape(-1))
    holders = (np.arange(len(slot_stops))[:, None] * cp_size + rank).reshape(-1)
    return long, _joined(short._replace(holder=holders[short.holder]))


def _dealt(tokens: IntArray, num_slots: int) -> IntArray:
    """``[n, …]``: of so many tokens dealt to the slots in turn, those in a slot or before it."""
    up_to = np.arange(1, num_slots + 1)
    rounds, others = np.divmod(tokens, num_slots)
    dealt: IntArray = np.multiply.outer(up_to, rounds) + np.minimum.outer(up_to, others)
    return dealt


def _per_document(
    document_tokens: IntArray, stops: IntArray, which: IntArray, num_slots: int
) -> IntArray:
    """``[n, D]``: where each document's piece in a slot ends, which is where the next one starts.

    Pieces have ⌊d/n⌋ or ⌈d/n⌉ tokens: as if all tokens of the micro-batch were dealt to the slots
    in turn. So all documents fill the slots equally, and some of them no slot by more than that.
    ``stops`` are where the documents end in their micro-batch.
    """
    before = stops - document_tokens
    return _dealt(stops[which], num_slots) - _dealt(before[which], num_slots)


def _two_a_rank(which: IntArray, stop: IntArray) -> Chunks:
    """Gathers such pieces by rank and joins a rank's two of a document that touch."""
    start = np.zeros_like(stop)
    start[1:] = stop[:-1]
    stop = stop.copy()
    half = len(stop) // 2
    early, late = slice(half), slice(None, half - 1, -1)  # slots of the ranks, in their order
    touch = stop[early] == start[late]
    np.copyto(start[late], start[early], where=touch)
    np.copyto(stop[early], start[early], where=touch)
    at = np.flatnonzero(start < stop)
    slot, number = np.divmod(at, max(len(which), 1))
    rank = np.minimum(slot, 2 * half - 1 - slot)
    return Chunks(which[number], start.take(at), stop.take(at), rank)


def _per_sequence(document_tokens: IntArray, which: IntArray, slot_stops: IntArray) -> Chunks:
    """Cuts the row of documents into slots at any token."""
    tokens = document_tokens[which]
    document_stops = np.cumsum(tokens)
    stops = np.concatenate([document_stops, slot_stops])
    order = np.argsort(stops, kind="stable")
    stops = stops[order]
    starts = np.concatenate([[0], stops[:-1]])
    some = np.flatnonzero(starts < stops)
    # A piece is in the slot and the document after those that ended before it.
    ends_slot = order >= len(which)
    slot: IntArray = (np.cumsum(ends_slot) - ends_slot)[some]
    number = some - slot
    before = (document_stops - tokens)[number]
    return Chunks(which[number], starts[some] - before, stops[some] - before, slot)


def _with_round_robin(document_tokens: IntArray, cp_size: int) -> Chunks:
    """§5.1: ``n`` pieces of ⌊d/n⌋ tokens, and the rest of all documents dealt to ranks singly."""
    every = np.arange(len(document_tokens))
    remainder = document_tokens % (2 * cp_size)
    even = document_tokens - remainder
    pieces = _two_a_rank(every, _per_document(even, np.cumsum(even), every, 2 * cp_size))
    segment = np.repeat(every, remainder)
    number = np.arange(remainder.sum())
    start = (even - np.cumsum(remainder) + remainder)[segment] + number
    singles = Chunks(segment, start, start + 1, number % cp_size)
    return _joined(_in_order(_together(pieces, singles), document_tokens))


def _together(*groups: Chunks) -> Chunks:
    return Chunks(*(np.concatenate(rows) for rows in zip(*groups, strict=True)))


def _in_order(chunks: Chunks, document_tokens: IntArray) -> Chunks:
    """Sorts by rank, then as the tokens are in the micro-batch."""
    first_token = np.cumsum(document_tokens) - document_tokens
    token = chunks.holder * document_tokens.sum() + first_token[chunks.segment] + chunks.start
    order = np.argsort(token, kind="stable")
    return Chunks(*(row[order] for row in chunks))


def _joined(pieces: Chunks) -> Chunks:
    """Joins each piece to the one before it, if it continues that and has the same holder."""
    segment, start, stop, holder = pieces
    begins = np.ones(len(start) + 1, dtype=bool)  # and one past the end
    begins[1:-1] = start[1:] != stop[:-1]
    begins[1:-1] |= holder[1:] != holder[:-1]
    begins[1:-1] |= segment[1:] != segment[:-1]
    limits = np.flatnonzero(begins)
    first, last = limits[:-1], limits[1:] - 1
    return Chunks(segment[first], start[first], stop[last], holder[first])
