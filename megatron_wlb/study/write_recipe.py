"""A simulated layout as what trains it: Megatron's flags, a command line, a recipe file.

A recipe is a YAML file in the form of Megatron-LM's ``model_config.yaml``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import takewhile
from types import MappingProxyType
from typing import Any, TypeAlias

import yaml

from megatron_wlb.cost.shape import ModelShape, Recompute
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.planning.from_words import settings_of_script
from megatron_wlb.planning.layer_patterns import pattern_of
from megatron_wlb.planning.packing import kind_of
from megatron_wlb.planning.run import Run
from megatron_wlb.settings import allocator
from megatron_wlb.settings.config import Config, flag_of, script_defaults, table
from megatron_wlb.settings.megatron import ModelConfig
from megatron_wlb.settings.recipe import quoted
from megatron_wlb.settings.split import LAYOUT, flags_of

Value: TypeAlias = bool | int | float | str | list[str | int]
Flags: TypeAlias = Mapping[str, Value]
"""A flag and its value; True for a bare one, a list where it takes several."""
VPP = "--num-virtual-stages-per-pipeline-rank"
LAUNCHER = "megatron_wlb.launch"
TO_ADD = "--data-path", "--tokenizer-type", "--train-iters", "--lr", "--eval-interval"
"""What a run by :data:`LAUNCHER` needs, and no layout says."""
MACHINE = "NUM_NODES", "GPUS_PER_NODE"
"""Variables of a recipe that say how many devices it has."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Megatron asks for 1 of it with TP or CP, on GPUs before Blackwell."""


def model_flags(shape: ModelShape) -> Flags:
    grouped = shape.num_query_groups != shape.num_attention_heads
    own_channels = shape.kv_channels * shape.num_attention_heads != shape.hidden_size
    rotary = 0.0 if shape.learned_positions else shape.rotary_percent
    rotates = rotary or shape.latent  # whose own part of a head has the positions
    positions = "learned_absolute" if shape.learned_positions else "rope" if rotates else "none"
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
            "--vocab-size": shape.vocab_size,
            **_expert_flags(shape),
        }
    )


def told_flags(
    config: Config, written: Collection[str], others: Mapping[str, list[str]]
) -> tuple[Flags, Flags]:
    """What settings say of the model, and beside it, that no search decides.

    That is what is ``written``, not the default, or not what Megatron-LM's script would have
    otherwise. ``others`` are flags that no setting stands for.
    """
    usual, scripts = Config().flat(), script_defaults()
    model, beside = dict[str, Value | None](), dict[str, Value | None]()
    own = {f.name for f in fields(ModelConfig)}
    for name, value in config.flat().items():
        known, flag = table()[name], flag_of(name)
        told = flag in written or value != usual[name]
        if config.model.num_experts or not name.startswith("moe_"):
            told |= scripts.get(name, value) != value
        if told and not (known.searched or known.layout):
            (model if name in own else beside)[flag] = _value(value)
    beside |= {flag: _value(tuple(values)) or True for flag, values in others.items()}
    return _given(model), _given(beside)


