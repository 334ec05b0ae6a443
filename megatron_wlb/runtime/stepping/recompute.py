"""Recomputes single micro-batches: their layers keep their inputs, and run again in backward.

Megatron recomputes all micro-batches or none. Its blocks read whether at the beginning of a forward
pass, so that it can be said anew for each. A pass that was begun so ends so, whatever is said then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

SAID = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def configs_of(chunk: torch.nn.Module) -> list[TransformerConfig]:
    """What the blocks of a model chunk read, each once."""
    kinds = TransformerBlock, MultiTokenPredictionLayer
    read = {id(m.config): m.config for m in chunk.modules() if isinstance(m, kinds)}
    return list(read.values())


@contextlib.contextmanager
def recomputed(configs: Sequence[TransformerConfig]) -> Iterator[None]:
    """Forward passes in it recompute every layer."""
    known = [{name: getattr(config, name) for name in SAID} for config in configs]
    try:
        for config in configs:
            vars(config).update(SAID)
        yield
    finally:
        for config, values in zip(configs, known, strict=True):
            vars(config).update(values)
