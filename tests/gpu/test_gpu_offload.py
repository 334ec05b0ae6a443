"""Passes whose activations wait in the host's memory: gradients, bytes and overlap on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from megatron_wlb.cost.schedule.order import Action, sliced
from megatron_wlb.runtime.stepping import offload

WIDTH, NUM_LAYERS, NUM_PASSES, NUM_ROWS = 1024, 6, 5, 4096
PASS_BYTES = 2 * NUM_LAYERS * NUM_ROWS * WIDTH * 4


def step(
    hosted: list[bool], window_bytes: float
) -> tuple[list[torch.Tensor], list[int], offload.Passage]:
    """Gradients of a step of one chain, the bytes on the device before each action, and what
    moved them.
    """
    offload.SLAB_BYTES = 1 << 22
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers).to("cuda")
    inputs = [torch.randn(NUM_ROWS, WIDTH, device="cuda") for _ in hosted]
    (actions,) = sliced(1, [len(hosted)])
    host = offload.Host(torch.device("cuda"))
    expected = np.full((1, len(hosted)), float(PASS_BYTES))
    passage = offload.Passage(host, actions, hosted, window_bytes, model.parameters, expected)
    outputs: dict[int, torch.Tensor] = {}
    held = []
    for action in actions:
        passage.before(action)
        held.append(torch.cuda.memory_allocated())
        if action.kind == "F":
            received = inputs[action.micro_batch].detach().requires_grad_()
            outputs[action.micro_batch] = output = model(received).square().mean()
            passage.behind(action, received, output)
        else:
            outputs.pop(action.micro_batch).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return gradients, held, passage


def test_gradients_are_the_same_to_the_last_bit() -> None:
    expected, *_ = step([False] * NUM_PASSES, 0.0)
    for window_bytes in (0.0, 1.5 * PASS_BYTES, 100.0 * PASS_BYTES):
        found, _, passage = step([True, True, False, True, True], window_bytes)
        assert passage.num_bytes > 0.9 * 4 * PASS_BYTES
        assert all(map(torch.equal, found, expected))


def test_device_has_its_memory_back_between_the_passes() -> None:
    _, plain, _ = step([False] * NUM_PASSES, 0.0)
    _, held, _ = step([True] * NUM_PASSES, 0.0)
    last = NUM_PASSES  # the first backward
    assert plain[last] - plain[0] > 0.9 * NUM_PASSES * PASS_BYTES
    assert held[last] - held[0] < 1.2 * PASS_BYTES  # what runs backward next


def test_copies_run_beside_passes() -> None:
    """The host does not wait, and both lanes are other streams than that of the passes."""
    step([True] * NUM_PASSES, 2.0 * PASS_BYTES)  # pins memory
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step([True] * NUM_PASSES, 2.0 * PASS_BYTES)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert any("DtoH" in name for name in names) and any("HtoD" in name for name in names)
    torch.cuda.set_sync_debug_mode("error")
    try:
        host, actions = offload.Host(torch.device("cuda")), [Action("F", 0, 0), Action("B", 0, 0)]
        expected = np.full((1, 1), float(PASS_BYTES))
        passage = offload.Passage(host, actions, [True], 0.0, list, expected)
        received = torch.ones(NUM_ROWS, WIDTH, device="cuda", requires_grad=True)
        output = received.exp().sum()
        passage.before(Action("F", 0, 0))
        passage.behind(Action("F", 0, 0), received, output)
        passage.before(Action("B", 0, 0))
        output.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert received.grad is not None and torch.allclose(received.grad, torch.ones(1).exp().cuda())
