"""The kernels of layers with a state, against scans token by token of each document alone, in
fp64: outputs, last states and all gradients, with a state to begin with or without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_wlb.runtime.emulation.scan_kernels import (
    causal_conv1d,
    chunk_gated_delta_rule,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)

LENGTHS = 37, 1, 16, 5
TOTAL, HEADS, KEY, VALUE, GROUPS, TAPS = sum(LENGTHS), 4, 5, 6, 2, 4
Tensors = Sequence[torch.Tensor]


@pytest.fixture
def random() -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(
        *shape, generator=generator, dtype=torch.float64
    ).requires_grad_()


def assert_alike(found: Tensors, right: Tensors, inputs: Tensors) -> None:
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs)
    losses = (sum(t.sin().sum() for t in out) for out in (found, right))
    grads = [
        torch.autograd.grad(loss, inputs, retain_graph=True, materialize_grads=True)
        for loss in losses
    ]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def delta_tokens(rows: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = []
    for q, k, v, g, beta in zip(*rows, strict=True):
        state = state * g.exp()[:, None, None]
        new = beta[:, None] * (v - (k[:, :, None] * state).sum(1))
        state = state + k[:, :, None] * new[:, None]
        out.append((q[:, :, None] * state).sum(1) * KEY**-0.5)
    return torch.stack(out), state


@pytest.mark.parametrize("begins", [False, True])
def test_gated_delta_rule(random: Any, begins: bool) -> None:
    q, k, v = (random(1, TOTAL, HEADS, size) for size in (KEY, KEY, VALUE))
    g, beta = random(1, TOTAL, HEADS), random(1, TOTAL, HEADS)
    initial = random(len(LENGTHS), HEADS, KEY, VALUE)
    rows = q, F.normalize(k, dim=-1), v, -g.exp(), beta.sigmoid()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    known = {"initial_state": initial if begins else None, "output_final_state": True}
    out, states = chunk_gated_delta_rule(*rows, cu_seqlens=ends, **known)
    assert states is not None
    documents = zip(*(t[0].split(LENGTHS) for t in rows), initial, strict=True)
    alone = [delta_tokens(own[:5], own[5] * begins) for own in documents]
    right = torch.cat([y for y, _ in alone])[None], torch.stack([s for _, s in alone])
    assert_alike((out, states), right, (q, k, v, g, beta, *[initial] * begins))


@pytest.mark.parametrize("begins", [False, True])
def test_convolution(random: Any, begins: bool) -> None:
    x, weight, bias = random(1, TOTAL, HEADS), random(HEADS, TAPS), random(HEADS)
    initial = random(len(LENGTHS), HEADS, TAPS)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    state = initial if begins else None
    out, _ = causal_conv1d(x, weight, bias, "silu", state, ends)
    right = []
    for own, before in zip(x[0].split(LENGTHS), initial, strict=True):
        seen = torch.cat([before.t()[1:] * begins, own])
        sums = [(seen[at : at + TAPS] * weight.t()).sum(0) + bias for at in range(len(own))]
        right.append(F.silu(torch.stack(sums)))
    assert_alike([out], [torch.cat(right)[None]], (x, weight, bias, *[initial] * begins))


def mamba_tokens(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    skip: torch.Tensor, state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out, each = [], HEADS // GROUPS
    for value, step, key, query in zip(x, F.softplus(dt), b, c, strict=True):
        keys, queries = (t.repeat_interleave(each, 0) for t in (key, query))
        grown = (step[:, None] * value)[:, :, None] * keys[:, None]
        state = state * (step * a).exp()[:, None, None] + grown
        out.append((state * queries[:, None]).sum(-1) + skip[:, None] * value)
    return torch.stack(out), state


@pytest.mark.parametrize("begins", [False, True])
def test_scan(random: Any, begins: bool) -> None:
    x, z = (random(1, TOTAL, HEADS, VALUE) for _ in range(2))
    b, c = (random(1, TOTAL, GROUPS, KEY) for _ in range(2))
    dt, a, skip, bias = random(1, TOTAL, HEADS), random(HEADS), random(HEADS), random(HEADS)
    initial = random(1, HEADS, VALUE, KEY)
    out, state = mamba_chunk_scan_combined(
        x, dt, -a.exp(), b, c, 64, skip, z, bias, initial if begins else None, True
    )
    y, last = mamba_tokens(x[0], dt[0] + bias, -a.exp(), b[0], c[0], skip, initial[0] * begins)
    right = (y * F.silu(z[0]))[None], last[None]
    assert_alike((out, state), right, (x, z, b, c, dt, a, skip, bias, *[initial] * begins))


def test_fused_layer_takes_each_document_alone(random: Any) -> None:
    channels = HEADS * VALUE + 2 * GROUPS * KEY
    rows = random(1, TOTAL, HEADS * VALUE + channels + HEADS)
    weight, bias, steps, a, skip = (
        random(*shape) for shape in ((channels, TAPS), (channels,), (HEADS,), (HEADS,), (HEADS,))
    )
    known = weight, bias, steps, -a.exp(), skip, 64
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    named = {"headdim": VALUE, "ngroups": GROUPS}
    out = mamba_split_conv1d_scan_combined(rows, *known, numbers, **named)
    alone = [
        mamba_split_conv1d_scan_combined(own[None], *known, **named)
        for own in rows[0].split(LENGTHS)
    ]
    assert_alike([out], [torch.cat(alone, 1)], (rows, weight, bias, steps, a, skip))
    leaking = mamba_split_conv1d_scan_combined(rows, *known, **named)
    assert not torch.allclose(out, leaking)
