"""A micro-batch's plan and the corpora -> the tensors that one pipeline stage needs.

Legend: ``T`` the micro-batch's padded tokens; a context-parallel rank has ``T/CP`` of them, in the
order of its shard. Padding, at the tail only, is an attention segment of its own and counts in no
loss. Of a micro-batch that k data-parallel ranks run together, each of their context-parallel ranks
has ``T/(k·CP)``.

A rank reads the tokens that it needs, and no others. Tensor-parallel ranks, which need the same,
read them each for itself: pages that one has read are in the machine's cache for the others, and
nobody waits for a broadcast.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from megatron_wlb.data.corpus import Corpus
from megatron_wlb.errors import CorpusError
from megatron_wlb.extensions import load
from megatron_wlb.plan import MicroBatchPlan, RowRun, Span, StepPlan
from megatron_wlb.plan.sharding import Sharding, rank_layout
from megatron_wlb.runtime.gpt.attention.document_attention import PlanSeqParams
from megatron_wlb.runtime.gpt.attention.joined_rows import RowsSeen
from megatron_wlb.runtime.gpt.attention.kernels import Segments
from megatron_wlb.runtime.gpt.attention.key_exchange import KeyGather
from megatron_wlb.runtime.gpt.attention.slice_attention import KVSlice, SliceStore
from megatron_wlb.runtime.gpt.moe import RoutedTokens
from megatron_wlb.runtime.gpt.prediction import Ahead
from megatron_wlb.runtime.ranks.reads import ReadRun
from megatron_wlb.runtime.ranks.transfer import PinnedBlock, mapped, to_device
from megatron_wlb.runtime.stepping.losses import LossFunction, OwnLoss, targeted

LOOK_AHEAD = 2
"""Micro-batches that each chunk has made, or being made, before they are asked for."""


@dataclass(frozen=True)
class Batch:
    """What the forward step of one micro-batch takes; ``[1, T/CP]`` int64 unless said otherwise."""

    plan: MicroBatchPlan
    position_ids: torch.Tensor
    packed_seq_params: PlanSeqParams
    tokens: torch.Tensor | None
    """Token ids, on the first stage, and on the last where layers predict further ahead."""
    labels: torch.Tensor | None
    """Labels, on the last stage only; 0 where there is none."""
    loss_mask: torch.Tensor | None
    """The loss mask, on the last stage only: fp32, what each token's label counts."""
    num_targets: float
    """What local labels count together: this rank's part of the loss normaliser. 0 before the last
    stage."""
    ahead: Ahead | None = None
    """On the last stage, what layers that predict further ahead take, if there are any."""
    own_loss: OwnLoss | None = None
    """On the last stage, the loss that replaces cross-entropy, if there is one."""


IntArray: TypeAlias = npt.NDArray[np.int64]


def local_params(
    lengths: Sequence[int],
    positions: IntArray,
    device: str | torch.device,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    sharding: Sharding,
    cut: KVSlice | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    reach_tokens: int | None = None,
    above: Sequence[Sequence[RowRun]] = (),
) -> tuple[IntArray | slice, PlanSeqParams]:
    """Which tokens of a micro-batch are local, and what attention and RoPE need of them.

    ``lengths`` are the tokens of each attention segment, ``positions`` ``[T]`` those of each token
    in its document. ``cut`` is the slice that the first segment is, if it is one, or the part of a
    tree that all documents are. ``group`` are the ranks, if they are others than the model's
    context-parallel ranks. ``reach_tokens`` are the most keys that a query sees in layers of a
    sliding window, if there are any. ``above`` are the rows that each segment shares
    (:attr:`.Sharing.above`).
    """

    def in_tree(cut: KVSlice, reach: int | None, chunks: Any = None) -> KVSlice:
        given = lengths[: len(above)], above, device, reach, cut.start, chunks
        return replace(cut, rows=load("shared rows").of(*given))

    def made(reach: int | None) -> tuple[IntArray | slice, PlanSeqParams]:
        def segments_of(queries: Sequence[int], keys: Sequence[int]) -> Segments | None:
            return Segments.of(queries, keys, device, reach) if queries or not cut else None

        if cp_size == 1:
            whole_cut, shared, others = None, None, lengths
            if cut is not None and cut.of_tree:
                whole_cut, others = in_tree(cut, reach), lengths[len(above) :]
            elif cut is not None:
                whole_cut = _cut_in_chunks(cut, [(cut.stop - cut.start,) * 2], device, reach)
                others = lengths[1:]
            elif any(above):
                shared = load("shared rows").of(lengths, above, device, reach)
            params = PlanSeqParams.of(segments_of(others, others), positions, cut=whole_cut)
            return slice(None), replace(params, shared=shared)
        if cut is None:
            layout = whole = rank_layout(lengths, cp_size, cp_rank, sharding, reach, above)
            parts, slice_rows = None, None
        else:  # All of a slice's keys are exchanged, as every rank's buffer has all of them.
            layout = rank_layout(lengths, cp_size, cp_rank, sharding)
            chunks, whole = layout.split(cut.stop - cut.start)
            whole = whole if reach is None else whole.within(reach)
            slice_rows = layout.token_rows[: cut.stop - cut.start]
            if cut.of_tree:
                first_tokens = layout.tokens[np.cumsum(chunks[:, 0]) - chunks[:, 0]]
                parts = in_tree(cut, reach, np.column_stack([first_tokens, chunks]).tolist())
            else:
                parts = _cut_in_chunks(cut, chunks.tolist(), device, reach)
        segments = segments_of(whole.lengths_q.tolist(), whole.lengths_k.tolist())
        gather = KeyGather.of(whole, device, slice_rows, group)
        return layout.tokens, PlanSeqParams.of(segments, positions[layout.tokens], gather, parts)

    local, params = made(None)
    if reach_tokens is None:
        return local, params
    sliding = replace(made(reach_tokens)[1], positions=params.positions)
    return local, replace(params, sliding=sliding)


