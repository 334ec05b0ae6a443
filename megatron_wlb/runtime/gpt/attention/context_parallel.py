"""Attention over context-parallel ranks: each has its own queries, and gathers keys and values.

Forward: one all-gather of K and V, one gather by index into the order that the kernel takes, one
kernel call. Backward: K and V are gathered again, the kernel's backward runs, the gradients of
all keys are added up by row, and one reduce-scatter brings each rank those of its own.

The ranks are the model's context-parallel ones, or for a micro-batch that several data-parallel
ranks run together those of all of them.

A pass is one loop over *head groups*: the communication of the next one runs while the present one
is computed. Each other feature stands by itself: how keys or latents come
(:mod:`megatron_wlb.runtime.gpt.attention.key_exchange`), a head start
(:mod:`megatron_wlb.runtime.gpt.attention.head_start`), a slice, whose keys are gathered with the
others once and go to its document's buffer
(:mod:`megatron_wlb.runtime.gpt.attention.slice_attention`), and a buffer that ranks divide
(:mod:`megatron_wlb.runtime.gpt.attention.divided`).

What it holds is in :func:`megatron_wlb.cost.exchange.exchange_bytes`.

Legend: ``T`` tokens of the micro-batch, ``Tk`` keys of the kernel call, ``H`` query heads, ``G``
key/value heads, ``D`` head dimension, ``R`` numbers of a token's latent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, cast

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_wlb.errors import PlanError
from megatron_wlb.runtime.gpt.attention.divided import DividedSlice
from megatron_wlb.runtime.gpt.attention.head_start import JoinedCall, NearKeys, pays
from megatron_wlb.runtime.gpt.attention.kernels import Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.kernels.kernel import KernelCall, LseKernel
from megatron_wlb.runtime.gpt.attention.key_exchange import (
    ContextParallel,
    Expand,
    KeyExchange,
    KeyGather,
    LatentExchange,
    UnderWay,
    free,
    halves,
    one_ahead,
    regain,
)
from megatron_wlb.runtime.gpt.attention.slice_attention import (
    LayerSlice,
    SliceCall,
)


@dataclass(slots=True)
class _Heads:
    """One head group between forward and backward."""

    pair: torch.Tensor
    """``[Tk, 2, G/g, D]``: key and value of ``rest`` are its :func:`halves`."""
    own: list[SliceCall] = field(default_factory=list)
    """Calls for the slice's chunks."""
    rest: KernelCall | JoinedCall | None = None
    """The call for all other tokens, if there are any."""

    @property
    def calls(self) -> list[SliceCall | JoinedCall]:
        return [*self.own, *([] if self.rest is None else [self.rest])]

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
    exchange = LatentExchange(gather, group, expand) if expand else KeyExchange(gather, group)
    if cut is not None and cut.slice.divided:
        cut = DividedSlice.of(cut, group, parallel)
    run = _Run(segments, exchange, kernel, scale, parallel, cut, value_dim)
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
        ctx.save_for_backward(*((key, value) if run.exchange.gathers_again else (None, None)))
        ctx.run = run
        with torch.enable_grad():
            ctx.parts = list(run.forward(query, key, value, keep=True))
        ctx.calls = [call for part in ctx.parts for call in part.calls]
        if isinstance(run.exchange, LatentExchange) and run.exchange.kept:
            ctx.calls.append(run.exchange)
        return _joined([part.out.detach() for part in ctx.parts])

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        (parts, ctx.parts), ctx.calls = (ctx.parts, None), ()
        if parts is None:
            raise RuntimeError("backward ran through this attention before; run forward again")
        key, value = ctx.saved_tensors
        return *ctx.run.backward(parts, grad, key, value), None


