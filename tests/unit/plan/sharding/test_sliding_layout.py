"""With a sliding window a rank takes the keys in reach, and sends what queries of others see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.plan.sharding import Sharding, rank_layout, shard_arrays
from megatron_wlb.plan.sharding.shard import KINDS

SHARDINGS = [Sharding(kind, 7 if kind == "hybrid" else 0) for kind in KINDS]


@settings(max_examples=80)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=6),
    st.sampled_from([2, 3, 4]),
    st.sampled_from(SHARDINGS),
    st.integers(1, 30),
)
def test_rows_hold_the_keys_in_reach(
    lengths: list[int], cp_size: int, sharding: Sharding, reach_tokens: int
) -> None:
    lengths = [*lengths, -sum(lengths) % (2 * cp_size) or 2 * cp_size]
    layouts = [
        rank_layout(lengths, cp_size, rank, sharding, reach_tokens) for rank in range(cp_size)
    ]
    names = [(s, i) for s, length in enumerate(lengths) for i in range(length)]
    held = [[names[token] for token in layout.tokens] for layout in layouts]
    chunks = shard_arrays(lengths, cp_size, sharding)
    seen = [  # by each rank, of its chunks one after another
        [(at, i) for at, start, stop in own for i in range(max(0, start + 1 - reach_tokens), stop)]
        for own in chunks
    ]
    wanted = [  # of each rank, by others
        {key for other, keys in enumerate(seen) if other != rank for key in keys} & set(own)
        for rank, own in enumerate(held)
    ]
    most, num_local = max(1, *map(len, wanted)), len(held[0])
    is_less = (cp_size + 1) * most <= cp_size * num_local
    rows = [name for own in held for name in own]
    if is_less:
        rows = []
        for layout, own, others in zip(layouts, held, wanted, strict=True):
            assert layout.sent is not None and layout.num_sent == most
            sent = [own[token] for token in layout.sent]
            assert set(sent) == others and len(sent) == len(others)
            rows += sent + [None] * (most - len(sent))
    for layout, own, keys in zip(layouts, held, seen, strict=True):
        assert (layout.sent is not None) == is_less
        here = [*rows, *own] if is_less else rows
        assert layout.num_rows == len(here)
        assert [here[row] for row in layout.key_rows] == keys
        assert layout.lengths_k.sum() == len(keys)
        assert sum(len(own) for own, _ in layout.rounds) == len(keys)


def test_long_documents_are_exchanged_as_far_as_the_window_reaches() -> None:
    """Per document a rank has two pieces of 64 tokens, of each of which the next sees 7."""
    layouts = [rank_layout([1024], 8, rank, Sharding("per-document"), 8) for rank in range(8)]
    # The first rank has the last piece too, which nobody sees; the last rank has two in a row.
    assert [len(layout.sent) for layout in layouts] == [7, *[14] * 6, 7]  # type: ignore[arg-type]
    assert {layout.num_sent for layout in layouts} == {14}
    whole = [rank_layout([1024], 8, rank, Sharding("per-document")) for rank in range(8)]
    keys, all_keys = (sum(int(one.lengths_k.sum()) for one in of) for of in (layouts, whole))
    # Pieces end at 64, 128, …, 1024; the two of the last rank are one chunk.
    assert keys == 1024 + 14 * 7
    assert all_keys == 7 * (1024 + 64) + 9 * 64


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_a_window_of_the_longest_document_takes_all_keys(sharding: Sharding) -> None:
    for rank in range(4):
        plain = rank_layout([61, 3, 50, 6], 4, rank, sharding)
        wide = rank_layout([61, 3, 50, 6], 4, rank, sharding, 61)
        assert np.array_equal(wide.lengths_k, plain.lengths_k)
        if wide.sent is None:
            assert np.array_equal(wide.key_rows, plain.key_rows)
