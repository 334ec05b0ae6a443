"""What Megatron-LM must be told on a machine without GPUs is asked for in one line."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_wlb.runtime.megatron_lm import cpu_loop

TOLD: dict[str, Any] = {
    "distributed_backend": "gloo", "transformer_impl": "local",
    "gradient_accumulation_fusion": False, "no_persist_layer_norm": True,
    "apply_rope_fusion": False, "position_embedding_type": "rope",
    "use_rotary_position_embeddings": False, "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "native",
}  # fmt: skip
OF_GPUS: dict[str, Any] = {
    "distributed_backend": "nccl", "transformer_impl": "transformer_engine",
    "gradient_accumulation_fusion": True, "no_persist_layer_norm": False,
    "apply_rope_fusion": True, "position_embedding_type": "learned_absolute",
    "cross_entropy_fusion_impl": "te",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, None),
        (OF_GPUS, list(cpu_loop.NEEDED)[:-1]),
        (OF_GPUS | {"use_rotary_position_embeddings": True}, list(cpu_loop.NEEDED)),
        ({"apply_rope_fusion": True}, ["--no-rope-fusion"]),
        ({"cross_entropy_fusion_impl": "te"}, ["--cross-entropy-fusion-impl native"]),
        ({"cross_entropy_fusion_impl": "te", "cross_entropy_loss_fusion": False}, None),
        ({"distributed_backend": "nccl"}, ["--distributed-backend gloo"]),
    ],
)
def test_flags_missing_without_a_gpu_are_named(
    given: dict[str, Any], missing: list[str] | None
) -> None:
    lines = list(cpu_loop.refusals(argparse.Namespace(**TOLD | given)))
    assert "no kernels" not in "".join(lines)
    expected = f"without a GPU Megatron-LM must be told so; add {' '.join(missing or ())}"
    assert lines == ([] if missing is None else [expected])


def test_kernels_of_experts_that_only_gpus_have_are_named() -> None:
    given = {"moe_grouped_gemm": True, "moe_permute_fusion": False, "moe_router_fusion": True}
    assert list(cpu_loop.refusals(argparse.Namespace(**TOLD | given))) == [
        "without a GPU there are no kernels for --moe-grouped-gemm --moe-router-fusion; leave "
        "that out"
    ]
