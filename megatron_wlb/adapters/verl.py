"""verl's balancing of sequence lengths, with micro-batches by time and under the cap.

At the end of ``verl/utils/seqlen_balancing.py`` add::

    from megatron_wlb.adapters.verl import get_seqlen_balanced_partitions, rearrange_micro_batches

Both take and return what verl's functions of these names do, and what verl builds on them uses them
too. Time is verl's own workload, ``linear · n + quadratic · n²``. As in verl from 0.9.1 on, a
micro-batch never has more tokens than ``max_token_len``. What differs: fewer micro-batches may be
enough for that; and with ``pp_size`` their number is what a simulation of the pipeline finds
fastest::

    rearrange_micro_batches = functools.partial(rearrange_micro_batches, pp_size=4)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_wlb.adapters.trainers import (
    TOKENS,
    Numbers,
    Parts,
    as_many_parts,
    cost_of_flops,
    fewest_parts,
    halved,
    partitions,
    shared_ranks,
    small_ends,
    times_of,
)
from megatron_wlb.api import plan_batch
from megatron_wlb.cost import Parallelism
from megatron_wlb.errors import ConfigError, WLBError

FLOPS_OF_WORK = 1e5
"""What a unit of verl's workload is in FLOPs, about; only ratios matter."""


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> Parts:
    """``k_partitions`` lists of numbers in ``seqlen_list``, ascending, whose sums are alike.

    ``seqlen_list`` are lengths or workloads, also a tensor. With ``equal_size`` each part has as
    many. Raises :class:`ConfigError` where they cannot, or where a part would be empty.
    """
    given = np.array([int(n) for n in seqlen_list], dtype=np.int64)
    if len(given) < k_partitions or k_partitions < 1:
        raise ConfigError(
            f"k_partitions is {k_partitions}, but there are {len(given)} samples; each part takes "
            "one at least"
        )
    if equal_size and len(given) % k_partitions:
        raise ConfigError(
            f"{len(given)} samples cannot be {k_partitions} parts of equal size; give a multiple "
            f"of {k_partitions}, or equal_size=False"
        )
    size = len(given) // k_partitions if equal_size else None
    # Samples that weigh nothing spread too: no part is empty.
    return [sorted(part) for part in partitions(given + 1, k_partitions, size)]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
    *,
    pp_size: int = 1,
    shared: bool = False,
) -> tuple[list[Any], Parts]:
    """The micro-batches of a rank's ``batch``, and the numbers of the samples in each.

    Args:
        batch: a TensorDict with nested ``input_ids``, or with ``attention_mask`` ``[samples, S]``.
        max_token_len: the most tokens of a micro-batch.
        dp_group: ranks that must have as many micro-batches; None if this rank alone decides.
        num_batches_divided_by: what the number is a multiple of.
        same_micro_num_in_dp: whether the ranks of ``dp_group`` agree on a number.
        min_num_micro_batch: the least number.
        use_dynamic_bsz_balance: whether the smallest run first and last, so that a pipeline fills
            and drains soon; else in the order of their first samples.
        force_group_size: so many samples in a row stay in one micro-batch.
        pp_size: stages of the pipeline that runs them; verl's callers do not say.
        shared: whether the model computes once what samples of a micro-batch begin alike with, as
            :mod:`megatron_wlb.adapters.verl_shared` has it. Only what runs counts then.

    Raises:
        ConfigError: a group of samples above ``max_token_len``, or fewer of them than
            micro-batches; on all ranks of ``dp_group`` alike.
    """
    import torch
    from verl.utils import seqlen_balancing, tensordict_utils
    from verl.utils.device import get_device_name

    input_ids = batch["input_ids"]
    if input_ids.is_nested:
        lengths = input_ids.offsets().diff().tolist()
    else:
        lengths = batch["attention_mask"].sum(dim=1).tolist()
    tokens = None
    if shared and force_group_size == 1:
        tokens = [sample.cpu().numpy() for sample in input_ids.unbind()]

    def most_of_ranks(own: list[int]) -> list[int]:
        if dp_group is None or not (same_micro_num_in_dp and torch.distributed.is_initialized()):
            return own
        numbers = torch.tensor(own, device=get_device_name())
        most = torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(numbers, op=most, group=dp_group)
        found: list[int] = numbers.tolist()
        return found

    work = seqlen_balancing.calculate_workload(torch.tensor([TOKENS, 2 * TOKENS])).tolist()
    parts = micro_batches_of(
        lengths, max_token_len, work, multiple=num_batches_divided_by or 1,
        least=min_num_micro_batch or 1, group=force_group_size, agreed=most_of_ranks,
        balance=use_dynamic_bsz_balance, pp_size=pp_size, tokens=tokens,
    )  # fmt: skip
    return [tensordict_utils.index_select_tensor_dict(batch, part) for part in parts], parts


