"""A micro-batch's plan and the corpora -> the tensors that one pipeline stage needs.

Legend: ``T`` the micro-batch's padded tokens; a context-parallel rank has ``T/CP`` of them, in the
order of its shard. Padding, at the tail only, is an attention segment of its own and counts in no
loss. Of a micro-batch that k data-parallel ranks run together, each of their context-parallel ranks
has ``T/(k·CP)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from megatron_wlb.data.corpus import Corpus
from megatron_wlb.errors import CorpusError
from megatron_wlb.plan import MicroBatchPlan, Span
from megatron_wlb.runtime.attention.context_parallel import KeyGather
from megatron_wlb.runtime.attention.core import PlanSeqParams
from megatron_wlb.runtime.attention.kernels import Segments
from megatron_wlb.runtime.attention.slices import Slice, SliceStore
from megatron_wlb.runtime.transfer import to_device
from megatron_wlb.sharding import Sharding, rank_layout


@dataclass(frozen=True)
class Batch:
    """What the forward step of one micro-batch takes; ``[1, T/CP]`` int64 unless said otherwise."""

    plan: MicroBatchPlan
    position_ids: torch.Tensor
    packed_seq_params: PlanSeqParams
    tokens: torch.Tensor | None
    """Token ids, on the first stage only."""
    labels: torch.Tensor | None
    """Labels, on the last stage only; 0 where there is none."""
    loss_mask: torch.Tensor | None
    """The loss mask, on the last stage only: fp32, 1 where the token has a label."""
    num_targets: int
    """Local tokens that have a label: this rank's part of the loss normaliser. 0 before the last
    stage."""


IntArray: TypeAlias = npt.NDArray[np.int64]


def local_params(
    lengths: Sequence[int],
    positions: IntArray,
    device: str | torch.device,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    sharding: Sharding,
    cut: Slice | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> tuple[IntArray | slice, PlanSeqParams]:
    """Which tokens of a micro-batch are local, and what attention and RoPE need of them.

    ``lengths`` are the tokens of each attention segment, ``positions`` ``[T]`` those of each token
    in its document. ``cut`` is the slice that the first segment is, if it is one. ``group`` are the
    ranks, if they are others than the model's context-parallel ranks.
    """
    if cp_size == 1:
        if cut is not None:
            chunk = Segments.of([cut.stop - cut.start], [cut.stop], device)
            cut, lengths = replace(cut, chunks=(chunk,)), lengths[1:]
        segments = Segments.of(lengths, device=device) if lengths or not cut else None
        return slice(None), PlanSeqParams.of(segments, positions, cut=cut)
    layout = whole = rank_layout(lengths, cp_size, cp_rank, sharding)
    slice_rows = None
    if cut is not None:
        num_tokens = cut.stop - cut.start
        chunks, whole = layout.split(num_tokens)
        slice_rows = layout.token_rows[:num_tokens]
        own = tuple(Segments.of([q], [cut.start + k], device) for q, k in chunks.tolist())
        cut = replace(cut, chunks=own)
    segments = None
    if len(whole.lengths_q):
        segments = Segments.of(whole.lengths_q.tolist(), whole.lengths_k.tolist(), device)
    gather = KeyGather.of(whole, device, slice_rows, group)
    return layout.tokens, PlanSeqParams.of(segments, positions[layout.tokens], gather, cut)


class BatchBuilder:
    """Builds the batches of one pipeline stage and context-parallel rank.

    ``corpora`` are in the order of ``Document.corpus``. Ids from ``vocab_size`` on are an error, as
    they would index beyond the embedding.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        vocab_size: int,
        device: str,
        *,
        cp_rank: int = 0,
        cp_size: int = 1,
    ) -> None:
        self.corpora = corpora
        self.vocab_size = vocab_size
        self.device = device
        self.cp_rank = cp_rank
        self.cp_size = cp_size
        self.slices = SliceStore()
        """The open documents of the step; who runs it begins and ends that."""
        self.groups: dict[tuple[int, ...], torch.distributed.ProcessGroup] = {}
        """This rank's peers in micro-batches that several data-parallel ranks run together, by
        these ranks; who runs a step opens them."""
        self._latest: dict[int, tuple[MicroBatchPlan, IntArray | slice, PlanSeqParams]] = {}
        """What a micro-batch's batches have in common on all chunks, by its index."""

    def build(self, plan: MicroBatchPlan, *, first: bool, last: bool) -> Batch:
        """Builds the tensors for a stage that embeds (``first``) or has the loss (``last``).

        Raises :class:`CorpusError` for a token id outside the vocabulary.
        """
        local, params = self._shared(plan)
        assert params.positions is not None
        tokens = labels = loss_mask = None
        num_targets = 0
        if first or last:
            ids = np.zeros(plan.padded_length, dtype=np.int64)
            targets = np.zeros(plan.padded_length, dtype=np.int64)
            mask = np.zeros(plan.padded_length, dtype=np.float32)
            at = 0
            for span in plan.spans:
                stored = self._read(span)
                ids[at : at + span.length] = stored[: span.length]
                targets[at : at + span.num_targets] = stored[1:]
                mask[at : at + span.num_targets] = 1.0
                at += span.length
            if first:
                tokens = to_device(ids[local], self.device)[None]
            if last:
                labels = to_device(targets[local], self.device)[None]
                loss_mask = to_device(mask[local], self.device)[None]
                num_targets = int(mask[local].sum())
        return Batch(plan, params.positions[None], params, tokens, labels, loss_mask, num_targets)

    def forget(self) -> None:
        """Drops what the chunks of the last step had in common; to be called between steps."""
        self._latest.clear()

    def _shared(self, plan: MicroBatchPlan) -> tuple[IntArray | slice, PlanSeqParams]:
        """Makes what chunks share once a micro-batch, not once a chunk."""
        known = self._latest.get(plan.index)
        if known is None or known[0] is not plan:
            positions = np.concatenate(
                [np.arange(s.start, s.stop) for s in plan.spans]
                + [np.arange(plan.padded_length - plan.length)]
            )
            group = self.groups[plan.replicas] if plan.replicas else None
            own = local_params(
                plan.lengths,
                positions,
                self.device,
                cp_rank=group.rank() if group else self.cp_rank,
                cp_size=group.size() if group else self.cp_size,
                sharding=plan.sharding,
                cut=self.slices.slice(plan.slice) if plan.slice else None,
                group=group,
            )
            known = self._latest[plan.index] = (plan, *own)
        return known[1:]

    def _read(self, span: Span) -> np.ndarray:
        """The span's tokens and the one after them, if the stored document has one."""
        document = span.document
        start = document.offset + span.start
        stored = self.corpora[document.corpus].tokens(
            document.index, start, start + span.num_targets + 1
        )
        if stored.max() >= self.vocab_size or stored.min() < 0:
            raise CorpusError(
                f"{self.corpora[document.corpus].prefix}: document {document.index} has token "
                f"{stored.max()}, but the vocabulary has {self.vocab_size}; pass the tokenizer's "
                "--vocab-size"
            )
        return stored

    def iterate(
        self, micro_batches: Sequence[MicroBatchPlan], *, first: bool, last: bool
    ) -> Iterator[Batch]:
        """Builds one batch after another, when it is asked for."""
        for plan in micro_batches:
            yield self.build(plan, first=first, last=last)