@dataclass(frozen=True, slots=True)
class _Run:
    """Runs one layer's attention of one micro-batch, a head group after another."""

    segments: Segments | None
    exchange: KeyExchange
    kernel: VarlenKernel
    scale: float
    parallel: ContextParallel
    cut: LayerSlice | None
    value_dim: int | None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, *, keep: bool
    ) -> Iterator[_Heads]:
        """Each head group's part, with graphs of its own if gradients are enabled."""
        exchange, cut, num_own = self.exchange, self.cut, self._num_own
        kept = keep and self.parallel.keep_gathered
        buffer: Iterable[Any] = repeat(None)
        if cut is not None:  # with as many heads as its keys
            buffer = self.parallel.heads(cut.fill(query if exchange.has_latents else key).pair)
        near = self._near_keys(query, key)
        groups = self._groups(query, key, value)
        for group, gathering, room in zip(groups, self._begun(groups), buffer, strict=False):
            own, rest = group[0][:num_own], group[0][num_own:]
            joined, where = None, exchange.gather
            if near is not None:  # by the first group, while the keys of others come
                joined = JoinedCall(cast(LseKernel, self.kernel), near, self.scale, rest, group[1:])
                near, where = None, where.split[1]
            rows = exchange.rows(gathering, keep=kept)
            part = _Heads(rows.index_select(0, where.rows))
            if cut is not None:
                cut.write(room, rows, where.slice_rows)
            del rows
            if cut is not None:
                part.own = cut.attend(room, own, keep=keep)
            if joined is not None:
                joined.add(part.pair)
                part.rest = joined
            elif self.segments is not None:
                whole = rest, *halves(part.pair, self.value_dim), self.segments
                part.rest = KernelCall.of(self.kernel, *whole, self.scale, keep)
            if not kept:
                free(part.pair)
            yield part
        if cut is not None:
            cut.filled()

    def backward(
        self,
        parts: list[_Heads],
        grad: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Gradients of the local query, key and value; frees what the parts hold."""
        exchange, cut, num_own = self.exchange, self.cut, self._num_own
        dtype = parts[0].pair.dtype
        sums: Iterable[Any] = repeat(None)
        if cut is not None:
            sums = self.parallel.heads(cut.turn()[1])
        groups = self._groups(grad, key, value)
        gatherings: Iterable[UnderWay | None] = repeat(None)
        if exchange.gathers_again and not self.parallel.keep_gathered:
            gatherings = self._begun(groups)
        grads_query, reducing = [], []
        for part, group, gathering, of_buffer in zip(parts, groups, gatherings, sums, strict=False):
            own, rest = group[0][:num_own], group[0][num_own:]
            where = exchange.gather
            if isinstance(part.rest, JoinedCall):
                part.rest.begin_backward(rest, group[1:])
                where = where.split[1]
            if gathering is not None:
                rows = exchange.rows(gathering, keep=True)
                with _unsafe_preserve_version_counter(part.pair):
                    torch.index_select(rows, 0, where.rows, out=regain(part.pair))
                del rows
            grads: list[torch.Tensor] = []
            far: list[torch.Tensor] = []
            near: list[torch.Tensor] = []
            of_slice = None
            if cut is not None:
                grads, of_slice = cut.differentiate(part.own, own, of_buffer)
            if isinstance(part.rest, JoinedCall):
                of_rest, far, near = part.rest.backward(rest, part.pair)
                grads.append(of_rest)
            elif part.rest is not None:
                of_rest, *far = part.rest.backward(rest)
                grads.append(of_rest)
            free(part.pair)
            grads_query.append(_joined(grads, dim=0))
            to_all = self.parallel.sum_dtype(dtype), self.value_dim, of_slice
            by_row = where.sums(part.pair, far, *to_all)
            if near:
                exchange.gather.split[0].add(near, by_row)
            reducing.append(exchange.start_back(by_row))
            del far, near, grads, of_slice, by_row
        if cut is not None:
            cut.turned()
        local = _joined([exchange.own(*back) for back in reducing], dim=2).to(dtype)
        of_keys = (local, None) if exchange.has_latents else local.unbind(1)
        return _joined(grads_query), *of_keys

    @property
    def _num_own(self) -> int:
        """Local queries of the slice."""
        return self.cut.slice.num_queries if self.cut else 0

    def _groups(self, *tensors: torch.Tensor | None) -> list[tuple[Any, ...]]:
        """The head groups of several tensors together; of no tensor each has None."""
        num = self.parallel.num_head_groups
        heads = [repeat(None, num) if t is None else self.parallel.heads(t) for t in tensors]
        return list(zip(*heads, strict=True))

    def _begun(self, groups: list[tuple[Any, ...]]) -> Iterator[UnderWay]:
        """Each head group's keys and values under way, with those of the next one."""
        return one_ahead(self.exchange.start(key, value) for _, key, value in groups)

    def _near_keys(self, query: torch.Tensor, key: torch.Tensor) -> NearKeys | None:
        """Where the near keys are, if it pays that the first head group begins with them."""
        num, least_bytes = self.parallel.num_head_groups, self.parallel.head_start_bytes
        if self.segments is None or least_bytes is None or not isinstance(self.kernel, LseKernel):
            return None
        # Of latents little is exchanged; of a sliding window queries do not see all far keys.
        if self.exchange.has_latents or self.segments.reach_tokens is not None:
            return None
        received_bytes = 2 * key.nbytes * (self.exchange.group.size() - 1)
        has_time = pays(received_bytes / num, query.nbytes / num, least_bytes)
        return self.exchange.gather.split[0] if has_time else None


def _joined(tensors: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)
