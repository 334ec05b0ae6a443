"""Models that another trainer built: they run samples that begin alike, inside a micro-batch.

:func:`share` teaches a model once, before its first step. A micro-batch's samples become
:class:`SharedSamples`: the tokens that run, what attention is told, and the way back from rows to
samples. A call of the model with any other ``packed_seq_params`` runs as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.plan.sharding import Sharding, length_multiple, rank_layout
from megatron_wlb.planning.balance.trees import SharedPrefixes, part_of
from megatron_wlb.runtime.gpt.attention.document_attention import (
    DocumentAttention,
    PlanSeqParams,
    model_reach,
)
from megatron_wlb.runtime.gpt.attention.rope import DocumentRotaryEmbedding
from megatron_wlb.runtime.gpt.build import attention_options
from megatron_wlb.runtime.gpt.hybrid import attentions_of
from megatron_wlb.runtime.ranks.transfer import mapped, to_device
from megatron_wlb.runtime.stepping.batch import local_params
from megatron_wlb.settings.config import WlbConfig

FP8_ROWS = 128
"""What TransformerEngine's FP8 wants a rank's rows to be a multiple of, at most."""
SHARDING = Sharding("per-document")
"""How context-parallel ranks share a micro-batch."""


@dataclass(frozen=True, eq=False)
class SharedSamples:
    """The samples of a micro-batch, where what they begin alike with runs once.

    Legend: ``T`` the rows that run, padding too; each context-parallel rank has ``T/CP`` of them.
    """

    tokens: torch.Tensor
    """``[1, T/CP]`` int64: token ids."""
    targets: torch.Tensor
    """``[1, T/CP]`` int64: what each row predicts; 0 where that is nothing."""
    params: PlanSeqParams
    """What the model takes as ``packed_seq_params``."""
    lengths: list[int]
    """Tokens of each sample."""
    rows: torch.Tensor
    """``[Σ lengths]`` int64: the row of each token of each sample, one sample behind another; in
    the order of context-parallel ranks."""
    group: torch.distributed.ProcessGroup | None = None
    """The context-parallel ranks; None if there is one."""

    @classmethod
    def of(cls, samples: Sequence[torch.Tensor], core: TransformerConfig) -> SharedSamples:
        """Takes token ids, ``[length]`` of each, and finds what is equal."""
        device = samples[0].device
        ids = [sample.cpu().numpy() for sample in samples]
        lengths = [len(own) for own in ids]
        paths = SharedPrefixes.found(ids).paths(range(len(ids)), lengths, ahead=0)
        num_rows = sum(path.document.length for path in paths)
        spans, sharing = part_of(paths, 0, num_rows)
        tp_size, cp_size = core.tensor_model_parallel_size, core.context_parallel_size
        least = FP8_ROWS if core.fp8 else 1
        padding = -num_rows % length_multiple(tp_size, cp_size, core.sequence_parallel, least)
        tokens, targets = np.zeros((2, num_rows + padding), dtype=np.int64)
        rows: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(ids)
        for path in paths:
            number, length = path.document.number, lengths[path.document.number]
            runs = path.up_to(length)
            rows[number] = own = np.concatenate([np.arange(*run) for run in runs])
            tokens[own] = ids[number]
            targets[own[:-1]] = ids[number][1:]
        places = zip(sharing.places(spans), spans, strict=True)
        positions = [np.arange(place, place + span.length) for place, span in places]
        segments = [*(span.length for span in spans), *([padding] if padding else [])]
        group = mpu.get_context_parallel_group() if cp_size > 1 else None
        order = np.arange(num_rows + padding)
        if group is not None:
            shards = [
                rank_layout(segments, cp_size, rank, SHARDING, None, sharing.above).tokens
                for rank in range(cp_size)
            ]
            order = np.concatenate(shards)
        local, params = local_params(
            segments,
            np.concatenate([*positions, np.arange(padding)]),
            "cpu",
            cp_rank=group.rank() if group else 0,
            cp_size=cp_size,
            sharding=SHARDING,
            reach_tokens=model_reach(core),
            above=sharing.above,
        )

        def moved(array: npt.NDArray[np.int64]) -> torch.Tensor:
            return to_device(torch.from_numpy(array), str(device))

        return cls(
            moved(tokens[local])[None],
            moved(targets[local])[None],
            mapped(params, lambda tensor: to_device(tensor, str(device))),
            lengths,
            moved(np.argsort(order)[np.concatenate(rows)]),
            group,
        )

    @property
    def position_ids(self) -> torch.Tensor:
        """``[1, T/CP]`` int64: each row's position in its sample."""
        assert self.params.positions is not None
        return self.params.positions[None]

    def of_samples(self, rows: torch.Tensor, *, summed: bool = False) -> torch.Tensor:
        """``[1, T/CP, …] -> [Σ lengths, …]``: what each token of each sample has. Gradients of what
        is shared are summed.

        All context-parallel ranks get all. A rank's own rows get the gradients of its own loss; or
        if ``summed`` of the sum of all ranks' losses.
        """
        if self.group is not None:
            gather: Any = _OfAllRanks.apply
            rows = gather(rows, self.group, summed)
        return rows.index_select(1, self.rows)[0]

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """``[Σ lengths, …] -> [1, T/CP, …]``: what rows have; 0 in padding.

        Raises :class:`CompatibilityError` where samples have unlike values on rows that they share.
        """
        num_own = self.tokens.shape[1]
        num_rows, rank = num_own, 0
        if self.group is not None:
            num_rows, rank = num_own * self.group.size(), self.group.rank()
        found = values.new_zeros(num_rows, *values.shape[1:])
        found[self.rows] = values
        if not torch.equal(found[self.rows], values):
            raise CompatibilityError(
                "samples that share a beginning have unlike values of its tokens, such as "
                "temperatures; give them the same, or do not share prefixes"
            )
        return found[None, rank * num_own : (rank + 1) * num_own]