def _cut_in_chunks(
    cut: KVSlice,
    chunks: Sequence[Sequence[int]],
    device: str | torch.device,
    reach_tokens: int | None,
) -> KVSlice:
    """``cut`` with this rank's ``chunks``: numbers of queries, and of the slice's own keys."""
    made, first_keys = [], []
    for q, own in chunks:
        k = cut.start + own
        in_reach = k if reach_tokens is None else min(k, q + reach_tokens - 1)
        made.append(Segments.of([q], [in_reach], device, reach_tokens))
        first_keys.append(k - in_reach)
    first_row = 0 if reach_tokens is None else max(0, cut.start + 1 - reach_tokens)
    cut = replace(cut, chunks=tuple(made), first_keys=tuple(first_keys), first_row=first_row)
    if reach_tokens is not None or len(chunks) < 2 - bool(cut.start):
        return cut
    queries, keys = zip(*chunks, strict=True)
    before = None
    if cut.start:
        before = RowsSeen.of(slice(0, cut.start), [slice(0, sum(queries))], device)
    return replace(cut, own=Segments.of(queries, keys, device), before=before)


class Chunk(NamedTuple):
    """What a chunk of the model does besides its layers."""

    first: bool
    """Whether it embeds the tokens."""
    last: bool
    """Whether it has the loss."""


