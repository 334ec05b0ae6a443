"""Attention over context-parallel ranks: each has its own queries, and gathers keys and values.

Forward: one all-gather of K and V, one gather by index into the order that the kernel takes, one
kernel call. Backward: K and V are gathered again, the kernel's backward runs, the gradients of
all keys are added up by row, and one reduce-scatter brings each rank those of its own.

The ranks are the model's context-parallel ones, or for a micro-batch that several data-parallel
ranks run together those of all of them.

A slice's keys and values are gathered with the others, once, and go to the document's buffer, which
is whole on every rank. The gradients there are this rank's part. Those of the slice's own rows are
reduced with the others when its backward pass runs: the same bytes as without slices. Where ranks
divide the buffer, the rows before the slice are gathered besides
(:mod:`megatron_wlb.runtime.gpt.attention.divided`).

The first exchange may have a *head start*: see
:mod:`megatron_wlb.runtime.gpt.attention.head_start`.

With a sliding window a rank sends only what others see, where that is less
(:attr:`megatron_wlb.plan.sharding.RankLayout.sent`), and takes its own keys from itself.

A layer with multi-latent attention exchanges *latents* instead, which have one small head, and
projects what it receives up to keys and values (:class:`LatentRows`).

With several *head groups* each of these happens once a group of key/value heads, and the
communication of the next group runs while the present one is computed.

What it holds is in :func:`megatron_wlb.cost.exchange.exchange_bytes`.

Legend: ``T`` tokens of the micro-batch, ``Tk`` keys of the kernel call, ``H`` query heads, ``G``
key/value heads, ``D`` head dimension, ``R`` numbers of a token's latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_wlb.errors import PlanError
from megatron_wlb.plan.sharding import RankLayout
from megatron_wlb.runtime.gpt.attention.divided import Gathered, Reduction, Rows
from megatron_wlb.runtime.gpt.attention.divided import all_gather as _all_gather
from megatron_wlb.runtime.gpt.attention.divided import reduce_scatter as _reduce_scatter
from megatron_wlb.runtime.gpt.attention.head_start import JoinedCall, NearKeys, pays
from megatron_wlb.runtime.gpt.attention.kernels import Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.kernels.kernel import LseKernel
from megatron_wlb.runtime.gpt.attention.latent_rows import Expand, LatentRows
from megatron_wlb.runtime.gpt.attention.slice_attention import (
    KernelCall,
    LayerSlice,
    PrefixCall,
    halves,
)
from megatron_wlb.runtime.ranks.transfer import to_device


@dataclass(frozen=True, eq=False)
class KeyGather:
    """Index tensors of one micro-batch, made once and used by every layer."""

    layout: RankLayout
    """The tokens that are no slice's."""
    rows: torch.Tensor
    """``[Tk]`` int64: the row of each key that the kernel takes."""
    first: torch.Tensor
    """``[T]`` int64: the first place of each row in ``rows``; any for one that is not there."""
    unseen: torch.Tensor | None
    """Rows that are not in ``rows`` and not the slice's, if there are any."""
    again: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Pairs of (places in ``rows``, their rows) for rows that come again; each row once in a pair,
    see :attr:`RankLayout.rounds`. At most T/CP a pair, as they are copied on the way."""
    sent: torch.Tensor | None = None
    """``[n]`` int64: the local tokens that are sent, filled up to as many as other ranks send; None
    is all."""
    slice_rows: torch.Tensor | None = None
    """``[n]`` int64: the row of each token of the micro-batch's slice, if it has one."""
    group: torch.distributed.ProcessGroup | None = None
    """The ranks that have the tokens, where they are others than the model's context-parallel
    ranks."""
    made_split: tuple[NearKeys, KeyGather] | None = None
    """:attr:`split`, made ahead where it will be needed."""

    @classmethod
    def of(
        cls,
        layout: RankLayout,
        device: torch.device | str,
        slice_rows: npt.NDArray[np.int64] | None = None,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> KeyGather:
        first = np.zeros(layout.num_rows, dtype=np.int64)
        is_unseen = np.ones(layout.num_rows, dtype=bool)
        rounds = layout.rounds
        for places, to in rounds[:1]:
            first[to], is_unseen[to] = places, False
        if slice_rows is not None:
            is_unseen[slice_rows] = False
        unseen, most = np.flatnonzero(is_unseen), len(layout.tokens)
        sent = None
        if layout.sent is not None:
            filler = np.zeros(layout.num_sent - len(layout.sent), dtype=np.int64)
            sent = to_device(np.concatenate([layout.sent, filler]), device)
        return cls(
            layout,
            to_device(layout.key_rows, device),
            to_device(first, device),
            to_device(unseen, device) if len(unseen) else None,
            tuple(
                (to_device(places[at : at + most], device), to_device(to[at : at + most], device))
                for places, to in rounds[1:]
                for at in range(0, len(to), most)
            ),
            sent,
            None if slice_rows is None else to_device(slice_rows, device),
            group,
        )

    @property
    def num_received(self) -> int:
        """Rows that an all-gather returns: T, or fewer where only some tokens are sent."""
        if self.sent is None:
            return self.layout.num_tokens
        return self.layout.num_rows - len(self.layout.tokens)

    @cached_property
    def split(self) -> tuple[NearKeys, KeyGather]:
        """The near keys, and where the far ones are."""
        if self.made_split is not None:
            return self.made_split
        device = self.rows.device
        near, far = NearKeys.of(self.layout, device)
        slice_rows = None
        if self.slice_rows is not None:  # On the host: a GPU would have to be waited for.
            slice_rows = self.layout.token_rows[: len(self.slice_rows)]
        return near, KeyGather.of(far, device, slice_rows, self.group)

    @property
    def has_others(self) -> bool:
        """Whether any rank has tokens that are no slice's."""
        return self.slice_rows is None or len(self.slice_rows) < self.layout.num_tokens


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """How attention runs over the ranks of a group; the same for all layers."""

    num_head_groups: int = 1
    """Groups of key/value heads whose communication and computation overlap; a divisor."""
    keep_gathered: bool = False
    """Keep gathered keys and values for the backward pass instead of gathering them again."""
    reduce_in_fp32: bool = False
    """Sum the gradients of keys and values in fp32, over chunks and ranks."""
    head_start_bytes: int | None = None
    """The least that the first head group exchanges to begin with near keys; None is never."""


@dataclass(slots=True)
class _Heads:
    """One head group between forward and backward."""

    calls: list[KernelCall | JoinedCall | PrefixCall]
    """Calls for the slice's chunks, and then one for all other tokens, if there are any."""
    pair: torch.Tensor
    """``[Tk, 2, G/g, D]``: key and value of the last call are its :func:`halves`."""
    opened: torch.Tensor | None = None
    """``[rows, 2, G/g, D]``: the rows that a slice sees, where ranks divide them."""

    @property
    def out(self) -> torch.Tensor:
        return _joined([call.out for call in self.calls], dim=0)


def context_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    segments: Segments | None,
    gather: KeyGather,
    kernel: VarlenKernel,
    scale: float,
    group: torch.distributed.ProcessGroup,
    parallel: ContextParallel,
    cut: LayerSlice | None = None,
    expand: Expand | None = None,
    value_dim: int | None = None,
) -> torch.Tensor:
    """Computes attention of the local queries to the keys of all ranks.

    All ranks of the group call it together, with shards of one micro-batch, their local tokens in
    local order: ``[T/CP, H, D], [T/CP, G, D], [T/CP, G, D] -> [T/CP, H, D]``. ``segments`` are the
    queries and keys of the local chunks, ``gather`` says where those keys are. The first tokens may
    be those of a slice, ``cut``; ``segments`` are the others, or None where no others are local.

    With ``expand`` there are latents ``[n, 1, R]`` for keys, and no values; ``value_dim`` is the
    width of those that they are projected up to.
    """
    if gather.layout.num_tokens != len(query) * group.size():
        raise PlanError(
            f"attention got {len(query)} local tokens on each of {group.size()} "
            f"context-parallel ranks, where the plan has {gather.layout.num_tokens} in all"
        )
    latent = LatentRows(expand, group.size()) if expand else None
    run = _Run(segments, gather, kernel, scale, group, parallel, cut, latent, value_dim)
    if torch.is_grad_enabled():
        apply: Any = _ContextAttention.apply
        out: torch.Tensor = apply(query, key, value, run)
        return out
    return _joined([part.out for part in run.forward(query, key, value, keep=False)])


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, run: _Run
    ) -> torch.Tensor:
        ctx.save_for_backward(*((key, value) if run.gathers_again else (None, None)))
        ctx.run = run
        with torch.enable_grad():
            ctx.parts = list(run.forward(query, key, value, keep=True))
        ctx.calls = [call for part in ctx.parts for call in part.calls]
        if run.latent is not None and run.latent.kept:
            ctx.calls.append(run.latent)
        return _joined([part.out.detach() for part in ctx.parts])

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        (parts, ctx.parts), ctx.calls = (ctx.parts, None), ()
        if parts is None:
            raise RuntimeError("backward ran through this attention before; run forward again")
        key, value = ctx.saved_tensors
        return *ctx.run.backward(parts, key, value, grad), None


