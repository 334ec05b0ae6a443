"""Costs measured on real ranks: complete, equal on all of them, and leaving no trace."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
from helpers.gloo import GlooPool

from megatron_wlb.cost import DocumentCost, ProfiledCost
from megatron_wlb.cost.fit import Fit
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.settings.command_line import parse

LONGEST = 130
FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-layers 4 --seq-length 64 --vocab-size 59 "
    "--make-vocab-size-divisible-by 32 --global-batch-size 2 --group-query-attention "
    "--num-query-groups 2 "
)


def measure(flags: str) -> tuple[ProfiledCost, list[Any]]:
    """The tables, and what measuring changed: gradients that are not zero, random numbers."""
    import torch
    from helpers.ranks import build_runner
    from helpers.workload import make_workload

    from megatron_wlb.runtime.measuring.measure import measure_tables
    from megatron_wlb.runtime.saving.core import rng_state

    config = parse(flags.split())
    model = build_runner(config, make_workload([[8]], vocab_size=59)).model
    before = rng_state()
    deferred = [torch.ones(1)]  # as runs with --defer-embedding-wgrad-compute add to it
    model.gpts[-1].grad_output_buffer = deferred
    tables = measure_tables(model, model_shape(config, 64), LONGEST, 59, "here")
    changed = [
        name
        for chunk in model.chunks
        for name, parameter in chunk.named_parameters()
        if parameter.main_grad.any()
    ]
    changed += ["deferred gradients"] * len(deferred)
    for name, state in rng_state().items():
        same = torch.utils._pytree.tree_map(torch.equal, before[name], state)
        if not all(torch.utils._pytree.tree_leaves(same)):
            changed.append(f"random numbers of {name}")
    return tables, changed


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, ""),
        (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
        (2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt||tL"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.1"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
        (2, "--context-parallel-size 2 --window-size 15,0 --window-attn-skip-freq 2"),
    ],
)
def test_tables_serve_the_run_that_they_were_measured_for(
    gloo: GlooPool, world_size: int, flags: str
) -> None:
    results = gloo.run(world_size, measure, FLAGS + flags)
    tables = results[0][0]
    assert all(other == tables for other, _ in results)
    assert [changed for _, changed in results] == [[]] * world_size
    config = parse((FLAGS + flags).split())
    shape, tp_size = model_shape(config, 64), config.parallel.tensor_model_parallel_size
    cp_size = config.parallel.context_parallel_size
    tables.check(shape, tp_size, cp_size)
    tables.check_reach(LONGEST)
    with pytest.raises(ConfigError, match="num_query_groups 2, but this one has 4"):
        other = dataclasses.replace(shape, num_query_groups=4)
        tables.check(other, tp_size, cp_size)
    assert tables.document_us(LONGEST) > tables.document_us(3) > 0
    work = tables.work([LONGEST])
    assert min(work.forward_linear_us, work.backward_attention_us) > 0
    assert ProfiledCost.from_dict(tables.as_dict()) == tables


def fit_as_each_processor_does(flags: str, fails: bool) -> Any:
    """The measured cost where every rank would fit another one, or none."""
    import torch
    from helpers.ranks import build_runner
    from helpers.workload import make_workload

    from megatron_wlb.runtime.measuring import measure as measuring

    rank = torch.distributed.get_rank()

    def fit(samples: Any, *window: Any) -> Fit:
        assert len(list(samples)) > 3
        if fails:
            raise ConfigError(f"rank {rank} cannot fit")
        return Fit(DocumentCost(0.1, 0.0, 0.3 * (1 + rank * 2**-52), 0.0, 5.0), 0.1, 0.2, 9)

    config = parse(flags.split())
    model = build_runner(config, make_workload([[8]], vocab_size=59)).model
    with mock.patch.object(measuring, "fit_document_cost", fit):
        try:
            return measuring.measured_cost(model, 64, 59).as_dict()
        except ConfigError as error:
            torch.distributed.barrier()  # nobody is left behind
            return str(error)


def test_ranks_that_would_fit_unlike_costs_hold_the_same(gloo: GlooPool) -> None:
    flags = FLAGS + "--pipeline-model-parallel-size 2"
    first, second = gloo.run(2, fit_as_each_processor_does, flags, False)
    assert first == second
    assert first["backward_linear_us"] == 0.3
    assert gloo.run(2, fit_as_each_processor_does, flags, True) == ["rank 0 cannot fit"] * 2
