"""slime's schedule of micro-batches, planned by :func:`megatron_wlb.plan_batch`.

In ``slime/ray/rollout.py`` import this one instead::

    from megatron_wlb.adapters.slime import build_dp_schedule

It keeps what slime promises of its own: as many micro-batches on each data-parallel rank, a
multiple of ``microbatch_group_size_per_vp_stage`` with virtual stages, none without a sample, none
above ``--max-tokens-per-gpu`` × CP but a longer sample alone. Ranks and micro-batches are balanced
by slime's own FLOPs, and their number is what a simulation of the pipeline finds fastest. Without
``--use-dynamic-batch-size`` slime's own function runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_wlb.adapters.trainers import TOKENS, cost_of_flops, filled_ranks, shared_ranks
from megatron_wlb.cost import DocumentCost, Parallelism
from megatron_wlb.plan.sharding import length_multiple

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    tokens: Sequence[Any] | None = None,
) -> Schedule:
    """Takes and returns what slime's function of this name does: ``(partitions,
    micro_batch_indices, num_microbatches, global_batch_sizes)``.

    With ``tokens``, ids of each sample, what samples of a micro-batch begin alike with runs once
    and counts once, as :mod:`megatron_wlb.adapters.slime_shared` has it.

    Raises :class:`ConfigError` where samples are fewer than micro-batches, and what slime
    raises for less than a step of rollouts.
    """
    if not args.use_dynamic_batch_size:
        from slime.utils import dp_schedule

        own: Schedule = dp_schedule.build_dp_schedule(
            args, train_parallel_config, total_lengths,
            global_batch_size=global_batch_size, rollout_indices=rollout_indices,
        )  # fmt: skip
        return own
    layout, cost = _layout(args, train_parallel_config), _cost(args)
    rollouts: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        rollouts.setdefault(rollout, []).append(sample)
    steps = len(rollouts) // global_batch_size
    if not steps:
        raise AssertionError(
            f"num_rollouts ({len(rollouts)}) < global_batch_size ({global_batch_size}); need at "
            "least one rollout per step"
        )
    of_step = list(rollouts.values())
    partitions: list[list[int]] = [[] for _ in range(layout.dp_size)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(layout.dp_size)]
    numbers = []
    for first in range(0, steps * global_batch_size, global_batch_size):
        samples = [n for own in of_step[first : first + global_batch_size] for n in own]
        own_tokens = None if tokens is None else [np.asarray(tokens[n]) for n in samples]
        ranks = _ranks([total_lengths[n] for n in samples], layout, cost, args, own_tokens)
        numbers.append(len(ranks[0]))
        for mine, schedule, rank in zip(partitions, micro_batches, ranks, strict=True):
            for micro_batch in rank:
                schedule.append(list(range(len(mine), len(mine) + len(micro_batch))))
                mine += [samples[n] for n in micro_batch]
    return partitions, micro_batches, numbers, [global_batch_size] * steps


def _ranks(
    lengths: list[int],
    layout: Parallelism,
    cost: DocumentCost,
    args: Any,
    tokens: list[Any] | None,
) -> list[list[list[int]]]:
    """The micro-batches of each rank, each of which has a sample."""
    cap = args.max_tokens_per_gpu * layout.cp_size
    cap -= cap % length_multiple(layout.tp_size, layout.cp_size, layout.sequence_parallel)
    if tokens is not None:
        return shared_ranks(tokens, cap, layout, cost)
    return filled_ranks(lengths, cap, layout, cost)


def _layout(args: Any, config: Mapping[str, int]) -> Parallelism:
    vpp_size, tp_size = config["vpp_size"], getattr(args, "tensor_model_parallel_size", 1)
    pp_size = getattr(args, "pipeline_model_parallel_size", 1)
    return Parallelism(
        tp_size=tp_size,
        cp_size=config["cp_size"],
        pp_size=max(pp_size, 2) if vpp_size > 1 else pp_size,
        vpp_size=vpp_size,
        dp_size=config["dp_size"],
        group_size=config["microbatch_group_size_per_vp_stage"] if vpp_size > 1 else None,
        sequence_parallel=tp_size > 1,
    )


def _cost(args: Any) -> DocumentCost:
    """By slime's FLOPs of a short and a long sample: ``linear · n + quadratic · n²``."""
    from slime.utils.flops_utils import calculate_fwd_flops

    return cost_of_flops(*(calculate_fwd_flops([n], args) for n in (TOKENS, 2 * TOKENS)))