@dataclass(frozen=True, slots=True)
class _Run:
    """Runs one layer's attention of one micro-batch."""

    segments: Segments | None
    gather: KeyGather
    kernel: VarlenKernel
    scale: float
    group: torch.distributed.ProcessGroup
    parallel: ContextParallel
    cut: LayerSlice | None
    latent: LatentRows | None = None
    value_dim: int | None = None

    @property
    def gathers_again(self) -> bool:
        """Whether the backward pass needs what was sent."""
        # Of latents it needs those of a slice too, for the gradient of what projects them up.
        return self.gather.has_others or self.latent is not None

    @property
    def _rows(self) -> Rows | None:
        """What the slice works on, where ranks divide its document's keys and values."""
        if self.cut is None or not self.cut.slice.divided:
            return None
        cut = self.cut.slice
        return Rows(self.group, cut.first_row, cut.start, cut.stop)

    @property
    def _num_own(self) -> int:
        """Local queries of the slice."""
        return self.cut.slice.num_queries if self.cut else 0

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, *, keep: bool
    ) -> Iterator[_Heads]:
        """Each head group's part, with graphs of its own if gradients are enabled."""
        like = key if self.latent is None else query  # which has as many heads as its keys
        opened: list[torch.Tensor] = []
        gathered = None
        if self.cut is not None:
            size = 1 if self._rows is None else self._rows.group.size()
            opened += self._heads(self.cut.fill(like, size).pair)
            if self._rows is not None:
                gathered = self.cut.gathered(self._rows, self._heads, self._rows.start)
        parts = self._head_start(query, key)
        begun: list[JoinedCall] = []

        def begin() -> None:
            if parts is not None:
                kernel, first = cast(LseKernel, self.kernel), self._heads(query)[0]
                local = self._heads(key)[0], self._heads(cast(torch.Tensor, value))[0]
                begun.append(JoinedCall(kernel, parts, self.scale, first[self._num_own :], local))

        kept = keep and self.parallel.keep_gathered
        pairs = self._gathered(
            key, value, begin, parts is not None, opened=opened, before=gathered, keep=kept
        )
        for number, (group_query, pair) in enumerate(zip(self._heads(query), pairs, strict=True)):
            calls: list[KernelCall | JoinedCall | PrefixCall] = []
            if self.cut is not None:
                own = group_query[: self._num_own]
                calls += self.cut.attend(opened[number], own, keep=keep)
            if begun and number == 0:
                begun[0].add(pair)
                calls.append(begun[0])
            elif self.segments is not None:
                rest = group_query[self._num_own :]
                whole = rest, *halves(pair, self.value_dim), self.segments
                calls.append(KernelCall.of(self.kernel, *whole, self.scale, keep))
            if not kept:
                _free(pair)
                if gathered is not None:
                    _free(opened[number])
            yield _Heads(calls, pair, None if gathered is None else opened[number])
        if self.cut is not None:
            self.cut.filled()

    def backward(
        self,
        parts: list[_Heads],
        key: torch.Tensor,
        value: torch.Tensor | None,
        grad: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Gradients of the local query, key and value; frees what the parts hold."""
        opened: tuple[torch.Tensor, ...] = ()
        again = None
        if self.cut is not None:
            _, sums = self.cut.turn()
            opened = self._heads(sums)
            if self._rows is not None and not self.parallel.keep_gathered:
                again = self.cut.gathered(self._rows, self._heads, self._rows.stop)
        pairs = [part.pair for part in parts]
        gathered = iter(pairs)
        joined = parts[0].calls[-1] if parts[0].calls else None

        def begin() -> None:
            if isinstance(joined, JoinedCall):
                first = self._heads(grad)[0][self._num_own :]
                local = self._heads(key)[0], self._heads(cast(torch.Tensor, value))[0]
                joined.begin_backward(first, local)

        is_joined = isinstance(joined, JoinedCall)
        if self.gathers_again and not self.parallel.keep_gathered:
            gathered = self._gathered(key, value, begin, is_joined, into=pairs, keep=True)
        else:
            begin()
        grads_query, reducing = [], []
        shares: list[tuple[Reduction | None, torch.Tensor]] = []
        for number, (part, pair, grad_out) in enumerate(
            zip(parts, gathered, self._heads(grad), strict=True)
        ):
            own, own_rows = [], None
            if self.cut is not None:
                calls = cast(list[KernelCall | PrefixCall], part.calls[: self.cut.num_calls])
                sums = opened[number]
                if again is not None:
                    again.take(part.opened)
                if self._rows is not None:
                    sums = self._rows.sums(sums)
                own = self.cut.differentiate(calls, grad_out[: self._num_own], sums)
                if self._rows is not None:
                    assert part.opened is not None
                    _free(part.opened)
                    started = self._rows.start_reduce(sums, self._sum_dtype(pair))
                    shares.append((started, opened[number]))
                own_rows = self.cut.rows(sums)
            far: list[torch.Tensor] = []
            near: list[torch.Tensor] = []
            gather = self.gather
            if self.segments is not None:
                call, rest = part.calls[-1], grad_out[self._num_own :]
                if isinstance(call, JoinedCall):
                    grad_query, far, near = call.backward(rest, pair)
                    gather = gather.split[1]
                else:
                    grad_query, *far = cast(KernelCall, call).backward(rest)
                own.append(grad_query)
            _free(pair)
            grads_query.append(_joined(own, dim=0))
            reducing.append(self._start_reduce(pair, gather, far, near, own_rows))
            del far, near, own
        for reduction, share in shares:
            if reduction is not None:
                reduction.add_to(share)
        for _, _, work in reducing:
            work.wait()
        if self.cut is not None:
            self.cut.turned()
        locals_ = [self._own(local, rows) for local, rows, _ in reducing]
        local = _joined(locals_, dim=2).to(pairs[0].dtype)
        if self.latent is not None:
            return _joined(grads_query), local, None
        return _joined(grads_query), local[:, 0], local[:, 1]

    def _sum_dtype(self, pair: torch.Tensor) -> torch.dtype:
        """In which gradients of keys and values are summed over the ranks."""
        exact = torch.promote_types(pair.dtype, torch.float32)
        return exact if self.parallel.reduce_in_fp32 else pair.dtype

    def _own(self, reduced: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Adds up the local keys' gradients: those of the sent rows, and those of all rows here."""
        if self.gather.sent is None:
            return reduced
        assert self.gather.layout.sent is not None
        num = len(self.gather.layout.sent)  # of the filler there are none
        own = rows[self.gather.num_received :]
        return own.index_add(0, self.gather.sent[:num], reduced[:num])

    def _head_start(self, query: torch.Tensor, key: torch.Tensor) -> NearKeys | None:
        """The parts of the first head group's keys, if it pays to begin with the near ones."""
        parallel, least_bytes = self.parallel, self.parallel.head_start_bytes
        if self.segments is None or least_bytes is None or not isinstance(self.kernel, LseKernel):
            return None
        if self.latent is not None:  # Little is exchanged, and near keys come of it too.
            return None
        if self.segments.reach_tokens is not None:  # Queries do not see all far keys.
            return None
        received_bytes = 2 * key.nbytes * (self.group.size() - 1)
        if not pays(
            received_bytes / parallel.num_head_groups,
            query.nbytes / parallel.num_head_groups,
            least_bytes,
        ):
            return None
        return self.gather.split[0]

    def _heads(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``[…, heads, D]`` in head groups: query heads go with their key/value heads."""
        return tensor.chunk(self.parallel.num_head_groups, dim=-2)

    def _gathered(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        begin: Callable[[], None],
        is_split: bool,
        *,
        opened: list[torch.Tensor] | None = None,
        before: Gathered | None = None,
        into: list[torch.Tensor] | None = None,
        keep: bool,
    ) -> Iterator[torch.Tensor]:
        """Each head group's ``[Tk, 2, G/g, D]``, the next one's collective under way.

        ``begin`` works while the first one's is. Where that has a head start (``is_split``), it has
        far keys only. ``opened`` are the buffers in which a slice's rows are written; or shares of
        them, in whose places come the rows ``before`` and the slice's. ``into`` are tensors as
        those given, whose storage was freed: they are filled again. With ``keep`` the projection
        of latents can be differentiated.
        """
        values = (None,) if value is None else self._heads(value)
        groups = list(zip(self._heads(key), values, strict=True))
        started = self._start_gather(*groups[0])
        for number in range(len(groups)):
            rows, sent, work = started
            if number + 1 < len(groups):
                started = self._start_gather(*groups[number + 1])
            else:
                del started
            if number == 0:
                begin()
            work.wait()
            del sent, work
            if self.latent is not None:
                rows = self.latent.up(rows, keep=keep)
            index = (self.gather.split[1] if is_split and number == 0 else self.gather).rows
            if self.cut is not None and opened is not None:
                share = opened[number]
                if before is not None:
                    opened[number] = before.take()
                self.cut.write(opened[number], rows, self.gather.slice_rows)
                if before is not None:
                    before.rows.keep(opened[number], share)
            if into is None:
                pair = rows.index_select(0, index)
            else:
                pair = into[number]
                _refill(pair, rows, index)
            del rows
            yield pair

    def _start_gather(
        self, key: torch.Tensor, value: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """``[T/CP, G/g, D]`` ×2 -> all rows ``[T, 2, G/g, D]``, what is sent, and the work.

        Of keys in reach alone rows are those that all ranks send, and then the local ones. Of
        latents there are ``[n, 1, R]``, and so many of each rank.
        """
        if value is None:
            local = key.detach().contiguous()
            rows = local.new_empty(len(local) * self.group.size(), *local.shape[1:])
            return rows, local, _all_gather(rows, local, group=self.group, async_op=True)
        local = torch.stack((key.detach(), value.detach()), dim=1)
        rows = local.new_empty(self.gather.layout.num_rows, *local.shape[1:])
        if self.gather.sent is not None:
            rows[self.gather.num_received :] = local
            local = local.index_select(0, self.gather.sent)
        received = rows[: self.gather.num_received]
        work = _all_gather(received, local, group=self.group, async_op=True)
        return rows, local, work

    def _start_reduce(
        self,
        pair: torch.Tensor,
        gather: KeyGather,
        far: Sequence[torch.Tensor],
        near: Sequence[torch.Tensor],
        own: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Gradients ``[Tk, G/g, D]`` ×2 -> the sum over ranks of the local ones' ``[T/CP, 2, …]``.

        ``pair`` is what they are the gradients of, ``gather`` where it is from. ``near`` are those
        of near keys and values, if these were attended to apart. ``own`` ``[n, 2, G/g, D]`` are the
        slice's. In fp32 where that is asked for. Also what is sent, and the work. Of latents, their
        gradients by these.
        """
        dtype = self._sum_dtype(pair)
        make = pair.new_empty if far else pair.new_zeros
        rows = make(gather.layout.num_rows, *pair.shape[1:], dtype=dtype)
        num_local = len(gather.layout.tokens)
        # Rows are filled by one pass that reads each gradient once: most rows have one only.
        for grad, to in zip(far, halves(rows, self.value_dim), strict=False):
            if dtype == grad.dtype:
                torch.index_select(grad, 0, gather.first, out=to)
            else:  # through a copy, of as few rows as is received
                parts = torch.split(to, num_local), torch.split(gather.first, num_local)
                for part, first in zip(*parts, strict=True):
                    part.copy_(grad.index_select(0, first))
            if gather.unseen is not None:
                to.index_fill_(0, gather.unseen, 0.0)
            for places, rows_again in gather.again:
                to.index_add_(0, rows_again, grad[places].to(dtype))
        for grad, to in zip(near, rows.unbind(1), strict=False):
            for places, rows_again in self.gather.split[0].rounds:
                to.index_add_(0, rows_again, grad[places].to(dtype))
        if own is not None:
            assert self.gather.slice_rows is not None
            rows.index_copy_(0, self.gather.slice_rows, own.to(rows.dtype))
        sums = rows[: gather.num_received]
        if self.latent is not None:
            sums = rows = self.latent.down(rows)
        local = rows.new_empty(len(sums) // self.group.size(), *rows.shape[1:])
        work = _reduce_scatter(local, sums, group=self.group, async_op=True)
        return local, rows, work


def _joined(tensors: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)


def _free(pair: torch.Tensor) -> None:
    """Gives back the memory, though graphs hold the tensor; :func:`_refill` undoes it.

    On a GPU the allocator hands it on in stream order, after the kernels that read it.
    """
    pair.untyped_storage().resize_(0)


def _refill(pair: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
    """Puts back what was freed; autograd need not know, as the values are the same."""
    pair.untyped_storage().resize_(pair.numel() * pair.element_size())
    with _unsafe_preserve_version_counter(pair):
        torch.index_select(rows, 0, index, out=pair)
