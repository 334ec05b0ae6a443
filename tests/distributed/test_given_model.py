"""A model that another trainer built gives samples that begin alike what each gives alone.

Stock Megatron builds the model and runs its schedule. Each sample alone runs by stock attention
under a causal mask, in the same layout but on one context-parallel rank; what is taught runs them
together. Log-probabilities and every gradient are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.gloo import GlooPool

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.settings.command_line import parse

VOCAB_SIZE = 64
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 512 "
    "--make-vocab-size-divisible-by 32 --global-batch-size 1 --position-embedding-type rope"
)
LAYOUTS = {
    "alone": "",
    "tp2_sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "cp2_tp2_sp": "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
}
Ids = npt.NDArray[np.int64]


def samples() -> list[list[Ids]]:
    """Micro-batches: a tree of three levels, an equal pair, one that is another's beginning, and
    what shares nothing.
    """
    random = np.random.RandomState(0)

    def more(length: int, *before: Ids) -> Ids:
        return np.concatenate([*before, random.randint(0, VOCAB_SIZE, length)])

    prompt = more(90)
    turn = more(75, prompt)
    tree = [more(1, turn), more(40, turn), more(33, prompt), turn, turn, more(64, prompt)]
    return [[*tree, more(50)], [more(9), more(120)], [more(20, prompt), more(31, prompt)]]


def gradients_and_log_probs(
    flags: str, together: bool, break_it: bool = False, changed: Any = (), summed: bool = False
) -> tuple[dict[str, Any], list[Any]]:
    """Of each parameter of this rank; and on the last stage of each sample."""
    import torch
    from megatron.core import mpu, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_wlb.runtime.compat.norm import TorchNorm
    from megatron_wlb.runtime.trainer import distributed
    from megatron_wlb.runtime.trainer.given_model import SharedSamples, share

    class TEDotProductAttention(torch.nn.Module):
        """Where TransformerEngine's would be, as Megatron's own knows no context parallelism."""

        __module__ = "megatron.core.extensions.transformer_engine"
        __qualname__ = "TEDotProductAttention"

        def __init__(self, **_: Any) -> None:
            super().__init__()

    config = parse([*MODEL.split(), *flags.split()])
    distributed.initialize_groups(config)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(mpu.get_pipeline_model_parallel_rank())
    p = config.parallel
    cp_size = p.context_parallel_size
    settings: dict[str, Any] = dict(
        num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
        tensor_model_parallel_size=p.tensor_model_parallel_size, pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=p.pipeline_model_parallel_size,
        context_parallel_size=cp_size,
        sequence_parallel=p.sequence_parallel, variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall", cuda_graph_modules=[],
    )  # fmt: skip
    changed = dict(changed)
    own_core = changed.pop("own core", False)
    core = TransformerConfig(**settings | changed)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    # Megatron's own refuses sequence parallelism.
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
    if cp_size > 1 or own_core:
        TEDotProductAttention.__qualname__ = own_core or "TEDotProductAttention"
        spec.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    num_layers = 4 // p.pipeline_model_parallel_size
    block = TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=TorchNorm)
    gpt = GPTModel(
        config=core, transformer_layer_spec=block, vocab_size=VOCAB_SIZE, max_sequence_length=512,
        pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip
    names = list(gpt.state_dict())
    if together:
        share([gpt])
    assert list(gpt.state_dict()) == names
    found: list[Any] = []

    def log_probs(logits: Any, targets: Any) -> Any:
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits.transpose(0, 1), targets.mT)
        return -losses.mT

    def weighed(own: Any) -> Any:
        found.append(own.detach().numpy())
        return -(own * torch.linspace(0.5, 1.5, len(own))).sum()

    def forward_step(batches: Any, model: Any) -> tuple[Any, Any]:
        batch = [torch.from_numpy(ids) for ids in next(batches)]
        if not together:
            (ids,) = batch
            mask = torch.ones(len(ids), len(ids)).tril() < 0.5
            padded = torch.nn.functional.pad(ids, (0, -len(ids) % 2))
            mask = torch.nn.functional.pad(mask, (0, -len(ids) % 2) * 2, value=True)

            def loss(logits: Any) -> tuple[Any, dict[str, Any]]:
                own = log_probs(logits[:, : len(ids) - 1], ids[None, 1:])[0]
                return weighed(own), {}

            positions = torch.arange(len(padded))
            return model(padded[None], positions[None], mask[None, None]), loss
        known = SharedSamples.of(batch, core)
        params = known.params
        if break_it:
            from dataclasses import replace

            params = replace(params, shared=None)

        def loss(logits: Any) -> tuple[Any, dict[str, Any]]:
            own = log_probs(logits, known.targets)
            every = known.of_samples(own, summed=summed).split(known.lengths)
            return sum(weighed(own[:-1]) for own in every), {}

        tokens = known.of_rows(torch.cat(batch))
        assert torch.equal(tokens, known.tokens)
        return model(tokens, None, None, packed_seq_params=params), loss

    batches = samples() if together else [[ids] for batch in samples() for ids in batch]
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=[gpt],
        num_microbatches=len(batches), seq_length=512, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    for parameter in gpt.parameters():
        if getattr(parameter, "sequence_parallel", False):  # as Megatron's finalize_model_grads
            group = mpu.get_tensor_model_parallel_group()
            torch.distributed.all_reduce(parameter.grad, group=group)
        if cp_size > 1:
            torch.distributed.all_reduce(parameter.grad, group=mpu.get_context_parallel_group())
    # Megatron divides by the one, and multiplies by the other.
    scale = len(batches) / cp_size / (cp_size if summed else 1)
    return {n: p.grad.numpy() * scale for n, p in gpt.named_parameters()}, found


def assert_alike(wanted_ranks: list[Any], ranks: list[Any]) -> int:
    """So many samples' log-probabilities were compared."""
    number = 0
    for (wanted, wanted_probs), (got, got_probs) in zip(wanted_ranks, ranks, strict=True):
        assert wanted.keys() == got.keys() and wanted
        for name, gradient in wanted.items():
            scale = np.abs(gradient).max()
            np.testing.assert_allclose(got[name], gradient, atol=3e-6 * scale, err_msg=name)
        for one, other in zip(wanted_probs, got_probs, strict=True):
            np.testing.assert_allclose(other, one, atol=2e-6)
        number += len(wanted_probs)
    return number


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_together_are_what_each_is_alone(gloo: GlooPool, layout: str) -> None:
    flags = LAYOUTS[layout]
    world_size = 2 ** flags.count(" 2")
    own_flags = flags.removeprefix("--context-parallel-size 2").strip()
    cp_size = 1 if own_flags == flags else 2
    alone = gloo.run(world_size // cp_size, gradients_and_log_probs, own_flags, False)
    alone *= cp_size  # tensor-parallel ranks are neighbours
    together = gloo.run(world_size, gradients_and_log_probs, flags, True)
    assert assert_alike(alone, together) >= 11
    if cp_size > 1:  # where ranks have losses of their own the sum counts
        run = world_size, gradients_and_log_probs, flags, True, False, (), True
        assert_alike(alone, gloo.run(*run))
        return
    # Without what they share they are other samples.
    broken = gloo.run(world_size, gradients_and_log_probs, flags, True, True)
    assert any(
        not np.allclose(one, other, atol=1e-2)
        for (_, own), (_, others) in zip(alone, broken, strict=True)
        for one, other in zip(own, others, strict=True)
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention_dropout": 0.1}, "cannot share prefixes with dropout: one draw"),
        ({"window_size": (3, 1)}, r"window_size is \(3, 1\)"),
        ({"own core": "CappedAttention"}, "has the core attention megatron.*CappedAttention"),
    ],
)
def test_models_that_cannot_share_are_refused(
    gloo: GlooPool, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(CompatibilityError, match=said):
        gloo.run(1, gradients_and_log_probs, "", True, False, changed)
