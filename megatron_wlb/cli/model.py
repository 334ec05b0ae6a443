"""``--model NAME|FILE``: read alike by every command that takes it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron_wlb.cli.flags import flag
from megatron_wlb.cost import ModelShape
from megatron_wlb.cost.model_file import is_shape, load_model
from megatron_wlb.data.ramp import SCHEDULE
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import batch, model_shape
from megatron_wlb.planning.from_words import flags_beside, settings_of, settings_of_script
from megatron_wlb.settings.command_line import yaml_arguments
from megatron_wlb.settings.config import Config, flag_of
from megatron_wlb.settings.recipe import Recipe, read_recipe
from megatron_wlb.simulator.forecast import DEFAULT_VOCAB_SIZE
from megatron_wlb.study.write_recipe import Flags, batch_flags, model_flags, told_flags

MODELS = """\
model:
  --model NAME         550m, 7b, 30b or 70b: shapes of WLB-LLM's Table 1; mixtral-8x7b or
                       deepseek-v3: models with experts (configs/model)
  --model FILE         a YAML file of such sizes, of training settings as for --wlb-config
                       (num_layers: 32, hidden_size: 4096, …), or a Megatron recipe (MODEL_ARGS);
                       what settings say of window, batch, layout and --mock-data is taken as well
"""


@dataclass(frozen=True)
class Model:
    """What ``--model`` names."""

    config: Config
    """Training settings; the defaults where it is sizes alone."""
    words: tuple[str, ...] = ()
    """The file as a command line; empty where it is sizes alone."""
    sizes: ModelShape | None = None
    """What a name or a file of sizes says; the vocabulary is not padded."""
    recipe: Recipe | None = None

    @cached_property
    def written(self) -> frozenset[str]:
        """Flags that the file gives."""
        return frozenset(word for word in self.words if word.startswith("--"))

    @property
    def window(self) -> int | None:
        return self.config.data.seq_length if "--seq-length" in self.written else None

    @property
    def micro_batch_size(self) -> int | None:
        given = "--micro-batch-size" in self.written
        return self.config.training.micro_batch_size if given else None

    def num_micro_batches(self, micro_batch_size: int) -> int | None:
        """N, if a micro-batch has so many windows, once batches have grown.

        Raises :class:`ConfigError` where the batch has a rest.
        """
        training, said = self.config.training, "--global-batch-size of --model is"
        size = training.global_batch_size
        if training.step_batch_size_schedule is not None:
            size, ramp = batch(self.config, 1)
            assert ramp is not None
            said = f"{SCHEDULE} of --model leads to a batch of"
        elif "--global-batch-size" not in self.written:
            return None
        number, rest = divmod(size, micro_batch_size)
        if not number or (rest and not training.decrease_batch_size_if_needed):
            raise ConfigError(
                f"{said} {size}, which --micro-batch-size {micro_batch_size} does not divide; give "
                "another one, or --num-micro-batches"
            )
        return number

    def dp_size(self, inner: int) -> int | None:
        """Data-parallel replicas on the devices that a recipe runs on, ``inner`` a replica; None
        where it says no devices.

        Raises :class:`ConfigError` for devices that do not divide so.
        """
        if self.recipe is None or not {"NUM_NODES", "GPUS_PER_NODE"} & set(self.recipe.environment):
            return None
        num_devices = self.recipe.num_nodes * self.recipe.devices_per_node
        if num_devices % inner:
            raise ConfigError(
                f"the {num_devices} devices of --model do not divide over TP × CP × PP = {inner}; "
                "give --dp-size"
            )
        return num_devices // inner

    @cached_property
    def shape(self) -> ModelShape:
        """Its sizes, the vocabulary not padded; trained in 16 bits, whatever the settings say."""
        if self.sizes is not None:
            return self.sizes
        config = replace(self.config, training=replace(self.config.training, bf16=True))
        return model_shape(config, config.data.vocab_size or DEFAULT_VOCAB_SIZE)

    def with_settings(self, config: Config) -> Model:
        """The same with flags over its settings."""
        return replace(self, config=config)

    @property
    def flags(self) -> dict[str, Flags]:
        """By heading, what it says of the model and beside it that no search decides, and how
        Megatron-LM's script is told of it.
        """
        model, beside = told_flags(self.config, self.written, flags_beside(self.words))
        # What Megatron takes with --swiglu where it is not given is not what a settings file means.
        model = {**model, "--ffn-hidden-size": self.shape.ffn_hidden_size}
        if self.sizes is not None:
            model = model_flags(self.sizes)
        return {"Model": model, "As --model says": beside}

    def batch_flags(self, num_windows: int, *, bits: bool = True) -> Flags:
        """How Megatron-LM's script is told of the batch."""
        m, window = self.config.model, self.config.data.seq_length
        positions = max(self.shape.learned_positions, m.max_position_embeddings or 0)
        precision = "fp16" if "--fp16" in self.words else "bf16"
        return batch_flags(window, num_windows, positions=positions, bits=precision if bits else "")

    @property
    def environment(self) -> Mapping[str, str]:
        """What a recipe exports."""
        return self.recipe.environment if self.recipe else {}

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables of a recipe that nobody has set."""
        return self.recipe.unresolved if self.recipe else ()


def add_model_flag(group: argparse._ArgumentGroup, *, required: bool = False) -> None:
    about = "7b, …, or a YAML file of sizes, of training settings, or a Megatron recipe"
    flag(group, "--model NAME|FILE", about, required=required)


def read_model(name_or_path: str) -> Model:
    """The model of that name, or that a file describes in any of its three forms.

    Raises :class:`ConfigError` for an unknown name (all are listed) or a file that is none.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".json") or is_shape(path):
        sizes = load_model(name_or_path)
        layers = replace(Config().model, num_layers=sizes.num_layers)
        return Model(replace(Config(), model=layers), sizes=sizes)
    try:
        words, recipe = yaml_arguments(name_or_path), None
        if flag_of("MODEL_ARGS") in words:
            recipe = read_recipe(path, os.environ)
            words = list(recipe.arguments)
        read = settings_of if recipe is None else settings_of_script
        return Model(read(words), tuple(words), recipe=recipe)
    except ConfigError as error:
        raise ConfigError(f"--model {name_or_path}: {error}") from None
