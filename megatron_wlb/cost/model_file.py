"""Model shapes by name or file: ``configs/model`` has those of WLB-LLM's Table 1.

A file gives :class:`~megatron_wlb.cost.shape.ModelShape` by field, and may say what it is under
``description``. What it says of experts has Megatron's names, and what it leaves out of attention
has Megatron's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from megatron_wlb.cost.parts import Experts, Latent
from megatron_wlb.cost.shape import ModelShape
from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import (
    MOST_LAYERS,
    check_names,
    named_file,
    read_mapping,
    read_pattern,
    record,
    shipped,
    shown,
    whole_number,
)

_DENSE = {f.name: f.default is MISSING for f in fields(ModelShape) if f.type != "Runs"}
_LAYERS = (
    "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "moe_layer_freq", "mtp_num_layers",
)  # fmt: skip
_HEADS = "num_query_groups", "kv_channels"
"""What Megatron takes from the number of attention heads where it is not given."""
_SIZES = _DENSE | dict.fromkeys((*_HEADS, *_LAYERS), False)
"""What a file may give, and whether it must."""

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
        if content.get("latent") is not None:
            content["latent"] = record("latent: ", Latent, content["latent"])
        content = _heads(content) | content
        if content.get("latent") or content.get("learned_positions"):
            content.setdefault("rotary_percent", 0.0)
        layers = {name: content.pop(name) for name in _LAYERS if name in content}
        ahead = layers.pop("mtp_num_layers", 0)
        shape = ModelShape(**content)
        shape = _with_experts(shape, **layers) if layers else shape
        return shape.with_predictors(whole_number("mtp_num_layers", ahead, 0, MOST_LAYERS))
    except ConfigError as error:
        raise ConfigError(f"model {path}: {error}") from None


def _heads(sizes: Mapping[str, Any]) -> dict[str, int]:
    """What ``num_query_groups`` and ``kv_channels`` are where a file does not give them."""
    heads = whole_number("num_attention_heads", sizes["num_attention_heads"], 1)
    hidden_size = whole_number("hidden_size", sizes["hidden_size"], 1)
    latent = sizes.get("latent")
    if isinstance(latent, Latent):
        channels = latent.key_dim
    elif hidden_size % heads and "kv_channels" not in sizes:
        raise ConfigError(
            f"hidden_size {hidden_size} does not divide into {heads} attention heads; give "
            "kv_channels, or another size"
        )
    else:
        channels = hidden_size // heads
    return {"num_query_groups": heads, "kv_channels": channels}


def _with_experts(
    shape: ModelShape,
    num_experts: int | None = None,
    moe_router_topk: int = 2,
    moe_ffn_hidden_size: int | None = None,
    moe_shared_expert_intermediate_size: int = 0,
    moe_latent_size: int | None = None,
    moe_layer_freq: int | str = 1,
) -> ModelShape:
    """``shape`` with the experts of a file, by Megatron's names and defaults."""
    experts = Experts(
        whole_number("num_experts", num_experts, 1),
        moe_router_topk,
        shape.ffn_hidden_size if moe_ffn_hidden_size is None else moe_ffn_hidden_size,
        shape.gated,
        moe_shared_expert_intermediate_size,
        moe_latent_size,
    )
    layers = layers_with_experts("moe_layer_freq", str(moe_layer_freq), shape.num_layers)
    return shape.with_experts(experts, layers)


def layers_with_experts(name: str, said: str, num_layers: int) -> list[bool]:
    """Whether each layer has experts, by a pattern of Megatron's that ``name`` says.

    Raises :class:`ConfigError` for no pattern of so many layers.
    """
    pattern = read_pattern(said)
    if isinstance(pattern, int) and pattern >= 1:  # every Nth layer, from the first on
        return [layer % pattern == 0 for layer in range(num_layers)]
    if isinstance(pattern, list) and len(pattern) == num_layers and set(pattern) <= {0, 1}:
        return [bool(one) for one in pattern]
    raise ConfigError(
        f"{name} is {shown(said)}; give N of at least 1, or a list of 1 (experts) and 0 (dense) "
        f"for each of the {num_layers} layers, as in [0]+[1]*3"
    )


def is_shape(path: Path) -> bool:
    """Whether a YAML file is of sizes as they are called here, and not of training settings.

    Raises :class:`ConfigError` for an unreadable file.
    """
    known = {*_SIZES, "description"}
    # These are called so in both.
    ours = known - {"hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads",
                    "num_query_groups", "kv_channels", "vocab_size", "rotary_percent",
                    *_LAYERS}  # fmt: skip
    names = set(read_mapping(path, "model"))
    return names <= known or bool(names & ours)


def padded_vocabulary(shape: ModelShape, tp_size: int) -> ModelShape:
    """Pads the shape to the rows of LM head and embedding that Megatron makes of them."""
    multiple = VOCAB_MULTIPLE * tp_size
    return replace(shape, vocab_size=-(-shape.vocab_size // multiple) * multiple)
