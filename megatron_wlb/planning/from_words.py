"""Words of a Megatron command line -> the settings that plans and predictions are made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning import guards
from megatron_wlb.settings.command_line import parse_known, taken_out
from megatron_wlb.settings.config import Config, script_defaults

_NOT_MODELLED = {
    "--use-torch-fsdp2",
    "--yaml-cfg",
    "--use-megatron-fsdp",
    "--hybrid-override-pattern", "--cpu-offloading-num-layers",
}  # fmt: skip
_PER_VIRTUAL_STAGE = "--num-layers-per-virtual-pipeline-stage"
_SEARCHED = {_PER_VIRTUAL_STAGE, "--recompute-activations", "--recompute-modules", "--fp16"}
"""What commands that search decide by other flags."""


def settings_of(arguments: Sequence[str], defaults: Mapping[str, Any] | None = None) -> Config:
    """The settings that a Megatron command line gives, as far as they matter here.

    What is not given is as in ``defaults``, or else as this project has it.

    Raises:
        ConfigError: a flag that neither side knows, or one of a model that is not modelled.
    """
    config, others = parse_known(arguments, defaults)
    guards.check_ranges(config)
    given = {flag.split("=")[0] for flag in others if flag.startswith("--")}
    if config.parallel.use_torch_fsdp2:
        given.add("--use-torch-fsdp2")
    if found := sorted(given & _NOT_MODELLED):
        raise ConfigError(f"{found[0]} is not modelled: nothing can be predicted; leave it out")
    if "--fp16" in given:  # it has the same sizes and rates
        config = dataclasses.replace(
            config, training=dataclasses.replace(config.training, bf16=True)
        )
    said, _ = taken_out(_PER_VIRTUAL_STAGE, others)
    if said is not None:
        layers = int(said) if said.isdecimal() else 0
        split = config.parallel.split
        if split.has_ends or split.has_layout:
            raise ConfigError(
                f"{_PER_VIRTUAL_STAGE} is {said}, but other flags say how many layers stages have; "
                "use --num-virtual-stages-per-pipeline-rank, or a layout of so many stages"
            )
        of_all = config.model.num_layers + split.accounts
        stage = of_all // config.parallel.pipeline_model_parallel_size
        if layers < 1 or stage % layers:
            raise ConfigError(
                f"{_PER_VIRTUAL_STAGE} is {said}, which does not divide the {stage} layers of a "
                "pipeline rank; use a divisor"
            )
        vpp = stage // layers if stage > layers else None
        parallel = dataclasses.replace(config.parallel, num_virtual_stages_per_pipeline_rank=vpp)
        config = dataclasses.replace(config, parallel=parallel)
    return config


def settings_of_script(
    arguments: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> Config:
    """As :func:`settings_of`, with the defaults of Megatron-LM's script under ``defaults``."""
    config = settings_of(arguments, {**script_defaults(), **(defaults or {})})
    model = config.model
    if model.swiglu and model.ffn_hidden_size is None:  # as many weights as without a gate
        model = dataclasses.replace(model, ffn_hidden_size=model.hidden_size * 8 // 3 // 64 * 64)
    return dataclasses.replace(config, model=model)


def flags_beside(arguments: Sequence[str]) -> dict[str, Any]:
    """Megatron's flags that no setting stands for, but for those that a search decides: True for a
    bare one, a value, or a list of several.
    """
    flags: dict[str, list[str]] = {}
    for word in parse_known(arguments)[1]:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            values = flags[flag] = [value] if equals else []
        else:
            values.append(word)
    return {
        flag: values if len(values) > 1 else values[0] if values else True
        for flag, values in flags.items()
        if flag not in _SEARCHED
    }
