"""What an attention kernel takes and promises: packed segments of queries and their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron_wlb.errors import PlanError
from megatron_wlb.runtime.ranks.transfer import to_device


@dataclass(frozen=True, eq=False, slots=True)
class Segments:
    """Where each segment's queries and keys lie in packed tensors.

    A segment is a run of ``q`` queries and the ``k >= q`` keys up to the last of them: query ``i``
    sees keys ``0 … k - q + i`` (a causal mask aligned to the bottom right). ``q == k`` is a whole
    document; fewer queries are a later part of one, as context parallelism has them.

    With a sliding window a query sees the last ``reach_tokens`` of these keys.
    """

    lengths_q: tuple[int, ...]
    """Queries of each segment, on the host; positive."""
    lengths_k: tuple[int, ...]
    """Keys of each segment, on the host."""
    cu_seqlens_q: torch.Tensor
    """``[segments + 1]`` int32 on the device: where each segment's queries start."""
    cu_seqlens_k: torch.Tensor
    """``[segments + 1]`` int32 on the device: where each segment's keys start."""
    max_q: int
    max_k: int
    reach_tokens: int | None = None
    """The most keys that a query sees, its own the last; None: all up to its own."""

    @classmethod
    def of(
        cls,
        lengths_q: Sequence[int],
        lengths_k: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        reach_tokens: int | None = None,
    ) -> Segments:
        """Segments of so many queries and keys; as many keys as queries if not given.

        Raises :class:`PlanError` for none, one without queries, or one with fewer keys than
        queries.
        """
        queries = tuple(map(int, lengths_q))
        keys = queries if lengths_k is None else tuple(map(int, lengths_k))
        for q, k in zip(queries, keys, strict=False):
            if not 1 <= q <= k:
                raise PlanError(
                    f"attention of {q} queries to {k} keys; a segment needs a query, and a key for "
                    "each"
                )
        return replace(cls.of_unlike(queries, keys, device), reach_tokens=reach_tokens)

    @classmethod
    def of_unlike(
        cls, lengths_q: Sequence[int], lengths_k: Sequence[int], device: torch.device | str
    ) -> Segments:
        """Segments of which queries see all keys, so that these may be fewer.

        Raises :class:`PlanError` for none, or not as many runs of queries as of keys.
        """
        queries, keys = tuple(lengths_q), tuple(lengths_k)
        if not queries or len(queries) != len(keys):
            raise PlanError(
                f"attention over {len(queries)} runs of queries and {len(keys)} of keys; give each "
                "run of queries its keys"
            )
        return cls(
            queries, keys, _starts(queries, device), _starts(keys, device), max(queries), max(keys)
        )


def _starts(lengths: Sequence[int], device: torch.device | str) -> torch.Tensor:
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


class VarlenKernel(Protocol):
    """Causal attention of packed segments, each to itself; differentiable by autograd.

    Args:
        query: ``[Tq, H, D]``, the segments one after another; ``Tq = sum(segments.lengths_q)``.
        key: ``[Tk, G, D]`` with ``H % G == 0`` (grouped-query attention); any strides, the last 1.
        value: ``[Tk, G, Dv]``, likewise; ``Dv`` is ``D``, or less where that is demanded.
        segments: whose queries and keys these are.
        scale: factor of the scores before the softmax.

    Returns:
        ``[Tq, H, Dv]``, in storage of its own.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float,
    ) -> torch.Tensor: ...


class Forward(Protocol):
    """``causal`` is as in :class:`Segments`; otherwise queries see all keys of their segment, which
    may be fewer, and there is no sliding window. Returns the output and the log-sum-exp of scores,
    ``[H, Tq]`` of at least fp32.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Backward(Protocol):
    """Gradients of query, key and value by the output's.

    Output and log-sum-exp may be those over more keys than these: then it gives these keys' part.
    """

    def __call__(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class LseKernel:
    """A :class:`VarlenKernel` that tells log-sum-exps, so that it can attend to keys in parts."""

    forward: Forward
    backward: Backward

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float,
    ) -> torch.Tensor:
        apply: Any = _Attention.apply
        out: torch.Tensor = apply(query, key, value, segments, scale, self)
        return out


