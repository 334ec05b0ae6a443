"""What all ranks find out together without their GPUs: reductions between the hosts."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import StepPlan
from megatron_wlb.runtime.transfer import open_group


class Hosts:
    """Reduces over all ranks in host memory.

    A reduction on the device is queued behind its kernels, and a host that looks at the result
    waits for them all. So there are two groups of gloo's: the ranks of one replica of the model,
    and those that hold the same weights. One after the other they reach every rank. Each rank has
    ``TP · PP + DP · CP`` connections for that, where one group of the world would have all ranks.
    A reduction takes two exchanges of a few bytes. Under gloo Megatron's own groups serve.
    """

    def __init__(
        self, groups: ProcessGroupCollection, timeout: datetime.timedelta | None = None
    ) -> None:
        self._of_model = groups
        self._timeout = timeout

    def max(self, *values: int) -> list[int]:
        """The largest of each value over all ranks, all of which call it."""
        largest = np.array(values, dtype=np.int64)
        for group in self._groups:
            dist.all_reduce(torch.from_numpy(largest), op=dist.ReduceOp.MAX, group=group)
        found: list[int] = largest.tolist()
        return found

    def verify_digest(self, plan: StepPlan) -> None:
        """Compares the plan's digest over all ranks.

        Raises :class:`PlanError` on every rank where any two differ.
        """
        value = int(plan.digest[:15], 16)
        largest, negated_smallest = self.max(value, -value)
        if largest != -negated_smallest:
            raise PlanError(
                f"step {plan.step}: ranks hold different plans (this one {plan.digest[:12]}); they "
                "must see the same corpus, flags, seed, packing state, and files of --wlb-hardware "
                "and --wlb-cost"
            )

    @cached_property
    def _groups(self) -> Sequence[dist.ProcessGroup]:
        """Made when all ranks have come to the first reduction."""
        known = (self._of_model.mp, self._of_model.dp_cp)
        return [between_hosts(group, self._timeout) for group in known if group.size() > 1]


def between_hosts(
    group: dist.ProcessGroup, timeout: datetime.timedelta | None = None
) -> dist.ProcessGroup:
    """The group itself if it is gloo's, or one of gloo with the same ranks. All ranks of the world
    call it together.
    """
    if dist.get_backend(group) == dist.Backend.GLOO:
        return group
    return open_group(dist.get_process_group_ranks(group), timeout, backend="gloo")
