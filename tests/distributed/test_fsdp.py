"""Weights that torch's FSDP2 shards: loss, every gradient and the weights are one process's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from helpers.layouts import FULL, HEAD_GROUPS, WORKLOAD, Differences, Layout, further
from helpers.oracle import State
from helpers.plans import merged_for, scatter_for, sliced_for
from helpers.ranks import build_runner, load
from helpers.shards import RankRun
from helpers.workload import Workload

from megatron_wlb.plan import StepPlan
from megatron_wlb.settings.config import Config

CASES = [
    # Megatron refuses tied embeddings, which the other models have.
    Layout("llama", 5, dp=2),
    further(Layout("llama", 2, dp=3, extra=FULL)),  # which divides few of the weights
    Layout("llama", 3, dp=2, tp="2sp"),
    further(Layout("llama-3", 3, dp=2, cp=2, sharding="per-document", extra=HEAD_GROUPS)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharded_weights_train_as_one_process_does(wrong: Differences, case: Layout) -> None:
    plan = scatter_for(case.config, WORKLOAD, case.world_size, 0)
    assert len({sum(m.num_targets for m in rank) for rank in plan.micro_batches}) > 1
    assert wrong(case, "", train=train) == []


FSDP2 = "--use-torch-fsdp2"


@pytest.mark.parametrize(
    "case",
    [
        Layout("llama", 5, dp=2, extra=f"{FSDP2} {FULL}"),
        further(Layout("llama-3", 3, dp=2, cp=2, sharding="per-document", extra=FSDP2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("plan_for", [sliced_for, merged_for])
def test_sharded_weights_train_on_slices_that_ranks_run_alike(
    wrong: Differences, case: Layout, plan_for: Callable[..., StepPlan]
) -> None:
    plan = plan_for(case.config, WORKLOAD, case.world_size, 0)
    first, second = ([m.num_targets for m in rank] for rank in plan.micro_batches)
    assert any(bool(one) != bool(other) for one, other in zip(first, second, strict=True))
    assert max(plan.chains[0]) > 1
    assert wrong(case, "", plan_for, train=train) == []


FAULTS = {"mean of ranks": 0.5, "undivided": None}
"""What Megatron's gradients are multiplied with, instead of the number of ranks ÷ tokens."""


@pytest.mark.parametrize("fault", FAULTS)
def test_gradients_that_are_divided_otherwise_are_seen(wrong: Differences, fault: str) -> None:
    found = wrong(CASES[0], fault, train=train)
    assert any("step 0: gradient of" in line for line in found)


def train(
    config: Config,
    workload: Workload,
    initial: State,
    fault: str,
    plan_for: Callable[[Config, Workload, int, int], StepPlan],
) -> RankRun:
    """Does what :func:`helpers.ranks.train` does, under the wrapper that Megatron-LM's loop has."""
    import torch
    from megatron.core.distributed import (
        TorchFullyShardedDataParallel,
        TorchFullyShardedDataParallelConfig,
        finalize_model_grads,
    )

    from megatron_wlb.runtime.gpt import build as model_module
    from megatron_wlb.runtime.megatron_lm import fsdp
    from megatron_wlb.runtime.megatron_lm.chunks import of_chunks
    from megatron_wlb.runtime.stepping.optimizer import build_optimizer, build_scheduler
    from megatron_wlb.runtime.stepping.step import StepRunner

    with mock.patch.object(model_module, "_wrap", lambda config, core, chunks: chunks):
        plain = build_runner(config, workload)
    core, (gpt,) = plain.model.config, plain.model.gpts
    held, _ = load(config, plain.model, initial)
    core.finalize_model_grads_func = finalize_model_grads
    # As Megatron-LM's arguments say.
    core.transformer_impl = "local"
    for module in gpt.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = False
    chunk = TorchFullyShardedDataParallel(core, TorchFullyShardedDataParallelConfig(), gpt)
    scale, factor = fsdp._scale_gradients, FAULTS.get(fault, 1.0)

    def scale_wrongly(chunk: Any, scaling_factor: float) -> None:
        scale(chunk, scaling_factor * factor if factor else 1 / chunk.process_group.size())

    with mock.patch.object(fsdp, "_scale_gradients", scale_wrongly):
        model = of_chunks([chunk])
    runner = StepRunner(model, plain.batches, replicas_meet=True)
    optimizer = build_optimizer(config, model)
    scheduler = build_scheduler(config, optimizer)
    parameters = list(gpt.parameters())
    assert all(part.indices.shape == p.shape for part, p in zip(held, parameters, strict=True))
    losses, evaluated, gradients = [], [], []
    for number in range(len(workload.steps)):
        plan = plan_for(config, workload, torch.distributed.get_world_size(), number)
        chunk.train()
        optimizer.zero_grad()
        losses.append(runner.run(plan).mean)
        chunk.eval()
        with torch.no_grad():
            evaluated.append(runner.run(plan, forward_only=True).mean)
        gradients.append(tuple(p.grad.full_tensor().reshape(-1).numpy() for p in parameters))
        success, _, _ = optimizer.step()
        assert success
        scheduler.step(increment=config.training.global_batch_size)
    weights = tuple(p.detach().full_tensor().numpy() for p in parameters)
    ranges = tuple((0, p.numel()) for p in parameters)
    return RankRun(tuple(held), tuple(losses), tuple(evaluated), tuple(gradients), ranges, weights)
