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

from megatron_wlb.cost.fp8 import row_multiple
from megatron_wlb.data.sample_corpus import SampleCorpus
from megatron_wlb.errors import CompatibilityError
from megatron_wlb.plan import MicroBatchPlan
from megatron_wlb.plan.sharding import Sharding, length_multiple
from megatron_wlb.planning.balance.trees import SharedPrefixes, part_of, refuse_sharing
from megatron_wlb.runtime.gpt.attention.document_attention import (
    DocumentAttention,
    PlanSeqParams,
    model_reach,
)
from megatron_wlb.runtime.gpt.attention.rope import DocumentRotaryEmbedding
from megatron_wlb.runtime.gpt.build import attention_options
from megatron_wlb.runtime.gpt.hybrid import attentions_of
from megatron_wlb.runtime.gpt.states import tokens_of_ranks
from megatron_wlb.runtime.ranks.transfer import to_device
from megatron_wlb.runtime.stepping.batch import BatchBuilder
from megatron_wlb.settings.config import Config

MOST_IDS = 1 << 31
"""Token ids are the trainer's matter."""
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
        corpus = SampleCorpus.of([sample.cpu().numpy() for sample in samples])
        lengths: list[int] = corpus.lengths.tolist()
        paths = SharedPrefixes.found(corpus.stored).paths(range(len(samples)), lengths, ahead=0)
        num_rows = sum(path.document.length for path in paths)
        spans, sharing = part_of(paths, 0, num_rows)
        tp_size, cp_size = core.tensor_model_parallel_size, core.context_parallel_size
        multiple = length_multiple(tp_size, cp_size, core.sequence_parallel, _fp8_rows(core))
        num_padded = -(-num_rows // multiple) * multiple
        plan = MicroBatchPlan(0, tuple(spans), num_padded, 0.0, SHARDING, sharing=sharing)
        group = mpu.get_context_parallel_group() if cp_size > 1 else None
        builder = BatchBuilder(
            [corpus],
            MOST_IDS,
            str(device),
            cp_rank=group.rank() if group else 0,
            cp_size=cp_size,
            reach_tokens=model_reach(core),
        )
        batch = builder.finish(builder.prepare(plan, first=True, last=True))
        assert batch.tokens is not None and batch.labels is not None  # of a stage that is both
        place = np.argsort(tokens_of_ranks(plan.lengths, cp_size, SHARDING))
        rows: dict[int, npt.NDArray[np.int64]] = {}
        for path in paths:
            runs = path.up_to(lengths[path.document.number])
            rows[path.document.number] = np.concatenate([place[slice(*run)] for run in runs])
        in_order = np.concatenate([rows[number] for number in range(len(samples))])
        known = batch.tokens, batch.labels, batch.packed_seq_params, lengths
        return cls(*known, to_device(in_order, device), group)

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
            grad = grad.clone(memory_format=torch.contiguous_format)
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
        options = options or attention_options(Config(), core)
        for attention in attentions_of(gpt):
            if not isinstance(attention, SelfAttention):
                raise CompatibilityError(
                    f"layer {attention.layer_number} has {type(attention).__name__}, in which "
                    "samples cannot share prefixes in another trainer; leave prefixes unshared"
                )
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
            inner.forward = _told(inner.forward, layer)
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
    remedy = "set it otherwise, or leave prefixes unshared"
    refuse_sharing(reasons, remedy, CompatibilityError)


def _fp8_rows(core: TransformerConfig) -> int:
    """What FP8 wants a rank's rows to be a multiple of."""
    if not core.fp8:
        return 1
    spread = core.sequence_parallel and core.tensor_model_parallel_size > 1
    return row_multiple(str(getattr(core.fp8_recipe, "value", core.fp8_recipe)), spread=spread)


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
    inner: Callable[..., torch.Tensor], layer: DocumentAttention
) -> Callable[..., torch.Tensor]:
    """The forward of a core attention that runs shared rows by ours."""

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        run: Callable[..., torch.Tensor] = inner
        if isinstance(kwargs.get("packed_seq_params"), PlanSeqParams):
            run = layer  # which drops nothing, so that it is the same in training
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
