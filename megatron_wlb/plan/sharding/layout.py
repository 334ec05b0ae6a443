"""The place of a context-parallel rank's tokens, and of the keys that they attend to.

The ranks' local tokens one after another, rank by rank, is the order in which an all-gather
returns keys and values; a *row* is a place in it. A kernel wants another order: for each chunk the
keys of its segment up to the chunk's end. One gather by :attr:`RankLayout.key_rows` makes that.

With a sliding window a chunk takes the keys in reach only, and ranks may exchange only tokens that
queries of others see (:attr:`RankLayout.sent`).

Legend: ``T`` tokens of the micro-batch, ``Tk`` keys that a rank's kernel call takes: about
``T · (2·CP + 1) / (2·CP)`` if it is one document, less if it is many per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.plan.sharding.shard import IntArray, Sharding, shard_arrays

BoolArray: TypeAlias = npt.NDArray[np.bool_]


def length_multiple(tp_size: int, cp_size: int, sequence_parallel: bool, rows: int = 1) -> int:
    """What a micro-batch's padded length is a multiple of.

    Context parallelism asks for 2·CP equal slots, sequence parallelism for equal parts of a rank's
    tokens, and matrix products in FP8 for ``rows`` tokens, or a multiple, on each rank.
    """
    ranks = cp_size * (tp_size if sequence_parallel else 1)
    return ranks * math.lcm(rows, 2 if cp_size > 1 else 1)


@dataclass(frozen=True, eq=False, slots=True)
class RankLayout:
    """What one rank holds and attends to."""

    num_tokens: int
    """Tokens of the micro-batch over all ranks, T."""
    tokens: IntArray
    """``[T / CP]``: which of the micro-batch's tokens are local, in local order."""
    lengths_q: IntArray
    """``[chunks]``: queries of each chunk."""
    lengths_k: IntArray
    """``[chunks]``: keys that they attend to, from the start of their segment or those in reach."""
    key_rows: IntArray
    """``[Tk]``: the row of each of these keys, chunk by chunk."""
    token_rows: IntArray
    """``[T]``: the row of each token of the micro-batch, where all are exchanged."""
    sent: IntArray | None = None
    """Which local tokens, by their number, queries of other ranks see, if only such are exchanged.
    A row is then a place in what an all-gather of these returns, each rank's filled up to
    :attr:`num_sent`, with all local tokens behind."""
    num_sent: int = 0
    """The most of any rank; at least one."""

    @property
    def num_rows(self) -> int:
        if self.sent is None:
            return self.num_tokens
        return self.num_tokens // len(self.tokens) * self.num_sent + len(self.tokens)

    def within(self, reach_tokens: int) -> RankLayout:
        """The same with only the keys that a query of their chunk sees."""
        lengths_k = np.minimum(self.lengths_k, self.lengths_q + reach_tokens - 1)
        starts = np.cumsum(self.lengths_k) - lengths_k
        return replace(self, lengths_k=lengths_k, key_rows=self.key_rows[_runs(starts, lengths_k)])

    def split(self, first_tokens: int) -> tuple[IntArray, RankLayout]:
        """The chunks of the first segment, ``[chunks, 2]`` queries and keys, and the others alone.

        ``first_tokens`` is the segment's length. Either may have no chunk on this rank.
        """
        ends = np.cumsum(self.lengths_q)
        at = np.searchsorted(ends, np.searchsorted(self.tokens, first_tokens), side="right")
        others = replace(
            self,
            lengths_q=self.lengths_q[at:],
            lengths_k=self.lengths_k[at:],
            key_rows=self.key_rows[self.lengths_k[:at].sum() :],
        )
        return np.stack([self.lengths_q[:at], self.lengths_k[:at]], axis=1), others

    @property
    def rounds(self) -> list[tuple[IntArray, IntArray]]:
        """Groups the keys so that a row comes at most once in a group: the first time that it
        comes, the second, and so on.

        Pairs of (places in :attr:`key_rows`, their rows).
        """
        rounds = []
        places, first = np.arange(len(self.key_rows)), np.empty(self.num_rows, dtype=np.int64)
        while len(places):
            rows = self.key_rows[places]
            first[rows[::-1]] = places[::-1]
            is_first = first[rows] == places
            rounds.append((places[is_first], rows[is_first]))
            places = places[~is_first]
        return rounds


