"""A micro-batch's plan and the corpora -> the tensors that one pipeline stage needs.

Legend: ``T`` the micro-batch's padded tokens. Padding, at the tail only, is an attention segment
of its own and counts in no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_wlb.data.corpus import Corpus
from megatron_wlb.errors import CorpusError
from megatron_wlb.plan import MicroBatchPlan, Span
from megatron_wlb.runtime.attention import PlanSeqParams


@dataclass(frozen=True)
class Batch:
    """What the forward step of one micro-batch takes; ``[1, T]`` int64 unless said otherwise."""

    plan: MicroBatchPlan
    position_ids: torch.Tensor
    packed_seq_params: PlanSeqParams
    tokens: torch.Tensor | None
    """On the first stage only."""
    labels: torch.Tensor | None
    """On the last stage only; 0 where there is none."""
    loss_mask: torch.Tensor | None
    """On the last stage only; fp32, 1 where the token has a label."""


class BatchBuilder:
    """Builds the batches of one pipeline stage.

    Args:
        corpora: in the order of ``Document.corpus``.
        vocab_size: ids from this on are an error (they would index beyond the embedding).
        device: where the tensors go.
    """

    def __init__(self, corpora: Sequence[Corpus], vocab_size: int, device: str) -> None:
        self.corpora = corpora
        self.vocab_size = vocab_size
        self.device = device

    def build(self, plan: MicroBatchPlan, *, first: bool, last: bool) -> Batch:
        """The tensors of ``plan`` for a stage that embeds (``first``) or has the loss (``last``).

        Raises:
            CorpusError: a token id outside the vocabulary.
        """
        positions = np.concatenate(
            [np.arange(s.start, s.stop) for s in plan.spans]
            + [np.arange(plan.padded_length - plan.length)]
        )
        position_ids = self._tensor(positions)
        tokens = labels = loss_mask = None
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
                tokens = self._tensor(ids)[None]
            if last:
                labels = self._tensor(targets)[None]
                loss_mask = self._tensor(mask)[None]
        return Batch(
            plan,
            position_ids[None],
            PlanSeqParams.of(plan.lengths, position_ids),
            tokens,
            labels,
            loss_mask,
        )

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

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def iterate(
        self, micro_batches: Sequence[MicroBatchPlan], *, first: bool, last: bool
    ) -> Iterator[Batch]:
        """One batch after another, built when it is asked for."""
        for plan in micro_batches:
            yield self.build(plan, first=first, last=last)
