"""Process groups of unlike replicas, and Megatron's globals for the time that one runs."""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.runtime.stepping.executor import Links

_GROUPS = {
    (): "DATA_PARALLEL_GROUP",
    (2,): "TENSOR_MODEL_PARALLEL_GROUP TENSOR_AND_DATA_PARALLEL_GROUP",
    (1,): "CONTEXT_PARALLEL_GROUP DATA_PARALLEL_GROUP_WITH_CP "
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    (1, 2): "TENSOR_AND_CONTEXT_PARALLEL_GROUP TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    (0, 2): "MODEL_PARALLEL_GROUP",
    (0,): "PIPELINE_MODEL_PARALLEL_GROUP",
}
"""Megatron's names of the groups of a replica, whose data-parallel ranks are one, by axes of
``[PP, CP, TP]``."""

_EXPERT_GROUPS = {
    (3,): "EXPERT_TENSOR_PARALLEL_GROUP",
    (2,): "EXPERT_MODEL_PARALLEL_GROUP",
    (2, 3): "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    (0, 2, 3): "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    (1,): "EXPERT_DATA_PARALLEL_GROUP INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
}
"""Megatron's names of the groups of its experts, by axes of ``[PP, EDP, EP, ETP]``."""

_RANKS = {
    "DATA_PARALLEL_GLOBAL_RANKS": "DATA_PARALLEL_GROUP",
    "DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "DATA_PARALLEL_GROUP_WITH_CP",
    "TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "TENSOR_MODEL_PARALLEL_GROUP",
    "CONTEXT_PARALLEL_GLOBAL_RANKS": "CONTEXT_PARALLEL_GROUP",
    "PIPELINE_GLOBAL_RANKS": "PIPELINE_MODEL_PARALLEL_GROUP",
    "MODEL_PARALLEL_GLOBAL_RANKS": "MODEL_PARALLEL_GROUP",
    "EXPERT_MODEL_PARALLEL_RANKS": "EXPERT_MODEL_PARALLEL_GROUP",
}
"""Megatron's lists of ranks, and the groups that they are of."""


_TWINS = ("_WITH_GTP_REMAT", "_WITH_EGTP")
"""Ends of the names of groups that some have besides from 0.19 on, with the ranks that share the
shards of a weight: here no others."""


class ReplicaGroups:
    """The groups of one replica that this rank is in, as Megatron's globals."""

    def __init__(self, values: Mapping[str, Any], links: Links | None = None) -> None:
        self.links = links
        """The communicators that slices need, where the replica runs them."""
        self._values = {f"_{name}": value for name, value in values.items()}
        twins = {f"{n}{more}": v for n, v in self._values.items() for more in _TWINS}
        self._values |= {name: v for name, v in twins.items() if hasattr(parallel_state, name)}
        for name in self._values:
            if not hasattr(parallel_state, name):
                raise CompatibilityError(
                    f"megatron.core.parallel_state has no {name}, which replicas of strategies "
                    "set; this Megatron is not one that megatron-wlb knows"
                )

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Inside, Megatron's globals are those of this replica: it reads some of them also where a
        ``ProcessGroupCollection`` is given.
        """
        before = {name: getattr(parallel_state, name) for name in self._values}
        vars(parallel_state).update(self._values)
        try:
            yield
        finally:
            vars(parallel_state).update(before)


class GroupOpener:
    """Makes the groups of replicas, one for each set of ranks; all ranks of the world call it in
    the same order.
    """

    def __init__(self, timeout: datetime.timedelta | None = None) -> None:
        self._timeout = timeout
        self._known: dict[tuple[int, ...], Any] = {}

    def replica(
        self, scheme: Scheme, ranks: tuple[int, ...], ep_size: int, etp_size: int
    ) -> ReplicaGroups | None:
        """Opens the groups of a replica, whose experts are divided over ``ep_size`` ranks and each
        over ``etp_size``; None on ranks that are not in it.
        """
        grid = np.array(ranks).reshape(scheme.pp_size, scheme.cp_size, scheme.tp_size)
        # TP's ranks are neighbours in both.
        experts = grid.reshape(scheme.pp_size, -1, ep_size, etp_size)
        own: dict[str, Any] = {}
        for of, names_by_axes in ((grid, _GROUPS), (experts, _EXPERT_GROUPS)):
            for axes, names in names_by_axes.items():
                own |= dict.fromkeys(names.split(), self._mine(_along(of, axes)))
        pipelines = _along(grid, (0,))
        num_more = Links.num_more(scheme.pp_size, scheme.vpp_size) if scheme.sliced else 0
        more = [self._mine(pipelines, anew=True) for _ in range(num_more)]
        own["EMBEDDING_GROUP"] = self._mine(pipelines[:, sorted({0, scheme.pp_size - 1})])
        own["POSITION_EMBEDDING_GROUP"] = self._mine(pipelines[:, :1])
        if dist.get_rank() not in ranks:
            return None
        values = dict(own)
        values |= {name: dist.get_process_group_ranks(own[g]) for name, g in _RANKS.items()}
        (pipeline,) = (row.tolist() for row in pipelines if dist.get_rank() in row)
        ends = dict.fromkeys((pipeline[0], pipeline[-1]))
        values["EMBEDDING_GLOBAL_RANKS"] = list(ends)
        values["POSITION_EMBEDDING_GLOBAL_RANKS"] = pipeline[:1]
        vpp = scheme.vpp_size if scheme.vpp_size > 1 else None
        values["VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = vpp
        values["VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = None if vpp is None else 0
        links, pp_group = None, own["PIPELINE_MODEL_PARALLEL_GROUP"]
        if scheme.sliced:
            links = Links.open(pp_group, self._timeout, scheme.vpp_size, [*filter(None, more)])
        return ReplicaGroups(values, links)

    def _mine(self, lists: Any, *, anew: bool = False) -> dist.ProcessGroup | None:
        """Opens a group for each list of ranks, ``anew`` also where there is one; this rank's, if
        it is in one.
        """
        own: dist.ProcessGroup | None = None
        for ranks in map(tuple, lists.tolist()):
            if anew or ranks not in self._known:
                self._known[ranks] = dist.new_group(list(ranks), timeout=self._timeout)
            if dist.get_rank() in ranks:
                own = self._known[ranks]
        return own


def _along(grid: Any, axes: tuple[int, ...]) -> Any:
    """The ranks of a grid in lists that go along ``axes``: ``[lists, ranks]``."""
    others = [axis for axis in range(grid.ndim) if axis not in axes]
    size = math.prod(grid.shape[axis] for axis in axes)
    return grid.transpose(*others, *axes).reshape(-1, size)