class BatchBuilder:
    """Builds the batches of one pipeline stage and context-parallel rank.

    ``corpora`` are in the order of ``Document.corpus``. Ids from ``vocab_size`` on are an error, as
    they would index beyond the embedding. ``reach_tokens`` is as in :func:`local_params`.
    ``num_ahead`` layers predict further ahead (:mod:`megatron_wlb.runtime.gpt.prediction`). With
    ``has_experts`` batches tell routers of the step, which :meth:`begin` must have been given.
    With ``scan_taps``, the most of any, batches tell layers that carry states where documents are.
    ``loss`` replaces cross-entropy.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        vocab_size: int,
        device: str,
        *,
        cp_rank: int = 0,
        cp_size: int = 1,
        reach_tokens: int | None = None,
        num_ahead: int = 0,
        has_experts: bool = False,
        scan_taps: int = 0,
        loss: LossFunction | None = None,
    ) -> None:
        self.corpora = corpora
        self.vocab_size = vocab_size
        self.device = device
        self._host = PinnedBlock(device)
        self.cp_rank = cp_rank
        self.cp_size = cp_size
        self.reach_tokens = reach_tokens
        self.num_ahead = num_ahead
        self.has_head_start = False
        """Whether layers may begin with near keys; who runs steps says so."""
        self.depth_weights: list[float] = []
        """What a label of each depth counts; who runs a step weighs them."""
        self.step_targets: float = 0
        self.has_experts = has_experts
        self.scan_taps = scan_taps
        self.loss = loss
        self._step: StepPlan | None = None
        self.slices = SliceStore()
        """The open documents of the step; who runs it begins and ends that."""
        self.groups: dict[tuple[int, ...], torch.distributed.ProcessGroup] = {}
        """This rank's peers in micro-batches that several data-parallel ranks run together, by
        these ranks; who runs a step opens them."""
        self._latest: dict[int, tuple[MicroBatchPlan, IntArray | slice, PlanSeqParams]] = {}
        """What a micro-batch's batches have in common on all chunks, by its index: on the host."""
        self._moved: dict[int, tuple[PlanSeqParams, PlanSeqParams]] = {}
        """The same on the host and on the device."""
        self.read: dict[int, list[ReadRun]] = {}
        """What was read in this step, by micro-batch."""

    @contextlib.contextmanager
    def ahead(
        self, micro_batches: Sequence[MicroBatchPlan], stages: Sequence[Chunk]
    ) -> Iterator[list[Iterator[Batch]]]:
        """Each chunk's batches one after another, made in a thread :data:`LOOK_AHEAD` before.

        The thread makes what :meth:`prepare` does and leaves the device alone, so that copies come
        in the order of the stream that computes. Its errors are raised where the batch is taken. It
        ends with the ``with`` block, whatever ends that.
        """
        pool = ThreadPoolExecutor(1, "wlb-batches", initializer=self._use_device())

        def start(stage: Chunk, plans: Iterator[MicroBatchPlan]) -> Iterator[Future[Batch]]:
            return (pool.submit(self.prepare, p, first=stage.first, last=stage.last) for p in plans)

        def take(more: Iterator[Future[Batch]], started: deque[Future[Batch]]) -> Iterator[Batch]:
            while started:
                made = started.popleft().result()
                started.extend(itertools.islice(more, 1))
                yield self.finish(made)

        try:
            starting = [start(stage, iter(micro_batches)) for stage in stages]
            yield [take(more, deque(itertools.islice(more, LOOK_AHEAD))) for more in starting]
        finally:
            pool.shutdown(cancel_futures=True)

    def prepare(self, plan: MicroBatchPlan, *, first: bool, last: bool) -> Batch:
        """Builds a batch on the host for a stage that embeds (``first``) or has the loss
        (``last``), in memory from which :meth:`finish` copies it.

        Raises :class:`CorpusError` for a token id outside the vocabulary.
        """
        local, params = self._shared(plan)
        assert params.positions is not None
        if not (first or last):
            return Batch(plan, params.positions[None], params, None, None, None, 0)
        ids, targets, masks = self._read(plan, local, last=last)
        num_targets = float(masks[0].sum(dtype=np.float64)) if last else 0
        own_loss = None
        if last and self.loss is not None:
            own_loss = OwnLoss.of(self.loss, plan, local, targets[0])
        for depth, weight in enumerate(self.depth_weights[: len(masks) - 1], start=1):
            masks[depth] *= weight
        tokens, labels, weights = (
            tuple(self._host.pinned(torch.from_numpy(row)[None]) for row in rows)
            for rows in (ids, targets, masks)
        )
        ahead = None
        if last and self.num_ahead:
            ones = self._host.pinned(torch.ones_like(weights[0]))
            ahead = Ahead(tokens, labels, (ones, *weights[1:]), self.step_targets)
        return Batch(
            plan,
            params.positions[None],
            params,
            tokens[0] if first or ahead else None,
            labels[0] if last else None,
            weights[0] if last else None,
            num_targets,
            ahead,
            mapped(own_loss, self._host.pinned),
        )

    def finish(self, made: Batch) -> Batch:
        """Copies what :meth:`prepare` made to the device; the host waits for none of it."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return to_device(tensor, self.device)

        own, index = made.packed_seq_params, made.plan.index
        if index not in self._moved or self._moved[index][0] is not own:
            self._moved[index] = own, mapped(own, move)
        params = self._moved[index][1]
        assert params.positions is not None
        tensors = made.tokens, made.labels, made.loss_mask, made.ahead, made.own_loss
        tokens, labels, loss_mask, ahead, own_loss = mapped(tensors, move)
        return replace(
            made,
            position_ids=params.positions[None],
            packed_seq_params=params,
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            ahead=ahead,
            own_loss=own_loss,
        )

    def begin(self, plan: StepPlan) -> None:
        """Begins a step: drops what chunks of the last one had in common, pins memory for what
        :meth:`prepare` makes, and weighs labels.
        """
        self._step = plan
        self._latest.clear()
        self._moved.clear()
        self._host.begin(max(sum(m.padded_length for m in own) for own in plan.micro_batches))
        self.read = {}
        self.step_targets = plan.num_targets
        ahead = (plan.targets_ahead(depth) for depth in range(1, self.num_ahead + 1))
        self.depth_weights = [plan.num_targets / num if num else 0.0 for num in ahead]

    def _use_device(self) -> Callable[[], None] | None:
        """Gives a thread this thread's GPU: else its pinned memory would open the first one's."""
        if torch.device(self.device).type != "cuda":
            return None
        return functools.partial(torch.cuda.set_device, torch.cuda.current_device())

    def _shared(self, plan: MicroBatchPlan) -> tuple[IntArray | slice, PlanSeqParams]:
        """Makes what chunks share once a micro-batch, not once a chunk."""
        known = self._latest.get(plan.index)
        if known is None or known[0] is not plan:
            positions = np.concatenate(
                [
                    np.arange(place, place + s.length)
                    for place, s in zip(plan.places, plan.spans, strict=True)
                ]
                + [np.arange(plan.padded_length - plan.length)]
            )
            group = self.groups[plan.replicas] if plan.replicas else None
            local, params = local_params(
                plan.lengths,
                positions,
                "cpu",
                cp_rank=group.rank() if group else self.cp_rank,
                cp_size=group.size() if group else self.cp_size,
                sharding=plan.sharding,
                cut=self.slices.part(plan),
                group=group,
                reach_tokens=self.reach_tokens,
                above=plan.sharing.above,
            )
            gather = params.gather
            if self.has_head_start and gather is not None and len(gather.layout.lengths_q):
                params = replace(params, gather=replace(gather, made_split=gather.split))
            if self.has_experts:
                assert self._step is not None, "who runs a step begins it"
                routed = RoutedTokens.of(plan, local, self._step, params.slice, group)
                params = replace(params, routed=routed)
            if self.scan_taps:
                given = self.scan_taps, params.slice, plan.sharing
                scanned = load("states").of(plan.lengths, self.cp_size, plan.sharding, *given)
                params = replace(params, scanned=scanned)
            known = self._latest[plan.index] = (plan, local, mapped(params, self._host.pinned))
        return known[1:]

    def _read(
        self, plan: MicroBatchPlan, local: IntArray | slice, *, last: bool
    ) -> tuple[IntArray, IntArray, npt.NDArray[np.float32]]:
        """Reads ids, labels and loss mask of the ``local`` tokens, ``[1 + D, T/CP]`` each.

        Stages before the last one get depth 0 alone. It reads each span's runs of local tokens, and
        for labels the token after each.
        """
        ends = np.cumsum(plan.lengths)
        rows = np.arange(plan.padded_length) if isinstance(local, slice) else local
        cuts = np.append(np.searchsorted(rows, ends[:-1]), np.flatnonzero(np.diff(rows) != 1) + 1)
        edges = np.unique(np.append(cuts, [0, len(rows)])).tolist()
        depths = 1 + self.num_ahead if last else 1
        ids, targets = np.zeros((2, depths, len(rows)), dtype=np.int64)
        masks = np.zeros((depths, len(rows)), dtype=np.float32)
        read = self.read[plan.index] = []
        for begin, end in itertools.pairwise(edges):
            number = int(np.searchsorted(ends, rows[begin], side="right"))
            if number == len(plan.spans):  # of padding
                break
            span = plan.spans[number]
            start = int(rows[begin] - ends[number]) + span.length
            num_tokens = end - begin
            # Up to the last label of the document. A token that is a label alone is not taken in:
            # no loss would tell, but experts would count it.
            before = span.start + start
            rest = span.document.num_labels + 1 - before
            num_read = min(num_tokens + depths, rest) if last else num_tokens
            stored = self._stored(span, start, start + num_read)
            taken = stored[: span.document.length - before]
            place = span.document.corpus, span.document.number, span.document.offset + before
            read.append(ReadRun.of((plan.index, *place), stored, taken[:num_tokens], last))
            for depth in range(depths):
                own, labels = taken[depth:][:num_tokens], stored[depth + 1 :][:num_tokens]
                ids[depth, begin : begin + len(own)] = own
                targets[depth, begin : begin + len(labels)] = labels
        for part in targeted(plan, rows):
            for depth in range(depths):
                masks[depth, part.rows] += part.weights(depth)
        return ids, targets, masks

    def _stored(self, span: Span, start: int, stop: int) -> IntArray:
        """Tokens ``[start, stop)`` of a span, counted from its first one."""
        document = span.document
        first = document.offset + span.start
        stored: IntArray = self.corpora[document.corpus].tokens(
            document.number, first + start, first + stop, document.epoch
        )
        if stored.max() >= self.vocab_size or stored.min() < 0:
            raise CorpusError(
                f"{self.corpora[document.corpus].prefix}: document {document.number} has token "
                f"{stored.max()}, but the vocabulary has {self.vocab_size}; pass the tokenizer's "
                "--vocab-size"
            )
        return stored
