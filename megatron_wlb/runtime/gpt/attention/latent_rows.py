"""All context-parallel ranks' latents of a layer with multi-latent attention, and what they become.

Legend: ``T`` tokens of the micro-batch, ``G`` heads, ``D`` head dimension, ``R`` numbers of a
token's latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F

Expand: TypeAlias = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Projects latents up: those of so many ranks ``[ranks · n, 1, 1, R]`` to keys and values
``[T, 1, G, …]``, in the order of ranks and of each one's tokens.

With sequence parallelism a rank has ``n`` of its tokens' latents, and all tensor-parallel ranks
call it together; otherwise those of all its tokens.
"""


class LatentRows:
    """All ranks' latents of one layer and micro-batch, from a gather to a reduction."""

    def __init__(self, expand: Expand, num_shards: int) -> None:
        self._expand, self._num_shards = expand, num_shards
        self._latents: torch.Tensor | None = None
        self._pairs: torch.Tensor | None = None

    def up(self, latents: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """``[…, 1, R] -> [T, 2, G, D]``, narrower values filled up with zeros; with ``keep`` it can
        be differentiated.
        """
        latents.requires_grad_(keep)
        with torch.set_grad_enabled(keep):
            key, value = self._expand(latents.unsqueeze(1), self._num_shards)
            value = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
            pairs = torch.cat([key, value], dim=1)
        if keep:
            self._latents, self._pairs = latents, pairs
        return pairs.detach()

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """What is kept for the backward, besides what a graph of its own keeps."""
        if self._latents is None or self._pairs is None:
            return ()
        return self._latents, self._pairs

    @property
    def out(self) -> torch.Tensor | None:
        """The end of that graph."""
        return self._pairs

    def down(self, sums: torch.Tensor) -> torch.Tensor:
        """Gradients of the latents by those of keys and values; adds the weights' to theirs."""
        latents, pairs = self._latents, self._pairs
        assert latents is not None and pairs is not None
        self._latents = self._pairs = None
        torch.autograd.backward(pairs, sums.to(pairs.dtype))
        assert latents.grad is not None
        return latents.grad.to(sums.dtype)
