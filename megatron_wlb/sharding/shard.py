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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from megatron_wlb.errors import PlanError

Kind: TypeAlias = Literal["per-sequence", "per-document", "per-document-remainder", "hybrid"]
IntArray: TypeAlias = npt.NDArray[np.int64]

KINDS: tuple[Kind, ...] = get_args(Kind)


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
    if cp_size < 1:
        raise PlanError(f"context parallelism over {cp_size} ranks; give at least 1")
    if min(lengths, default=1) < 1:
        raise PlanError(f"a segment of {min(lengths)} tokens; each needs at least 1")
    document_tokens = np.asarray(lengths, dtype=np.int64)
    if cp_size == 1:
        segments = np.arange(len(document_tokens))
        return (np.stack([segments, np.zeros_like(segments), document_tokens], axis=1),)
    num_slots = 2 * cp_size
    num_tokens = int(document_tokens.sum())
    if num_tokens % num_slots:
        raise PlanError(
            f"{num_tokens} tokens do not divide into {num_slots} slots of {cp_size} "
            "context-parallel ranks; pad the micro-batch at its tail to a multiple"
        )
    if sharding.kind == "per-document-remainder":
        pieces = _with_round_robin(document_tokens, num_slots)
    else:
        threshold = {"per-document": 0, "per-sequence": num_tokens + 1}.get(
            sharding.kind, sharding.threshold
        )
        is_long = document_tokens >= threshold
        pieces = _per_document(document_tokens, np.flatnonzero(is_long), num_slots)
        filled = np.bincount(pieces[3], weights=pieces[2] - pieces[1], minlength=num_slots)
        free = num_tokens // num_slots - filled.astype(np.int64)
        rest = _per_sequence(document_tokens, np.flatnonzero(~is_long), free)
        pieces = np.concatenate([pieces, rest], axis=1)
    return _by_rank(pieces, document_tokens, cp_size)


# Pieces are [4, number] rows: segment, start, stop, slot.


def _per_document(document_tokens: IntArray, which: IntArray, num_slots: int) -> IntArray:
    """Each document in ``n`` pieces of ⌊d/n⌋ or ⌈d/n⌉ tokens, one a slot."""
    tokens = document_tokens[which][:, None]  # [D, 1]
    slots = np.arange(num_slots)
    remainder = tokens % num_slots
    # The longer pieces are the next `remainder` slots, going round from where the last document
    # ended: slots then never differ by more than one token, and not at all once Σd divides by n.
    first = np.cumsum(remainder, axis=0) - remainder
    longer = (slots - first) % num_slots < remainder
    tokens_of_slot = tokens // num_slots + longer  # [D, n]
    stop = np.cumsum(tokens_of_slot, axis=1)
    # [D, n] -> [CP, D, 2]: already in the order of ranks, which sorting finds out fast.
    by_rank = np.stack([slots, slots[::-1]], axis=1)[: num_slots // 2]
    pieces = np.empty((4, len(by_rank), len(which), 2), dtype=np.int64)
    pieces[0] = which[:, None]
    pieces[1] = (stop - tokens_of_slot)[:, by_rank].swapaxes(0, 1)
    pieces[2] = stop[:, by_rank].swapaxes(0, 1)
    pieces[3] = by_rank[:, None]
    return pieces.reshape(4, -1)


def _per_sequence(document_tokens: IntArray, which: IntArray, free: IntArray) -> IntArray:
    """The documents one after another, cut into slots of ``free`` tokens at any token."""
    document_stops = np.cumsum(document_tokens[which])
    slot_stops = np.cumsum(free)
    stops = np.union1d(document_stops, slot_stops[free > 0])
    starts = np.concatenate([[0], stops])[:-1]
    number = np.searchsorted(document_stops, starts, side="right")
    slot = np.searchsorted(slot_stops, starts, side="right")
    before = (document_stops - document_tokens[which])[number]
    return np.stack([which[number], starts - before, stops - before, slot])


def _with_round_robin(document_tokens: IntArray, num_slots: int) -> IntArray:
    """§5.1: ``n`` pieces of ⌊d/n⌋ tokens, and the rest of all documents dealt to ranks singly."""
    every = np.arange(len(document_tokens))
    remainder = document_tokens % num_slots
    even = _per_document(document_tokens - remainder, every, num_slots)
    segment = np.repeat(every, remainder)
    number = np.arange(remainder.sum())
    before = np.cumsum(remainder) - remainder
    start = (document_tokens - remainder - before)[segment] + number
    single = np.stack([segment, start, start + 1, number % (num_slots // 2)])
    return np.concatenate([even, single], axis=1)


def _by_rank(pieces: IntArray, document_tokens: IntArray, cp_size: int) -> tuple[IntArray, ...]:
    """The pieces of each rank's slots in token order, neighbours joined."""
    segment, start, stop, slot = np.take(pieces, np.flatnonzero(pieces[1] < pieces[2]), axis=1)
    rank = np.minimum(slot, 2 * cp_size - 1 - slot)
    first_token = np.cumsum(document_tokens) - document_tokens
    order = np.argsort(rank * document_tokens.sum() + first_token[segment] + start, kind="stable")
    segment, start, stop, rank = (row[order] for row in (segment, start, stop, rank))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (rank[1:] != rank[:-1]) | (segment[1:] != segment[:-1]) | (start[1:] != stop[:-1])
    ends = np.ones_like(begins)
    ends[:-1] = begins[1:]
    chunks = np.stack([segment[begins], start[begins], stop[ends]], axis=1)
    limits = np.searchsorted(rank[begins], np.arange(1, cp_size))
    return tuple(np.split(chunks, limits))
