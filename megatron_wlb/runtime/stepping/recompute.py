"""Recomputes single micro-batches: their layers, or MLPs, keep inputs, and run again in backward.

Megatron recomputes all micro-batches or none. Its blocks read whether at the beginning of a forward
pass, and its layers whether their MLPs, so that it can be said anew for each. A pass that was begun
so ends so, whatever is said then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_wlb.cost.slices import HOST, LAYERS, Recomputed
from megatron_wlb.errors import PlanError

SAID = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _said(chunk: torch.nn.Module, what: Recomputed) -> list[tuple[Any, dict[str, Any]]]:
    """What is said to whom."""
    if what == HOST:
        return []
    if what == LAYERS:
        kinds = TransformerBlock, HybridStack, MultiTokenPredictionLayer
        read = {id(m.config): m.config for m in chunk.modules() if isinstance(m, kinds)}
        return [(config, SAID) for config in read.values()]
    layers = [m for m in chunk.modules() if isinstance(m, TransformerLayer)]
    if any(layer.config.add_bias_linear for layer in layers):
        raise PlanError(
            "a micro-batch is to recompute its MLPs, which have biases: Megatron's backward pass "
            "then never ends; recompute its layers"
        )
    dense = (m for m in layers if not m.is_moe_layer and not isinstance(m.mlp, IdentityOp))
    return [(layer, {"recompute_mlp": True}) for layer in dense]


@contextlib.contextmanager
def recomputed(chunk: torch.nn.Module, what: Recomputed) -> Iterator[None]:
    """Forward passes of a model chunk in it recompute every layer, or dense MLP.

    Raises :class:`PlanError` for MLPs with biases.
    """
    said = _said(chunk, what) if what else []
    known = [{name: vars(of)[name] for name in values} for of, values in said]
    try:
        for of, values in said:
            vars(of).update(values)
        yield
    finally:
        for (of, _), values in zip(said, known, strict=True):
            vars(of).update(values)
