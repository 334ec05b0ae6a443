"""Attention that begins with a rank's own keys, while those of the other ranks are gathered.

Each local chunk of queries sees its own keys, and those of its document's earlier local chunks:
these are *near*. The others are *far*, and all of the chunk's queries see all of them. Two kernel
calls, joined by their log-sum-exps, give what one call gives. In backward each call gives its part
of the gradients from the joint output and log-sum-exp, and near keys are again the first.

Near keys are 1/CP of the work, which hides as much of the exchange. It costs a second call, and
passes over the output and the queries' gradients. :func:`pays` weighs them.

Legend: ``n`` local queries, ``H`` query heads, ``D`` head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from megatron_wlb.plan.sharding import RankLayout
from megatron_wlb.runtime.gpt.attention.kernels import Demand, Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.kernels.kernel import LseKernel, join
from megatron_wlb.runtime.gpt.attention.kernels.selection import Problem, problems
from megatron_wlb.runtime.ranks.transfer import to_device

logger = logging.getLogger(__name__)

LEAST_BYTES = 16 * 2**20
"""Exchanged bytes from which on a head start pays: they take 40 µs at 400 GB/s, the fastest link of
a GPU, and the further kernels and their launches about half of that."""
LINK_SHARE = 0.25
"""Exchanged bytes per byte of output from which on it pays. Joining reads two outputs and writes
one, at the memory's speed, which is about six times the fastest link's: half is the margin."""


def least_bytes(kernel: VarlenKernel, demand: Demand) -> int | None:
    """The least that must be exchanged for a head start; None where the kernel cannot have one.

    It cannot on the CPU, where exchange and kernels share the processor; without log-sum-exps; or
    where its two calls, tried on small problems, do not give what one gives.
    """
    if demand.device.type != "cuda" or not isinstance(kernel, LseKernel):
        return None
    mistake = check_parts(kernel, demand)
    if mistake is not None:
        logger.warning("attention gets no head start, because in two parts %s", mistake)
        return None
    return LEAST_BYTES


def check_parts(kernel: LseKernel, demand: Demand) -> str | None:
    """As :func:`check_kernel`, with the keys before a segment's own as the far ones."""
    tried = (Problem.of(demand, *lengths) for lengths in problems(demand))
    mistakes = (problem.mistake(partial(_in_parts, kernel, problem)) for problem in tried)
    return next(filter(None, mistakes), None)


def _in_parts(kernel: LseKernel, problem: Problem) -> list[torch.Tensor]:
    """Output, dQ, and dK with dV."""
    pair, grad, device = problem.pair, problem.grad, problem.pair.device
    own = np.array(problem.segments.lengths_q)
    before = np.array(problem.segments.lengths_k) - own
    is_far = np.repeat(np.tile([True, False], len(own)), np.stack([before, own], axis=1).ravel())
    far, near = (to_device(np.flatnonzero(places), device) for places in (is_far, ~is_far))
    parts = NearKeys(
        Segments.of(own.tolist(), device=device),
        near,
        (),
        Segments.of_unlike(own[before > 0].tolist(), before[before > 0].tolist(), device),
        to_device(np.flatnonzero(np.repeat(before > 0, own)), device),
    )
    halves = pair[:, 0], pair[:, 1]
    call = JoinedCall(kernel, parts, pair.shape[-1] ** -0.5, problem.query, halves)
    call.add(pair[far])
    call.begin_backward(grad, halves)
    grad_query, *grads = call.backward(grad, pair[far])
    grad_pair = torch.empty_like(pair)
    for places, of_part in zip((far, near), grads, strict=True):
        grad_pair[places] = torch.stack(of_part, dim=1)
    return [call.out, grad_query, grad_pair]


def pays(received_bytes: float, query_bytes: float, least_bytes: int) -> bool:
    """Whether to exchange the bytes takes longer than to join two outputs of ``query_bytes``."""
    return received_bytes >= max(least_bytes, LINK_SHARE * 3 * query_bytes)


