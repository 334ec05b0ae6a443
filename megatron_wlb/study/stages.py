"""Layers of pipeline stages that even out what embedding and LM head add to the ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_wlb.cost import Execution, Hardware, ModelShape, Parallelism, Recompute
from megatron_wlb.cost.analytic import AnalyticModel
from megatron_wlb.cost.shape import Stage


def balanced_layers(
    shape: ModelShape,
    hardware: Hardware,
    layout: Parallelism,
    recompute: Recompute,
    lengths: Sequence[int],
) -> tuple[int, ...]:
    """Layers of each virtual stage such that the slowest pipeline rank is as fast as whole layers
    allow, by the modelled time of documents of ``lengths``.

    Of ranks that are as fast, the later gets a layer more, as fewer micro-batches are in flight
    there. Every rank between the first and the last has at least one. Unlike layers count as their
    mean.
    """
    undivided = replace(layout, pp_size=1, vpp_size=1, group_size=None, stage_layers=None)
    model = AnalyticModel(shape, Execution(undivided, recompute), hardware)
    all_layers = Stage(shape.runs, first=False, last=False)
    layer_us = model.stage_cost(all_layers).total_us(lengths) / shape.num_layers
    ends_us = [0.0] * layout.num_stages
    ends_us[0] = model.stage_cost(Stage((), first=True, last=False)).total_us(lengths)
    ends_us[-1] += model.stage_cost(Stage((), first=False, last=True)).total_us(lengths)
    layers = [0] * layout.num_stages

    def rank_us(rank: int) -> tuple[bool, float, int]:
        own = slice(rank, None, layout.pp_size)
        has = sum(layers[own])
        needs_one = not has and 0 < rank < layout.pp_size - 1
        return not needs_one, sum(ends_us[own]) + has * layer_us, -rank

    def chunk_us(stage: int) -> float:
        return ends_us[stage] + layers[stage] * layer_us

    for _ in range(shape.num_layers):
        rank = min(range(layout.pp_size), key=rank_us)
        layers[min(range(rank, layout.num_stages, layout.pp_size), key=chunk_us)] += 1
    return tuple(layers)
