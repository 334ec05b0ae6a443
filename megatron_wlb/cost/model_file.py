"""Model shapes by name or file: ``configs/model`` has those of WLB-LLM's Table 1.

A file gives :class:`~megatron_wlb.cost.shape.ModelShape` by field, and may say what it is under
``description``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_wlb.cost.shape import ModelShape
from megatron_wlb.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "configs" / "model", _PACKAGE.parent / "configs" / "model")
"""Where an installed package and where a checkout has the files."""

VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of so many rows a TP rank."""


def model_names() -> list[str]:
    """The models whose files come with the project, small to large."""
    names = {path.stem for folder in _FOLDERS for path in folder.glob("*.yaml")}
    return sorted(names, key=lambda name: load_model(name).linear_parameters)


def load_model(name_or_path: str) -> ModelShape:
    """The model called so (``7b``), or that of a YAML file; ``vocab_size`` is not padded yet.

    Raises:
        ConfigError: an unknown name (the nearest one is named), an unreadable file, or one with an
            unknown, missing or impossible size.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        found = [folder / f"{name_or_path.lower()}.yaml" for folder in _FOLDERS]
        existing = [candidate for candidate in found if candidate.is_file()]
        if not existing:
            names = model_names()
            near = difflib.get_close_matches(name_or_path.lower(), names, n=1) or names
            raise ConfigError(
                f"unknown model {name_or_path}; use {' or '.join(near)}, or give a YAML file"
            )
        path = existing[0]
    return _from_sizes(path, _content(path))


def is_shape(path: Path) -> bool:
    """Whether a YAML file is of sizes as they are called here, and not of training settings.

    Raises :class:`ConfigError` for an unreadable file.
    """
    known = {f.name for f in fields(ModelShape)} | {"description"}
    # These are called so in both.
    ours = known - {"hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads",
                    "num_query_groups", "kv_channels", "vocab_size", "rotary_percent"}  # fmt: skip
    names = set(map(str, _content(path)))
    return names <= known or bool(names & ours)


def padded_vocabulary(shape: ModelShape, tp_size: int) -> ModelShape:
    """The shape with the rows of LM head and embedding that Megatron makes of them."""
    multiple = VOCAB_MULTIPLE * tp_size
    return replace(shape, vocab_size=-(-shape.vocab_size // multiple) * multiple)


def _content(path: Path) -> Mapping[Any, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"model {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"model {path}: expected sizes as `name: value`")
    return content


def _from_sizes(path: Path, content: Mapping[Any, Any]) -> ModelShape:
    known = {f.name: f for f in fields(ModelShape)}
    values: dict[str, Any] = {}
    for name, value in content.items():
        if name == "description":
            continue
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1) or list(known)
            raise ConfigError(f"model {path}: unknown size {name}; use {near[0]}")
        wanted = known[name].type
        right = isinstance(value, bool) if wanted == "bool" else not isinstance(value, bool)
        if not right or not isinstance(value, int | float if wanted == "float" else int):
            kind = {"bool": "true or false", "int": "a whole number"}.get(str(wanted), "a number")
            raise ConfigError(f"model {path}: {name} is {value!r}; give {kind}")
        values[name] = value
    missing = [name for name, f in known.items() if f.default is MISSING and name not in values]
    if missing:
        raise ConfigError(f"model {path}: {missing[0]} is missing; add it")
    try:
        return ModelShape(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
