"""The kernels that run on the CPU compute attention by its definition."""

from __future__ import annotations

import pytest
import torch
from helpers.attention import document_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.errors import PlanError
from megatron_wlb.runtime.gpt.attention.kernels import Segments, VarlenKernel, sdpa
from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen
from megatron_wlb.runtime.gpt.attention.kernels.torch_cpu import torch_cpu_varlen

HEAD_DIM = 4
KERNELS = [sdpa_varlen, torch_cpu_varlen]
on_every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=["sdpa", "torch-cpu"])


def draw(num_tokens: int, num_heads: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_heads, HEAD_DIM, generator=generator, dtype=dtype)


def both(
    kernel: VarlenKernel,
    lengths_q: list[int],
    lengths_k: list[int],
    heads: int,
    groups: int,
    dtype: torch.dtype,
    reach: int | None = None,
    value_dim: int = HEAD_DIM,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output, dQ, dK and dV of the kernel, and by definition."""
    query = draw(sum(lengths_q), heads, 1, dtype)
    # Strided, as context parallelism has them.
    key, value = draw(sum(lengths_k), 2 * groups, 2, dtype).unflatten(1, (2, groups)).unbind(1)
    grad = draw(sum(lengths_q), heads, 3, dtype)[..., :value_dim]
    results = []
    for is_definition in (True, False):
        inputs = [t.detach().requires_grad_() for t in (query, key, value[..., :value_dim])]
        if is_definition:
            out = document_attention(*inputs, lengths_q, lengths_k, 0.7, reach)
        else:
            out = kernel(*inputs, Segments.of(lengths_q, lengths_k, "cpu", reach), 0.7)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    return results[1], results[0]


@on_every_kernel
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=6),
    st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    st.none() | st.integers(1, 50),
    st.sampled_from([HEAD_DIM, HEAD_DIM - 1]),
)
def test_kernel_is_attention_by_definition(
    kernel: VarlenKernel,
    segments: list[tuple[int, int]],
    heads: tuple[int, int],
    reach: int | None,
    value_dim: int,
) -> None:
    """With a sliding window and values narrower than keys too, where the kernel has both."""
    lengths_q = [q for q, _ in segments]
    lengths_k = [q + earlier for q, earlier in segments]
    if kernel is not sdpa_varlen:
        reach, value_dim = None, HEAD_DIM
    given = kernel, lengths_q, lengths_k, *heads, torch.float64, reach, value_dim
    for a, b in zip(*both(*given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_sdpa_runs_long_parts_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    found, expected = both(sdpa_varlen, [50, 30], [61, 30], 4, 2, torch.float64)
    monkeypatch.setattr(sdpa, "BLOCK_TOKENS", 16)
    blocks, _ = both(sdpa_varlen, [50, 30], [61, 30], 4, 2, torch.float64)
    for whole, pieces, b in zip(found, blocks, expected, strict=True):
        torch.testing.assert_close(whole, b, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(pieces, b, rtol=1e-10, atol=1e-12)


@on_every_kernel
def test_kernel_runs_segments_of_many_blocks(kernel: VarlenKernel) -> None:
    """torch's flash attention works in blocks of up to 256 queries and 512 keys."""
    found, expected = both(kernel, [700, 300, 1], [1900, 300, 513], 2, 1, torch.float64)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@on_every_kernel
def test_kernel_in_bf16_is_no_worse_than_bf16_by_definition(kernel: VarlenKernel) -> None:
    lengths_q, lengths_k = [60, 30, 1], [60, 75, 9]
    found, plain = both(kernel, lengths_q, lengths_k, 4, 2, torch.bfloat16)
    # The same numbers, exactly.
    query = draw(sum(lengths_q), 4, 1, torch.bfloat16).double()
    pair = draw(sum(lengths_k), 4, 2, torch.bfloat16).double().unflatten(1, (2, 2))
    out = document_attention(query, pair[:, 0], pair[:, 1], lengths_q, lengths_k, 0.7)
    error = (found[0].double() - out).abs().max()
    assert 0 < error <= 2 * (plain[0].double() - out).abs().max()


def test_segments_say_where_queries_and_keys_are() -> None:
    segments = Segments.of([3, 1, 5], [3, 8, 6])
    assert segments.cu_seqlens_q.tolist() == [0, 3, 4, 9]
    assert segments.cu_seqlens_k.tolist() == [0, 3, 11, 17]
    assert segments.cu_seqlens_q.dtype == segments.cu_seqlens_k.dtype == torch.int32
    assert (segments.max_q, segments.max_k) == (5, 8)
    assert Segments.of([4, 2]).lengths_k == (4, 2)


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"), [([], []), ([3], [2]), ([0], [4]), ([2, 2], [2])]
)
def test_segments_without_meaning_are_refused(lengths_q: list[int], lengths_k: list[int]) -> None:
    with pytest.raises(PlanError):
        Segments.of(lengths_q, lengths_k)
