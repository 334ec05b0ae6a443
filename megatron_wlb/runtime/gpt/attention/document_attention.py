"""Core attention for packed documents, as a Megatron ``core_attention`` module.

Legend: ``T`` tokens of the micro-batch, ``H`` query heads and ``G`` key/value heads of this TP
rank, ``D`` head dimension. Megatron's layout is ``[T, 1, H, D]``.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_wlb.errors import CompatibilityError, PlanError
from megatron_wlb.runtime.gpt.attention.context_parallel import context_attention
from megatron_wlb.runtime.gpt.attention.dropout import own_numbers
from megatron_wlb.runtime.gpt.attention.kernels import Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.key_exchange import ContextParallel, Expand, KeyGather
from megatron_wlb.runtime.gpt.attention.slice_attention import (
    KVSlice,
    LayerSlice,
    slice_attention,
)
from megatron_wlb.runtime.gpt.moe import RoutedTokens
from megatron_wlb.runtime.gpt.prediction import Ahead
from megatron_wlb.runtime.ranks.transfer import to_device

if TYPE_CHECKING:
    from megatron_wlb.runtime.gpt.attention.shared_rows import SharedRows
    from megatron_wlb.runtime.gpt.states import ScannedDocuments


@dataclass
class PlanSeqParams(PackedSeqParams):  # type: ignore[misc]
    """What one micro-batch's plan tells attention and RoPE on this context-parallel rank.

    ``qkv_format`` is ``sbhd``, not ``thd``: Megatron's THD code would look for boundaries that are
    padded and sharded as ring attention needs them. The documents travel in the fields below.
    """

    segments: Segments | None = None
    """The local tokens' runs of queries, and the keys of each; a slice's are not among them. None
    if there are no others."""
    positions: torch.Tensor | None = None
    """``[T/CP]`` int64 on the device: each local token's position in its document."""
    gather: KeyGather | None = None
    """Where the keys are, if tokens are spread over ranks."""
    slice: KVSlice | None = None
    """The part of a document that the first tokens are, if they are one."""
    shared: SharedRows | None = None
    """What segments share, where all tokens are on this rank; None where they share nothing."""
    sliding: PlanSeqParams | None = None
    """The same for layers of a sliding window, with the keys in reach alone; None without any."""
    routed: RoutedTokens | None = None
    """What layers of experts are told of the tokens; None without any."""
    ahead: Ahead | None = None
    """What layers that predict further ahead take; None without any."""
    scanned: ScannedDocuments | None = None
    """What layers that carry a state through documents are told; None without any."""

    @property
    def num_tokens(self) -> int:
        """Local tokens, those of padding too."""
        whole = sum(self.segments.lengths_q) if self.segments else 0
        return whole + (self.slice.num_queries if self.slice else 0)

    @classmethod
    def of(
        cls,
        segments: Segments | None,
        positions: npt.NDArray[np.int64],
        gather: KeyGather | None = None,
        cut: KVSlice | None = None,
    ) -> PlanSeqParams:
        of_cut = () if cut is None else (cut.rows.own,) if cut.rows else cut.chunks
        known = [*of_cut, *([segments] if segments else ())]
        num_positions = int(positions.max()) + 1  # on the host: a GPU would have to be waited for
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=num_positions,
            max_seqlen_kv=num_positions,
            segments=segments,
            positions=to_device(positions, known[0].cu_seqlens_q.device),
            gather=gather,
            slice=cut,
        )


@dataclass(frozen=True)
class AttentionOptions(ContextParallel):
    """How attention runs, under CP too; the same in all layers."""

    kernel: VarlenKernel
    """The kernel, which drops nothing."""
    kernel_name: str = ""
    dropping: VarlenKernel | None = None
    """The kernel with the model's dropout, for training; None without dropout."""
    seed: int = 0
    """Where this run's random numbers start."""


class DocumentAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each document of a micro-batch, and to nothing else.

    Takes the place of ``DotProductAttention``. Its boundaries come from :class:`PlanSeqParams`;
    without one it refuses to run, because a causal mask over the whole micro-batch would silently
    let documents see each other.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        options: AttentionOptions,
    ) -> None:
        super().__init__(config=config)
        check_config(config)
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise CompatibilityError(
                f"layer {layer_number} asks for {attn_mask_type.name} {attention_type}-attention; "
                "attention to packed documents is causal self-attention only"
            )
        # apply_query_key_layer_scaling changes no result: Megatron divides scores by the layer's
        # number to keep them in fp16's range, and multiplies them again. Here they are fp32.
        self.key_dim = k_channels or config.kv_channels
        self.value_dim = v_channels or self.key_dim
        self.expand: Expand | None = None
        """What projects latents up to keys and values, if these are exchanged under CP."""
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(self.key_dim)
        self.layer_number = layer_number
        self.reach_tokens = layer_reach(config, layer_number)
        """The most keys that a query sees; None without a sliding window."""
        # What is computed again in the backward pass is used at once: no need to gather twice.
        again = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )
        self.options = replace(options, keep_gathered=options.keep_gathered or again)
        self.group: torch.distributed.ProcessGroup | None = None
        if config.context_parallel_size > 1:
            assert pg_collection is not None
            self.group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """``[T/CP, 1, H, D], [T/CP, 1, G, D], [T/CP, 1, G, Dv] -> [T/CP, 1, H·Dv]``.

        With :attr:`expand` there are latents ``[n, 1, 1, R]`` for keys, and no values.
        """
        params = self._told(packed_seq_params, query.shape[0])
        gather, cut, options = params.gather, params.slice, self.options
        query, key = query.squeeze(1), key.squeeze(1)
        value = None if value is None else value.squeeze(1)
        kernel = options.kernel
        numbers: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.training and options.dropping is not None:
            kernel, numbers = options.dropping, own_numbers(options.seed)
        run = None
        # On a GPU a head start tells that the kernel was seen to give the same in two parts;
        # there a single chunk attends to several parts of its prefix at once, too.
        joined_from = 1 if options.head_start_bytes is not None else None
        if query.device.type == "cpu":
            joined_from = 2
        if cut is not None:
            known = kernel, self.softmax_scale, self.value_dim, joined_from
            run = LayerSlice(cut, self.layer_number, *known)
        with numbers:
            if gather is not None:
                group = self.group if gather.group is None else gather.group
                assert group is not None
                # Little is exchanged of a slice behind many: one group, fewer calls that do more.
                behind = cut and not cut.divided and cut.start > gather.layout.num_tokens
                out = context_attention(
                    query,
                    key,
                    value,
                    params.segments,
                    gather,
                    kernel,
                    self.softmax_scale,
                    group,
                    replace(options, num_head_groups=1) if behind else options,
                    run,
                    self.expand if value is None else None,
                    self.value_dim,
                )
            else:
                assert value is not None
                if run is not None:
                    out = slice_attention(query, key, value, run, params.segments)
                elif params.shared is not None:
                    out = params.shared.attention(
                        query,
                        key,
                        value,
                        kernel,
                        self.softmax_scale,
                        may_join=joined_from is not None,
                    )
                else:
                    assert params.segments is not None
                    out = kernel(query, key, value, params.segments, self.softmax_scale)
        return out.reshape(out.shape[0], 1, -1)  # [T/CP, H, Dv] -> [T/CP, 1, H·Dv]

    def _told(self, params: PackedSeqParams | None, num_tokens: int) -> PlanSeqParams:
        """What the plan tells this layer of so many tokens.

        Raises :class:`PlanError` where it is nothing, or does not fit.
        """
        if not isinstance(params, PlanSeqParams) or not params.num_tokens:
            raise PlanError(
                "attention was called without the micro-batch's document boundaries; the model "
                "must be run by megatron-wlb's forward step"
            )
        if params.num_tokens != num_tokens:
            raise PlanError(
                f"attention got {num_tokens} tokens where the plan has {params.num_tokens}; "
                "the ranks do not run the same plan"
            )
        if self.reach_tokens is not None:
            if params.sliding is None:
                raise PlanError(
                    f"layer {self.layer_number} has a sliding window of {self.reach_tokens} keys, "
                    "but the micro-batch was made without; the model must be run by megatron-wlb's "
                    "forward step"
                )
            params = params.sliding
        gather = params.gather
        is_divided = self.group is not None or (gather is not None and gather.group is not None)
        if is_divided != (gather is not None):
            raise PlanError(
                f"attention over {self.config.context_parallel_size} context-parallel ranks got a "
                f"micro-batch that is{'' if gather else ' not'} divided over ranks"
            )
        return params


def layer_reach(config: TransformerConfig, layer_number: int) -> int | None:
    """The most keys that a query sees in a layer, its own too; None without a sliding window.

    Layers count from 1 over the whole model.
    """
    if not config.window_size:
        return None
    skipped = config.window_attn_skip_freq
    if isinstance(skipped, int):
        windowed = layer_number % skipped != 0
    else:
        windowed = skipped is None or bool(skipped[layer_number - 1])
    return config.window_size[0] + 1 if windowed else None


def model_reach(config: TransformerConfig) -> int | None:
    """The same over all layers, of which some may have none."""
    numbers = range(1, config.num_layers + 1)
    return max(filter(None, (layer_reach(config, number) for number in numbers)), default=None)


def check_config(config: TransformerConfig) -> None:
    """Checks that the model asks of attention nothing that it would silently leave out.

    Raises :class:`CompatibilityError` for a setting that cannot be honoured, with the reason.
    """
    if config.window_size is not None:
        left, right = config.window_size
        if left < 0 or right != 0:
            raise CompatibilityError(
                f"window_size is {config.window_size!r}, but attention to packed documents is "
                "causal; set it to (W, 0), W keys before a query's own"
            )
    for name, honoured, reason in _HONOURED:
        value = getattr(config, name, honoured)
        if value != honoured:
            raise CompatibilityError(
                f"{name} is {value!r}, which attention to packed documents does not honour: "
                f"{reason}; set it to {honoured!r}"
            )
    if config.fine_grained_activation_offloading and "core_attn" in config.offload_modules:
        raise CompatibilityError(
            "offload_modules has core_attn, but attention frees gathered keys and values itself; "
            "leave core_attn out"
        )


_HONOURED: tuple[tuple[str, Any, str], ...] = (
    ("cache_mla_latents", False, "it is for inference"),
    ("experimental_attention_variant", None, "only causal softmax attention is known here"),
    ("softmax_type", "vanilla", "its kernels know no offset or sink in the softmax"),
    ("qk_clip", False, "its kernels do not report the largest logit"),
    ("log_max_attention_logit", False, "its kernels do not report the largest logit"),
    ("fp8_dot_product_attention", False, "keys and values are gathered in bf16 or fp32"),
    ("fp8_multi_head_attention", False, "keys and values are gathered in bf16 or fp32"),
    ("cuda_graph_impl", "none", "every micro-batch has other shapes, and a graph only one"),
    ("enable_cuda_graph", False, "every micro-batch has other shapes, and a graph only one"),
    ("external_cuda_graph", False, "every micro-batch has other shapes, and a graph only one"),
    ("tp_comm_overlap", False, "it bakes in one sequence length"),
    ("flash_decode", False, "it is for inference"),
    ("batch_invariant_mode", False, "it is for Megatron's own kernels"),
    ("hybrid_context_parallel", False, "it divides sequences over ranks in its own way"),
)
"""Settings, the value that is honoured, and why no other is."""
