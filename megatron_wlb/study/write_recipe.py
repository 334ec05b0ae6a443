"""A simulated layout as what trains it: Megatron's flags, a command line, a recipe file.

A recipe is a YAML file in the form of Megatron-LM's ``model_config.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import takewhile
from typing import TypeAlias

import yaml

from megatron_wlb.cost.shape import ModelShape, Recompute
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.layer_patterns import pattern_of
from megatron_wlb.planning.packing import kind_of
from megatron_wlb.planning.run import Run
from megatron_wlb.settings import allocator
from megatron_wlb.settings.config import flag_of
from megatron_wlb.settings.megatron import TrainingConfig
from megatron_wlb.settings.recipe import quoted
from megatron_wlb.settings.split import LAYOUT, flags_of

Value: TypeAlias = bool | int | float | str | list[str | int]
Flags: TypeAlias = Mapping[str, Value]
"""A flag and its value; True for a bare one, a list where it takes several."""
VPP = "--num-virtual-stages-per-pipeline-rank"
LAUNCHER = ("megatron_wlb.launch", "$MEGATRON_LM_PATH/pretrain_gpt.py")
TO_ADD = "--data-path, --tokenizer-type, --train-iters, --lr, --eval-interval"
"""What a run by :data:`LAUNCHER` needs, and no layout says."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Megatron asks for 1 of it with TP or CP, on GPUs before Blackwell."""


def model_flags(shape: ModelShape) -> Flags:
    grouped = shape.num_query_groups != shape.num_attention_heads
    own_channels = shape.kv_channels * shape.num_attention_heads != shape.hidden_size
    rotary = 0.0 if shape.learned_positions else shape.rotary_percent
    positions = "learned_absolute" if shape.learned_positions else "rope" if rotary else "none"
    latent = (
        {flag_of(name): size for name, size in asdict(shape.latent).items()}
        if (shape.latent)
        else {}
    )
    return _given(
        {
            "--multi-latent-attention": bool(latent),
            **latent,
            "--num-layers": shape.num_layers,
            "--hidden-size": shape.hidden_size,
            "--ffn-hidden-size": shape.ffn_hidden_size,
            "--num-attention-heads": shape.num_attention_heads,
            "--group-query-attention": grouped,
            "--num-query-groups": shape.num_query_groups if grouped else None,
            "--kv-channels": shape.kv_channels if own_channels and not latent else None,
            "--normalization": "RMSNorm" if shape.rms_norm else None,
            "--swiglu": shape.gated,
            "--disable-bias-linear": not shape.linear_bias,
            "--add-qkv-bias": shape.qkv_bias,
            "--qk-layernorm": shape.qk_norm,
            "--window-size": f"{shape.reach_tokens - 1},0" if shape.reach_tokens else None,
            "--window-attn-skip-freq": pattern_of(shape, lambda one: one.windowed_query_size > 0),
            "--untie-embeddings-and-output-weights": not shape.tied_embeddings,
            "--mtp-num-layers": shape.num_ahead or None,
            "--position-embedding-type": positions,
            "--rotary-percent": rotary if 0 < rotary < 1 else None,
            "--hidden-dropout": None if shape.dropout else 0.0,
            "--attention-dropout": None if shape.dropout else 0.0,
            **_expert_flags(shape),
        }
    )


def _expert_flags(shape: ModelShape) -> Mapping[str, Value | None]:
    """Raises :class:`ConfigError` for experts of several kinds."""
    if not shape.experts:
        return {}
    if len(shape.experts) > 1:
        raise ConfigError(
            f"a recipe has experts of one size; these are of {len(shape.experts)}, so give a model "
            "of one"
        )
    (experts,) = shape.experts
    return {
        "--num-experts": experts.num_experts,
        "--moe-layer-freq": pattern_of(shape, lambda layer: layer.is_routed),
        "--moe-ffn-hidden-size": experts.expert_hidden_size,
        "--moe-shared-expert-intermediate-size": experts.shared_hidden_size or None,
        "--moe-router-topk": experts.topk,
        "--moe-grouped-gemm": True,
        "--moe-token-dispatcher-type": "alltoall",
    }


def _given(flags: Mapping[str, Value | None]) -> Flags:
    return {flag: x for flag, x in flags.items() if x is not None and x is not False}


def fp8_flags(training: TrainingConfig) -> Flags:
    """FP8 as the settings have it; nothing where they have none."""
    if training.fp8_format is None:
        return {}
    default = TrainingConfig()
    names = [f.name for f in fields(training) if f.name.startswith("fp8_") or "_bf16" in f.name]
    given = {name: getattr(training, name) for name in names}
    flags = {flag_of(n): x for n, x in given.items() if x != getattr(default, n)}
    return _given(flags)


