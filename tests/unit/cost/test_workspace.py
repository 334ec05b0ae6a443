"""What attention's backward works in, counted by hand for one rank."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_wlb.cost import MemoryModel, ModelShape, Parallelism, load_hardware
from megatron_wlb.cost.activations import ActivationModel
from megatron_wlb.cost.execution import Execution, Kernels
from megatron_wlb.cost.memory import num_communicators, overhead_gib
from megatron_wlb.cost.schedule.order import Action
from megatron_wlb.cost.slices import Slice, Unit, UnitTable
from megatron_wlb.cost.tape import Operation
from megatron_wlb.cost.workspace import WORKSPACES

H, G, D = 8, 2, 128
LLAMA_70B = ModelShape(
    8192, 28672, 80, 64, 16, 128, 32000, True, rms_norm=True, linear_bias=False,
    tied_embeddings=False,
)  # fmt: skip
MHA = dataclasses.replace(LLAMA_70B, num_query_groups=64)
TP8 = Parallelism(tp_size=8, sequence_parallel=True)
TOKENS = 10_000
DOCUMENTS = 5


def attention(
    shape: ModelShape, kernel: str | None, layout: Parallelism = TP8, kernels: Kernels = "fused"
) -> Operation:
    how = {"attention_kernel": kernel, "document_tokens": TOKENS / DOCUMENTS}
    model = ActivationModel(shape, Execution(layout, kernels=kernels, **how))  # type: ignore[arg-type]
    tape = model.tape(first=False, last=False)
    return next(o for o in tape.operations if o.name == "attention")


def test_flash_2_sums_gradients_in_fp32_and_expands_those_of_shared_keys() -> None:
    rows = TOKENS + 128 * DOCUMENTS
    own = 4 * rows * H * D + 4 * H * rows
    assert WORKSPACES["flash-attn-2"](H, H, D, 2).total(TOKENS, TOKENS, DOCUMENTS) == own
    shared = WORKSPACES["flash-attn-2"](H, G, D, 2).total(TOKENS, 2 * TOKENS, DOCUMENTS)
    assert shared == own + 2 * 2 * (2 * TOKENS) * H * D
    # Of 80 channels it computes 96.
    assert WORKSPACES["torch"](H, H, 80, 2).total(1, 1, 0) == 4 * H * (96 + 1)
    assert WORKSPACES["transformer-engine"](H, G, D, 2) == WORKSPACES["torch"](H, G, D, 2)


def test_flash_3_sums_all_gradients_in_fp32() -> None:
    rows = TOKENS + 128 * DOCUMENTS
    own = 4 * rows * H * D + 2 * 4 * H * rows
    assert WORKSPACES["flash-attn-3"](H, H, D, 2).total(TOKENS, TOKENS, DOCUMENTS) == own
    shared = WORKSPACES["flash-attn-3"](H, G, D, 2).total(TOKENS, TOKENS, DOCUMENTS)
    assert shared == own + 2 * 4 * rows * G * D
    assert WORKSPACES["flash-attn-3"](H, H, 160, 2).row_bytes == 4 * H * (192 + 2)


def test_backward_of_attention_has_the_named_kernel_s_workspace() -> None:
    def extra(shape: ModelShape, kernel: str | None) -> float:
        q, k = H * D, shape.num_query_groups // 8 * D
        # Gradients of the residual path, of the output and of queries, keys and values.
        gradients = 2 * 8192 / 8 + 2 * q + 2 * (q + 2 * k)
        return attention(shape, kernel).backward - gradients

    for shape, groups in ((LLAMA_70B, G), (MHA, H)):
        of = {
            name: make(H, groups, D, 2).total(TOKENS, TOKENS, DOCUMENTS) / TOKENS
            for name, make in WORKSPACES.items()
        }
        for name, expected in of.items():
            assert extra(shape, name) == pytest.approx(expected)
        assert extra(shape, None) == pytest.approx(max(of.values()))
    # A kernel that runs document by document has one document's gradients twice instead.
    assert extra(MHA, "sdpa") == pytest.approx(2 * 3 * H * D)


def test_attention_on_the_cpu_works_in_nothing_of_its_own() -> None:
    torch = attention(LLAMA_70B, None, kernels="torch")
    assert torch.prefix == 0
    assert attention(LLAMA_70B, "torch-cpu", kernels="torch") == torch
    assert attention(LLAMA_70B, "torch", kernels="torch").backward > torch.backward


def test_context_parallel_rank_expands_the_gradients_of_all_keys() -> None:
    layout = dataclasses.replace(TP8, cp_size=4)
    more = attention(LLAMA_70B, "flash-attn-2", layout).backward * 4
    less = attention(LLAMA_70B, "sdpa", layout).backward * 4
    space = WORKSPACES["flash-attn-2"](H, G, D, 2)
    # Of a local token: 4.5 keys, and 2 chunks of each document on each of 4 ranks.
    expected = space.total(1, 4.5, 8 * DOCUMENTS / TOKENS)
    copy = 4.5 * 2 * 2 * G * D
    residual = 2 * 8192 / 8 + 2 * H * D
    assert more == pytest.approx(residual + 2 * copy + 2 * H * D + expected)
    assert less < more


def test_slice_s_kernel_works_on_the_keys_before_it_too() -> None:
    def peak(kernel: str, start: int) -> float:
        shape = dataclasses.replace(LLAMA_70B, num_layers=2)
        memory = MemoryModel(shape, Execution(TP8, attention_kernel=kernel))
        unit = Unit(1000, Slice(0, start, start + 1000, start + 1000))
        (use,) = memory.program_bytes(0, [Action("B", 0, 0)], UnitTable.of([unit]))
        return use.peak

    start = 100_000  # so many that the peak is in attention
    keys = WORKSPACES["flash-attn-2"](H, G, D, 2).key_bytes
    flash_3 = WORKSPACES["flash-attn-3"](H, G, D, 2).key_row_bytes
    more = peak("flash-attn-2", start) - peak("flash-attn-3", start)
    assert more == pytest.approx((keys - flash_3) * start, rel=0.02)


def test_communicators_are_those_of_groups_with_company() -> None:
    assert num_communicators(Parallelism()) == 0
    assert num_communicators(Parallelism(dp_size=4)) == 2  # gradients, the world
    # TP, its product with PP, PP, the world.
    assert num_communicators(Parallelism(tp_size=8, pp_size=2)) == 4
    # TP, CP, DP × CP, TP × PP, PP, the world and DP.
    assert num_communicators(Parallelism(8, 2, 4, dp_size=2)) == 7


def test_overhead_is_context_and_communicators() -> None:
    h100, layout = load_hardware("h100-sxm"), Parallelism(8, 2, 4, dp_size=2)
    assert overhead_gib(h100, layout) * 1024 == h100.context_mib + 7 * h100.communicator_mib
    assert 2 < overhead_gib(h100, layout) < 4
    assert overhead_gib(load_hardware("cpu"), layout) == 0
