"""All context-parallel ranks' latents of a layer with multi-latent attention, and what they become.

Legend: ``T`` tokens of the micro-batch, ``G`` heads, ``D`` head dimension, ``R`` numbers of a
token's latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_wlb.runtime.gpt.attention.key_exchange import KeyExchange, KeyGather
from megatron_wlb.runtime.gpt.attention.under_way import UnderWay, all_gather

Expand: TypeAlias = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Projects latents up: those of so many ranks ``[ranks · n, 1, 1, R]`` to keys and values
``[T, 1, G, …]``, in the order of ranks and of each one's tokens.

With sequence parallelism a rank has ``n`` of its tokens' latents, and all tensor-parallel ranks
call it together; otherwise those of all its tokens.
"""


class LatentExchange(KeyExchange):
    """Exchanges latents ``[n, 1, R]`` in place of keys and values, so many of each rank.

    What comes is projected up, and gradients down; both are there for one head group alone.
    """

    has_latents = True

    def __init__(self, gather: KeyGather, group: dist.ProcessGroup, expand: Expand) -> None:
        super().__init__(gather, group)
        self._expand = expand
        self._latents: torch.Tensor | None = None
        self._pairs: torch.Tensor | None = None

    def start(self, key: torch.Tensor, value: torch.Tensor | None) -> UnderWay:
        local = key.detach().contiguous()
        rows = local.new_empty(len(local) * self.group.size(), *local.shape[1:])
        return UnderWay(all_gather, rows, local, self.group)

    def rows(self, gathering: UnderWay, *, keep: bool) -> torch.Tensor:
        """``[T, 2, G, D]``: narrower values are filled up with zeros."""
        latents = gathering.wait().requires_grad_(keep)
        with torch.set_grad_enabled(keep):
            key, value = self._expand(latents.unsqueeze(1), self.group.size())
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
        """The end of the graph from latents to keys and values."""
        return self._pairs

    def start_back(self, sums: torch.Tensor) -> tuple[UnderWay, torch.Tensor]:
        """The same with the latents' gradients; adds the weights' to theirs."""
        latents, pairs = self._latents, self._pairs
        assert latents is not None and pairs is not None
        self._latents = self._pairs = None
        torch.autograd.backward(pairs, sums.to(pairs.dtype))
        assert latents.grad is not None
        return super().start_back(latents.grad.to(sums.dtype))