def rank_layout(
    lengths: Sequence[int],
    cp_size: int,
    cp_rank: int,
    sharding: Sharding,
    reach_tokens: int | None = None,
    above: Sequence[Sequence[tuple[int, int]]] = (),
) -> RankLayout:
    """Makes the layout of one rank: all arrays, no loop over documents but of those that branch.

    With ``reach_tokens`` it is that of attention with such a sliding window. ``above`` are the runs
    of the micro-batch's tokens, ``[start, stop)``, that each segment attends to besides its own.
    Raises :class:`PlanError` as :func:`shard_arrays` does.
    """
    arrays = shard_arrays(lengths, cp_size, sharding)
    sizes = np.asarray(lengths, dtype=np.int64)
    first_token = np.cumsum(sizes) - sizes
    segment, start, stop = np.concatenate(arrays).T
    token_of_row = _runs(first_token[segment] + start, stop - start)
    row_of_token = np.empty_like(token_of_row)
    row_of_token[token_of_row] = np.arange(len(token_of_row))
    segment, start, stop = arrays[cp_rank].T
    num_local = len(token_of_row) // cp_size
    layout = RankLayout(
        num_tokens=len(token_of_row),
        tokens=token_of_row[cp_rank * num_local : (cp_rank + 1) * num_local],
        lengths_q=stop - start,
        lengths_k=stop,
        key_rows=row_of_token[_runs(first_token[segment], stop)],
        token_rows=row_of_token,
    )
    if any(above):
        layout = _with_above(layout, segment, first_token, above)
        return layout if reach_tokens is None else layout.within(reach_tokens)
    if reach_tokens is None:
        return layout
    seen = np.zeros((cp_size, num_local), dtype=bool)  # by rank and local number
    for rank, chunks in enumerate(arrays):
        segment, start, _ = chunks.T
        before = np.minimum(start, reach_tokens - 1)
        rows = row_of_token[_runs(first_token[segment] + start - before, before)]
        mask = np.zeros_like(seen)
        mask.reshape(-1)[rows] = True
        mask[rank] = False
        seen |= mask
    return _with_sent(layout.within(reach_tokens), seen, cp_rank)


def _with_above(
    layout: RankLayout,
    segments: IntArray,
    first_token: IntArray,
    above: Sequence[Sequence[tuple[int, int]]],
) -> RankLayout:
    """``layout`` with the tokens ``above`` before the keys of each chunk, whose segments are
    given.
    """
    starts, lengths, before = [], [], []
    for segment, own in zip(segments.tolist(), layout.lengths_k.tolist(), strict=True):
        runs = above[segment] if segment < len(above) else ()
        before.append(sum(stop - start for start, stop in runs))
        starts += [*(start for start, _ in runs), first_token[segment]]
        lengths += [*(stop - start for start, stop in runs), own]
    tokens = _runs(np.array(starts), np.array(lengths))
    lengths_k = layout.lengths_k + np.array(before)
    return replace(layout, lengths_k=lengths_k, key_rows=layout.token_rows[tokens])


def _with_sent(layout: RankLayout, seen: BoolArray, cp_rank: int) -> RankLayout:
    """``layout`` with only those tokens exchanged that are ``seen`` by other ranks.

    As it is where this would hold as much in memory as to exchange all.
    """
    cp_size, num_local = seen.shape
    num_sent = max(1, int(seen.sum(axis=1).max()))
    if (cp_size + 1) * num_sent > cp_size * num_local:
        return layout
    rows = np.arange(cp_size)[:, None] * num_sent + np.cumsum(seen, axis=1) - 1
    rows[cp_rank] = cp_size * num_sent + np.arange(num_local)
    return replace(
        layout,
        key_rows=rows.reshape(-1)[layout.key_rows],
        sent=np.flatnonzero(seen[cp_rank]),
        num_sent=num_sent,
    )


def _runs(starts: IntArray, lengths: IntArray) -> IntArray:
    """``start, start + 1, … start + length - 1`` of each run, one after another."""
    begins = np.cumsum(lengths) - lengths
    runs: IntArray = np.repeat(starts - begins, lengths) + np.arange(int(lengths.sum()))
    return runs
