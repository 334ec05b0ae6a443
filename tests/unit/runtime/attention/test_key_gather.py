"""Where a rank's near and far keys are, of a micro-batch that begins with a slice."""

from __future__ import annotations

from helpers.waits import recorded

from megatron_wlb.plan.sharding import Sharding, rank_layout


def test_split_of_keys_waits_for_nothing_on_the_device() -> None:
    from megatron_wlb.runtime.gpt.attention.key_exchange import KeyGather

    layout = rank_layout([24, 8], 2, 1, Sharding("per-document"))
    slice_rows = layout.token_rows[:24]
    gather = KeyGather.of(layout.split(24)[1], "cpu", slice_rows)
    with recorded() as places:
        _, far = gather.split
    assert places == set()
    assert far.slice_rows is not None
    assert far.slice_rows.tolist() == slice_rows.tolist()


def test_a_split_that_is_made_ahead_moves_with_its_gather() -> None:
    from dataclasses import replace

    from megatron_wlb.runtime.gpt.attention.key_exchange import KeyGather
    from megatron_wlb.runtime.ranks.transfer import mapped

    gather = KeyGather.of(rank_layout([24, 8], 2, 1, Sharding("per-document")), "cpu")
    ahead = replace(gather, made_split=gather.split)
    moved = mapped(ahead, lambda tensor: tensor.clone())
    with recorded() as places:
        near, far = moved.split
    assert places == set()
    assert near.tokens is not gather.split[0].tokens
    assert near.tokens.tolist() == gather.split[0].tokens.tolist()
    assert far.rows.tolist() == gather.split[1].rows.tolist()
