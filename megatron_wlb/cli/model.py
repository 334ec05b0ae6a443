"""``--model NAME|FILE``, and settings over its own: read alike by every command that takes them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_wlb.cli.flags import flag
from megatron_wlb.cost import ModelShape
from megatron_wlb.data.lengths import REFERENCE_WINDOW
from megatron_wlb.data.ramp import SCHEDULE
from megatron_wlb.errors import ConfigError, refuse_all
from megatron_wlb.planning.from_config import batch
from megatron_wlb.planning.from_words import flags_beside, settings_of, settings_of_script
from megatron_wlb.planning.models import model_names, shape_of
from megatron_wlb.reading import named_file
from megatron_wlb.settings.command_line import argument, said, yaml_arguments
from megatron_wlb.settings.config import Config, flag_of, table
from megatron_wlb.settings.recipe import Recipe, read_recipe
from megatron_wlb.study.write_recipe import Flags, flags_of, told

USUAL: dict[str, Any] = {"seq_length": REFERENCE_WINDOW, "wlb_solver_limit": 1.0}
"""Settings of commands where nothing gives them, if they are not a run's defaults."""
ASSUMED = {"bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True}
"""What commands predict of a run where ``--model`` does not say, unless it is a recipe."""

MODELS = """\
model:
  --model NAME         a file of configs/model: 550m, 7b, 30b or 70b, shapes of WLB-LLM's Table 1;
                       llama-3-8b, llama-3-70b; qwen3-30b-a3b, qwen3-235b-a22b, mixtral-8x7b and
                       deepseek-v3, with experts; qwen3.5-35b-a3b, nemotron-3-super, hybrids
  --model FILE         a YAML file of training settings as for --wlb-config (num_layers: 32,
                       hidden_size: 4096, …), or a Megatron recipe (MODEL_ARGS); what it says of
                       window, batch, layout and --mock-data is taken as well
"""


@dataclass(frozen=True)
class Model:
    """What ``--model`` names."""

    config: Config
    written: tuple[str, ...]
    """Settings that it gives, in its order."""
    words: tuple[str, ...] = ()
    """The file as a command line."""
    recipe: Recipe | None = None

    @property
    def num_micro_batches(self) -> int | None:
        """N, once batches have grown; None where nothing gives a batch.

        Raises :class:`ConfigError` where the batch has a rest.
        """
        training, said = self.config.training, "--global-batch-size is"
        size, micro_batch_size = training.global_batch_size, training.micro_batch_size
        if training.step_batch_size_schedule is not None:
            size, ramp = batch(self.config, 1)
            assert ramp is not None
            said = f"{SCHEDULE} of --model leads to a batch of"
        elif "global_batch_size" not in self.written:
            return None
        number, rest = divmod(size, micro_batch_size)
        if not number or (rest and not training.decrease_batch_size_if_needed):
            raise ConfigError(
                f"{said} {size}, which --micro-batch-size {micro_batch_size} does not divide; give "
                "another one, or --num-micro-batches"
            )
        return number

    @property
    def dp_size(self) -> int | None:
        """Data-parallel replicas on the devices that a recipe runs on; None where it says none.

        Raises :class:`ConfigError` for devices that do not divide so.
        """
        if self.recipe is None or not {"NUM_NODES", "GPUS_PER_NODE"} & set(self.recipe.environment):
            return None
        p, num_devices = self.config.parallel, self.recipe.num_nodes * self.recipe.devices_per_node
        inner = p.tensor_model_parallel_size * p.context_parallel_size
        inner *= p.pipeline_model_parallel_size
        if num_devices % inner:
            raise ConfigError(
                f"the {num_devices} devices of --model do not divide over TP × CP × PP = {inner}; "
                "give --dp-size"
            )
        return num_devices // inner

    @cached_property
    def shape(self) -> ModelShape:
        """Its sizes, the vocabulary not padded; trained in 16 bits, whatever the settings say."""
        config = replace(self.config, training=replace(self.config.training, bf16=True))
        return shape_of(config)

    @property
    def flags(self) -> dict[str, Flags]:
        """By heading, what it says of the model and beside it that no search decides, and how
        Megatron-LM's script is told of it.
        """
        model, beside = map(flags_of, told(self.config, self.written))
        # What Megatron takes with --swiglu where it is not given is not what a settings file means.
        model = {**model, "--ffn-hidden-size": self.shape.ffn_hidden_size}
        if self.config.parallel.hybrid_layer_pattern is not None:  # which Megatron counts
            model.pop("--num-layers", None)
        return {"Model": model, "As --model says": {**beside, **flags_beside(self.words)}}

    def batch_flags(self, num_windows: int, *, bits: bool = True) -> Flags:
        """How Megatron-LM's script is told of the batch."""
        window, rows = self.config.data.seq_length, self.config.model.max_position_embeddings or 0
        batch = {
            "seq_length": window,
            # Megatron asks for it whatever the positions are.
            "max_position_embeddings": max(window, rows),
            "micro_batch_size": 1,
            "global_batch_size": num_windows,
        }
        precision = "fp16" if "--fp16" in self.words else "bf16"
        return flags_of(batch | {precision: bits})

    @property
    def environment(self) -> Mapping[str, str]:
        """What a recipe exports."""
        return self.recipe.environment if self.recipe else {}

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables of a recipe that nobody has set."""
        return self.recipe.unresolved if self.recipe else ()


def add_model_flag(group: argparse._ArgumentGroup, *, required: bool = False) -> None:
    about = "7b, …, or a YAML file of training settings, or a Megatron recipe"
    flag(group, "--model NAME|FILE", about, required=required)


def spellings(name: str) -> tuple[str, ...]:
    """The flags of a setting in commands: the short one, then Megatron's or ours."""
    short = table()[name].short or name.removeprefix("wlb_")
    return tuple(dict.fromkeys(map(flag_of, (short, name))))


def settings(group: argparse._ActionsContainer, *names: str, about: str = "") -> None:
    """Adds the flags of settings, Megatron's and short ones: both fill the same.

    Help says ``about``, or what the setting is and its default.
    """
    usual = Config().flat() | USUAL
    for name in names:
        options = argument(name, ", or ".join(filter(None, ("--model's", said(usual[name])))))
        options["help"] = about or options["help"]
        group.add_argument(*spellings(name), **options)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags give. Raises :class:`ConfigError` for values that cannot be."""
    found = {name: value for name, value in vars(args).items() if name in table()}
    refuse_all(
        error
        for name, value in found.items()
        for error in table()[name].beyond(spellings(name)[0], value)
    )
    return found


def read_model(name_or_path: str) -> Model:
    """The model of that name, or that a file of settings or a recipe describes.

    Raises :class:`ConfigError` for an unknown name (all are listed) or a file that is none.
    """
    path = named_file("model", name_or_path, model_names)
    try:
        words, recipe = yaml_arguments(str(path)), None
        if flag_of("MODEL_ARGS") in words:
            recipe = read_recipe(path, os.environ)
            words = list(recipe.arguments)
        names = {flag_of(name): name for name in table()}
        written = tuple(names[word] for word in words if word in names)
        config = settings_of_script(words, USUAL) if recipe else settings_of(words, USUAL | ASSUMED)
        return Model(config, written, tuple(words), recipe)
    except ConfigError as error:
        raise ConfigError(f"--model {name_or_path}: {error}") from None
