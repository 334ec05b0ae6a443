"""What attention refuses before it would silently compute something else; where it goes in."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from helpers.gloo import GlooPool

from megatron_wlb.errors import CompatibilityError, PlanError
from megatron_wlb.settings.command_line import parse

# On a rank, where Megatron is imported under the CPU emulation.


def config(**settings: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = {"attention_dropout": 0.0, "cuda_graph_modules": []} | settings
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **settings)


def options() -> Any:
    from megatron_wlb.runtime.gpt.attention.document_attention import AttentionOptions
    from megatron_wlb.runtime.gpt.attention.kernels.sdpa import sdpa_varlen

    return AttentionOptions(sdpa_varlen)


def refused(function: Callable[[], object], *words: str) -> None:
    try:
        function()
    except (CompatibilityError, PlanError) as error:
        assert all(word in str(error) for word in words), error
        assert "\n" not in str(error)
    else:
        raise AssertionError(f"{words} not refused")


def check_settings() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_wlb.runtime.gpt.attention.document_attention import (
        DocumentAttention,
        check_config,
    )

    check_config(config())
    check_config(config(attention_dropout=0.1))
    check_config(config(window_size=(64, 0)))
    for size in ((64, -1), (64, 2), (-1, 0)):
        refused(lambda s=size: check_config(config(window_size=s)), f"{size!r}", "set it to (W, 0)")
    for name, value in (
        ("softmax_type", "learnable"),
        ("qk_clip", True),
        ("log_max_attention_logit", True),
        ("fp8_dot_product_attention", True),
        ("fp8_multi_head_attention", True),
        ("cuda_graph_impl", "local"),
        ("flash_decode", True),
        ("tp_comm_overlap", True),
        ("experimental_attention_variant", "dsa"),
        ("enable_cuda_graph", True),
        ("external_cuda_graph", True),
        ("batch_invariant_mode", True),
        ("hybrid_context_parallel", True),
    ):
        changed = config()
        assert hasattr(changed, name), name
        setattr(changed, name, value)
        refused(lambda c=changed: check_config(c), f"{name} is {value!r}", "set it to")
    changed = config()
    changed.fine_grained_activation_offloading, changed.offload_modules = True, ["core_attn"]
    refused(lambda: check_config(changed), "offload_modules", "leave core_attn out")

    # The module checks too, however it was built.
    def build(mask: Any, kind: str) -> Any:
        return DocumentAttention(config(), 1, mask, kind, options=options())

    refused(lambda: build(AttnMaskType.padding, "self"), "padding self-attention")
    refused(lambda: build(AttnMaskType.causal, "cross"), "causal cross-attention")
    build(AttnMaskType.causal, "self")


def check_micro_batches() -> None:
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_wlb.plan.sharding import Sharding
    from megatron_wlb.runtime.gpt.attention.document_attention import (
        DocumentAttention,
        PlanSeqParams,
    )
    from megatron_wlb.runtime.gpt.attention.kernels import Segments
    from megatron_wlb.runtime.stepping.batch import local_params

    attention = DocumentAttention(config(), 1, AttnMaskType.causal, "self", options=options())
    qkv = [torch.randn(6, 1, 2, 4) for _ in range(3)]
    whole = PlanSeqParams.of(Segments.of([4, 2]), np.array([0, 1, 2, 3, 0, 1]))
    assert attention(*qkv, None, packed_seq_params=whole).shape == (6, 1, 8)
    refused(lambda: attention(*qkv, None), "without the micro-batch's document boundaries")
    short = PlanSeqParams.of(Segments.of([4]), np.arange(4))
    refused(lambda: attention(*qkv, None, packed_seq_params=short), "6 tokens where the plan has 4")
    core = config(window_size=(1, 0), window_attn_skip_freq=[0, 1])
    wide, narrow = (
        DocumentAttention(core, number, AttnMaskType.causal, "self", options=options())
        for number in (1, 2)
    )
    refused(lambda: narrow(*qkv, None, packed_seq_params=whole), "layer 2 has a sliding window")
    _, both = local_params(
        [4, 2], whole.positions.numpy(), "cpu", sharding=Sharding(), reach_tokens=2
    )
    expected = attention(*qkv, None, packed_seq_params=both)
    assert torch.equal(wide(*qkv, None, packed_seq_params=both), expected)
    assert not torch.equal(narrow(*qkv, None, packed_seq_params=both), expected)
    _, shard = local_params([8, 4], np.r_[:8, :4], "cpu", cp_rank=1, cp_size=2, sharding=Sharding())
    refused(lambda: attention(*qkv, None, packed_seq_params=shard), "that is divided over ranks")


def check_scale() -> None:
    """Megatron divides scores by the layer's number in half precision, and multiplies again."""
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_wlb.runtime.gpt.attention.document_attention import (
        DocumentAttention,
        PlanSeqParams,
    )
    from megatron_wlb.runtime.gpt.attention.kernels import Segments
    from megatron_wlb.runtime.trainer import distributed

    distributed.initialize_groups(parse([]))
    qkv = [torch.randn(6, 1, 2, 4) for _ in range(3)]
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
    whole = PlanSeqParams.of(Segments.of([6]), np.arange(6))
    for settings in ({}, {"apply_query_key_layer_scaling": True}, {"softmax_scale": 0.8}):
        core = config(masked_softmax_fusion=False, **settings)
        common = (core, 3, AttnMaskType.causal, "self")
        scale = {"softmax_scale": core.softmax_scale}
        expected = DotProductAttention(*common, **scale)(*qkv, mask)
        found = DocumentAttention(*common, **scale, options=options())(
            *qkv, None, packed_seq_params=whole
        )
        torch.testing.assert_close(found, expected)


