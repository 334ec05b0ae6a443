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
import numpy.typing as npt

from megatron_wlb.api import plan_batch
from megatron_wlb.cost import Parallelism
from megatron_wlb.errors import ConfigError
from megatron_wlb.trainers import TOKENS, cost_of_flops

Parts = list[list[int]]
"""Numbers of samples, a list for each rank or micro-batch."""
Numbers = npt.NDArray[np.int64]

MOST_SWAPS = 64
"""The most swaps of a part, in the mean."""
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
    parts = _placed(given + 1, np.zeros_like(given), 0, k_partitions, size)
    assert parts is not None  # There is no cap.
    _swap(given + 1, np.zeros_like(given), 0, parts, moves=not equal_size)
    return [sorted(part) for part in parts]


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
        agreed=most_of_ranks, small_ends=use_dynamic_bsz_balance, pp_size=pp_size,
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
    small_ends: bool = True,
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
    scale = 1e6 / cost.document_us(max(1, max_tokens))
    times = np.array([1 + round(scale * cost.document_us(int(n))) for n in sizes], dtype=np.int64)
    parts = _fewest(times, sizes, max_tokens) if fits else []
    wanted = len(parts)
    if fits and pp_size > 1:
        layout = Parallelism(pp_size=pp_size)
        plan = plan_batch(
            np.maximum(sizes, 1).tolist(), max_tokens=max_tokens, layout=layout, cost=cost
        )
        wanted = max(wanted, min(len(sizes), len(plan.micro_batches[0])))
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
    if number > len(parts):
        parts = _placed(times, sizes, max_tokens, number) or _split(times, parts, number)
    _swap(times, sizes, max_tokens, parts)
    parts = sorted(sorted(part) for part in parts)
    if small_ends:
        ascending = sorted(parts, key=lambda part: (int(times[part].sum()), part))
        parts = [*ascending[::2], *ascending[1::2][::-1]]
    return parts


def _fewest(times: Numbers, sizes: Numbers, max_tokens: int) -> Parts:
    """As few parts as a search finds to hold all samples: balanced by time where that has room,
    else by tokens, else by best fit, the longest first.
    """
    least = max(1, -(-int(sizes.sum()) // max_tokens))
    full: Parts = []
    rooms: list[int] = []
    for sample in np.argsort(-sizes, kind="stable").tolist():
        own = int(sizes[sample])
        fitting = [(room, at) for at, room in enumerate(rooms) if room >= own]
        if fitting:
            _, at = min(fitting)
            full[at].append(sample)
            rooms[at] -= own
        else:
            full.append([sample])
            rooms.append(max_tokens - own)
    for number in range(least, len(full)):
        found = _placed(times, sizes, max_tokens, number)
        if found is not None:
            return found
        found = _placed(sizes, sizes, int(sizes.sum()), number)
        assert found is not None  # There is room for all in each.
        _swap(sizes, sizes, 0, found)
        if max(int(sizes[part].sum()) for part in found) <= max_tokens and all(found):
            return found
    return _placed(times, sizes, max_tokens, len(full)) or full


def _placed(
    times: Numbers, sizes: Numbers, max_tokens: int, number: int, most: int | None = None
) -> Parts | None:
    """The heaviest first, each where least is of the parts with room; None where none has."""
    parts: Parts = [[] for _ in range(number)]
    loads, rooms = np.zeros(number, dtype=np.int64), np.full(number, max_tokens)
    closed = np.iinfo(np.int64).max
    for sample in np.argsort(-times, kind="stable").tolist():
        at = int(np.where(rooms >= sizes[sample], loads, closed).argmin())
        if rooms[at] < sizes[sample] or loads[at] == closed:
            return None
        parts[at].append(sample)
        loads[at] += times[sample]
        rooms[at] -= sizes[sample]
        if len(parts[at]) == most:
            rooms[at] = -1
    return parts


def _split(times: Numbers, parts: Parts, number: int) -> Parts:
    """Halves the heaviest parts of several samples until there are ``number``."""
    parts = [[*part] for part in parts]
    while len(parts) < number:
        several = [at for at, part in enumerate(parts) if len(part) > 1]
        part = parts.pop(max(several, key=lambda at: (int(times[parts[at]].sum()), -at)))
        part.sort(key=lambda sample: (-int(times[sample]), sample))
        half: Parts = [[], []]
        for sample in part:
            half[int(times[half[1]].sum() < times[half[0]].sum())].append(sample)
        parts += half
    return parts


def _swap(
    times: Numbers, sizes: Numbers, max_tokens: int, parts: Parts, moves: bool = True
) -> None:
    """Swaps samples of the heaviest part with those of others, for as long as that helps.

    Where one sample can ``move`` without another in return, that is tried, too.
    """
    loads = [int(times[part].sum()) for part in parts]
    tokens = [int(sizes[part].sum()) for part in parts]
    for _ in range(MOST_SWAPS * len(parts)):
        heavy = max(range(len(parts)), key=lambda at: (loads[at], -at))
        for other in sorted(range(len(parts)), key=lambda at: (loads[at], at)):
            gap = loads[heavy] - loads[other]
            if gap <= 1:
                return
            may_move = moves and len(parts[heavy]) > 1
            a, b = np.array(parts[heavy]), np.array(parts[other])
            given_us, given = times[a], sizes[a]
            taken_us, taken = times[b], sizes[b]
            if may_move:
                taken_us, taken = np.append(taken_us, 0), np.append(taken, 0)
            less = given_us[:, None] - taken_us[None, :]
            more = given[:, None] - taken[None, :]
            helps = (less > 0) & (less < gap)
            if max_tokens:
                helps &= (more <= max_tokens - tokens[other]) & (more >= tokens[heavy] - max_tokens)
            if not helps.any():
                continue
            slower = np.where(helps, np.maximum(gap - less, less), gap)
            row, column = divmod(int(slower.argmin()), slower.shape[1])
            sample = parts[heavy].pop(row)
            if column < len(parts[other]):
                parts[heavy].append(parts[other].pop(column))
            parts[other].append(sample)
            loads[heavy] -= int(less[row, column])
            loads[other] += int(less[row, column])
            tokens[heavy] -= int(more[row, column])
            tokens[other] += int(more[row, column])
            break
        else:
            return
