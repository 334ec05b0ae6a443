"""Core attention for packed documents, as a Megatron ``core_attention`` module.

Legend: ``T`` tokens of the micro-batch, ``H`` query heads and ``G`` key/value heads of this TP
rank, ``D`` head dimension. Megatron's layout is ``[T, 1, H, D]``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_wlb.errors import PlanError
from megatron_wlb.runtime.kernels import Segments, VarlenKernel
from megatron_wlb.runtime.kernels.sdpa import sdpa_varlen


@dataclass
class PlanSeqParams(PackedSeqParams):  # type: ignore[misc]
    """What one micro-batch's plan tells attention and RoPE.

    ``qkv_format`` is ``sbhd``, not ``thd``: Megatron's THD code would look for boundaries that are
    padded and sharded as ring attention needs them. The documents travel in the fields below.
    """

    lengths: tuple[int, ...] = ()
    """Tokens of each attention segment, on the host; the padding at the tail is one of its own."""
    segments: Segments | None = None
    """The same, as kernels take them."""
    positions: torch.Tensor | None = None
    """``[T]`` int64 on the device: each token's position in its document."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], positions: torch.Tensor) -> PlanSeqParams:
        longest = max(lengths)
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
            segments=Segments.of(lengths, device=positions.device),
            positions=positions,
        )


class DocumentAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each document of a micro-batch, and to nothing else.

    Takes the place of ``DotProductAttention``. Its boundaries come from
    :class:`PlanSeqParams`; without one it refuses to run, because a causal mask over the whole
    micro-batch would silently let documents see each other.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.layer_number = max(1, layer_number)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        if config.apply_query_key_layer_scaling:
            self.softmax_scale /= self.layer_number
        self.kernel: VarlenKernel = sdpa_varlen

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """``[T, 1, H, D], [T, 1, G, D], [T, 1, G, D] -> [T, 1, H·D]``."""
        if not isinstance(packed_seq_params, PlanSeqParams):
            raise PlanError(
                "attention was called without the micro-batch's document boundaries; the model "
                "must be run by megatron-wlb's forward step"
            )
        if sum(packed_seq_params.lengths) != query.shape[0]:
            raise PlanError(
                f"attention got {query.shape[0]} tokens where the plan has "
                f"{sum(packed_seq_params.lengths)}; the ranks do not run the same plan"
            )
        assert packed_seq_params.segments is not None
        out = self.kernel(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            packed_seq_params.segments,
            self.softmax_scale,
        )
        return out.reshape(out.shape[0], 1, -1)  # [T, H, D] -> [T, 1, H·D]