def check_specs() -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron_wlb.runtime.compat.norm import TorchNorm
    from megatron_wlb.runtime.gpt import build
    from megatron_wlb.runtime.gpt.attention.document_attention import DocumentAttention
    from megatron_wlb.runtime.gpt.attention.latent_attention import DocumentLatentAttention

    chosen = options()
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    found = build.with_document_attention(spec, chosen).submodules.self_attention
    core = found.submodules.core_attention
    assert core.func is DocumentAttention and core.keywords == {"options": chosen}
    mla = gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True)
    found = build.with_document_attention(mla, chosen).submodules.self_attention
    core = found.submodules.core_attention
    assert found.module is DocumentLatentAttention
    assert core.module is DocumentAttention and core.params == {"options": chosen}
    fused = gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True)
    fused.submodules.self_attention.module = type("FusedMLASelfAttention", (), {})
    refused(lambda: build.with_document_attention(fused, chosen), "FusedMLASelfAttention")
    refused(lambda: build.with_document_attention(SimpleNamespace(), chosen), "attention is None")

    assert not gpt_layer_specs.HAVE_TE
    refused(lambda: build.layer_submodules(config(), "transformer_engine", chosen), "install")
    spec = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=True)
    stand_in = mock.Mock(return_value=spec)
    with mock.patch.multiple(
        gpt_layer_specs,
        create=True,
        HAVE_TE=True,
        TENorm="its norm",
        get_gpt_layer_with_transformer_engine_spec=stand_in,
    ):
        layer, norm = build.layer_submodules(
            config(qk_layernorm=True), "transformer_engine", chosen
        )
    assert norm == "its norm"
    stand_in.assert_called_once_with(qk_layernorm=True, multi_latent_attention=False)
    attention = layer.submodules.self_attention.submodules
    assert attention.core_attention.func is DocumentAttention
    # Its own norms stay.
    assert TorchNorm not in (layer.submodules.input_layernorm, attention.q_layernorm)


# In pytest.


def test_settings_that_attention_cannot_honour_are_refused(gloo: GlooPool) -> None:
    gloo.run(1, check_settings)


def test_attention_refuses_what_is_not_its_micro_batch(gloo: GlooPool) -> None:
    gloo.run(1, check_micro_batches)


def test_attention_goes_into_self_attention_of_any_spec_and_no_other(gloo: GlooPool) -> None:
    """TransformerEngine is not here: its spec is stood in for by one of its shape."""
    gloo.run(1, check_specs)


def test_scores_are_scaled_as_megatron_scales_them(gloo: GlooPool) -> None:
    gloo.run(1, check_scale)
