"""A training step runs without a look at the device: the loss is read when it is told."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from helpers.gloo import GlooPool
from helpers.layouts import WORKLOAD, Layout, further
from helpers.waits import recorded


def places_of_step(layout: Layout, sliced: bool) -> list[list[str]]:
    """Where a rank would wait in its second step, and while its figures are read."""
    from helpers.plans import scatter_for, sliced_for
    from helpers.ranks import build_trainer

    config = layout.config
    trainer = build_trainer(config, WORKLOAD)
    _ = trainer.optimizer
    plan_for = sliced_for if sliced else scatter_for
    for number in range(2):
        plan = plan_for(config, WORKLOAD, torch.distributed.get_world_size(), number)
        with recorded() as step:
            loss = trainer.gradients(plan)
        with recorded() as read:
            assert loss.mean > 0
        trainer.update()
    return [sorted(step), sorted(read)]


ALLOWED = {
    # Compares states of the host's generator: whether device code has drawn from it.
    "megatron/core/tensor_parallel/random.py:fork",
}
READ = ["megatron_wlb/runtime/ranks/transfer.py:item"]


@pytest.mark.parametrize(
    ("case", "sliced"),
    [
        (Layout("llama", 5), False),
        (Layout("gpt2", 4, pp=2, vpp=2), False),
        (Layout("gpt2", 5, pp=2, dp=2, extra="--use-distributed-optimizer"), False),
        (Layout("mixed", 3, tp="2sp"), False),
        (Layout("llama", 3, cp=2, sharding="hybrid"), False),
        further(Layout("llama", 1, cp=2, sharding="hybrid"), True),
        further(Layout("llama", 1, pp=2, cp=2, sharding="hybrid"), True),
    ],
    ids=str,
)
def test_a_step_waits_for_nothing_on_the_device(gloo: GlooPool, case: Layout, sliced: bool) -> None:
    for step, read in gloo.run(case.world_size, places_of_step, case, sliced):
        assert set(step) <= ALLOWED
        assert read == READ


def pins_and_messages(layout: Layout, sliced: bool) -> list[list[str]]:
    """What a rank pins and sends or receives in each of two steps, in this order, as if its device
    were a GPU.
    """
    from helpers.plans import scatter_for, sliced_for
    from helpers.ranks import build_runner

    from megatron_wlb.runtime.ranks.transfer import PinnedBlock

    config = layout.config
    runner = build_runner(config, WORKLOAD)
    runner.batches.device, runner.batches._host = "cuda", PinnedBlock("cuda")
    order: list[str] = []
    blocks: list[torch.UntypedStorage] = []
    empty, group = torch.empty, torch.distributed.ProcessGroup
    send, receive = group.send, group.recv

    def noted_empty(*given: Any, **options: Any) -> torch.Tensor:
        made = empty(*given, **options)
        if options.get("pin_memory"):
            order.append("pins")
            blocks.append(made.untyped_storage())
        return made

    def noted_pin(tensor: torch.Tensor) -> torch.Tensor:
        if all(tensor.untyped_storage()._cdata != block._cdata for block in blocks):
            order.append("pins")
        return tensor

    def noted(call: Any) -> Any:
        return lambda *given: order.append("message") or call(*given)

    found = []
    with (
        mock.patch.object(torch, "empty", noted_empty),
        mock.patch.object(torch.Tensor, "pin_memory", noted_pin),
        mock.patch.object(group, "send", noted(send)),
        mock.patch.object(group, "recv", noted(receive)),
    ):
        for number in range(2):
            order.clear()
            plan_for = sliced_for if sliced else scatter_for
            runner.run(plan_for(config, WORKLOAD, torch.distributed.get_world_size(), number))
            found.append([*order])
    return found


@pytest.mark.parametrize(
    ("case", "sliced"),
    [
        (Layout("gpt2", 4, pp=2, vpp=2), False),
        (Layout("llama", 1, pp=2, cp=2, sharding="hybrid"), True),
        further(Layout("moe-seq", 4, pp=2, dp=2, ep=2), True),
    ],
    ids=str,
)
def test_a_step_pins_memory_before_its_first_message(
    gloo: GlooPool, case: Layout, sliced: bool
) -> None:
    """It may wait for all that the device has to do, which may need what comes later."""
    for steps in gloo.run(case.world_size, pins_and_messages, case, sliced):
        for step in steps:
            assert step[0] == "pins" and set(step[1:]) == {"message"}
