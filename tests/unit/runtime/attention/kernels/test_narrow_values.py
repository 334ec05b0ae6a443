"""Values narrower than keys, as multi-latent attention has them: taken, or filled up."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from helpers.attention import document_attention, flash_backward, flash_forward

from megatron_wlb.runtime.gpt.attention.kernels import (
    CANDIDATES,
    Demand,
    Segments,
    check_kernel,
    transformer_engine,
)
from megatron_wlb.runtime.gpt.attention.kernels.kernel import LseKernel, VarlenKernel
from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen
from megatron_wlb.runtime.gpt.attention.kernels.selection import Candidate

NARROW = Demand(torch.device("cpu"), torch.float32, 4, 4, 12, value_head_dim=7)
LENGTHS = (5, 30, 1), (9, 30, 4)


def made(candidate: Candidate, demand: Demand = NARROW) -> VarlenKernel:
    kernel = candidate.make(demand)
    assert not isinstance(kernel, str), kernel
    return kernel


def assert_exact(kernel: VarlenKernel) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(sum(lengths), 4, dim, generator=generator, requires_grad=True)
        for lengths, dim in zip((LENGTHS[0], LENGTHS[1], LENGTHS[1]), (12, 12, 7), strict=True)
    )
    out = kernel(query, key, value, Segments.of(*LENGTHS), 0.3)
    expected = document_attention(query, key, value, *LENGTHS, 0.3)
    assert out.shape == (36, 4, 7)
    grad = torch.randn(out.shape, generator=generator)
    for a, b in zip(
        (out, *torch.autograd.grad(out, (query, key, value), grad)),
        (expected, *torch.autograd.grad(expected, (query, key, value), grad)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # fp32, of numbers of about 1


@pytest.mark.parametrize("name", ["torch-cpu"])
def test_cpu_kernels_take_narrow_values(name: str) -> None:
    assert_exact(made(CANDIDATES[name]))


def test_dropout_and_windows_take_narrow_values() -> None:
    made(CANDIDATES["sdpa"], dataclasses.replace(NARROW, dropout=0.25))
    window = dataclasses.replace(NARROW, reach_tokens=9)
    assert check_kernel(made(CANDIDATES["sdpa"], window), window) is None


@pytest.mark.parametrize("tells_lse", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_kernel_of_one_width_gets_values_filled_up(tells_lse: bool, fails: bool) -> None:
    """Whether it says so or computes nonsense; its width is then that of keys alone."""
    widths: list[int] = []

    def spoilt(key: Any, value: Any) -> bool:
        widths.append(value.shape[-1])
        if fails and value.shape[-1] != key.shape[-1]:
            raise RuntimeError("headdim of v must be that of k")
        return bool(value.shape[-1] != key.shape[-1])

    def attend(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return sdpa_varlen(query, key, value * (1 - spoilt(key, value) / 2), *rest)

    def forward(query: Any, key: Any, value: Any, *rest: Any, causal: bool = True) -> Any:
        value = value * (1 - spoilt(key, value) / 2)
        segments, scale, *given = rest
        return flash_forward(query, key, value, segments, scale, given[0] if given else causal)

    def backward(*tensors: Any, **named: Any) -> Any:
        assert len({t.shape[-1] for t in tensors[:5]}) == 1
        return flash_backward(*tensors, **named)

    kernel: Any = LseKernel(forward, backward) if tells_lse else attend
    found = made(Candidate(lambda _: None, lambda _: kernel))
    assert isinstance(found, LseKernel) == tells_lse
    widths.clear()
    assert_exact(found)
    assert set(widths) == {12}


def test_transformer_engine_is_told_both_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def attention(num_heads: int, head_dims: Any, **_: Any) -> Any:
        told.append(head_dims)
        return lambda query, key, value, **_: query.new_zeros(len(query), num_heads * 7)

    fake = types.SimpleNamespace(DotProductAttention=attention)
    monkeypatch.setattr(transformer_engine.importlib, "import_module", lambda _: fake)
    kernel = transformer_engine.build(NARROW)
    query, value = torch.zeros(6, 4, 12), torch.zeros(6, 4, 7)
    assert kernel(query, query, value, Segments.of([6]), 1.0).shape == (6, 4, 7)
    kernel(query[..., :7], query[..., :7], value, Segments.of([6]), 1.0)
    assert told == [(12, 7), 7]
