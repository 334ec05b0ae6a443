"""Kernels on a GPU compute attention by its definition, alone and under context parallelism."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.attention import errors_over_bf16, in_slices, ranks_in_turn
from helpers.pretrain import FUSED, UNFUSED
from test_gpu_smoke import train

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.plan.sharding import Sharding
from megatron_wlb.plan.sharding.shard import KINDS
from megatron_wlb.runtime.gpt.attention.kernels import (
    CANDIDATES,
    Demand,
    Segments,
    VarlenKernel,
    choose_kernel,
)
from megatron_wlb.runtime.gpt.attention.kernels.selection import time_ms

HEADS, SCALE = 8, 0.1
LENGTHS = [700, 1, 33, 1290, 128, 256, 5, 147]  # 2560 tokens: 8 slots of CP=4


def demand(num_groups: int, head_dim: int, *, deterministic: bool = False) -> Demand:
    device = torch.device("cuda", torch.cuda.current_device())
    return Demand(device, torch.bfloat16, HEADS, num_groups, head_dim, deterministic)


def kernel_called(name: str, wanted: Demand) -> VarlenKernel:
    reason = CANDIDATES[name].obstacle(wanted)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    try:
        chosen = choose_kernel(name, wanted)
    except CompatibilityError as error:
        if "only support" in str(error):  # what the package itself says of its build
            pytest.skip(str(error))
        raise
    return chosen.dropping or chosen.kernel


def tensors(num_groups: int, head_dim: int, num_q: int, num_k: int) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient, in bf16."""
    generator = torch.Generator("cuda").manual_seed(3)
    shapes = [(num_q, HEADS), (num_k, num_groups), (num_k, num_groups), (num_q, HEADS)]
    return [
        torch.randn(*shape, head_dim, generator=generator, device="cuda").bfloat16()
        for shape in shapes
    ]


def assert_kernel_as_good_as_bf16(
    kernel: VarlenKernel,
    inputs: list[torch.Tensor],
    lengths_q: list[int],
    lengths_k: list[int],
    reach_tokens: int | None = None,
) -> None:
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = kernel(*leaves, Segments.of(lengths_q, lengths_k, "cuda", reach_tokens), SCALE)
    found = [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]
    assert_as_good_as_bf16(found, inputs, lengths_q, lengths_k, reach_tokens=reach_tokens)


def assert_as_good_as_bf16(
    found: list[torch.Tensor],
    inputs: list[torch.Tensor],
    lengths_q: list[int],
    *keys: list[int],
    reach_tokens: int | None = None,
) -> None:
    """Errors of at most twice those of the definition itself in bf16."""
    lengths_k = keys[0] if keys else lengths_q
    ratios = errors_over_bf16(found, inputs, lengths_q, lengths_k, SCALE, reach_tokens)
    assert all(0 < ratio <= 2 for ratio in ratios)


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize(("num_groups", "head_dim"), [(8, 128), (2, 64), (1, 128)])
def test_kernel_is_attention_by_definition(name: str, num_groups: int, head_dim: int) -> None:
    kernel = kernel_called(name, demand(num_groups, head_dim))
    lengths_q, lengths_k = [5, 300, 1, 64, 129], [5, 700, 90, 64, 131]
    inputs = tensors(num_groups, head_dim, sum(lengths_q), sum(lengths_k))
    assert_kernel_as_good_as_bf16(kernel, inputs, lengths_q, lengths_k)


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (24, 16)])
def test_kernel_with_narrow_values_is_attention_by_definition(
    name: str, key_dim: int, value_dim: int
) -> None:
    kernel = kernel_called(name, replace(demand(HEADS, key_dim), value_head_dim=value_dim))
    lengths_q, lengths_k = [5, 300, 1, 64, 129], [5, 700, 90, 64, 131]
    query, key, value, grad = tensors(HEADS, key_dim, sum(lengths_q), sum(lengths_k))
    inputs = [query, key, value[..., :value_dim].contiguous(), grad[..., :value_dim].contiguous()]
    assert_kernel_as_good_as_bf16(kernel, inputs, lengths_q, lengths_k)


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("num_groups", [8, 2])
@pytest.mark.parametrize("reach_tokens", [2, 40, 128, 500])
def test_kernel_with_a_window_is_attention_by_definition(
    name: str, num_groups: int, reach_tokens: int
) -> None:
    kernel = kernel_called(name, replace(demand(num_groups, 128), reach_tokens=reach_tokens))
    lengths_q = [5, 300, 1, 64, 1290]
    in_reach = zip(lengths_q, [5, 700, 90, 64, 1290], strict=True)
    lengths_k = [min(k, q + reach_tokens - 1) for q, k in in_reach]
    inputs = tensors(num_groups, 128, sum(lengths_q), sum(lengths_k))
    assert_kernel_as_good_as_bf16(kernel, inputs, lengths_q, lengths_k, reach_tokens)


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("num_groups", [8, 2])
def test_dropout_is_none_in_the_mean(name: str, num_groups: int) -> None:
    """Of many draws; and one state of the random numbers gives one output. The gradients are
    checked where kernels are chosen.
    """
    wanted = replace(demand(num_groups, 64), dropout=0.2)
    kernel = kernel_called(name, wanted)
    lengths_q, lengths_k = [5, 300, 1, 64], [5, 700, 90, 64]
    inputs = tensors(num_groups, 64, sum(lengths_q), sum(lengths_k))
    segments = Segments.of(lengths_q, lengths_k, "cuda")
    state = torch.cuda.get_rng_state()
    draws = torch.stack([kernel(*inputs[:3], segments, SCALE).float() for _ in range(400)])
    torch.cuda.set_rng_state(state)
    assert torch.equal(kernel(*inputs[:3], segments, SCALE).float(), draws[0])
    assert not torch.equal(draws[0], draws[1])
    expected = kernel_called(name, replace(wanted, dropout=0.0))(*inputs[:3], segments, SCALE)
    off = (draws.mean(0) - expected.float()).abs()
    # Kernels compare 8 random bits and round to bf16: both are off by less than a hundredth.
    assert (off < 6 * draws.std(0) / len(draws) ** 0.5 + 0.01 * (1 + expected.abs())).all()


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("kind", KINDS)
def test_context_parallel_ranks_are_attention_by_definition(name: str, kind: str) -> None:
    """Every rank in turn on one device."""
    kernel = kernel_called(name, demand(2, 128))
    inputs = tensors(2, 128, sum(LENGTHS), sum(LENGTHS))
    sharding = Sharding(kind, 300 if kind == "hybrid" else 0)  # type: ignore[arg-type]
    found = ranks_in_turn(*inputs, LENGTHS, 4, sharding, kernel, SCALE)
    assert_as_good_as_bf16(found, inputs, LENGTHS)


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("num_groups", [8, 2])
@pytest.mark.parametrize("joined_from", [1, 2])
def test_slices_are_the_whole_document(name: str, num_groups: int, joined_from: int) -> None:
    """Kernels take views of the buffer, and their gradients are summed in fp32.

    From one chunk on it is joined of parts, several of them where queries are few.
    """
    kernel = kernel_called(name, demand(num_groups, 128))
    inputs = tensors(num_groups, 128, 2560, 2560)
    cuts = [0, 128, 129, 700, 1500, 2560]
    found = in_slices(*inputs, cuts, kernel, SCALE, joined_from=joined_from)
    assert_as_good_as_bf16(found, inputs, [2560])