def _value(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    if value and isinstance(value[0], int):  # Megatron reads several as one word
        return ",".join(map(str, value))
    return list(value) if len(value) > 1 else value[0] if value else None


def check_model(flags: Flags, shape: ModelShape) -> None:
    """Raises :class:`ConfigError` where ``flags`` make another model than ``shape``."""
    config = settings_of_script(_words(flags))
    built = model_shape(config, config.data.vocab_size or shape.vocab_size)
    unlike = [f.name for f in fields(shape) if getattr(built, f.name) != getattr(shape, f.name)]
    if unlike:
        raise ConfigError(
            f"Megatron-LM's flags cannot describe {', '.join(unlike)} of this model, so there is "
            "no command to print; give --model a file of training settings that do"
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


def layout_flags(scenario: Run) -> Flags:
    """How the model is divided, and what is recomputed."""
    p, shape = scenario.parallelism, scenario.shape
    uneven = flags_of(p.layers_of_stages(shape), p.vpp_size, shape.num_ahead)
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


def batch_flags(window: int, num_windows: int, *, positions: int = 0, bits: str = "bf16") -> Flags:
    """Window, micro-batches of one window in a step, and 16 bits, if any.

    Megatron asks for ``--max-position-embeddings`` whatever the positions are; ``positions`` are
    those of the model.
    """
    return _given(
        {
            "--seq-length": window,
            "--max-position-embeddings": max(window, positions),
            "--micro-batch-size": 1,
            "--global-batch-size": num_windows,
            f"--{bits}": bool(bits),
        }
    )


def balance_flags(scenario: Run, packing: Sequence[str], sharding: str, hardware: str) -> Flags:
    """The words of ``packing``, sharding, slices' memory, and the machine that costs are for."""
    flags: dict[str, Value] = {}
    for at, word in enumerate(packing):
        if word.startswith("--"):
            values = [*takewhile(lambda text: not text.startswith("--"), packing[at + 1 :])]
            numbers = [int(text) if text.isdecimal() else text for text in values]
            flags[word] = numbers[0] if len(numbers) == 1 else numbers
    kind = kind_of(str(flags["--wlb-packing"]))
    if kind.slices and scenario.memory_gib is not None:
        # Or training would choose them by time alone.
        flags["--wlb-memory-gib"] = int(10 * scenario.memory_gib) / 10
    if scenario.execution.host_gib and kind.slices:
        flags["--wlb-host-gib"] = scenario.execution.host_gib
    if scenario.parallelism.cp_size > 1:
        flags["--wlb-cp-sharding"] = sharding
    flags["--wlb-hardware"] = hardware
    return flags


def to_add(flags: Flags) -> str:
    """What is left to add to a command."""
    given = {*flags, *(["--data-path"] if "--mock-data" in flags else [])}
    return ", ".join(flag for flag in TO_ADD if flag not in given) or "nothing"


def command(
    flags: Flags,
    num_devices: int,
    devices_per_node: int,
    environment: Mapping[str, str] = MappingProxyType({}),
    variables: Collection[str] = (),
) -> str:
    """The command line that trains so, once :func:`to_add` is added, for a shell that puts
    ``variables`` in.
    """
    nodes = -(-num_devices // devices_per_node)
    words = ["torchrun", "--nproc-per-node", str(min(num_devices, devices_per_node))]
    if nodes > 1:
        words += f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HOST:29500".split()
    own = {name: x for name, x in environment.items() if name not in (*MACHINE, CONNECTIONS)}
    variables = {"HOST", *variables}
    if "--wlb-strategies" not in flags:  # whose command has no TP
        own[CONNECTIONS] = "1"
    exports = (f"{name}={quoted(str(x), variables)}" for name, x in own.items())
    words += ["-m", LAUNCHER, *_words(flags)]
    return " ".join([*exports, *(quoted(word, variables) for word in words)])


def _words(flags: Flags) -> list[str]:
    words = list[str]()
    for flag, value in flags.items():
        values = value if isinstance(value, list) else [value]
        words += [flag] if value is True else [flag, *map(str, values)]
    return words


def recipe(
    sections: Mapping[str, Flags],
    num_devices: int,
    devices_per_node: int,
    remarks: str,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """A YAML file of flags under headings; ``remarks`` stand at its top."""
    machine = -(-num_devices // devices_per_node), min(num_devices, devices_per_node)
    head = {allocator.VARIABLE: allocator.VALUE, **environment, CONNECTIONS: 1}
    head |= dict(zip(MACHINE, machine, strict=True))
    lines = [f"# {line}".rstrip() for line in remarks.splitlines()]
    lines += ["TEST_TYPE: release", "ENV_VARS:"]
    lines += [f"  {name}: {value}" for name, value in head.items()]
    lines.append("MODEL_ARGS:")
    for heading, flags in sections.items():
        lines += [f"  # {heading}"] if flags else []
        for flag, value in flags.items():
            text = yaml.safe_dump(value, width=math.inf).splitlines()[0]
            if isinstance(value, list):  # As Megatron's recipes write several values of a flag.
                text = f"[{' '.join(map(str, value))}]"
                text = json.dumps(text) if "$" in text else text
            elif str(value).startswith("["):  # A pattern, which is one word.
                text = f"({value})"
            elif flag == LAYOUT:  # which two shells read where Megatron runs recipes
                text = re.sub(r"[|()]", r"\\\\\g<0>", text)
            lines.append(f"  {flag}: {text}")
    return "\n".join(lines) + "\n"
