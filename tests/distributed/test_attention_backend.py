"""Kernels are checked in the environment in which they train: that of --attention-backend."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from helpers.gloo import GlooPool

BACKENDS = {"flash": "100", "fused": "010", "unfused": "001", "auto": "111"}
"""TransformerEngine's flash, fused and unfused kernels, allowed or not."""
NAMES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def seen(backend: str) -> tuple[str, str]:
    """What of :data:`NAMES` stands when the kernel is chosen, and once the model is built."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_wlb.runtime.compat.patching import PatchSet
    from megatron_wlb.runtime.megatron_lm import chunks as lm_model
    from megatron_wlb.settings.command_line import parse

    found = []
    choose = lm_model.choose_kernel

    def allowed() -> str:
        return "".join(os.environ.get(name, "-") for name in NAMES)

    def noted(*args: object) -> object:
        found.append(allowed())
        return choose(*args)  # type: ignore[arg-type]

    rest = {k: v for k, v in os.environ.items() if k not in NAMES}
    patches = PatchSet()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    try:
        with mock.patch.dict(os.environ, rest, clear=True):
            lm_model.install(patches, parse(["--mock-data"]), noted)  # type: ignore[arg-type]
            core = TransformerConfig(
                num_layers=1, hidden_size=64, num_attention_heads=4,
                attention_backend=AttnBackend[backend], calculate_per_token_loss=True,
                moe_token_dispatcher_type="alltoall",
            )  # fmt: skip
            spec = gpt_layer_specs.get_gpt_layer_local_spec()
            GPTModel(core, spec, 128, 64, position_embedding_type="rope")
            return found[0], allowed()
    finally:
        patches.restore()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kernel_is_chosen_where_it_trains(gloo: GlooPool, backend: str) -> None:
    assert gloo.run(1, seen, backend) == [(BACKENDS[backend], BACKENDS[backend])]
