"""What ranks find out together reaches all of them, and no device."""

from __future__ import annotations

from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import Layout
from helpers.waits import recorded

LAYOUT = Layout("gpt2", 4, pp=2, dp=2)


def largest(own_groups: bool, holder: int) -> tuple[list[int], list[str], int]:
    """The maximum over ranks, of which one holds a large value; the calls that would wait."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_wlb.runtime.ranks.hosts import Hosts
    from megatron_wlb.runtime.trainer import distributed

    distributed.initialize_groups(LAYOUT.config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    hosts = Hosts(groups)
    values = (100, -5) if dist.get_rank() == holder else (dist.get_rank(), -7)
    # As where the model's groups are NCCL's.
    backend = "nccl" if own_groups else "gloo"
    with mock.patch.object(dist, "get_backend", lambda _: backend):
        num_own = sum(group not in (groups.mp, groups.dp_cp) for group in hosts._groups)
    with recorded() as places:
        found = hosts.max(*values)
    parallel_state.destroy_model_parallel()
    return found, sorted(places), num_own


@pytest.mark.parametrize("own_groups", [False, True])
@pytest.mark.parametrize("holder", [0, 3])
def test_the_largest_value_reaches_all_ranks(gloo: GlooPool, own_groups: bool, holder: int) -> None:
    for found, places, num_own in gloo.run(4, largest, own_groups, holder, timeout_s=25):
        assert found == [100, -5]
        assert places == []
        assert num_own == 2 * own_groups
