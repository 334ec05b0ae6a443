"""Layers of pipeline stages that even out what embedding and LM head add to the ends."""

from __future__ import annotations

import math
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
    mean, but for a HybridModel's: there no stage takes longer than it must.
    """
    undivided = replace(layout, pp_size=1, vpp_size=1, group_size=None, stage_layers=None)
    model = AnalyticModel(shape, Execution(undivided, recompute), hardware)
    all_layers = Stage(shape.runs, first=False, last=False)
    layer_us = model.stage_cost(all_layers).total_us(lengths) / shape.num_layers
    ends_us = [0.0] * layout.num_stages
    ends_us[0] = model.stage_cost(Stage((), first=True, last=False)).total_us(lengths)
    ends_us[-1] += model.stage_cost(Stage((), first=False, last=True)).total_us(lengths)
    if shape.is_hybrid:
        each = {id(layer): model.stage_cost(Stage(((1, layer),), False, False)).total_us(lengths)
                for _, layer in shape.runs}  # fmt: skip
        return _cut([each[id(layer)] for num, layer in shape.runs for _ in range(num)], ends_us)
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


def _cut(layers_us: Sequence[float], ends_us: Sequence[float]) -> tuple[int, ...]:
    """Layers of each stage, in order, such that the slowest stage is as fast as can be; ``ends_us``
    are what stages have besides.
    """

    def filled(limit_us: float) -> list[int]:
        counts, at = [], 0
        for stage, end_us in enumerate(ends_us):
            left = len(ends_us) - 1 - stage  # each of which needs a layer, if there are as many
            begin, us = at, end_us
            while at < len(layers_us) - left and (
                at == begin or us + layers_us[at] <= limit_us or not left
            ):
                us += layers_us[at]
                at += 1
            counts.append(at - begin)
            slowest[0] = max(slowest[0], us)
        return counts

    low, high = 0.0, sum(layers_us) + sum(ends_us)
    best: tuple[float, list[int]] = math.inf, []
    for _ in range(40):
        slowest = [0.0]
        middle = (low + high) / 2
        counts = filled(middle)
        best = min(best, (slowest[0], counts))
        low, high = (low, middle) if slowest[0] <= middle else (middle, high)
    return tuple(best[1])