@pytest.fixture(scope="module")
def nccl() -> Iterator[None]:
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("num_head_groups", [1, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_freed_and_gathered_again_over_nccl(nccl: None, num_head_groups: int, keep: bool) -> None:
    """NCCL's stream, the memory that is given back and taken again: many layers in a row."""
    from megatron_wlb.plan.sharding import rank_layout
    from megatron_wlb.runtime.gpt.attention.context_parallel import context_attention
    from megatron_wlb.runtime.gpt.attention.key_exchange import ContextParallel, KeyGather

    kernel = choose_kernel("auto", demand(2, 128)).kernel
    layout = rank_layout(LENGTHS, 1, 0, Sharding())
    segments = Segments.of(layout.lengths_q.tolist(), layout.lengths_k.tolist(), "cuda")
    parallel = ContextParallel(num_head_groups=num_head_groups, keep_gathered=keep)
    group = torch.distributed.group.WORLD
    rest = segments, KeyGather.of(layout, "cuda"), kernel, SCALE, group, parallel
    inputs = tensors(2, 128, sum(LENGTHS), sum(LENGTHS))
    layers = []
    for _ in range(4):
        leaves = [t.detach().requires_grad_() for t in inputs[:3]]
        out = context_attention(*leaves, *rest)
        layers.append((out, leaves))
        del out
    for out, leaves in reversed(layers):
        found = [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]
        assert_as_good_as_bf16(found, inputs, LENGTHS)


@pytest.mark.parametrize("name", [name for name in CANDIDATES if name != "sdpa"])
def test_deterministic_kernel_gives_the_same_bits(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        kernel = kernel_called(name, demand(2, 128, deterministic=True))
        inputs = tensors(2, 128, sum(LENGTHS), sum(LENGTHS))
        runs = [
            ranks_in_turn(*inputs, LENGTHS, 4, Sharding("per-document-remainder"), kernel, SCALE)
            for _ in range(3)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_a_kernel_is_timed_by_the_gpu_not_by_its_host() -> None:
    wanted = demand(2, 128)
    kernel = choose_kernel("auto", wanted).kernel

    def late(*given: Any) -> torch.Tensor:
        time.sleep(0.01)
        return kernel(*given)

    fast_ms = time_ms(kernel, wanted)
    assert fast_ms < 5 and time_ms(late, wanted) == pytest.approx(fast_ms, rel=0.3)


def test_transformer_engine_layers_train_as_local_ones(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("transformer_engine is not installed")
    from megatron_wlb.data.build_corpus import build_corpus

    (tmp_path / "texts.txt").write_text("a few words, over and over. " * 4000)
    build_corpus([tmp_path / "texts.txt"], tmp_path / "texts")
    local, engine = (
        train(tmp_path, tmp_path / "texts", name, layers, "--bf16")
        for name, layers in (("local", UNFUSED), ("engine", FUSED))
    )
    assert engine[0] == pytest.approx(local[0], rel=0.05)
    assert engine[-1] < engine[0] - 0.3
