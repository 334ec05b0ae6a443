"""Micro-batches that several data-parallel ranks run together (DP-Merge, SlimPack §4).

For such a micro-batch the context-parallel ranks of all these replicas are one group: each has its
share of the tokens, as under context parallelism, and keys and values are gathered over the group.
Weights stay where they are. Gradients need nothing else: the loss is a sum over tokens, and so is
what data-parallel reduction adds up.

Every rank runs its merged micro-batches forward before all others, and backward before all others,
in one chain. With one model chunk a rank, all ranks of a group so come to its collectives in one
order, though replicas differ in what else they run. With several they need not: such a document is
then run by one replica.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_wlb.cost.schedule.messages import meet_in_order
from megatron_wlb.errors import PlanError
from megatron_wlb.plan import MicroBatchPlan, StepPlan
from megatron_wlb.runtime.ranks.transfer import nccl_options

Block: TypeAlias = tuple[int, ...]
"""Data-parallel ranks that run a micro-batch together: ``MicroBatchPlan.replicas``."""


def open_groups(
    groups: ProcessGroupCollection,
    sizes: Iterable[int],
    device: str,
    timeout: datetime.timedelta | None = None,
) -> dict[Block, dist.ProcessGroup]:
    """Makes this rank's groups: one with the ranks of its block that hold the same weights, for
    each of ``sizes``, which are numbers of data-parallel ranks.

    All ranks of the world call it together, with the same sizes.
    """
    peers = tuple(dist.get_process_group_ranks(groups.dp_cp))
    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(known, (peers, groups.dp.rank()))
    options = nccl_options(groups.cp)
    opened = {}
    for size in sizes:
        members: dict[tuple[Block, int], list[int]] = {}
        for rank, (its_peers, dp_rank) in enumerate(known):
            members.setdefault((its_peers, dp_rank // size), []).append(rank)
        for (_, number), ranks in members.items():  # every rank takes part in making every group
            made = dist.new_group(ranks, timeout=timeout, pg_options=options)
            if dist.get_rank() in ranks:
                opened[tuple(range(number * size, (number + 1) * size))] = made
    for group in opened.values():
        # NCCL connects ranks at their first collective, and blocks their hosts until all are there.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return opened


def check_meeting(plan: StepPlan, pp_size: int, vpp_size: int) -> None:
    """Raises :class:`PlanError` where replicas would come to their collectives in unlike orders."""
    blocks = [[m.replicas for m in own] for own in plan.micro_batches]
    if plan.chains and not meet_in_order(pp_size, vpp_size, plan.chains, blocks):
        raise PlanError(
            f"step {plan.step}: with {vpp_size} chunks a rank, replicas with "
            f"{[len(own) for own in blocks]} micro-batches come to those that they run together in "
            "unlike orders, and would wait for one another for ever; plan with --wlb-dp-merge off"
        )


def check_merged(plan: StepPlan) -> None:
    """Checks that all ranks of a block run its micro-batches, in one order and before all others.

    Larger blocks come first, so that ranks agree on the order of blocks, too.

    Raises :class:`PlanError` for a plan with which ranks would wait for one another for ever.
    """
    dp_size = len(plan.micro_batches)
    runs: dict[Block, dict[int, list[MicroBatchPlan]]] = {}
    for rank, micro_batches in enumerate(plan.micro_batches):
        merged = [m for m in micro_batches if m.replicas]
        chain = plan.chains[rank][0] if plan.chains else 0
        for number, m in enumerate(merged):
            num, first = len(m.replicas), m.replicas[0]
            where = (
                f"step {plan.step}, data-parallel rank {rank}: micro-batch {m.index} runs on "
                f"replicas {list(m.replicas)} together"
            )
            if (
                num < 2
                or dp_size % num
                or first % num
                or [*m.replicas] != [*range(first, first + num)]
            ):
                raise PlanError(
                    f"{where}; give n of them, from a multiple of n on, where n is at least 2 and "
                    f"divides {dp_size}"
                )
            if rank not in m.replicas:
                raise PlanError(f"{where}, but not on this one; give it to these only")
            if micro_batches[number] is not m or chain != len(merged):
                raise PlanError(
                    f"{where}; the {len(merged)} of this kind come first and are the first chain, "
                    f"which has {chain} micro-batches"
                )
            if number and (before := len(merged[number - 1].replicas)) % num:
                raise PlanError(
                    f"{where}, behind one of {before}; let larger blocks come first, each with "
                    "whole smaller ones in it"
                )
            runs.setdefault(m.replicas, {}).setdefault(rank, []).append(m)
    for block, lists in runs.items():
        expected = next(iter(lists.values()))
        for rank in block:
            own = lists.get(rank, [])
            for mine, theirs in zip_longest(own, expected):
                if mine != theirs:
                    index = (theirs or mine).index
                    raise PlanError(
                        f"step {plan.step}, data-parallel rank {rank}: micro-batch {index} runs "
                        f"on replicas {list(block)} together, but this one has "
                        f"{'none' if mine is None else f'micro-batch {mine.index}, or another'} in "
                        "its place; give the same to all of them, in one order"
                    )
