"""Shardings: which tokens of a micro-batch each CP rank holds, and how that is chosen."""

from __future__ import annotations

from megatron_wlb.plan.sharding.layout import RankLayout, length_multiple, rank_layout
from megatron_wlb.plan.sharding.select import Selector, predict
from megatron_wlb.plan.sharding.shard import Sharding, shard_arrays

__all__ = [
    "RankLayout",
    "Selector",
    "Sharding",
    "length_multiple",
    "predict",
    "rank_layout",
    "shard_arrays",
]
