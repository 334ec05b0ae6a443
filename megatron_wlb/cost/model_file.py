"""Model shapes by name or file: ``configs/model`` has those of WLB-LLM's Table 1.

A file gives :class:`~megatron_wlb.cost.shape.ModelShape` by field, and may say what it is under
``description``.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path

from megatron_wlb.cost.layers import Latent
from megatron_wlb.cost.shape import ModelShape
from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import check_names, named_file, read_mapping, shipped

_SIZES = {f.name: f.default is MISSING for f in fields(ModelShape) if f.type != "Runs"}
"""What a file may give, of equal layers, and whether it must."""

VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of so many rows a TP rank."""


def model_names() -> list[str]:
    """The models whose files come with the project, small to large."""
    return sorted(shipped("model"), key=lambda name: load_model(name).linear_parameters)


def load_model(name_or_path: str) -> ModelShape:
    """Loads the model called so (``7b``), or that of a YAML file; ``vocab_size`` is not padded yet.

    Raises:
        ConfigError: an unknown name (all are listed), an unreadable file, or one with an
            unknown, missing or impossible size.
    """
    path = named_file("model", name_or_path, model_names)
    content = read_mapping(path, "model")
    content.pop("description", None)
    try:
        check_names("", "size", content, _SIZES, [n for n, needed in _SIZES.items() if needed])
        if isinstance(content.get("latent"), dict):
            sizes = {f.name: f.default is MISSING for f in fields(Latent)}
            needed = [name for name, must in sizes.items() if must]
            check_names("latent: ", "size", content["latent"], sizes, needed)
            content["latent"] = Latent(**content["latent"])
        return ModelShape(**content)
    except ConfigError as error:
        raise ConfigError(f"model {path}: {error}") from None


def is_shape(path: Path) -> bool:
    """Whether a YAML file is of sizes as they are called here, and not of training settings.

    Raises :class:`ConfigError` for an unreadable file.
    """
    known = {*_SIZES, "description"}
    # These are called so in both.
    ours = known - {"hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads",
                    "num_query_groups", "kv_channels", "vocab_size", "rotary_percent"}  # fmt: skip
    names = set(read_mapping(path, "model"))
    return names <= known or bool(names & ours)


def padded_vocabulary(shape: ModelShape, tp_size: int) -> ModelShape:
    """Pads the shape to the rows of LM head and embedding that Megatron makes of them."""
    multiple = VOCAB_MULTIPLE * tp_size
    return replace(shape, vocab_size=-(-shape.vocab_size // multiple) * multiple)
