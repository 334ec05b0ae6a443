"""The kinds of parts that layers have: a file each, which says all that is known of the kind."""

from megatron_wlb.cost.parts.attention import Attention
from megatron_wlb.cost.parts.feed_forward import FeedForward
from megatron_wlb.cost.parts.gated_delta import GatedDelta
from megatron_wlb.cost.parts.latent import Latent, LatentAttention
from megatron_wlb.cost.parts.mamba import Mamba
from megatron_wlb.cost.parts.mixture import Experts

__all__ = [
    "Attention", "Experts", "FeedForward", "GatedDelta", "Latent", "LatentAttention", "Mamba",
]  # fmt: skip
