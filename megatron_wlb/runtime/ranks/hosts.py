"""What all ranks find out together without their GPUs: reductions between the hosts."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import MicroBatchPlan, StepPlan
from megatron_wlb.runtime.ranks.agreement import MOST_NAMED, REMEDY, Held, differences, number_of
from megatron_wlb.runtime.ranks.reads import Reads
from megatron_wlb.runtime.ranks.transfer import of_all_ranks, open_group, others
from megatron_wlb.runtime.ranks.watchdog import waiting_for


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
        return self._reduced(values, dist.ReduceOp.MAX)

    def compare(self, where: str, values: Mapping[str, str]) -> None:
        """Compares values by name over all ranks, all of which call it.

        Only where some differ are they exchanged, and then those alone, unless ranks have unlike
        numbers of them. Raises :class:`PlanError` on every rank then, which names ``where`` that
        is, the ranks and the values.
        """
        differs, is_unlike = self._differ([number_of(str(values)), len(values)])
        if not (differs or is_unlike):
            return
        if not is_unlike:
            differing = self._differ([number_of(f"{name} {text}") for name, text in values.items()])
            named = [name for name, one in zip(values, differing, strict=True) if one]
            values = {name: values[name] for name in named[:MOST_NAMED]}
        held = of_all_ranks(Held.here(values))
        raise PlanError(f"{where}: {differences(held)}; {REMEDY}")

    def _differ(self, numbers: Sequence[int]) -> list[bool]:
        """Whether each number differs over ranks."""
        found = self.max(*numbers, *(-number for number in numbers))
        pairs = zip(found[: len(numbers)], found[len(numbers) :], strict=True)
        return [largest != -negated for largest, negated in pairs]

    def compare_step(self, plan: StepPlan, reads: Reads | None) -> None:
        """Compares the plan of the step that begins, and what was read in the one before.

        One reduction of two numbers does both. Raises :class:`PlanError` on every rank where any
        two differ, which names the ranks and the first difference.
        """
        own = number_of(plan.digest)
        plans, read = self._reduced([own, reads.balance if reads else 0], dist.ReduceOp.SUM)
        self._require_equal(reads, read)
        # All ranks see a sum that is not theirs, unless differences cancel out: once in 2^40.
        if plans != own * dist.get_world_size():
            self._refuse(plan)

    def compare_reads(self, reads: Reads | None) -> None:
        """Compares what was read in the last step alone, as in :meth:`compare_step`."""
        (read,) = self._reduced([reads.balance if reads else 0], dist.ReduceOp.SUM)
        self._require_equal(reads, read)

    def _require_equal(self, reads: Reads | None, balance: int) -> None:
        if balance:
            here = None if reads is None else (reads.place, Held.here(reads.told()))
            label = None if reads is None else reads.label
            places: dict[tuple[int, ...], list[Held]] = {}
            for said in of_all_ranks((label, here)):
                label = label or said[0]
                if said[1] is not None:
                    places.setdefault(said[1][0], []).append(said[1][1])
            found = filter(None, (_differing_reads(held) for held in places.values()))
            raise PlanError(
                f"{label}: ranks that must read the same tokens read others: "
                f"{next(found, 'which ones is not known')}; compare their machines' copies of the "
                "corpus (cksum), and go on from a checkpoint before this step"
            )

    def _refuse(self, plan: StepPlan) -> NoReturn:
        """Raises an error that says in what the ranks' plans differ first, from coarse to fine:
        each level has the same names on all ranks where those before it are equal.
        """
        for level in _levels(plan):
            self.compare(f"step {plan.step}: ranks hold different plans", level)
        raise PlanError(
            f"step {plan.step}: ranks hold different plans (this one {plan.digest[:12]}); {REMEDY}"
        )

    def _reduced(self, values: Sequence[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        reduced = np.array(values, dtype=np.int64)
        for group in self._groups:
            with waiting_for(others(group)):
                dist.all_reduce(torch.from_numpy(reduced), op=op, group=group)
        found: list[int] = reduced.tolist()
        return found

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


def _levels(plan: StepPlan) -> Iterator[dict[str, str]]:
    """A plan as values by name, from what is said of all of it down to its documents."""
    yield {
        "the number of the step": str(plan.step),
        "--wlb-packing": plan.packing,
        "the strategy": str(plan.strategy),
        "documents": f"{sum(1 for _ in plan.documents)} of {plan.num_tokens} tokens",
        "waiting documents": f"{plan.num_waiting} of {plan.waiting_tokens} tokens",
        "numbers of micro-batches": str([len(own) for own in plan.micro_batches]),
        "chains of slices": str(plan.chains),
    }
    places = [(r, n, m) for r, own in enumerate(plan.micro_batches) for n, m in enumerate(own)]
    yield {f"at place {n} of data-parallel rank {r}": _told(m) for r, n, m in places}
    yield {
        f"at place {number} of micro-batch {m.index}": f"document {s.document.number} of corpus "
        f"{s.document.corpus} in epoch {s.document.epoch}, tokens {s.document.offset + s.start} to "
        f"{s.document.offset + s.stop}{'' if s.document.ends else ', not its end'}"
        for _, _, m in places
        for number, s in enumerate(m.spans)
    }


def _told(m: MicroBatchPlan) -> str:
    together = f", run by data-parallel ranks {m.replicas}" if m.replicas else ""
    return (
        f"micro-batch {m.index} of {len(m.spans)} documents and {m.length} tokens, padded to "
        f"{m.padded_length}, {m.sharding}{together}"
    )


def _differing_reads(ranks: Sequence[Held]) -> str:
    """What differs among ranks that read the same; those of the stages between read nothing."""
    names = dict.fromkeys(name for held in ranks for name in held.values)
    for name in names:
        readers = [Held(h.rank, h.host, {name: h.values[name]}) for h in ranks if name in h.values]
        if said := differences(readers):
            return said
    return ""
