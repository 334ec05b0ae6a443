"""The store's order of elements, and routes over it, without any process."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.strategies.run.buckets import Buckets
from megatron_wlb.strategies.run.pieces import Piece, WholeTensor, whole_pieces
from megatron_wlb.strategies.run.routes import Routes

SHAPES = {
    # Divided along rows, along columns, not at all.
    "b.weight": ((12, 5), 0, 0),
    "a.weight": ((3, 24), 1, 0),
    "norm": ((7,), None, 0),
    "head": ((36, 2), 0, 1),
    "bias": ((5,), None, 1),
}


def pieces_of(tp_size: int, tp_rank: int) -> list[Piece]:
    """What a tensor-parallel rank holds."""
    found = []
    for key, (shape, axis, bucket) in SHAPES.items():
        whole = WholeTensor(key, (), (), shape, bucket, False)
        parts, group = 1 if axis is None else tp_size, int(len(shape) == 1)
        found.append(Piece(whole, axis or 0, parts, tp_rank if parts > 1 else 0, group=group))
    return found


def values_of(piece: Piece) -> torch.Tensor:
    """The elements of a piece, of which no two of the model are equal."""
    first = 1000 * sorted(SHAPES).index(piece.whole.key)
    whole = torch.arange(first, first + piece.whole.num_elements).view(piece.whole.shape)
    return whole.chunk(piece.parts, piece.axis)[piece.index].contiguous()


LAYOUTS = {
    "tp1+tp3": [pieces_of(1, 0), *(pieces_of(3, rank) for rank in range(3))],
    "2*tp2": [pieces_of(2, rank % 2) for rank in range(4)],
    "tp4": [pieces_of(4, rank) for rank in range(4)],
    "tp2 and idle ranks": [[], pieces_of(2, 0), pieces_of(2, 1), []],
}


def stored(*placed: str) -> tuple[Buckets, list[list[torch.Tensor]]]:
    """``[ranks][buckets]``: the shards of a model, filled from whole tensors by routes; parts are
    placed for some layouts.
    """
    every = [piece for own in LAYOUTS.values() for rank in own for piece in rank]
    buckets = Buckets(every, 2, 4)
    if placed:
        buckets.place([LAYOUTS[name] for name in placed])
    givers = [whole_pieces(iter(every)), [], [], []]
    shards = []
    given = Routes(buckets, givers, 0)
    for rank in range(4):
        routes = Routes(buckets, givers, rank)
        own = []
        for bucket in range(2):
            size = sum(stop - start for start, stop in buckets.parts(bucket, rank))
            shard = torch.full((size,), -1)
            sent = torch.cat(
                [v.reshape(-1) for v in given.views(bucket, [*map(values_of, givers[0])])]
            )
            parts = given.by_owner(bucket, sent).split(given.taken[bucket])[rank]
            for low, high in routes.given[bucket][0]:
                shard[low:high], parts = parts[: high - low], parts[high - low :]
            assert not len(parts)
            own.append(shard)
        shards.append(own)
    return buckets, shards


@pytest.mark.parametrize("placed", [(), ("2*tp2",), ("tp1+tp3", "tp4")], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_gets_what_it_holds_and_nothing_else(
    layout: str, placed: tuple[str, ...]
) -> None:
    buckets, shards = stored(*placed)
    needs = LAYOUTS[layout]
    owners = [Routes(buckets, needs, rank) for rank in range(4)]
    for user, routes in enumerate(owners):
        tensors = [torch.full_like(values_of(piece), -1) for piece in needs[user]]
        for bucket in range(2):
            got = torch.cat(
                [
                    shards[owner][bucket][low:high]
                    for owner in range(4)
                    for low, high in owners[owner].given[bucket][user]
                ]
                or [torch.empty(0, dtype=torch.int64)]
            )
            assert [owner.num_given(bucket)[user] for owner in owners] == routes.taken[bucket]
            views = routes.views(bucket, tensors)
            got = routes.in_order(bucket, got)
            assert torch.equal(routes.in_order(bucket, routes.by_owner(bucket, got)), got)
            for view, values in zip(views, got.split([v.numel() for v in views]), strict=True):
                view.copy_(values.view(view.shape))
        for piece, tensor in zip(needs[user], tensors, strict=True):
            assert torch.equal(tensor, values_of(piece)), (user, piece.whole.key)


def test_shards_are_even_and_decayed_elements_come_first() -> None:
    buckets, shards = stored()
    assert buckets.sizes == [60 + 72 + 7, 72 + 5]
    assert [ends[0] for ends in buckets.ends] == [60 + 72, 72]
    for bucket, size in enumerate(buckets.sizes):
        lengths = [len(own[bucket]) for own in shards]
        assert sum(lengths) == size
        assert set(lengths) <= {size // 4, math.ceil(size / 4)}
    elements = torch.cat([own[bucket] for bucket, own in itertools.product(range(2), shards)])
    assert len(set(elements.tolist())) == sum(buckets.sizes), "each element has one owner"
    norm = 1000 * sorted(SHAPES).index("norm")
    last = torch.cat([own[0] for own in shards])[buckets.ends[0][0] :]
    assert last.tolist() == [*range(norm, norm + 7)]


def test_ranks_keep_equally_much_of_what_they_use() -> None:
    buckets, shards = stored("2*tp2")
    for bucket, size in enumerate(buckets.sizes):
        assert all(len(own[bucket]) <= math.ceil(size / 4) for own in shards)
    needs = LAYOUTS["2*tp2"]
    lacking = {}
    for name, placed in {"as they come": (), "placed": ("2*tp2",)}.items():
        routes = [Routes(stored(*placed)[0], needs, rank) for rank in range(4)]
        lacking[name] = sum(
            sum(own.taken[bucket]) - own.taken[bucket][rank]
            for rank, own in enumerate(routes)
            for bucket in range(2)
        )
    # A distributed optimizer of two replicas moves half of what each rank has.
    held = sum(
        sum(map(sum, routes.taken)) for routes in [Routes(buckets, needs, r) for r in range(4)]
    )
    assert lacking["placed"] < 0.75 * lacking["as they come"]
    assert lacking["placed"] <= 1.15 * held / 2


def test_parts_of_stages_lie_with_the_ranks_that_run_them() -> None:
    """Two replicas of two stages, four layers: each rank keeps parts of its two layers alone."""
    wholes = [WholeTensor(f"w{n}", (), (), (16, 4), n, False) for n in range(4)]
    stages = [[Piece(whole) for whole in wholes[at : at + 2]] for at in (0, 2)]
    buckets = Buckets([piece for stage in stages for piece in stage], 4, 4)
    buckets.place([[stages[0], stages[1], stages[0], stages[1]]])
    sizes = [[len(buckets.parts(bucket, rank)) for rank in range(4)] for bucket in range(4)]
    assert sizes == [[2, 0, 2, 0], [2, 0, 2, 0], [0, 2, 0, 2], [0, 2, 0, 2]]
    # With four replicas of one stage, too, two parts would be given to four ranks at a time.
    whole = [*stages[0], *stages[1]]
    buckets.place([[stages[0], stages[1], stages[0], stages[1]], [whole] * 4])
    given = [Routes(buckets, [whole] * 4, rank).num_given(bucket)
             for rank in range(4) for bucket in range(4)]  # fmt: skip
    assert all(sum(own) == buckets.sizes[0] for own in given)


def test_tensors_divided_along_two_axes_are_refused() -> None:
    whole = WholeTensor("w", (), (), (4, 4), 0, False)
    with pytest.raises(CompatibilityError, match="w is divided along axis 0 by one strategy and 1"):
        Buckets([Piece(whole, 0, 2), Piece(whole, 1, 2)], 1, 2)
