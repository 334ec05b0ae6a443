"""Megatron's ``HybridModel``: a symbol a layer, each a mixer of tokens, an MLP or experts alone."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_wlb.errors import CompatibilityError

MODELS = GPTModel, HybridModel
"""Megatron's models that run plans."""
_MIX = "attention_layer", "mla_layer", "gdn_layer", "mamba_layer"
"""Specs of a stack's layers that mix the tokens of a document; a version may lack the second."""


def that_mix(stack: Any) -> dict[str, Any]:
    """The specs of a stack's layers that mix tokens, by name."""
    named = ((name, getattr(stack, name, None)) for name in _MIX)
    return {name: copy.deepcopy(spec) for name, spec in named if isinstance(spec, ModuleSpec)}


def with_layers(stack: ModuleSpec, layers: dict[str, Any]) -> ModuleSpec:
    """A copy of a stack's spec with other specs of some layers."""
    made = copy.copy(stack)
    made.submodules = dataclasses.replace(stack.submodules, **layers)
    return made


def layers_of(gpt: Any) -> list[Any]:
    """All layers of a chunk: the decoder's, then those that predict further on."""
    inner = (depth.mtp_model_layer for depth in depths_of(gpt))  # a layer, or a stack of some
    return [*gpt.decoder.layers, *(layer for of in inner for layer in getattr(of, "layers", [of]))]


def depths_of(gpt: Any) -> list[Any]:
    """What a chunk has to predict further on: a module a depth."""
    mtp = getattr(gpt, "mtp", None)
    return [] if mtp is None else list(mtp.layers)


def mixer_of(layer: Any) -> Any:
    """What mixes a layer's tokens; Mamba's has another name."""
    return getattr(layer, "self_attention", getattr(layer, "mixer", None))


def attentions_of(gpt: Any) -> list[Any]:
    """The attention of each layer of a chunk that has some, in order.

    Raises :class:`CompatibilityError` for a layer that mixes tokens in another way: it would mix
    those of documents that run together.
    """
    found = []
    for layer in layers_of(gpt):
        mixer = mixer_of(layer)
        if hasattr(mixer, "core_attention"):
            found.append(mixer)
        elif _taps(mixer):
            continue
        elif not (isinstance(layer, TransformerLayer) and isinstance(mixer, IdentityOp)):
            kind = type(layer if mixer is None else mixer).__name__
            raise CompatibilityError(
                f"layer {layer.layer_number} is a {kind}, which would mix documents that run "
                "together; leave out such layers, or the --wlb flags"
            )
    return found


def scan_taps_of(gpts: Iterable[Any]) -> int:
    """The most taps of layers that carry a state through documents; 0 where none does."""
    return max((_taps(mixer_of(layer)) for gpt in gpts for layer in layers_of(gpt)), default=0)


def _taps(mixer: Any) -> int:
    """Taps of a :class:`megatron_wlb.runtime.gpt.states.ScansDocuments`; 0 if it is none."""
    taps: int = getattr(mixer, "scan_taps", 0)
    return taps
