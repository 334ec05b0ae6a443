"""A simulated layout as what trains it: Megatron's flags, a command line, a recipe file.

A recipe is a YAML file in the form of Megatron-LM's ``model_config.yaml``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, TypeAlias

import yaml

from megatron_wlb.cost.shape import Recompute
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.settings import allocator
from megatron_wlb.settings.config import (
    Config,
    WlbConfig,
    flag_of,
    script_defaults,
    table,
)
from megatron_wlb.settings.pattern import HybridPattern
from megatron_wlb.settings.recipe import quoted
from megatron_wlb.settings.split import LAYOUT, PipelineSplit, split_of

Value: TypeAlias = bool | int | float | str | list[str | int]
Flags: TypeAlias = Mapping[str, Value]
"""A flag and its value; True for a bare one, a list where it takes several."""
LAUNCHER = "megatron_wlb.launch"
TO_ADD = "--data-path", "--tokenizer-type", "--train-iters", "--lr", "--eval-interval"
"""What a run by :data:`LAUNCHER` needs, and no layout says."""
MACHINE = "NUM_NODES", "GPUS_PER_NODE"
"""Variables of a recipe that say how many devices it has."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Megatron asks for 1 of it with TP or CP, on GPUs before Blackwell."""


def told(config: Config, written: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What settings say of the model, and beside it, that no search decides: those ``written``, in
    this order, and what Megatron-LM's script would have otherwise.
    """
    values, usual = config.flat(), Config().flat() | script_defaults()
    model, beside = dict[str, Any](), dict[str, Any]()
    for name in dict.fromkeys(written) | values:
        known, value = table()[name], values[name]
        matters = config.model.num_experts or not name.startswith("moe_")
        differs = name in written or (matters and value != usual[name])
        if differs and not (known.searched or known.layout):
            (model if hasattr(config.model, name) else beside)[name] = value
    return model, beside


def flags_of(settings: Mapping[str, Any]) -> Flags:
    """How a command line says settings: what is off or not given has no flag."""
    values = {name: _value(value) for name, value in settings.items()}
    if window := settings.get("window_size"):  # two numbers, which Megatron reads as one word
        values["window_size"] = ",".join(map(str, window))
    return {flag_of(name): x for name, x in values.items() if x is not None and x is not False}


def _value(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return list(value) if len(value) > 1 else value[0] if value else None


def layout_settings(run: Run, pattern: HybridPattern | None = None) -> dict[str, Any]:
    """How the model is divided, and what is recomputed. A HybridModel's ``pattern`` says its
    stages, virtual ones too.
    """
    p, shape = run.parallelism, run.shape
    stages = p.layers_of_stages(shape)
    if pattern is not None:
        split = PipelineSplit(hybrid_layer_pattern=pattern.divided(stages))
    else:
        split = split_of(stages, p.vpp_size, shape.num_ahead)
    own_stages = split.has_layout or pattern is not None  # which have VPP in them
    return {
        "tensor_model_parallel_size": p.tp_size,
        "context_parallel_size": p.cp_size,
        "pipeline_model_parallel_size": p.pp_size,
        "expert_model_parallel_size": p.ep_size if shape.experts else None,
        "expert_tensor_parallel_size": p.expert_tp_size if shape.experts else None,
        "sequence_parallel": p.sequence_parallel,
        "num_virtual_stages_per_pipeline_rank": (
            p.vpp_size if p.vpp_size > 1 and not own_stages else None
        ),
        **asdict(split),
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": run.execution.overlap_grad_reduce,
        **recompute_settings(run.recompute),
    }


def recompute_settings(recompute: Recompute) -> dict[str, Any]:
    return {f"recompute_{name}": value for name, value in asdict(recompute).items()}


def balance_settings(run: Run, setting: PackingSettings, config: WlbConfig) -> dict[str, Any]:
    """The packing, and what ``config`` says of sharding, slices' memory, and the machine."""
    found = setting.configured()
    if config.wlb_long_documents != "split":
        found["wlb_long_documents"] = config.wlb_long_documents
    if setting.kind.slices and run.memory_gib is not None:
        # Or training would choose them by time alone.
        found["wlb_memory_gib"] = run.memory_gib
    if setting.kind.slices:
        found["wlb_host_gib"] = run.execution.host_gib or None
    if run.parallelism.cp_size > 1:
        found["wlb_cp_sharding"] = config.wlb_cp_sharding
    return found | {"wlb_hardware": config.wlb_hardware}


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