def micro_batches_of(
    lengths: Sequence[int],
    max_tokens: int,
    work: Sequence[float],
    *,
    multiple: int = 1,
    least: int = 1,
    group: int = 1,
    agreed: Callable[[list[int]], list[int]] = list,
    balance: bool = True,
    pp_size: int = 1,
    tokens: Sequence[Any] | None = None,
) -> Parts:
    """Numbers of the samples in each micro-batch, ascending; none is empty or above ``max_tokens``.

    ``work`` is that of a sample of ``TOKENS`` and of one of twice as many. ``group`` samples in a
    row stay together. ``agreed`` takes numbers of this rank and gives the most of each over all
    ranks that run as many micro-batches. It is called once on each, so all raise alike. With
    ``tokens``, ids of each sample, what samples of a micro-batch begin alike with counts once.

    Raises :class:`ConfigError` as :func:`rearrange_micro_batches`.
    """
    sizes = np.array(lengths, dtype=np.int64)
    refused = _refused(sizes, max_tokens, group)
    parts: Parts = []
    groups = wanted = 0
    if not refused:
        cost = cost_of_flops(*(FLOPS_OF_WORK * one for one in work))
        layout = Parallelism(pp_size=pp_size)
        times = times_of(cost, sizes, max_tokens).reshape(-1, group).sum(axis=1)
        sums = sizes.reshape(-1, group).sum(axis=1)
        groups = len(sums)
        if tokens is not None:
            try:
                (parts,) = shared_ranks(tokens, max_tokens, layout, cost)
            except WLBError as error:
                refused = str(error)
            wanted = len(parts)
        else:
            parts = fewest_parts(times, sums, max_tokens, groups)
            wanted = len(parts)
            if pp_size > 1:
                given = np.maximum(sizes, 1).tolist()
                plan = plan_batch(given, max_tokens=max_tokens, layout=layout, cost=cost)
                wanted = max(wanted, min(groups // multiple * multiple, len(plan.micro_batches[0])))
    most, fewest, any_refused = agreed([max(wanted, least), -groups, int(bool(refused))])
    if any_refused:
        raise ConfigError(refused or "another data-parallel rank cannot run its samples; see there")
    number = -(-most // multiple) * multiple
    if number > -fewest:
        of = "samples" if group == 1 else f"groups of {group} samples"
        raise ConfigError(
            f"{number} micro-batches are needed of {-fewest} {of}, each with one at least: "
            f"{len(parts)} hold max_token_len {max_tokens} here, min_num_micro_batch is {least}, "
            f"num_batches_divided_by {multiple}; give each rank more samples"
        )
    if tokens is not None:
        return halved(np.ones_like(sizes), parts, number, in_order=True)
    parts = as_many_parts(times, sums, max_tokens, parts, number, groups)
    ordered = small_ends(times, parts) if balance else parts
    return [[group * n + at for n in part for at in range(group)] for part in ordered]


def _refused(sizes: Numbers, max_tokens: int, group: int) -> str:
    """Why a rank's samples cannot run; empty if they can."""
    if not len(sizes):
        return "the batch has no samples; give this rank one at least"
    if group < 1 or len(sizes) % group:
        return (
            f"{len(sizes)} samples are no whole groups of force_group_size {group}; give a multiple"
        )
    tokens = sizes.reshape(-1, group).sum(axis=1)
    longest = int(tokens.argmax())
    if tokens[longest] <= max_tokens:
        return ""
    name = "sample" if group == 1 else f"group of {group} samples"
    return (
        f"{name} {longest} has {tokens[longest]} tokens, above max_token_len {max_tokens}; "
        "raise it or cut the sample"
    )