@dataclass(frozen=True, eq=False, slots=True)
class NearKeys:
    """The two parts of a rank's keys; made once a micro-batch."""

    near: Segments
    tokens: torch.Tensor
    """int64: the local token that each near key is."""
    rounds: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Pairs of (places of near keys, their rows), see :attr:`RankLayout.rounds`."""
    far: Segments | None
    """Chunks that have far keys; None if none has."""
    queries: torch.Tensor | None
    """int64: the queries of these chunks among all; None is all."""

    @classmethod
    def of(cls, layout: RankLayout, device: torch.device | str) -> tuple[NearKeys, RankLayout]:
        """The parts, and the layout of the far keys alone."""
        first_row = layout.token_rows[layout.tokens[0]]
        is_near = (layout.key_rows >= first_row) & (
            layout.key_rows < first_row + len(layout.tokens)
        )
        lengths_q, starts = layout.lengths_q, np.cumsum(layout.lengths_k) - layout.lengths_k
        near = np.add.reduceat(is_near, starts, dtype=np.int64)
        far = layout.lengths_k - near
        near_rows = layout.key_rows[is_near]
        rounds = replace(layout, key_rows=near_rows).rounds
        queries = np.flatnonzero(np.repeat(far > 0, lengths_q))
        parts = cls(
            Segments.of(lengths_q.tolist(), near.tolist(), device),
            to_device(near_rows - first_row, device),
            tuple((to_device(places, device), to_device(to, device)) for places, to in rounds),
            Segments.of_unlike(lengths_q[far > 0].tolist(), far[far > 0].tolist(), device)
            if far.any()
            else None,
            to_device(queries, device) if len(queries) < lengths_q.sum() else None,
        )
        return parts, replace(layout, key_rows=layout.key_rows[~is_near])

    def add(self, grads: Sequence[torch.Tensor], sums: torch.Tensor) -> None:
        """Adds gradients of near keys and values to those by row, ``[rows, 2, G, D]``."""
        for grad, to in zip(grads, sums.unbind(1), strict=True):
            for places, rows in self.rounds:
                to.index_add_(0, rows, grad[places].to(sums.dtype))


class JoinedCall:
    """A kernel's two calls between forward and backward; made by the first of them."""

    def __init__(
        self,
        kernel: LseKernel,
        parts: NearKeys,
        scale: float,
        query: torch.Tensor,
        pair: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """``query`` ``[n, H, D]``; ``pair`` are the keys and values of all local tokens."""
        self.kernel, self.parts, self.scale = kernel, parts, scale
        self.query = query.detach()
        key, value = self._near(pair)
        self.out, self.lse = kernel.forward(self.query, key, value, parts.near, scale, causal=True)
        self._grads: tuple[torch.Tensor, ...] = ()

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """What is kept for the backward, but keys and values."""
        return self.query, self.out, self.lse

    def add(self, pair: torch.Tensor) -> None:
        """Attends to the far keys ``[…, 2, G, D]`` too."""
        far = self.parts.far
        if far is None:
            return
        query, out, lse = self._of_far(self.query, self.out, self.lse.t())
        part, part_lse = self.kernel.forward(
            query, pair[:, 0], pair[:, 1], far, self.scale, causal=False
        )
        join(out, lse, part, part_lse.t())
        if self.parts.queries is not None:
            self.out.index_copy_(0, self.parts.queries, out)
            self.lse.t().index_copy_(0, self.parts.queries, lse)

    def begin_backward(self, grad: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Computes the gradients of the near keys, and the queries' part by them."""
        key, value = self._near(pair)
        known = self.out, self.lse, self.parts.near, self.scale
        self._grads = self.kernel.backward(grad, self.query, key, value, *known, causal=True)

    def backward(
        self, grad: torch.Tensor, pair: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Gradients of the queries, and those of far and of near keys and values."""
        (grad_query, *near), self._grads = self._grads, ()
        far = self.parts.far
        if far is None:
            return grad_query, [], near
        grad, query, out, lse = self._of_far(grad, self.query, self.out, self.lse.t())
        known = out, lse.t().contiguous(), far, self.scale
        part, *halves = self.kernel.backward(
            grad, query, pair[:, 0], pair[:, 1], *known, causal=False
        )
        if self.parts.queries is None:
            grad_query += part
        else:
            grad_query.index_add_(0, self.parts.queries, part)
        return grad_query, halves, near

    def _near(self, pair: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        return [half.detach().index_select(0, self.parts.tokens) for half in pair]

    def _of_far(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The rows of queries that have far keys."""
        at = self.parts.queries
        return [t if at is None else t.index_select(0, at) for t in tensors]
