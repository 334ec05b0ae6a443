"""What an attention kernel takes and promises: packed segments of queries and their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from megatron_wlb.errors import PlanError
from megatron_wlb.runtime.transfer import to_device


@dataclass(frozen=True, eq=False, slots=True)
class Segments:
    """Where each segment's queries and keys lie in packed tensors.

    A segment is a run of ``q`` queries and the ``k >= q`` keys up to the last of them: query ``i``
    sees keys ``0 … k - q + i`` (a causal mask aligned to the bottom right). ``q == k`` is a whole
    document; fewer queries are a later part of one, as context parallelism has them.
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

    @classmethod
    def of(
        cls,
        lengths_q: Sequence[int],
        lengths_k: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Segments:
        """Segments of so many queries and keys; as many keys as queries if not given.

        Raises :class:`PlanError` for none, one without queries, or one with fewer keys than
        queries.
        """
        queries = tuple(map(int, lengths_q))
        keys = queries if lengths_k is None else tuple(map(int, lengths_k))
        if not queries or len(queries) != len(keys):
            raise PlanError(
                f"attention over {len(queries)} runs of queries and {len(keys)} of keys; give each "
                "run of queries its keys"
            )
        for q, k in zip(queries, keys, strict=True):
            if not 1 <= q <= k:
                raise PlanError(
                    f"attention of {q} queries to {k} keys; a segment needs a query, and a key for "
                    "each"
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
        value: ``[Tk, G, D]``, likewise.
        segments: whose queries and keys these are.
        scale: factor of the scores before the softmax.

    Returns:
        ``[Tq, H, D]``, in storage of its own.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float,
    ) -> torch.Tensor: ...


def packed_kernel(
    attend: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *names: str
) -> VarlenKernel:
    """The kernel that a package's packed function is.

    ``names`` are what it calls the starts of queries and of keys, the longest of each, and the
    scale. Of several results the first is the output: some versions return the log-sum-exp too.
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
        out = attend(query, key, value, **dict(zip(names, said, strict=True)))
        return (out[0] if isinstance(out, tuple) else out).view(query.shape)

    return kernel


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
    deterministic: bool = False
    """Whether gradients must be the same bits each time."""
