"""verl's balancing of sequence lengths, with micro-batches by time and under the cap.

At the end of ``verl/utils/seqlen_balancing.py`` add::

    from megatron_wlb.verl import get_seqlen_balanced_partitions, rearrange_micro_batches

Both take and return what verl's functions of these names do, and what verl builds on them uses them
too. Time is verl's own workload, ``linear · n + quadratic · n²``. What differs: a micro-batch never
has more tokens than ``max_token_len``, for which there may be one more than verl would take; and
with ``pp_size`` their number is what a simulation of the pipeline finds fastest::

    rearrange_micro_batches = functools.partial(rearrange_micro_batches, pp_size=4)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_wlb.api import plan_batch
from megatron_wlb.cost import Parallelism
from megatron_wlb.errors import ConfigError
from megatron_wlb.trainers import (
    TOKENS,
    Parts,
    as_many_parts,
    cost_of_flops,
    fewest_parts,
    partitions,
    small_ends,
    times_of,
)

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
    *,
    pp_size: int = 1,
) -> tuple[list[Any], Parts]:
    """The micro-batches of a rank's ``batch``, and the numbers of the samples in each.

    Args:
        batch: a TensorDict with nested ``input_ids``, or with ``attention_mask`` ``[samples, S]``.
        max_token_len: the most tokens of a micro-batch.
        dp_group: ranks that must have as many micro-batches, with ``same_micro_num_in_dp``.
        num_batches_divided_by: what the number is a multiple of.
        same_micro_num_in_dp: whether ranks agree on a number, if ``torch.distributed`` runs.
        min_num_micro_batch: the least number.
        use_dynamic_bsz_balance: whether the smallest run first and last, so that a pipeline fills
            and drains soon; else in the order of their first samples.
        pp_size: stages of the pipeline that runs them; verl's callers do not say.

    Raises:
        ConfigError: a sample above ``max_token_len``, or fewer samples than micro-batches.
    """
    import torch
    from verl.utils import seqlen_balancing, tensordict_utils
    from verl.utils.device import get_device_name

    input_ids = batch["input_ids"]
    if input_ids.is_nested:
        lengths = input_ids.offsets().diff().tolist()
    else:
        lengths = batch["attention_mask"].sum(dim=1).tolist()

    def most_of_ranks(number: int) -> int:
        if not (same_micro_num_in_dp and torch.distributed.is_initialized()):
            return number
        numbers = torch.tensor([number], device=get_device_name())
        most = torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(numbers, op=most, group=dp_group)
        return int(numbers.item())

    work = seqlen_balancing.calculate_workload(torch.tensor([TOKENS, 2 * TOKENS])).tolist()
    parts = micro_batches_of(
        lengths, max_token_len, work,
        multiple=num_batches_divided_by or 1, least=min_num_micro_batch or 1,
        agreed=most_of_ranks, balance=use_dynamic_bsz_balance, pp_size=pp_size,
    )  # fmt: skip
    return [tensordict_utils.index_select_tensor_dict(batch, part) for part in parts], parts


def micro_batches_of(
    lengths: Sequence[int],
    max_tokens: int,
    work: Sequence[float],
    *,
    multiple: int = 1,
    least: int = 1,
    agreed: Callable[[int], int] = int,
    balance: bool = True,
    pp_size: int = 1,
) -> Parts:
    """Numbers of the samples in each micro-batch, ascending; none is empty or above ``max_tokens``.

    ``work`` is that of a sample of ``TOKENS`` and of one of twice as many. ``agreed`` takes the
    number that is enough here, and gives the one that all ranks run. It is called once, so that no
    rank waits for one that has found an error before.

    Raises :class:`ConfigError` as :func:`rearrange_micro_batches`.
    """
    sizes = np.array(lengths, dtype=np.int64)
    longest = int(sizes.argmax()) if len(sizes) else -1
    fits = longest >= 0 and int(sizes[longest]) <= max_tokens
    cost = cost_of_flops(*(FLOPS_OF_WORK * one for one in work))
    times = times_of(cost, sizes, max_tokens)
    parts = fewest_parts(times, sizes, max_tokens, len(sizes)) if fits else []
    wanted = len(parts)
    if fits and pp_size > 1:
        layout = Parallelism(pp_size=pp_size)
        plan = plan_batch(
            np.maximum(sizes, 1).tolist(), max_tokens=max_tokens, layout=layout, cost=cost
        )
        wanted = max(wanted, min(len(sizes) // multiple * multiple, len(plan.micro_batches[0])))
    number = -(-agreed(max(wanted, least)) // multiple) * multiple
    if not fits:
        if longest < 0:
            raise ConfigError("the batch has no samples; give this rank one at least")
        raise ConfigError(
            f"sample {longest} has {sizes[longest]} tokens, above max_token_len {max_tokens}; "
            "raise it or cut the sample"
        )
    if number > len(sizes):
        raise ConfigError(
            f"{number} micro-batches are needed of {len(sizes)} samples, each with one at least: "
            f"{len(parts)} hold max_token_len {max_tokens}, min_num_micro_batch is {least}, "
            f"num_batches_divided_by {multiple}; give each rank more samples"
        )
    parts = as_many_parts(times, sizes, max_tokens, parts, number, len(sizes))
    return small_ends(times, parts) if balance else parts
