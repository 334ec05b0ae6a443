"""The user's own GPT or HybridModel, built by their own file, with attention by document.

Every one that is built passes through here, whatever made its layer spec: the local one,
TransformerEngine's, or that of ``--spec``.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import get_model_config, unwrap_model

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat.norm import TorchNorm
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.gpt.attention.document_attention import AttentionOptions
from megatron_wlb.runtime.gpt.attention.kernels import ChosenKernel, Demand, choose_kernel
from megatron_wlb.runtime.gpt.attention.rope import use_document_positions
from megatron_wlb.runtime.gpt.build import (
    BATCH_P2P_SYNC,
    Model,
    attention_options,
    packed,
    require_document_attention,
)
from megatron_wlb.runtime.gpt.hybrid import MODELS
from megatron_wlb.runtime.gpt.moe import route_by_document
from megatron_wlb.runtime.gpt.prediction import complete_layers
from megatron_wlb.runtime.megatron_lm import fsdp
from megatron_wlb.settings.config import Config


def install(
    patches: PatchSet,
    settings: Config,
    choose: Callable[[str, Demand], ChosenKernel] = choose_kernel,
) -> None:
    """Makes models that are built from now on attend inside documents; ``choose`` is as in
    :func:`.attention_options`.
    """
    # Ranks agree once, before their first chunks: while Megatron builds chunks it exchanges tied
    # embeddings, and ranks that wait there could not agree with those that build another chunk.
    choose = functools.cache(choose)
    for kind in MODELS:
        patches.replace(kind, "__init__", _packing(kind.__init__, settings, choose))
    make_norm = WrappedTorchNorm.__new__

    @functools.wraps(make_norm)
    def __new__(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        # torch's norm is that of the local spec where there is neither Apex nor TransformerEngine.
        if config.sequence_parallel:
            return TorchNorm(config, hidden_size, eps)
        return make_norm(cls, config, hidden_size, eps, **kwargs)

    patches.replace(WrappedTorchNorm, "__new__", staticmethod(__new__))


def _packing(
    build: Callable[..., None], settings: Config, choose: Callable[[str, Demand], ChosenKernel]
) -> Callable[..., None]:
    """``build`` of a model, with attention and positions by document."""
    layers = list(inspect.signature(build).parameters)[2]  # what it calls the spec of its layers

    @functools.wraps(build)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        # There is no flag: Megatron's arguments say False, and its configuration refuses True with
        # a dispatcher of experts that a dense model never has.
        config.variable_seq_lengths = True
        config.batch_p2p_sync = BATCH_P2P_SYNC  # nor is there one for this
        options = attention_options(settings, config, choose)
        spec, *rest = args or (kwargs.pop(layers),)
        if kwargs.get("mtp_block_spec") is not None:
            kwargs["mtp_block_spec"] = packed_block(kwargs["mtp_block_spec"], options)
        build(self, config, packed(spec, options), *rest, **kwargs)
        use_document_positions(self)
        complete_layers(self)
        route_by_document(self)

    return __init__


def packed_block(spec: Any, options: AttentionOptions) -> Any:
    """A copy of the spec of layers that predict further ahead, with our attention in each.

    Raises :class:`CompatibilityError` as :func:`packed`.
    """
    made = copy.deepcopy(spec)
    for parts in {id(layer): layer.submodules for layer in made.layer_specs}.values():
        parts.mtp_model_layer = packed(parts.mtp_model_layer, options)
    return made


def of_chunks(chunks: Sequence[torch.nn.Module]) -> Model:
    """Wraps what Megatron's set-up built as the step runner takes it.

    Raises :class:`CompatibilityError` for a chunk that is no GPT, or whose attention is not over
    documents.
    """
    gpts = unwrap_model(list(chunks))
    for gpt in gpts:
        if not isinstance(gpt, MODELS):
            raise CompatibilityError(
                f"the model is a {type(gpt).__name__}, but plans run on a GPTModel or HybridModel; "
                "run pretrain_gpt.py or pretrain_hybrid.py, or leave out the --wlb flags"
            )
        require_document_attention(gpt)
    for chunk in chunks:
        if fsdp.is_sharded(chunk):
            fsdp.divide_gradients(chunk)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return Model(get_model_config(chunks[0]), groups, list(chunks), gpts)
