"""A rank's layout finds its tokens, and each chunk's keys among the rows of an all-gather."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.plan.sharding import Sharding, length_multiple, rank_layout, shard_arrays
from megatron_wlb.plan.sharding.shard import KINDS

SHARDINGS = [Sharding(kind, 7 if kind == "hybrid" else 0) for kind in KINDS]


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(SHARDINGS),
)
def test_layout_is_what_the_chunks_say(
    lengths: list[int], cp_size: int, sharding: Sharding
) -> None:
    lengths = [*lengths, -sum(lengths) % (2 * cp_size) or 2 * cp_size]
    layouts = [rank_layout(lengths, cp_size, rank, sharding) for rank in range(cp_size)]
    chunks = shard_arrays(lengths, cp_size, sharding)
    first = np.cumsum([0, *lengths])
    # An all-gather of tokens named by their segment and position.
    names = [(s, i) for s, length in enumerate(lengths) for i in range(length)]
    rows = [names[token] for layout in layouts for token in layout.tokens]
    assert sorted(rows) == names
    for layout, own in zip(layouts, chunks, strict=True):
        assert layout.num_tokens == sum(lengths)
        assert layout.lengths_q.tolist() == [stop - start for _, start, stop in own]
        assert layout.lengths_k.tolist() == [stop for _, _, stop in own]
        local = [first[at] + i for at, start, stop in own for i in range(start, stop)]
        assert layout.tokens.tolist() == local
        keys = [rows[row] for row in layout.key_rows]
        assert keys == [(at, i) for at, _, stop in own for i in range(stop)]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_rounds_can_be_added_in_any_order(sharding: Sharding) -> None:
    several = False
    for rank in range(4):
        layout = rank_layout([61, 3, 50, 6], 4, rank, sharding)
        rounds = layout.rounds
        several |= len(rounds) > 1
        places = np.concatenate([at for at, _ in rounds])
        assert sorted(places) == list(range(len(layout.key_rows)))
        for number, (at, rows) in enumerate(rounds):
            assert (rows == layout.key_rows[at]).all()
            assert np.bincount(rows).max() == 1
            # Most rows are in the first one: what comes again is added to them.
            assert not number or set(rows) <= set(rounds[number - 1][1])
    assert several == (sharding.kind != "per-sequence")


def test_padding_is_less_than_two_slots_of_all_ranks() -> None:
    assert length_multiple(8, 1, False) == 1
    assert length_multiple(8, 1, True) == 8
    assert length_multiple(8, 4, False) == 8
    assert length_multiple(8, 4, True) == 64


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(SHARDINGS),
)
def test_split_layout_is_the_first_segment_and_the_others(
    lengths: list[int], cp_size: int, sharding: Sharding
) -> None:
    rest = -sum(lengths) % (2 * cp_size)
    lengths = [*lengths, rest] if rest else lengths
    chunks = shard_arrays(lengths, cp_size, sharding)
    layouts = [rank_layout(lengths, cp_size, rank, sharding) for rank in range(cp_size)]
    rows = np.concatenate([layout.tokens for layout in layouts])
    for layout, own in zip(layouts, chunks, strict=True):
        assert (rows[layout.token_rows] == np.arange(sum(lengths))).all()
        first, others = layout.split(lengths[0])
        assert first.tolist() == [[stop - start, stop] for at, start, stop in own if at == 0]
        assert others.lengths_q.tolist() == [stop - start for at, start, stop in own if at]
        assert others.lengths_k.tolist() == [stop for at, _, stop in own if at]
        starts = np.cumsum([0, *lengths])
        keys = [starts[at] + i for at, _, stop in own if at for i in range(stop)]
        assert rows[others.key_rows].tolist() == keys
        assert sum(len(places) for places, _ in others.rounds) == len(keys)
