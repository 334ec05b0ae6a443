"""What ranks that share a micro-batch exchange: where their keys and values are, and how they come.

A layer with multi-latent attention exchanges latents in their place. A collective that has begun is
a value, :class:`UnderWay`.

Legend: ``T`` tokens of the micro-batch, ``Tk`` keys of the kernel call, ``G`` key/value heads,
``G/g`` those of a head group, ``D`` head dimension, ``R`` numbers of a token's latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_wlb.plan.sharding import RankLayout
from megatron_wlb.runtime.gpt.attention.head_start import NearKeys
from megatron_wlb.runtime.ranks.transfer import to_device

T = TypeVar("T")

# Their names from torch 2.13 on; the old ones warn there.
all_gather, reduce_scatter = (
    getattr(dist, new, None) or getattr(dist, old)
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)


class UnderWay:
    """A collective that has begun. What it fills and what it reads stay until it is done.

    ``whole`` is what comes of it, if not what is received. Without anything to send nothing runs.
    """

    def __init__(
        self,
        start: Callable[..., Any],
        received: torch.Tensor,
        sent: torch.Tensor,
        group: dist.ProcessGroup,
        whole: torch.Tensor | None = None,
    ) -> None:
        self._tensors = [received if whole is None else whole, sent]
        self._work = start(received, sent, group=group, async_op=True) if len(sent) else None

    def wait(self) -> torch.Tensor:
        """What has come. It is handed over: to be called once."""
        if self._work is not None:
            self._work.wait()
        self._work = None  # which holds the tensors, too
        received = self._tensors[0]
        self._tensors.clear()
        return received


def one_ahead(begun: Iterable[T]) -> Iterator[T]:
    """What an iterator begins, each when the one behind it is begun too."""
    begun = iter(begun)
    present = next(begun)
    for following in begun:
        yield present
        present = following
    yield present


def free(tensor: torch.Tensor) -> None:
    """Gives back the memory, though graphs hold the tensor; :func:`regain` takes it again.

    On a GPU the allocator hands it on in stream order, after the kernels that read it.
    """
    tensor.untyped_storage().resize_(0)


def regain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with memory again. What it held is to be written: autograd need not know."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    return tensor


def halves(pair: torch.Tensor, value_dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[…, G, D]`` and values of a pair ``[…, 2, G, D]``, of which narrower values fill the
    first ``value_dim`` numbers; None: all.
    """
    key, value = pair.unbind(1)
    return key, value[..., :value_dim]


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

    def heads(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``[…, heads, D]`` in head groups: query heads go with their key/value heads."""
        return tensor.chunk(self.num_head_groups, dim=-2)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which gradients of keys and values of ``dtype`` are summed over the ranks."""
        return torch.promote_types(dtype, torch.float32) if self.reduce_in_fp32 else dtype


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
    group: dist.ProcessGroup | None = None
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
        group: dist.ProcessGroup | None = None,
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

    def sums(
        self,
        like: torch.Tensor,
        grads: Sequence[torch.Tensor],
        dtype: torch.dtype,
        value_dim: int | None,
        own: torch.Tensor | None,
    ) -> torch.Tensor:
        """Gradients by row ``[rows, 2, G/g, D]`` in ``dtype``.

        ``grads`` ``[Tk, G/g, D]`` ×2 are those of keys and values at :attr:`rows`, if there are
        any; ``own`` those of the slice's. ``like`` is any ``[…, 2, G/g, D]`` on the device.
        """
        make = like.new_empty if grads else like.new_zeros
        sums = make(self.layout.num_rows, *like.shape[1:], dtype=dtype)
        num_local = len(self.layout.tokens)
        # Rows are filled by one pass that reads each gradient once: most rows have one only.
        for grad, to in zip(grads, halves(sums, value_dim), strict=False):
            if dtype == grad.dtype:
                torch.index_select(grad, 0, self.first, out=to)
            else:  # through a copy, of as few rows as is received
                parts = torch.split(to, num_local), torch.split(self.first, num_local)
                for part, first in zip(*parts, strict=True):
                    part.copy_(grad.index_select(0, first))
            if self.unseen is not None:
                to.index_fill_(0, self.unseen, 0.0)
            for places, rows_again in self.again:
                to.index_add_(0, rows_again, grad[places].to(dtype))
        if own is not None:
            assert self.slice_rows is not None
            sums.index_copy_(0, self.slice_rows, own.to(dtype))
        return sums


class KeyExchange:
    """Brings all ranks the keys and values of one micro-batch and layer, and back the gradients."""

    has_latents = False

    def __init__(self, gather: KeyGather, group: dist.ProcessGroup) -> None:
        self.gather, self.group = gather, group

    @property
    def gathers_again(self) -> bool:
        """Whether the backward pass needs what was sent."""
        # Of latents it needs those of a slice too, for the gradient of what projects them up.
        return self.gather.has_others or self.has_latents

    def start(self, key: torch.Tensor, value: torch.Tensor | None) -> UnderWay:
        """Starts with the local ones of a head group, ``[T/CP, G/g, D]`` ×2."""
        assert value is not None
        local = torch.stack((key.detach(), value.detach()), dim=1)
        rows = local.new_empty(self.gather.layout.num_rows, *local.shape[1:])
        if self.gather.sent is not None:
            rows[self.gather.num_received :] = local
            local = local.index_select(0, self.gather.sent)
        return UnderWay(all_gather, rows[: self.gather.num_received], local, self.group, rows)

    def rows(self, gathering: UnderWay, *, keep: bool) -> torch.Tensor:
        """All rows ``[rows, 2, G/g, D]``; of keys in reach alone those that all ranks send, and
        then the local ones. With ``keep`` they can be differentiated.
        """
        return gathering.wait()

    def start_back(self, sums: torch.Tensor) -> tuple[UnderWay, torch.Tensor]:
        """Starts to sum the gradients of all rows over the ranks; for :meth:`own`."""
        sent = sums[: self.gather.num_received]
        local = sums.new_empty(len(sent) // self.group.size(), *sums.shape[1:])
        return UnderWay(reduce_scatter, local, sent, self.group), sums

    def own(self, reducing: UnderWay, sums: torch.Tensor) -> torch.Tensor:
        """The gradients of what this rank has started with, ``[T/CP, 2, G/g, D]``."""
        reduced = reducing.wait()
        if self.gather.sent is None:
            return reduced
        assert self.gather.layout.sent is not None
        num = len(self.gather.layout.sent)  # of the filler there are none
        own = sums[self.gather.num_received :]
        return own.index_add(0, self.gather.sent[:num], reduced[:num])


Expand: TypeAlias = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Projects latents up: those of so many ranks ``[ranks · n, 1, 1, R]`` to keys and values
``[T, 1, G, …]``, in the order of ranks and of each one's tokens.

With sequence parallelism a rank has ``n`` of its tokens' latents, and all tensor-parallel ranks
call it together; otherwise those of all its tokens.
"""


class LatentExchange(KeyExchange):
    """Exchanges latents ``[n, 1, R]`` in place of keys and values, so many of each rank.

    What comes is projected up, and gradients down; both are there for one head group alone.
    """

    has_latents = True

    def __init__(self, gather: KeyGather, group: dist.ProcessGroup, expand: Expand) -> None:
        super().__init__(gather, group)
        self._expand = expand
        self._latents: torch.Tensor | None = None
        self._pairs: torch.Tensor | None = None

    def start(self, key: torch.Tensor, value: torch.Tensor | None) -> UnderWay:
        local = key.detach().contiguous()
        rows = local.new_empty(len(local) * self.group.size(), *local.shape[1:])
        return UnderWay(all_gather, rows, local, self.group)

    def rows(self, gathering: UnderWay, *, keep: bool) -> torch.Tensor:
        """``[T, 2, G, D]``: narrower values are filled up with zeros."""
        latents = gathering.wait().requires_grad_(keep)
        with torch.set_grad_enabled(keep):
            key, value = self._expand(latents.unsqueeze(1), self.group.size())
            value = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
            pairs = torch.cat([key, value], dim=1)
        if keep:
            self._latents, self._pairs = latents, pairs
        return pairs.detach()

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """What is kept for the backward, besides what a graph of its own keeps."""
        if self._latents is None or self._pairs is None:
            return ()
        return self._latents, self._pairs

    @property
    def out(self) -> torch.Tensor | None:
        """The end of the graph from latents to keys and values."""
        return self._pairs

    def start_back(self, sums: torch.Tensor) -> tuple[UnderWay, torch.Tensor]:
        """The same with the latents' gradients; adds the weights' to theirs."""
        latents, pairs = self._latents, self._pairs
        assert latents is not None and pairs is not None
        self._latents = self._pairs = None
        torch.autograd.backward(pairs, sums.to(pairs.dtype))
        assert latents.grad is not None
        return super().start_back(latents.grad.to(sums.dtype))