def layout_flags(scenario: Run) -> Flags:
    """How the model is divided, and what is recomputed.

    Raises :class:`ConfigError` for layers that are unlike in more than precision, sliding window
    and experts, which no flag here says.
    """
    p, shape = scenario.parallelism, scenario.shape
    attention, mlp = replace(shape, reach_tokens=None, layers=(), predictors=()).layer.parts
    usual = {
        (first, second) for first in (attention, shape.layer.parts[0])
        for second in (mlp, *shape.experts)
    }  # fmt: skip
    if any(layer.parts not in usual for _, layer in shape.runs):
        raise ConfigError(
            f"a recipe has {scenario.shape.num_layers} equal layers; these are unlike, so give a "
            "model without layers"
        )
    uneven = flags_of(p.layers_of_stages(scenario.shape), p.vpp_size, scenario.shape.num_ahead)
    return _given(
        {
            "--tensor-model-parallel-size": p.tp_size,
            "--context-parallel-size": p.cp_size,
            "--pipeline-model-parallel-size": p.pp_size,
            "--expert-model-parallel-size": p.ep_size if shape.experts else None,
            "--expert-tensor-parallel-size": p.expert_tp_size if shape.experts else None,
            "--sequence-parallel": p.sequence_parallel,
            # A layout has VPP in it.
            VPP: p.vpp_size if p.vpp_size > 1 and LAYOUT not in uneven else None,
            **uneven,
            "--use-distributed-optimizer": True,
            "--overlap-grad-reduce": scenario.execution.overlap_grad_reduce,
            **recompute_flags(scenario.recompute),
        }
    )


def recompute_flags(recompute: Recompute) -> Flags:
    return _given(
        {
            "--recompute-granularity": recompute.granularity,
            "--recompute-method": recompute.method,
            "--recompute-num-layers": recompute.num_layers,
        }
    )


def batch_flags(scenario: Run) -> Flags:
    """Window and micro-batches of a step.

    Megatron asks for ``--max-position-embeddings`` whatever the positions are.
    """
    return {
        "--seq-length": scenario.window,
        "--max-position-embeddings": scenario.shape.learned_positions or scenario.window,
        "--micro-batch-size": scenario.micro_batch_size,
        "--global-batch-size": scenario.num_micro_batches * scenario.micro_batch_size,
        "--bf16": True,
    }


def balance_flags(scenario: Run, packing: Sequence[str], sharding: str, hardware: str) -> Flags:
    """The words of ``packing``, sharding, slices' memory, and the machine that costs are for."""
    flags: dict[str, Value] = {}
    for at, word in enumerate(packing):
        if word.startswith("--"):
            values = [*takewhile(lambda text: not text.startswith("--"), packing[at + 1 :])]
            numbers = [int(text) if text.isdecimal() else text for text in values]
            flags[word] = numbers[0] if len(numbers) == 1 else numbers
    if kind_of(str(flags["--wlb-packing"])).slices and scenario.memory_gib is not None:
        # Or training would choose them by time alone.
        flags["--wlb-memory-gib"] = int(10 * scenario.memory_gib) / 10
        if scenario.execution.host_gib:
            flags["--wlb-host-gib"] = scenario.execution.host_gib
    if scenario.parallelism.cp_size > 1:
        flags["--wlb-cp-sharding"] = sharding
    flags["--wlb-hardware"] = hardware
    return flags


def command(flags: Flags, num_devices: int, devices_per_node: int) -> str:
    """The command line that trains so, once :data:`TO_ADD` is added."""
    nodes = -(-num_devices // devices_per_node)
    words = ["torchrun", "--nproc-per-node", str(min(num_devices, devices_per_node))]
    if nodes > 1:
        words += f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HOST:29500".split()
    words = [f"{CONNECTIONS}=1", *words, "-m", *LAUNCHER]
    for flag, value in flags.items():
        values = value if isinstance(value, list) else [value]
        words += [flag] if value is True else [flag, *map(str, values)]
    return " ".join(quoted(word, {"HOST", "MEGATRON_LM_PATH"}) for word in words)


def recipe(
    sections: Mapping[str, Flags], num_devices: int, devices_per_node: int, remarks: str
) -> str:
    """A YAML file of flags under headings; ``remarks`` stand at its top."""
    head = {
        "NUM_NODES": -(-num_devices // devices_per_node),
        "GPUS_PER_NODE": min(num_devices, devices_per_node),
        CONNECTIONS: 1,
        allocator.VARIABLE: allocator.VALUE,
    }
    lines = [f"# {line}".rstrip() for line in remarks.splitlines()]
    lines += ["TEST_TYPE: release", "ENV_VARS:"]
    lines += [f"  {name}: {value}" for name, value in head.items()]
    lines.append("MODEL_ARGS:")
    for heading, flags in sections.items():
        lines.append(f"  # {heading}")
        for flag, value in flags.items():
            text = yaml.safe_dump(value).splitlines()[0]
            if isinstance(value, list):  # As Megatron's recipes write several values of a flag.
                text = f"[{' '.join(map(str, value))}]"
            elif flag == LAYOUT:  # which two shells read where Megatron runs recipes
                text = re.sub(r"[|()]", r"\\\\\g<0>", text)
            lines.append(f"  {flag}: {text}")
    return "\n".join(lines) + "\n"