class _Attention(torch.autograd.Function):
    """All segments of a call in one node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float,
        kernel: LseKernel,
    ) -> torch.Tensor:
        out, lse = kernel.forward(query, key, value, segments, scale, causal=True)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rest = segments, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        segments, scale, kernel = ctx.rest
        gradients = kernel.backward(grad, *ctx.saved_tensors, segments, scale, causal=True)
        return *gradients, None, None, None


class KernelCall(NamedTuple):
    """A call of a kernel between forward and backward, with a graph of its own."""

    inputs: tuple[torch.Tensor, ...]
    out: torch.Tensor

    @classmethod
    def of(
        cls,
        kernel: VarlenKernel,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float,
        keep: bool,
    ) -> KernelCall:
        """Runs the kernel; with ``keep``, and gradients enabled, it can be differentiated."""
        query, key, value = (t.detach().requires_grad_(keep) for t in (query, key, value))
        return cls((query, key, value), kernel(query, key, value, segments, scale))

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """What is kept for the backward, besides what a graph of its own keeps."""
        return self.inputs[0], self.out

    def backward(self, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key and value."""
        return torch.autograd.grad(self.out, self.inputs, grad)


def join(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Adds the ``part`` over other keys to ``out`` and ``lse``: ``[…, D]`` and ``[…]`` each."""
    total = torch.logaddexp(lse, part_lse)
    share = (part_lse - total).exp_().unsqueeze(-1).to(out.dtype)
    torch.lerp(out, part, share, out=out)
    lse.copy_(total)


def packed_kernel(
    attend: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *names: str
) -> VarlenKernel:
    """The kernel that a package's packed function is.

    ``names`` are what it calls the starts of queries and of keys, the longest of each, and the
    scale; a sliding window is ``window_size`` in all. Of several results the first is the output:
    some versions return the log-sum-exp too.
    """

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float,
    ) -> torch.Tensor:
        s = segments
        said = (s.cu_seqlens_q, s.cu_seqlens_k, s.max_q, s.max_k, scale)
        sliding = {} if s.reach_tokens is None else {"window_size": (s.reach_tokens - 1, 0)}
        out = attend(query, key, value, **dict(zip(names, said, strict=True)), **sliding)
        out = out[0] if isinstance(out, tuple) else out
        return out.view(*query.shape[:-1], value.shape[-1])

    return kernel


def with_wide_values(kernel: VarlenKernel) -> VarlenKernel:
    """``kernel``, which takes values as wide as keys only, for narrower ones.

    They get zeros, which change no score, and the output loses the columns that come of them.
    """

    def widen(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return F.pad(tensor, (0, like.shape[-1] - tensor.shape[-1]))

    if not isinstance(kernel, LseKernel):

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
        ) -> torch.Tensor:
            out = kernel(query, key, widen(value, key), *rest, **named)
            return out[..., : value.shape[-1]].contiguous()

        return attend
    inner = kernel

    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = inner.forward(query, key, widen(value, key), *rest, **named)
        return out[..., : value.shape[-1]].contiguous(), lse

    def backward(
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = (widen(grad, key), query, key, widen(value, key), widen(out, key))
        d_query, d_key, d_value = inner.backward(*wide, *rest, **named)
        return d_query, d_key, d_value[..., : value.shape[-1]]

    return LseKernel(forward, backward)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a kernel must be able to run."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    """Query heads of a TP rank, H."""
    num_groups: int
    """Key/value heads of a TP rank, G."""
    head_dim: int
    """Numbers of a query's head and a key's, D."""
    deterministic: bool = False
    """Whether gradients must be the same bits each time."""
    dropout: float = 0.0
    """The probability with which an attention probability is dropped, in [0, 1). A kernel draws
    from torch's generator of the device, anew at each call, and multiplies what it keeps by
    ``1 / (1 - dropout)``."""
    reach_tokens: int | None = None
    """The most keys that a query sees in layers of a sliding window; None where none has one."""
    value_head_dim: int | None = None
    """Numbers of a value's head, at most D; None: D too."""

    @property
    def value_dim(self) -> int:
        """Numbers of a value's head."""
        return self.value_head_dim or self.head_dim


NO_DROPOUT = "it has no dropout"
NO_WINDOW = "it has no sliding window"
"""Obstacles."""
