"""Kernels with a sliding window: what they compute, and who is not asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.attention import by_definition, in_slices

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.gpt.attention.kernels import (
    Demand,
    Segments,
    check_kernel,
    choose_kernel,
)
from megatron_wlb.runtime.gpt.attention.kernels.sdpa import BLOCK_TOKENS, build, sdpa_varlen
from megatron_wlb.runtime.gpt.attention.kernels.selection import check_dropout
from megatron_wlb.runtime.gpt.attention.kernels.torch_cpu import torch_cpu_varlen

WINDOW = Demand(torch.device("cpu"), torch.float32, 4, 2, 16, reach_tokens=3)


def test_blocks_of_a_long_document_know_the_window() -> None:
    length = 2 * BLOCK_TOKENS + 70
    inputs = [torch.randn(length, 2, 8, dtype=torch.float64) for _ in range(4)]
    for reach in (1, 90, BLOCK_TOKENS, BLOCK_TOKENS + 90, length):
        expected = by_definition(inputs, [length], [length], 0.7, torch.float64, reach)[0]
        out = sdpa_varlen(*inputs[:3], Segments.of([length], [length], "cpu", reach), 0.7)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def ignores_it(query: Any, key: Any, value: Any, segments: Segments, scale: float) -> Any:
    segments = dataclasses.replace(segments, reach_tokens=None)
    return sdpa_varlen(query, key, value, segments, scale)


def sees_one_more(query: Any, key: Any, value: Any, segments: Segments, scale: float) -> Any:
    reach = segments.reach_tokens and segments.reach_tokens + 1
    return sdpa_varlen(query, key, value, dataclasses.replace(segments, reach_tokens=reach), scale)


@pytest.mark.parametrize("reach_tokens", [1, 3, 40, 4096])
@pytest.mark.parametrize("kernel", [ignores_it, sees_one_more])
def test_kernel_that_does_another_window_does_not_run(kernel: Any, reach_tokens: int) -> None:
    demand = dataclasses.replace(WINDOW, reach_tokens=reach_tokens)
    assert check_kernel(sdpa_varlen, demand) is None
    assert "with a sliding window its output is wrong" in str(check_kernel(kernel, demand))
    # Without a window nothing is wrong with it.
    assert check_kernel(kernel, dataclasses.replace(WINDOW, reach_tokens=None)) is None


def test_kernel_without_windows_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_kernel("auto", WINDOW).kernel is sdpa_varlen
    assert choose_kernel("auto", dataclasses.replace(WINDOW, reach_tokens=None)).kernel is (
        torch_cpu_varlen
    )
    with pytest.raises(CompatibilityError, match="torch-cpu cannot run: it has no sliding window"):
        choose_kernel("torch-cpu", WINDOW)


def test_dropout_drops_inside_the_window() -> None:
    demand = dataclasses.replace(WINDOW, dropout=0.2, head_dim=64)
    assert check_dropout(build(demand), demand) is None

    def wide(*given: Any) -> Any:
        *inputs, segments, scale = given
        return build(demand)(*inputs, dataclasses.replace(segments, reach_tokens=None), scale)

    assert "is wrong" in str(check_dropout(wide, demand))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_window_of_one_key_has_a_kernel(dropout: float) -> None:
    """Queries have no gradient there, by which a check could divide."""
    demand = dataclasses.replace(WINDOW, reach_tokens=1, dropout=dropout)
    assert choose_kernel("auto", demand).name == "sdpa"


def test_slices_see_the_keys_in_reach() -> None:
    inputs = [torch.randn(60, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    seen = []

    def kernel(query: Any, key: Any, value: Any, segments: Segments, scale: float) -> Any:
        seen.append(len(key))
        return sdpa_varlen(query, key, value, segments, scale)

    for reach in (1, 7, 60):
        expected = by_definition(inputs, [60], [60], 0.7, torch.float64, reach)
        found = in_slices(*inputs, [0, 16, 17, 50, 60], kernel, 0.7, reach)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert seen == [16, 1, 33, 10, 16, 7, 39, 16, 16, 17, 50, 60]
