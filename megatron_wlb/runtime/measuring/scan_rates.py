"""What recurrences of layers with a state reach, by the kernels that Megatron found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.ssm import gated_delta_net, mamba_mixer
from torch.nn.functional import normalize

from megatron_wlb.cost.parts.gated_delta import GatedDelta
from megatron_wlb.cost.parts.mamba import Mamba
from megatron_wlb.cost.parts.scan import Scan

DELTA, MAMBA = GatedDelta(16, 32, 128, 128, 4), Mamba(64, 64, 128, 8)
"""Layers of Qwen3.5's and Nemotron 3's kind."""


def scan_tflops(
    random: Callable[..., torch.Tensor], best_s: Callable[[Callable[[], object]], float], size: int
) -> dict[str, float]:
    """10¹² FLOP/s of each recurrence over one document of ``size`` tokens, forward and backward.

    FLOPs are counted as Megatron counts them, backward as two forward passes. ``random`` makes a
    tensor of a shape, and ``best_s`` times a function. What is not installed has no rate.
    """
    scans: dict[str, tuple[Scan, Callable[[], torch.Tensor]]] = {}
    if delta_rule := getattr(gated_delta_net, "chunk_gated_delta_rule", None):
        heads, dim = DELTA.linear_num_value_heads, DELTA.linear_value_head_dim
        query, key = normalize(random(2, 1, size, heads, dim), dim=-1).requires_grad_()
        value = random(1, size, heads, dim).requires_grad_()
        gate, beta = random(2, 1, size, heads).sigmoid()
        scans["gated delta net"] = (
            DELTA,
            lambda: delta_rule(query, key, value, g=-gate.float(), beta=beta)[0],
        )
    if chunk_scan := mamba_mixer.mamba_chunk_scan_combined:
        heads, groups = MAMBA.mamba_num_heads, MAMBA.mamba_num_groups
        x, z = random(2, 1, size, heads, MAMBA.mamba_head_dim).requires_grad_()
        b, c = random(2, 1, size, groups, MAMBA.mamba_state_dim).requires_grad_()
        step, by_head = random(1, size, heads), random(heads).float()
        decay, named = -by_head.exp(), {"D": by_head, "dt_bias": by_head, "dt_softplus": True}
        scans["Mamba-2 layer"] = (
            MAMBA,
            lambda: chunk_scan(x, step, decay, b, c, MAMBA.chunk, z=z, **named),
        )

    def trained(run: Callable[[], torch.Tensor]) -> None:
        out = run()
        torch.autograd.backward(out, out.detach())

    return {
        name: 3 * 2 * layer.state_products * size / best_s(partial(trained, run)) / 1e12
        for name, (layer, run) in scans.items()
    }
