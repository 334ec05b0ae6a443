"""Runs of the launcher, and of Megatron-LM without it.

They train with the loop of the installed megatron-core; with a checkout's own ``pretrain_gpt.py``
where ``MEGATRON_LM_PATH`` names one.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from rank_runs import Finished, Flags, Run, read_metrics, start

from megatron_wlb.launch import STAND_IN
from megatron_wlb.settings.command_line import megatron_flags

PATH = os.environ.get("MEGATRON_LM_PATH")
SCRIPT = f"{PATH}/pretrain_gpt.py" if PATH else None
"""What the launcher is given; without one it runs its own."""

WINDOW = 128
BOTH: Flags = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": WINDOW,
    "max_position_embeddings": WINDOW,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "adam_beta2": 0.95,
    "split": "80,15,5",
    "log_interval": 1,
}


MEGATRON_LM: Flags = {
    # For a small model on a CPU.
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 255,  # no text has a byte of 255; corpora of bytes end documents with 0
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "no_gradient_accumulation_fusion": True,
    "no_persist_layer_norm": True,
    "no_masked_softmax_fusion": True,
    "no_bias_gelu_fusion": True,
    "no_bias_dropout_fusion": True,
    "no_rope_fusion": True,
    "eval_interval": 1000,
    "eval_iters": 0,
}

PP2: Flags = {"pipeline_model_parallel_size": 2}
PP2_VPP2: Flags = PP2 | {"num_virtual_stages_per_pipeline_rank": 2}
TP2_SP: Flags = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
DP2: Flags = {"use_distributed_optimizer": True}
CP2: Flags = {"context_parallel_size": 2}
PP2_CP2: Flags = PP2 | CP2
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "pp2": (2, PP2),
    "pp2-vpp2": (2, PP2_VPP2),
    "tp2-sp": (2, TP2_SP),
    "dp2": (2, DP2),
    "cp2": (2, CP2),
    "pp2-cp2-dp2": (8, PP2_CP2),
}
SLICES: Flags = {"wlb_packing": "slim", "wlb_units": 12, "wlb_slice_multiple": 8}
RECOMPUTED: Flags = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
LLAMA: Flags = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
}
LLAMA_LATENT: Flags = LLAMA | {
    "group_query_attention": None,
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 14,
}
LLAMA_EXPERTS: Flags = LLAMA | {
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.5,
    "moe_token_dispatcher_type": "alltoall",
}
LATENT: Flags = {
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 14,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "rotary_scaling_factor": 4.0,
    "mscale": 1.3,
    "init_method_std": 0.2,  # with which heads see more than means
}
EXPERTS: Flags = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 16,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
    "moe_router_dtype": "fp32",
    "disable_bias_linear": True,
}

DELTA: Flags = {
    "swiglu": True,  # its SiLU is that of gated delta nets too
    "disable_bias_linear": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "init_method_std": 0.2,  # with which states count
    "lr": 1e-5,  # and rounding grows little
}

MAMBA: Flags = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "mamba_state_dim": 10,
    "mamba_num_groups": 2,
    "init_method_std": 0.2,
    "lr": 1e-5,
}

FOCAL = """
import torch

def loss(log_probs, targets):
    far = 1 + (targets.positions > 20).float() + 0.5 * (targets.samples % 2)
    return -far * (1 - log_probs.exp()) ** 2 * log_probs
