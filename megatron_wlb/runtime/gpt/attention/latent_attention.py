"""Multi-latent attention: Megatron's layer, whose positions are by document, and whose latents
travel over context-parallel ranks.

A token's keys and values of all heads are projected up from one *latent*: ``kv_lora_rank`` numbers,
and ``qk_pos_emb_head_dim`` of a key that all heads share, which alone is rotated. Ranks exchange
latents, of which there are far fewer numbers than of keys and values, and each projects all of them
up. Gradients go back the same way: keys' and values' to latents on each rank, and the sum of these
over ranks to the rank that has the tokens. With sequence parallelism a tensor-parallel rank sends
the latents of its own share of the tokens, and projecting up gathers those of the others.

Two faults of Megatron with several tensor-parallel ranks are mended here. Its own method takes the
gradient of the shared key from a rank's own heads, where the down projection is divided over ranks.
And it adds up the gradients of the queries' norm, which are whole on each rank.

Legend: ``T`` tokens of the micro-batch, ``H`` heads of this TP rank, ``R`` numbers of a latent,
``n`` tokens whose latents are here: ``T/CP``, over TP with sequence parallelism.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_wlb.errors import PlanError
from megatron_wlb.runtime.gpt.attention.document_attention import DocumentAttention, PlanSeqParams
from megatron_wlb.runtime.gpt.attention.rope import DocumentRotaryEmbedding

_PAIRS = {"mla_rotary_interleaved": True}
if not _PAIRS.keys() & inspect.signature(apply_rotary_pos_emb).parameters.keys():
    _PAIRS = {}  # until 0.18 it takes this from the configuration
"""Says that a head's channels 2i and 2i + 1 turn together, as Megatron's own layer does."""


@contextlib.contextmanager
def _no_mock_of_te() -> Iterator[None]:
    """Keeps Megatron from asking whether a layer is of a mock of TransformerEngine's class.

    Some versions do where TransformerEngine is missing, which is an error.
    """
    has_te = multi_latent_attention.HAVE_TE
    multi_latent_attention.HAVE_TE = has_te and isinstance(multi_latent_attention.TELinear, type)
    try:
        yield
    finally:
        multi_latent_attention.HAVE_TE = has_te


class DocumentLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Stands in for ``MLASelfAttention``, whose parameters and modules it has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _no_mock_of_te():
            super().__init__(*args, **kwargs)
        self.rotary_pos_emb: DocumentRotaryEmbedding = DocumentRotaryEmbedding(self.rotary_pos_emb)
        assert isinstance(self.core_attention, DocumentAttention)
        self.core_attention.expand = self.expand
        if self.config.q_lora_rank is not None and not self.config.sequence_parallel:
            # Each TP rank has the whole gradient, but Megatron adds up what is called q_layernorm.
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Query, key and value ``[T/CP, 1, H, …]``, and what they are projected up from.

        Where tokens are spread over ranks latents ``[n, 1, 1, R]`` are in the key's place, and
        there is no value.
        """
        config, params = self.config, packed_seq_params
        if not isinstance(params, PlanSeqParams):
            raise PlanError(
                "attention was called without the micro-batch's positions; the model must be run "
                "by megatron-wlb's forward step"
            )
        angles, factor = self._angles(params)
        low = hidden_states
        if config.q_lora_rank is not None:
            low = self._down(self.linear_q_down_proj, hidden_states, config.q_lora_rank)
            low = self.q_layernorm(low)
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        both = self._down(self.linear_kv_down_proj, hidden_states, sum(sizes))
        latent, shared = torch.split(both, sizes, dim=-1)
        latent = self.kv_layernorm(latent)
        own_angles = angles
        if config.sequence_parallel:
            own_angles = angles.chunk(self.tp_group.size())[self.tp_group.rank()]
        shared = self._rotated(shared.unsqueeze(2), own_angles, factor)
        latents = torch.cat([latent.unsqueeze(2), shared], dim=-1)  # [n, 1, 1, R]
        is_divided = params.gather is not None

        def up(
            low: torch.Tensor, latents: torch.Tensor, angles: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            query = self._query(low, angles, factor)
            return (query,) if is_divided else (query, *self.expand(latents, 1))

        if self.recompute_up_proj:
            self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=config.fp8 or config.fp4)
            query, *pair = self.qkv_up_checkpoint.checkpoint(up, low, latents, angles)
        else:
            query, *pair = up(low, latents, angles)
        key, value = pair or (latents, None)
        return query, key, value, low, latents

    def expand(self, latents: torch.Tensor, num_shards: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~megatron_wlb.runtime.gpt.attention.key_exchange.Expand`."""
        config, heads = self.config, self.num_attention_heads_per_partition
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        latent, shared = torch.split(latents.squeeze(2), sizes, dim=-1)
        both, _ = self.linear_kv_up_proj(latent)
        # The heads of each rank give the shared key a part of its gradient.
        if config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.tp_group)
            both, shared = (self._by_shard(rows, num_shards) for rows in (both, shared))
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.tp_group)
        both = both.unflatten(-1, (heads, config.qk_head_dim + config.v_head_dim))
        own, value = both.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        key = torch.cat([own, shared.unsqueeze(2).expand(-1, -1, heads, -1)], dim=-1)
        return key, value.contiguous()

    def _by_shard(self, rows: torch.Tensor, num_shards: int) -> torch.Tensor:
        """Rows in the order of TP ranks, CP ranks, tokens -> of CP ranks, TP ranks, tokens."""
        if num_shards == 1:
            return rows
        tp_size = self.tp_group.size()
        divided = rows.view(tp_size, num_shards, -1, *rows.shape[1:])
        return divided.transpose(0, 1).reshape(rows.shape)

    def _angles(self, params: PlanSeqParams) -> tuple[torch.Tensor, float]:
        """Angles ``[T/CP, 1, 1, …]`` of the local tokens' positions, and YaRN's factor."""
        rotary = self.rotary_pos_emb
        length = rotary.get_rotary_seq_len(None, None, None, self.config, params)
        found = rotary(length)
        return found if isinstance(found, tuple) else (found, 1.0)

    def _down(self, linear: Any, hidden: torch.Tensor, size: int) -> torch.Tensor:
        """A down projection ``[n, 1, size]``, whether ranks divide its columns or each has all."""
        product: torch.Tensor = linear(hidden)[0]
        if product.shape[-1] == size:
            return product
        product = gather_from_tensor_model_parallel_region(product, group=self.tp_group)
        if self.config.sequence_parallel:
            product = scatter_to_sequence_parallel_region(product, group=self.tp_group)
        return product

    def _query(self, low: torch.Tensor, angles: torch.Tensor, factor: float) -> torch.Tensor:
        config = self.config
        project = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = project(low)[0].unflatten(-1, (-1, self.q_head_dim))
        sizes = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        own, rotated = query.split(sizes, dim=-1)
        return torch.cat([own, self._rotated(rotated, angles, factor)], dim=-1)

    def _rotated(self, heads: torch.Tensor, angles: torch.Tensor, factor: float) -> torch.Tensor:
        turned: torch.Tensor = apply_rotary_pos_emb(
            heads, angles, self.config, mscale=factor, cp_group=self.pg_collection.cp, **_PAIRS
        )
        return turned
