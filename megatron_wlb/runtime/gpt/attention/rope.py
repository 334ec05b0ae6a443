"""Rotary embeddings by position in the document, for any packing and any shard of documents.

Megatron computes the angles of positions ``0 … T-1`` once a length and caches them. Here the same
module computes them up to the longest document, and each token takes the row of its position.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from megatron_wlb.runtime.gpt.attention.document_attention import PlanSeqParams


class DocumentRotaryEmbedding(torch.nn.Module):
    """Stands in for a model's ``rotary_pos_emb`` and asks it for the angles.

    The model calls :meth:`get_rotary_seq_len` with the micro-batch's parameters just before
    ``forward``, in the same forward pass, which is how the positions get here.
    """

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._positions: torch.Tensor | None = None

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> int:
        assert isinstance(packed_seq_params, PlanSeqParams), "the forward step passes the plan"
        self._positions = packed_seq_params.positions
        # Rounded up to a power of two: the inner module caches by length, and ragged
        # micro-batches have a different one each time.
        return 1 << (int(packed_seq_params.max_seqlen_q) - 1).bit_length()

    def forward(self, max_seq_len: int, **kwargs: Any) -> Any:
        """Angles ``[T/CP, 1, 1, D]`` of each local token's position in its document.

        YaRN gives them with a factor of their sine and cosine, as the model expects.
        """
        assert self._positions is not None
        # As for packed sequences it returns all positions, not only those of a zigzag shard.
        found = self.inner(max_seq_len, packed_seq=True)
        if isinstance(found, tuple):
            angles, factor = found
            return angles[self._positions], factor
        return found[self._positions]


def use_document_positions(model: GPTModel) -> None:
    """Makes ``model`` rotate by position in the document; learned positions need nothing.

    Layers of multi-latent attention have a rotation each, with tables of megabytes: all get the
    first one's.
    """
    if hasattr(model, "rotary_pos_emb"):
        model.rotary_pos_emb = DocumentRotaryEmbedding(model.rotary_pos_emb)
    attentions = [getattr(layer, "self_attention", None) for layer in model.decoder.layers]
    own = [a for a in attentions if isinstance(a, MultiLatentAttention)]
    for attention in own:
        attention.rotary_pos_emb = own[0].rotary_pos_emb