"""
"""A `--wlb-loss` that is another one than cross-entropy."""


def launch(
    folder: Path,
    num_processes: int,
    flags: Flags,
    *,
    fault: Callable[[], None] | None = None,
    script: str | Path | None = SCRIPT,
) -> Run:
    """``torchrun -m megatron_wlb.launch [SCRIPT]``, with ranks forked."""
    program = functools.partial(launched, script=_of_model(flags, script))
    flags = MEGATRON_LM | _of_hybrid(flags) | flags
    return start(folder, num_processes, flags, fault=fault, program=program)


def run_without_launcher(
    folder: Path, num_processes: int, flags: Flags, *, fault: Callable[[], None] | None = None
) -> Run:
    """``torchrun pretrain_gpt.py``, which is stock Megatron, on a machine that passes for one with
    a GPU.
    """
    # Workers of its data loader would be handed a function that cannot be pickled.
    flags = MEGATRON_LM | {"num_workers": 0} | _of_hybrid(flags) | flags
    program = functools.partial(_run_alone, script=_of_model(flags, SCRIPT))
    return start(folder, num_processes, flags, fault=fault, program=program)


def _of_hybrid(flags: Flags) -> Flags:
    """What Megatron up to 0.18 asks for a HybridModel."""
    spec = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    return {"spec": spec} if "hybrid_layer_pattern" in flags else {}


def _of_model(flags: Flags, script: str | Path | None) -> str | Path | None:
    """The checkout's script for a model; that of the package is for all."""
    is_hybrid = script == SCRIPT and PATH and "hybrid_layer_pattern" in flags
    return f"{PATH}/pretrain_hybrid.py" if is_hybrid else script


def logged(finished: Finished, name: str) -> list[str]:
    """A figure of each of Megatron's log lines, as it is written there."""
    return re.findall(rf"\| {name}: +(\S+)", finished.output)


def validations(finished: Finished) -> list[str]:
    """The loss of each evaluation, as Megatron writes it."""
    return re.findall(r"validation loss at .*? \| lm loss value: (\S+)", finished.output)


def assert_equal_steps(found: Path, expected: Path, first: int = 1) -> None:
    """Compares two files of metrics from step ``first`` on: loss, gradients, what was trained.

    Losses are fp32 sums of a thousand token losses, in another order: up to 1e-7 is seen.
    """
    theirs = [line for line in read_metrics(expected) if line["iteration"] >= first]
    ours = list(read_metrics(found))
    assert len(ours) == len(theirs) > 1
    for one, other in zip(ours, theirs, strict=True):
        for key in ("iteration", "tokens", "targets", "delay_steps", "waiting_tokens"):
            assert one[key] == other[key]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def install_and_uninstall(_argv: list[str]) -> int:
    """Installs twice and uninstalls, and looks at every name of `megatron.training`."""
    from megatron_wlb.runtime.megatron_lm import cpu_loop

    _find_checkout()
    cpu_loop.install()
    import megatron.training
    from megatron.core.models.gpt import GPTModel
    from megatron.training import arguments, checkpointing, initialize, training, utils

    from megatron_wlb.runtime.megatron_lm import install

    owners = (megatron.training, training, initialize, arguments, checkpointing, utils, GPTModel)

    def names() -> dict[str, int]:
        """What each name is; not of modules, which an import may add."""
        return {
            f"{owner.__name__}.{name}": id(value)
            for owner in owners
            for name, value in vars(owner).items()
            if not isinstance(value, ModuleType | dict)
        }

    before = names()
    install.install()
    once = names()
    assert install.installed()
    assert once != before
    install.install()
    assert names() == once
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert parser.parse_args(["--wlb-packing", "wlb"]).wlb_packing == "wlb"
    flags = {flag for flag in parser._option_string_actions if flag.startswith("--")}
    new = {f for f in flags - megatron_flags() if not f.startswith("--wlb-")} - {"--help"}
    assert not new, "add them to megatron_flags.txt, where test_lm_flags.py has them reviewed"
    install.uninstall()
    assert not install.installed()
    assert names() == before
    install.uninstall()
    return 0


def launched(argv: list[str], script: str | Path | None = SCRIPT) -> int:
    from megatron_wlb.launch import main

    if PATH and Path(str(script)).parent != Path(
        PATH
    ):  # a copy somewhere else, which PYTHONPATH tells of the checkout
        sys.path.append(PATH)
    return main([*([str(script)] if script else []), *argv])


def _run_alone(argv: list[str], script: str | None) -> int:
    import runpy

    from megatron_wlb.runtime.megatron_lm import cpu_loop

    sys.argv = ["pretrain_gpt.py", *argv]
    _find_checkout()
    cpu_loop.install()
    if script:
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(STAND_IN, run_name="__main__")
    return 0


def _find_checkout() -> None:
    if PATH:
        sys.path[0] = PATH
