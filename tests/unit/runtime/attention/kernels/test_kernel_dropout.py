"""Dropout drops what it should, in kernels that have it; others are passed over."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from test_choose import CPU, HOPPER

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.gpt.attention.kernels import CANDIDATES, Segments, choose_kernel
from megatron_wlb.runtime.gpt.attention.kernels import selection as choose_module
from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen
from megatron_wlb.runtime.gpt.attention.kernels.selection import check_dropout
from megatron_wlb.runtime.gpt.attention.kernels.torch_cpu import torch_cpu_varlen

DROPPING = replace(CPU, dropout=0.1)


def dropping(probability: float, *inputs: Any) -> torch.Tensor:
    return sdpa_varlen(*inputs, dropout=probability)


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_sdpa_with_dropout_is_in_the_mean_what_it_is_without(probability: float) -> None:
    segments = Segments.of([1, 7, 3], [1, 7, 9])
    torch.manual_seed(5)
    query = torch.randn(11, 4, 16)
    key, value = torch.randn(2, 17, 2, 16).unbind()
    draws = [dropping(probability, query, key, value, segments, 0.3) for _ in range(3000)]
    outputs = torch.stack(draws)
    off = (outputs.mean(0) - sdpa_varlen(query, key, value, segments, 0.3)).abs()
    error = outputs.std(0) / math.sqrt(len(outputs))
    assert (off < 5 * error).all() and (error > 0).all()
    assert not torch.equal(outputs[0], outputs[1])


def test_sdpa_with_dropout_holds_what_queries_may_see() -> None:
    """In blocks, whose masks leave out the later keys; the output is the same."""
    segments, length = Segments.of([1300, 2]), 1302
    torch.manual_seed(5)
    query = torch.randn(length, 2, 8, requires_grad=True)
    key, value = (torch.randn(length, 1, 8, requires_grad=True) for _ in range(2))
    held: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out = dropping(1e-12, query, key, value, segments, 0.3)
    assert sum(held.values()) < 0.75 * 12 * 2 * 1300**2  # three numbers of each pair in fp32
    torch.testing.assert_close(out, sdpa_varlen(query, key, value, segments, 0.3))


def test_auto_with_dropout_passes_over_kernels_without_it_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    chosen = choose_kernel("auto", DROPPING)
    assert chosen.name == "sdpa" and chosen.kernel is sdpa_varlen and chosen.dropping is not None
    (line,) = caplog.messages  # and no warning: the CPU has no other
    assert line.startswith("attention kernel: sdpa") and "not torch-cpu: it has no dropout" in line
    with pytest.raises(CompatibilityError, match="torch-cpu cannot run: it has no dropout"):
        choose_kernel("torch-cpu", DROPPING)


def test_reference_left_alone_on_a_gpu_is_a_warning_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the GPU is stood in for, and the kernel's problems are solved on the CPU."""
    sdpa = replace(CANDIDATES["sdpa"], obstacle=lambda demand: None)
    monkeypatch.setattr(sdpa.__class__, "make", lambda self, demand: sdpa.build(demand))
    monkeypatch.setattr(choose_module, "CANDIDATES", {"sdpa": sdpa})
    choose_kernel("auto", HOPPER)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    choose_kernel("auto", replace(HOPPER, dropout=0.1))
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "--attention-dropout 0.1; train in bf16, install flash-attn 2" in said


def by_another_pattern(*inputs: Any) -> torch.Tensor:
    """The output of one draw with the gradients of another."""
    out, other = (dropping(0.1, *inputs) for _ in range(2))
    return other + (out - other).detach()


def not_scaled(*inputs: Any) -> torch.Tensor:
    return dropping(0.1, *inputs) * 0.9


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (partial(dropping, 0.1), None),
        (torch_cpu_varlen, "it drops 0.0000 of"),
        (partial(dropping, 0.2), "where 0.1 is asked for"),
        (not_scaled, "its output is wrong"),
        (by_another_pattern, "is wrong"),
        (lambda *_: 1 / 0, "it fails with dropout on a small problem (division by zero)"),
    ],
)
def test_dropout_that_is_something_else_does_not_pass(kernel: Any, said: str | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        state = torch.get_rng_state()
        found = check_dropout(kernel, replace(DROPPING, dtype=dtype))
        assert found is None if said is None else said in str(found)
        assert torch.equal(torch.get_rng_state(), state), "random numbers were drawn"
