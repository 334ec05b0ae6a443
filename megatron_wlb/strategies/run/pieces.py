"""Which parts of the model a rank's chunks hold, as their ``sharded_state_dict`` says it.

Megatron describes there where each tensor lies in the whole model, for checkpoints: so no layer
needs to be known here by its name, but for the bucket that it goes to.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.gpt.build import Model

GroupOf: TypeAlias = Callable[[torch.nn.Parameter], int]
"""The number of a parameter's group."""

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?")


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of the whole model."""

    key: str
    stack: tuple[int, ...]
    """Where it is on the axes that checkpoints stack it on: its layer."""
    stack_shape: tuple[int, ...]
    shape: tuple[int, ...]
    bucket: int
    """The layer with which it is stored: the embedding is with the first, final norm and LM head
    are with the last."""
    any_size: bool
    """Whether checkpoints may hold more or fewer rows of it: a padded vocabulary."""

    @property
    def num_elements(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True, slots=True)
class Piece:
    """One of ``parts`` equal parts of a tensor along ``axis``."""

    whole: WholeTensor
    axis: int = 0
    parts: int = 1
    index: int = 0
    adds: bool = True
    """Whether the gradient of this copy is a summand of its own. One of tensor-parallel ranks that
    hold the same is none, unless each has had a part of the sequence."""
    is_first: bool = True
    """Whether it is the first of equal copies in the replica."""
    group: int = 0
    """The number of its group of parameters, which have learning rate and weight decay in common.
    Experts that no other rank has may be in another group in another layout."""
    folds: int = 1
    """How many pieces of the tensor its rank has: two of the weights of a gated MLP, of which a
    tensor-parallel rank has a part of either half."""


class EmptyObject(NamedTuple):
    """What a layer saves besides its tensors: nothing, but runs that load it ask for it."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True)
class HeldPiece:
    """A piece and the parameter, or part of it, that is it."""

    piece: Piece
    parameter: torch.nn.Parameter
    weight: torch.Tensor
    gradient: torch.Tensor


def held_pieces(model: Model, num_layers: int, group_of: GroupOf) -> list[HeldPiece]:
    """Lists what this rank's chunks hold; parameters have a ``main_grad`` of their own shape.

    Raises :class:`CompatibilityError` for a tensor that is divided in a way not known here.
    """
    found = []
    for gpt in model.gpts:
        by_storage = {p.data_ptr(): p for p in gpt.parameters()}
        starts = sorted(by_storage)
        for shard in _described(model, gpt):
            if isinstance(shard, ShardedTensor):
                at = shard.data.data_ptr()
                owner = by_storage[max(start for start in starts if start <= at)]
                found.append(_held(shard, owner, num_layers, group_of(owner)))
    num = Counter(held.piece.whole for held in found)
    return [replace(held, piece=replace(held.piece, folds=num[held.piece.whole])) for held in found]


def empty_objects(model: Model) -> list[EmptyObject]:
    """Lists what this rank's chunks would save besides tensors.

    Raises :class:`CompatibilityError` for what is not empty.
    """
    found = []
    for gpt in model.gpts:
        for one in _described(model, gpt):
            if isinstance(one, ShardedObject):
                if not _is_empty(one.data):
                    raise CompatibilityError(
                        f"{one.key} holds {type(one.data).__name__}; the store of strategies saves "
                        "tensors alone: leave --fp8-format out, or use --fp8-recipe tensorwise"
                    )
                found.append(EmptyObject(one.key, one.global_shape, one.global_offset))
    return found


def _is_empty(data: Any) -> bool:
    """Whether a layer's own state is none; TransformerEngine's without FP8 is an empty tensor."""
    if isinstance(data, io.BytesIO):
        return not data.getbuffer().nbytes
    return data is None or (isinstance(data, torch.Tensor) and not data.numel())


def _described(model: Model, gpt: Any) -> Iterator[Any]:
    """Gives what a chunk holds, as Megatron's checkpoints describe it."""
    state = gpt.sharded_state_dict(metadata={"dp_cp_group": model.groups.dp_cp})
    apply_factories(state)
    yield from nested_values(state)


def _held(shard: Any, parameter: Any, num_layers: int, group: int) -> HeldPiece:
    stacked = shard.prepend_axis_num
    parts = tuple(shard.axis_fragmentations[stacked:])
    axes = [axis for axis, num in enumerate(parts) if num > 1]
    axis = axes[0] if axes else 0
    offset, size = shard.global_offset[stacked + axis], shard.local_shape[axis]
    if len(axes) > 1 or offset % size or size * parts[axis] != shard.global_shape[stacked + axis]:
        raise CompatibilityError(
            f"{shard.key} is divided as {parts} of {tuple(shard.global_shape)}; the store of "
            "strategies knows equal parts along one axis"
        )
    whole = WholeTensor(
        shard.key,
        tuple(shard.global_offset[:stacked]),
        tuple(shard.global_shape[:stacked]),
        tuple(shard.global_shape[stacked:]),
        _bucket(shard.key, shard.global_offset[:stacked], num_layers),
        shard.allow_shape_mismatch,
    )
    tied, tp_rank, dp_rank = shard.replica_id
    adds = tp_rank == 0 or getattr(parameter, "sequence_parallel", False)
    first = (tied, tp_rank, dp_rank) == (0, 0, 0)
    piece = Piece(whole, axis, parts[axis], offset // size, adds, first, group)
    weight = shard.data.detach()
    gradient = parameter.main_grad.as_strided(
        weight.shape,
        weight.stride(),
        parameter.main_grad.storage_offset() + weight.storage_offset() - parameter.storage_offset(),
    )
    return HeldPiece(piece, parameter, weight, gradient)


def _bucket(key: str, stack: Sequence[int], num_layers: int) -> int:
    layer = _LAYER.match(key)
    if layer is not None:
        return int(layer[1]) if layer[1] else int(stack[0])
    return 0 if key.startswith("embedding.") else num_layers - 1


def whole_pieces(pieces: Iterator[Piece]) -> list[Piece]:
    """Each tensor that some piece is of, whole and once, in one order on all ranks."""
    wholes = {piece.whole for piece in pieces}
    return [Piece(whole) for whole in sorted(wholes, key=lambda w: (w.key, w.stack))]
