"""Which tokens of a micro-batch each context-parallel rank holds.

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
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from megatron_wlb.errors import PlanError

Kind: TypeAlias = Literal["per-sequence", "per-document", "per-document-remainder", "hybrid"]
IntArray: TypeAlias = npt.NDArray[np.int64]

KINDS: tuple[Kind, ...] = get_args(Kind)

NEVER_LONG = sys.maxsize
"""Tokens that no document has."""


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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, stop)`` of attention segment ``segment`` of a micro-batch.

    Its queries attend to keys ``[0, stop)`` of the segment, causally (bottom-right aligned).
    Segments are those of ``MicroBatchPlan.lengths``: the padding at the tail is one of its own.
    """

    segment: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def shard(
    lengths: Sequence[int], cp_size: int, sharding: Sharding
) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of each rank in local order, as :func:`shard_arrays` has them.

    An object a chunk costs a microsecond: of many ranks, take the arrays.
    """
    arrays = shard_arrays(lengths, cp_size, sharding)
    return tuple(tuple(Chunk(*row) for row in rows.tolist()) for rows in arrays)


def shard_arrays(lengths: Sequence[int], cp_size: int, sharding: Sharding) -> tuple[IntArray, ...]:
    """Every token in exactly one chunk, and ``sum(lengths) / cp_size`` tokens on every rank.

    Returns, for each rank, ``[num_chunks, 3]`` rows of segment, start and stop in local order,
    which is that of the micro-batch. No chunk is empty, and no two of a rank touch.

    Departures from §5.1 in `per-document`: the r tokens of a document that do not divide by 2·CP
    (the paper's e_i lacks its ``× 2·CP``) are not handed out as r single rows, each of which
    would cost a kernel a whole tile. They lengthen r of its pieces by one token; which ones goes
    round from document to document, so that the slots come out equal without padding.

    Raises :class:`PlanError` if a length is below 1, or the total not divisible by ``2 · cp_size``
    (one rank takes any total).
    """
    document_tokens = checked_lengths(lengths, cp_size)
    if sharding.kind == "per-document-remainder":
        pieces = _in_order(_with_round_robin(document_tokens, cp_size), document_tokens)
        chunks = _joined(pieces)
    else:
        groups = chunks_by_threshold(document_tokens, cp_size, [sharding.long_tokens])
        chunks = _in_order(np.concatenate(groups, axis=1), document_tokens)
    limits = np.searchsorted(chunks[3], np.arange(1, cp_size))
    return tuple(np.split(chunks[:3].T.copy(), limits))


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


# Chunks and pieces below are [4, number] rows: segment, start, stop, and what holds them.


def chunks_by_threshold(
    document_tokens: IntArray, cp_size: int, thresholds: Sequence[int]
) -> tuple[IntArray, IntArray]:
    """The chunks of hybrids with each of these ascending thresholds: of long and short documents.

    What holds them is ``i · CP + rank`` for the i-th threshold, from 0. A long document has the
    same chunks whatever the threshold, so they are there once, for the last one that finds it long.
    They are not in local order.
    """
    num_slots = 2 * cp_size
    numbers, slots = np.arange(len(thresholds)), np.arange(num_slots)
    rank = np.minimum(slots, slots[::-1])
    last = np.searchsorted(thresholds, document_tokens, side="right") - 1  # -1: long for none

    which = np.flatnonzero(last >= 0)
    stop = _per_document(document_tokens, which, num_slots)
    # [i, n]: of the documents that are long for i, the tokens in a slot and those before it.
    holder = last[which] * num_slots + slots[:, None]
    filled = np.bincount(holder.reshape(-1), stop.reshape(-1), len(numbers) * num_slots)
    filled = filled.reshape(-1, num_slots)[::-1].cumsum(axis=0)[::-1]
    long = _chunks(stop, which, rank)
    long[3] += last[long[0]] * cp_size

    # The short documents of one threshold after those of another, each filling slots of its own.
    of, which = np.nonzero(last < numbers[:, None])
    slot_stops = _dealt(document_tokens.sum(keepdims=True), num_slots).T - filled.astype(np.int64)
    slot_stops[1:] += slot_stops[:-1, -1:].cumsum(axis=0)
    short = _per_sequence(document_tokens, which, slot_stops.reshape(-1))
    short[3] = (numbers[:, None] * cp_size + rank).reshape(-1)[short[3]]
    return long, _joined(short)


def _dealt(tokens: IntArray, num_slots: int) -> IntArray:
    """``[n, …]``: of so many tokens, dealt to the slots in turn, those in a slot or before it."""
    up_to = np.arange(1, num_slots + 1)
    rounds, others = np.divmod(tokens, num_slots)
    return np.multiply.outer(up_to, rounds) + np.minimum.outer(up_to, others)


def _per_document(document_tokens: IntArray, which: IntArray, num_slots: int) -> IntArray:
    """``[n, D]``: where each document's piece in a slot ends; the first starts at 0.

    Pieces have ⌊d/n⌋ or ⌈d/n⌉ tokens, as if all of the micro-batch were dealt to the slots in
    turn: so those of all documents fill the slots equally, and those of some never more than that.
    """
    stops = np.cumsum(document_tokens)
    before = stops - document_tokens
    return _dealt(stops[which], num_slots) - _dealt(before[which], num_slots)


def _chunks(stop: IntArray, which: IntArray, rank: IntArray) -> IntArray:
    """Of pieces by slot and document: those of one rank joined where nothing is between them."""
    start = np.zeros_like(stop)
    start[1:] = stop[:-1]
    half = len(stop) // 2
    early_start, early_stop, late_start = start[:half], stop[:half].copy(), start[: half - 1 : -1]
    touch = early_stop == late_start
    np.copyto(late_start, early_start, where=touch)
    np.copyto(stop[:half], early_start, where=touch)
    at = np.flatnonzero(start < stop)
    slot, number = np.divmod(at, max(len(which), 1))
    return np.stack([which[number], start.take(at), stop.take(at), rank[slot]])


def _per_sequence(document_tokens: IntArray, which: IntArray, slot_stops: IntArray) -> IntArray:
    """The documents one after another, cut into slots at any token."""
    tokens = document_tokens[which]
    document_stops = np.cumsum(tokens)
    stops = np.concatenate([document_stops, slot_stops])
    order = np.argsort(stops, kind="stable")
    # Whatever ends before a piece ends is what it is not in.
    ends_slot = order >= len(which)
    slot = np.cumsum(ends_slot) - ends_slot
    number = np.arange(len(order)) - slot
    stop = stops[order]
    start = np.concatenate([[0], stop[:-1]])
    keep = np.flatnonzero(start < stop)
    slot, number, start, stop = (row[keep] for row in (slot, number, start, stop))
    before = (document_stops - tokens)[number]
    return np.stack([which[number], start - before, stop - before, slot])


def _with_round_robin(document_tokens: IntArray, cp_size: int) -> IntArray:
    """§5.1: ``n`` pieces of ⌊d/n⌋ tokens, and the rest of all documents dealt to ranks singly."""
    num_slots = 2 * cp_size
    every, slots = np.arange(len(document_tokens)), np.arange(num_slots)
    remainder = document_tokens % num_slots
    stop = _per_document(document_tokens - remainder, every, num_slots)
    even = _chunks(stop, every, np.minimum(slots, slots[::-1]))
    segment = np.repeat(every, remainder)
    number = np.arange(remainder.sum())
    before = np.cumsum(remainder) - remainder
    start = (document_tokens - remainder - before)[segment] + number
    single = np.stack([segment, start, start + 1, number % cp_size])
    return np.concatenate([even, single], axis=1)


def _in_order(pieces: IntArray, document_tokens: IntArray) -> IntArray:
    """By rank, then as the tokens are in the micro-batch."""
    first_token = np.cumsum(document_tokens) - document_tokens
    segment, start, _, rank = pieces
    order = np.argsort(rank * document_tokens.sum() + first_token[segment] + start, kind="stable")
    return pieces.take(order, axis=1)


def _joined(pieces: IntArray) -> IntArray:
    """Each piece joined to the one before it, if it continues that and the same holds both."""
    segment, start, stop, holder = pieces
    begins = np.ones(len(holder) + 1, dtype=bool)  # and one past the end
    begins[1:-1] = start[1:] != stop[:-1]
    begins[1:-1] |= holder[1:] != holder[:-1]
    begins[1:-1] |= segment[1:] != segment[:-1]
    limits = np.flatnonzero(begins)
    chunks = pieces.take(limits[:-1], axis=1)
    chunks[2] = stop[limits[1:] - 1]
    return chunks
