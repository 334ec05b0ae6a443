"""Models by name or file: training settings that say what a model is, as in ``configs/model``."""

from __future__ import annotations

from megatron_wlb.cost import ModelShape
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.planning.from_words import settings_of
from megatron_wlb.reading import named_file, shipped
from megatron_wlb.settings.command_line import yaml_arguments
from megatron_wlb.settings.config import Config

DEFAULT_VOCAB_SIZE = 32000
"""The vocabulary of settings that name none, where no corpus does either."""


def model_names() -> list[str]:
    """The models whose files come with the project, small to large."""
    return sorted(shipped("model"), key=lambda name: load_model(name).linear_parameters)


def load_model(name_or_path: str) -> ModelShape:
    """The sizes of :func:`load_settings`, the vocabulary not padded."""
    return shape_of(load_settings(name_or_path))


def load_settings(name_or_path: str) -> Config:
    """Loads the model called so (``7b``), or that of a file of settings; numbers have 16 bits.

    Raises :class:`ConfigError` for an unknown name (all are listed), an unreadable file, or
    settings that cannot be.
    """
    path = named_file("model", name_or_path, model_names)
    try:
        return settings_of(yaml_arguments(str(path)), {"bf16": True})
    except ConfigError as error:
        raise ConfigError(f"model {path}: {error}") from None


def shape_of(config: Config) -> ModelShape:
    """The sizes of the settings' model, the vocabulary not padded."""
    return model_shape(config, config.data.vocab_size or DEFAULT_VOCAB_SIZE)
