"""What the trainer's model takes of Megatron's faster ways: all that the device can run."""

from __future__ import annotations

from typing import Any
from unittest import mock

from helpers.gloo import GlooPool
from helpers.memory import VOCAB_SIZE
from helpers.workload import make_workload

from megatron_wlb.settings.command_line import parse

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64"
LLAMA = "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights"
OF_GPUS = ("transformer_impl", "bias_activation_fusion", "apply_rope_fusion")


def chosen(flags: str, on_gpu: bool) -> dict[str, Any]:
    """What a model is made of, on the CPU or as on a GPU with TransformerEngine and Apex."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron_wlb.runtime import emulation
    from megatron_wlb.runtime.gpt import build
    from megatron_wlb.runtime.trainer import distributed

    config = parse(f"{SIZES} {flags}".split())
    distributed.initialize_groups(config)
    with (
        mock.patch.object(emulation, "installed", return_value=not on_gpu),
        mock.patch.object(gpt_layer_specs, "HAVE_TE", on_gpu),
        mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb", print if on_gpu else None),
    ):
        core = build.transformer_config(config)
        found = {"transformer_impl": build.transformer_impl(config)}
    names = ("bias_activation_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")
    return found | {name: getattr(core, name) for name in names}


def test_gpu_takes_every_fusion_that_honours_the_model(gloo: GlooPool) -> None:
    def on_gpu(flags: str) -> list[Any]:
        (found,) = gloo.run(1, chosen, flags, True)
        return [found[name] for name in OF_GPUS]

    assert on_gpu(LLAMA) == ["transformer_engine", True, True]
    assert on_gpu("--transformer-impl local") == ["local", False, True]  # exact GELU
    for other in ("--position-embedding-type yarn", "--rotary-interleaved"):
        assert on_gpu(other) == ["transformer_engine", False, False]


def test_cpu_takes_what_it_can_run(gloo: GlooPool) -> None:
    (found,) = gloo.run(1, chosen, LLAMA, False)
    assert [found[name] for name in OF_GPUS] == ["local", False, False]
    assert found["gradient_accumulation_fusion"]


def weights_with_gradients_of_their_own() -> list[str]:
    """The weights whose gradients autograd makes, of a step of two micro-batches."""
    from helpers.plans import scatter_for
    from helpers.ranks import build_runner

    config = parse(f"{SIZES} {LLAMA} --global-batch-size 2".split())
    workload = make_workload([[40, 30]], vocab_size=VOCAB_SIZE)
    runner = build_runner(config, workload)
    (chunk,) = runner.model.chunks
    chunk.zero_grad_buffer()
    runner.run(scatter_for(config, workload, 1, 0))
    return [
        name
        for name, weight in runner.model.gpts[0].named_parameters()
        if weight.dim() == 2 and not weight.grad_added_to_main_grad
    ]


def test_linear_layers_add_gradients_to_the_buffer(gloo: GlooPool) -> None:
    (found,) = gloo.run(1, weights_with_gradients_of_their_own)
    assert found == ["embedding.word_embeddings.weight"]
