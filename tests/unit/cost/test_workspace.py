"""What attention's backward works in, counted by hand for one rank."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_wlb.cost import ModelShape, Parallelism, load_hardware
from megatron_wlb.cost.activations import ActivationModel
from megatron_wlb.cost.execution import Execution, Kernels
from megatron_wlb.cost.memory import overhead_gib
from megatron_wlb.cost.tape import Operation
from megatron_wlb.cost.workspace import WORKSPACES

H, G, D = 8, 2, 128
LLAMA_70B = ModelShape(
    8192, 28672, 80, 64, 16, 128, 32000, True, rms_norm=True, linear_bias=False,
    tied_embeddings=False,
)  # fmt: skip
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


def test_overhead_is_context_and_communicators() -> None:
    h100, layout = load_hardware("h100-sxm"), Parallelism(8, 2, 4, dp_size=2)
    assert overhead_gib(h100, layout) * 1024 == h100.context_mib + 7 * h100.communicator_mib
    assert 2 < overhead_gib(h100, layout) < 4
    assert overhead_gib(load_hardware("cpu"), layout) == 0
