"""A kernel gets a head start where its two calls give what one gives, and where it pays."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.attention import flash_backward, flash_forward

from megatron_wlb.runtime.gpt.attention.head_start import (
    LEAST_BYTES,
    check_parts,
    least_bytes,
    pays,
)
from megatron_wlb.runtime.gpt.attention.kernels import Demand
from megatron_wlb.runtime.gpt.attention.kernels.kernel import LseKernel
from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen
from megatron_wlb.runtime.gpt.attention.kernels.torch_cpu import torch_cpu_varlen

CPU = Demand(torch.device("cpu"), torch.float32, 4, 2, 16)


def own_lse(*inputs: Any, causal: bool) -> Any:
    """A backward pass that computes the log-sum-exp for itself, over the keys that it is given."""
    grad, query, key, value, _, _, segments, scale = inputs
    out, lse = flash_forward(query, key, value, segments, scale, causal)
    return flash_backward(grad, query, key, value, out, lse, segments, scale, causal)


def always_causal(*inputs: Any, causal: bool) -> Any:
    return flash_forward(*inputs, causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_tell_log_sum_exps_pass(dtype: torch.dtype) -> None:
    demand = dataclasses.replace(CPU, dtype=dtype)
    for kernel in (torch_cpu_varlen, LseKernel(flash_forward, flash_backward)):
        assert isinstance(kernel, LseKernel)
        assert check_parts(kernel, demand) is None


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (LseKernel(flash_forward, own_lse), "its dQ is wrong"),
        (LseKernel(always_causal, flash_backward), "its output is wrong"),
    ],
    ids=["own-lse", "always-causal"],
)
def test_kernel_of_which_parts_do_not_make_a_whole_is_seen(kernel: LseKernel, said: str) -> None:
    assert said in str(check_parts(kernel, CPU))


def test_only_gpus_and_kernels_with_log_sum_exps_have_a_head_start() -> None:
    gpu = dataclasses.replace(CPU, device=torch.device("cuda"))
    assert least_bytes(torch_cpu_varlen, CPU) is None
    assert least_bytes(sdpa_varlen, gpu) is None


@pytest.mark.parametrize(
    ("received_mib", "query_mib", "expected"),
    [
        (64, 16, True),
        (15, 16, False),  # not worth the launches
        (64, 100, False),  # many query heads of each key/value head, and few ranks
    ],
)
def test_head_start_pays_for_long_exchanges(
    received_mib: int, query_mib: int, expected: bool
) -> None:
    assert pays(received_mib * 2**20, query_mib * 2**20, LEAST_BYTES) == expected
