"""Shardings: which tokens of a micro-batch each CP rank holds, and how that is chosen."""

from __future__ import annotations

from megatron_wlb.sharding.layout import RankLayout, length_multiple, rank_layout
from megatron_wlb.sharding.select import MODES, Prediction, Selector, predict
from megatron_wlb.sharding.shard import KINDS, Chunk, Sharding, shard, shard_arrays

__all__ = [
    "KINDS",
    "MODES",
    "Chunk",
    "Prediction",
    "RankLayout",
    "Selector",
    "Sharding",
    "length_multiple",
    "predict",
    "rank_layout",
    "shard",
    "shard_arrays",
]