class _OfAllRanks(torch.autograd.Function):
    """``[1, T/CP, …] -> [1, T, …]``, rank by rank."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: torch.distributed.ProcessGroup, summed: bool
    ) -> torch.Tensor:
        ctx.group, ctx.summed = group, summed
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        torch.distributed.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.summed:
            grad = grad.clone()
            torch.distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None, None


def share(chunks: Sequence[torch.nn.Module]) -> TransformerConfig:
    """Teaches the chunks of a Megatron ``GPTModel`` to run :class:`SharedSamples`; its settings.

    ``chunks`` may be wrapped, and are taught in place: parameters, their names and checkpoints stay
    what they are. All ranks call it, before the first step.

    Raises :class:`CompatibilityError` for a model in which samples cannot share, with the reason.
    """
    options = None
    for gpt in _models(chunks):
        core = gpt.config
        _check(gpt, core)
        # Stages have each other's rows, of which there is another number each time.
        core.variable_seq_lengths = True
        for attention in attentions_of(gpt):
            if not isinstance(attention, SelfAttention):
                raise CompatibilityError(
                    f"layer {attention.layer_number} has {type(attention).__name__}, in which "
                    "samples cannot share prefixes in another trainer; leave prefixes unshared"
                )
        options = options or attention_options(WlbConfig(), core)
        for attention in attentions_of(gpt):
            layer = DocumentAttention(
                core,
                attention.layer_number,
                AttnMaskType.causal,
                "self",
                softmax_scale=core.softmax_scale,
                pg_collection=attention.pg_collection,
                options=options,
            )
            inner = attention.core_attention
            _check_core(inner, layer)
            inner.forward = _told(inner.forward, inner, layer)
        if hasattr(gpt, "rotary_pos_emb"):
            gpt.rotary_pos_emb = _Rotary(gpt.rotary_pos_emb)
    return core


CORES = (
    "megatron.core.transformer.dot_product_attention.DotProductAttention",
    "megatron.core.extensions.transformer_engine.TEDotProductAttention",
)
"""Core attentions of Megatron that compute what ours does. Models have others with caps, windows
and scales of their own."""


def _models(chunks: Sequence[torch.nn.Module]) -> list[GPTModel]:
    found = [m for chunk in chunks for m in chunk.modules() if isinstance(m, GPTModel)]
    if len(found) != len(chunks) or not found:
        raise CompatibilityError(
            f"{len(chunks)} model chunks have {len(found)} of Megatron's GPTModel; samples share "
            "prefixes in it alone"
        )
    return found


def _check(gpt: Any, core: TransformerConfig) -> None:
    """Raises :class:`CompatibilityError` for what a row cannot do for several samples."""
    replays = ("enable_routing_replay", "moe_enable_routing_replay")
    reasons = {
        "dropout": (core.attention_dropout or core.hidden_dropout or _drops(gpt))
        and "one draw would serve all samples",
        "multi-token prediction": core.mtp_num_layers and "its labels go by rows of one sample",
        "seq_aux_loss": "seq_aux_loss" in core.moe_router_load_balancing_type
        and core.num_moe_experts
        and "it counts the tokens of each sample",
        "--overlap-moe-expert-parallel-comm": core.overlap_moe_expert_parallel_comm
        and "it calls layers in parts",
        "routing replay": any(getattr(core, name, False) for name in replays)
        and "a shared token has a record for each sample",
        f"moe_token_dispatcher_type {core.moe_token_dispatcher_type}": core.num_moe_experts
        and core.moe_token_dispatcher_type == "allgather"
        and "it wants micro-batches of one length",
        f"position_embedding_type {gpt.position_embedding_type}": gpt.position_embedding_type
        not in ("rope", "yarn", "none")
        and "rows are told their positions by rotation alone",
    }
    for name, reason in reasons.items():
        if reason:
            raise CompatibilityError(
                f"samples cannot share prefixes with {name}: {reason}; set it otherwise, or leave "
                "prefixes unshared"
            )


def _drops(gpt: Any) -> bool:
    """Whether any module drops, such as those of LoRA."""
    return any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in gpt.modules())


def _check_core(inner: torch.nn.Module, layer: DocumentAttention) -> None:
    """Raises :class:`CompatibilityError` where a core attention computes what ours does not."""
    kind = f"{type(inner).__module__}.{type(inner).__qualname__}"
    scale = getattr(inner, "softmax_scale", None)
    by_layer = layer.config.apply_query_key_layer_scaling  # which changes no result
    same = scale is None or by_layer or math.isclose(scale, layer.softmax_scale)
    if kind not in CORES or not same:
        raise CompatibilityError(
            f"layer {layer.layer_number} has the core attention {kind} with scale {scale}; samples "
            f"share prefixes in {' and '.join(CORES)} with scale {layer.softmax_scale:g}; leave "
            "prefixes unshared"
        )


def _told(
    inner: Callable[..., torch.Tensor], module: torch.nn.Module, layer: DocumentAttention
) -> Callable[..., torch.Tensor]:
    """The forward of a core attention that runs shared rows by ours."""

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        run: Callable[..., torch.Tensor] = inner
        if isinstance(kwargs.get("packed_seq_params"), PlanSeqParams):
            layer.train(module.training)
            run = layer
        return run(*args, **kwargs)

    return forward


class _Rotary(DocumentRotaryEmbedding):
    """Rotates shared rows by position, and anything else as the model did."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        params = kwargs.get("packed_seq_params", args[-1])
        if isinstance(params, PlanSeqParams):
            return super().get_rotary_seq_len(*args, **kwargs)
        self._positions = None
        found: int = self.inner.get_rotary_seq_len(*args, **kwargs)  # type: ignore[operator]
        return found

    def forward(self, max_seq_len: int, **kwargs: Any) -> Any:
        if self._positions is None:
            return self.inner(max_seq_len, **kwargs)
        return super().forward(max_seq_len, **kwargs)
