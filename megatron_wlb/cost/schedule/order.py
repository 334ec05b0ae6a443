"""Pipeline schedules as data: the orders in which Megatron's stock schedules run, and our own.

An order is, for each pipeline rank, the list of its actions: ``F0.3`` is the forward and ``B0.3``
the backward of micro-batch 3 through the rank's model chunk 0. Chunk ``c`` of rank ``r`` is the
*virtual stage* ``c * pp_size + r``: a forward sends its activations to the next virtual stage, a
backward its gradients to the previous one.

:func:`sliced` is the order for documents in slices, which no stock schedule can run. The others are
those of megatron-core (``pipeline_parallel/schedules.py``); the tests run its schedule
functions and compare. Not covered: ``overlap_moe_expert_parallel_comm``, which runs
one forward more before the first backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.errors import ConfigError, PlanError


@dataclass(frozen=True, slots=True)
class Action:
    """One forward ``F`` or backward ``B`` of a micro-batch through one of a rank's chunks."""

    kind: Literal["F", "B"]
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.micro_batch}"


Ints: TypeAlias = npt.NDArray[np.int64]
Columns: TypeAlias = tuple[Ints, ...]
"""A rank's actions: whether each is a backward, its chunk and its micro-batch."""
Order: TypeAlias = list[list[Action]]
"""``[pp_size][2 * vpp_size * num_micro_batches]``."""

Pass: TypeAlias = tuple[int, int]
"""``(chunk, micro_batch)`` of a forward or backward; the chunk is counted on its rank."""


class ReceiveOrder(NamedTuple):
    """What a rank receives, one entry per message, named by the action that consumes it."""

    forward: list[Pass]
    """Activations from the previous rank."""
    backward: list[Pass]
    """Gradients from the next rank."""


class Task(NamedTuple):
    """An action of a rank, and the task whose output it waits for."""

    rank: int
    action: Action
    source: int
    """Index of that task in the same list, always a smaller one; -1: waits for nothing."""


def one_f_one_b(pp_size: int, num_micro_batches: int) -> Order:
    """Megatron's schedule for one chunk a rank; with ``pp_size`` 1, that without a pipeline."""
    _check_sizes(pp_size, 1, num_micro_batches)
    passes = _forward_passes(1, num_micro_batches, num_micro_batches)
    return [_warm_up_then_alternate(passes, 1, pp_size - rank - 1) for rank in range(pp_size)]


def interleaved(
    pp_size: int, vpp_size: int, num_micro_batches: int, group_size: int | None = None
) -> Order:
    """Megatron's schedule for ``vpp_size`` ≥ 2 chunks a rank.

    Each chunk in turn runs ``group_size`` micro-batches (Megatron's
    ``microbatch_group_size_per_vp_stage``; ``pp_size`` if not given), the last group the rest.
    Raises :class:`ConfigError` where Megatron refuses the sizes.
    """
    group_size = pp_size if group_size is None else group_size
    _check_interleaved(pp_size, vpp_size, num_micro_batches, group_size)
    passes = _forward_passes(vpp_size, num_micro_batches, group_size)
    warm_up = (vpp_size - 1) * group_size
    return [
        _warm_up_then_alternate(passes, vpp_size, warm_up + 2 * (pp_size - rank - 1))
        for rank in range(pp_size)
    ]


def sliced(pp_size: int, chains: Sequence[int], vpp_size: int = 1) -> Order:
    """The order for documents in slices (after SlimPack §4).

    ``chains`` are the numbers of micro-batches that run the slices of one document, in order. A
    slice's keys and values get gradients from all slices behind it, so the backward passes of a
    chain run last to first, and none before the chain's last forward; chains follow one another.
    With chains of 1 and one chunk it is :func:`one_f_one_b`.

    A chain's forwards run ahead of its backwards, and all of them are held. This lead is built up
    before the chain and worked off behind it, slowly: between two backwards run at most 9/8 and at
    least 3/4 forwards, in the mean. Ranks that run many of a kind at once leave their neighbours
    waiting; a lead that stays is memory.

    With several chunks, as SlimPack does not have, groups of about 5/4 · ``pp_size`` micro-batches
    go through one chunk after another, and back in the order of their backwards. As in
    :func:`interleaved` all ranks have one sequence of forwards and one of backwards.

    A step's is asked for several times, and kept: it is not to be changed.

    Raises :class:`ConfigError` for sizes below 1 or too many passes.
    """
    return _sliced(pp_size, tuple(chains), vpp_size)


@lru_cache(maxsize=8)
def _sliced(pp_size: int, chains: tuple[int, ...], vpp_size: int) -> Order:
    return _order(sliced_columns(pp_size, chains, vpp_size))


@lru_cache(maxsize=32)
def sliced_columns(pp_size: int, chains: tuple[int, ...], vpp_size: int) -> list[Columns]:
    """:func:`sliced` in arrays, which takes a tenth of the time."""
    if min(chains, default=0) < 1:
        raise ConfigError(f"chains of {list(chains)} micro-batches; give one, of at least 1 each")
    num = sum(chains)
    _check_sizes(pp_size, vpp_size, num)
    stops = np.cumsum(chains, dtype=np.int64)
    needed = np.repeat(stops, chains)
    backwards = np.repeat(2 * stops - chains, chains) - 1 - np.arange(num)
    if vpp_size == 1:
        return _ahead(pp_size, backwards, needed, 1)
    number = max(1, num // -(-5 * pp_size // 4))
    cuts = num * np.arange(number + 1) // number
    sizes = np.repeat(np.diff(cuts), np.diff(cuts))
    chunks, last = np.arange(vpp_size)[:, None], vpp_size - 1
    # Where each chunk runs the first, second, … micro-batch, ``[V, N]``.
    place = np.arange(num) + last * np.repeat(cuts[:-1], np.diff(cuts)) + chunks * sizes
    came = place[::-1]
    forward, backward = np.empty((2, 2, place.size), dtype=np.int64)
    forward[:, place] = np.stack(np.broadcast_arrays(chunks, np.arange(num)))
    backward[:, came] = np.stack(np.broadcast_arrays(chunks, backwards))
    # Behind all forwards of its chain; and of its rank, as many as fill the pipeline.
    filled = last * int(cuts[1]) + 1
    enough = np.minimum(place.size, filled + np.arange(place.size))
    enough[came[last]] = np.maximum(enough[came[last]], place[last, needed - 1] + 1)
    enough = _worked_off(enough)
    # What the first rank runs before a backward that the last rank waits for in its next chunk down
    # must need no forward of the last rank behind it.
    before = np.zeros(1 + place.size, dtype=np.int64)
    before[1 + place[1:]] = place[:-1] + 1
    reached = np.maximum.accumulate(before).tolist()
    above = np.full(place.size, -1)  # the same backward of the chunk above
    above[came[:-1]] = came[1:]
    result, lead = [0], CHUNKS_LEAD * (pp_size - 1)
    for least, source in zip(enough.tolist(), above.tolist(), strict=True):
        if source >= 0:
            least = max(least, reached[min(place.size, result[source + 1] + lead)])
        result.append(max(least, result[-1]))
    return _lay(pp_size, forward, backward, np.array(result[1:]), CHUNKS_LEAD)


CHUNKS_LEAD = 2
"""Forwards that a rank of several chunks is ahead of the next, where slices run."""


def run_ahead(
    pp_size: int, backwards: Sequence[int], needed: Sequence[int], rank_lead: int = 1
) -> Order:
    """The order of ``backwards``, each behind its number of forwards on the last rank, 1 at least.

    Forwards run in their order, as many as backwards, and ``rank_lead`` more on each rank than on
    the next. The lead is worked off as :func:`sliced` has it.
    """
    return _order(_ahead(pp_size, np.array(backwards), np.array(needed), rank_lead))


def _ahead(pp_size: int, backwards: Ints, needed: Ints, rank_lead: int) -> list[Columns]:
    forward, backward = np.zeros((2, 2, len(backwards)), dtype=np.int64)
    forward[1], backward[1] = np.arange(len(backwards)), backwards
    return _lay(pp_size, forward, backward, _worked_off(needed), rank_lead)


def _worked_off(needed: Ints) -> Ints:
    """Forwards before each backward, at least as many as ``needed``."""
    up, down = 9 * np.arange(len(needed)), 6 * np.arange(len(needed))
    ahead = 8 * needed - up  # eighths of forwards
    ahead = np.maximum.accumulate(ahead[::-1])[::-1] + up - down
    ahead = np.maximum.accumulate(ahead) + down
    worked_off: Ints = -(-ahead // 8)
    return worked_off


def _lay(
    pp_size: int, forward: Ints, backward: Ints, enough: Ints, rank_lead: int
) -> list[Columns]:
    """Each backward behind ``enough`` forwards on the last rank, and more on those before.

    Passes are ``[2, passes]``: their chunks and micro-batches.
    """
    result = []
    for rank in range(pp_size):
        until = np.minimum(forward.shape[1], enough + rank_lead * (pp_size - 1 - rank))
        done = np.maximum.accumulate(until)
        columns = np.zeros((3, backward.shape[1] + done[-1]), dtype=np.int64)
        columns[0, np.arange(len(done)) + done] = 1
        is_backward = columns[0] == 1
        columns[1:, is_backward] = backward
        columns[1:, ~is_backward] = forward[:, : done[-1]]
        result.append(tuple(columns))
    return result


def columns_of(actions: Sequence[Action]) -> Columns:
    """Whether each action is a backward, its chunk and its micro-batch; read-only."""
    return _columns(tuple(actions))


@lru_cache(maxsize=64)  # a rank's are asked for several times a step, and by whole documents again
def _columns(actions: tuple[Action, ...]) -> Columns:
    table = [(action.kind == "B", action.chunk, action.micro_batch) for action in actions]
    columns = np.array(table, dtype=np.int64).reshape(-1, 3).T
    columns.flags.writeable = False
    return tuple(columns)


def _order(ranks: Sequence[Columns]) -> Order:
    """The actions of columns, each made once for all ranks."""
    made: dict[tuple[int, int, int], Action] = {}
    order = []
    for columns in ranks:
        own = list(zip(*(column.tolist() for column in columns), strict=True))
        made |= {one: Action("B" if one[0] else "F", *one[1:]) for one in own if one not in made}
        order.append([made[one] for one in own])
    return order


MOST_PASSES = 1 << 20
"""The most forward passes of a pipeline and step: more take seconds and gigabytes."""


@lru_cache(maxsize=8)
def schedule(
    pp_size: int, vpp_size: int, num_micro_batches: int, group_size: int | None = None
) -> Order:
    """The order that Megatron picks: :func:`interleaved`, or with one chunk :func:`one_f_one_b`.

    It is kept, and is not to be changed.
    """
    if vpp_size == 1:
        return one_f_one_b(pp_size, num_micro_batches)
    return interleaved(pp_size, vpp_size, num_micro_batches, group_size)


def receive_order(
    pp_size: int, vpp_size: int, num_micro_batches: int, group_size: int | None, pp_rank: int
) -> ReceiveOrder:
    """The order in which a rank receives activations and gradients under :func:`schedule`.

    All ranks run their forwards in one common order, and so their backwards: a rank receives in the
    order in which it consumes. A forward-only step receives the same activations and no gradients.
    """
    group_size = pp_size if group_size is None else group_size
    if vpp_size == 1:
        group_size = num_micro_batches
        _check_sizes(pp_size, vpp_size, num_micro_batches)
    else:
        _check_interleaved(pp_size, vpp_size, num_micro_batches, group_size)
    if not 0 <= pp_rank < pp_size:
        raise ConfigError(f"pp_rank {pp_rank} is not below pp_size {pp_size}; give 0 … pp_size - 1")
    passes = _forward_passes(vpp_size, num_micro_batches, group_size)
    first, last = pp_rank == 0, pp_rank == pp_size - 1
    last_chunk = vpp_size - 1
    return ReceiveOrder(
        forward=[(c, m) for c, m in passes if not (first and c == 0)],
        backward=[(last_chunk - c, m) for c, m in passes if not (last and c == 0)],
    )


def sizes(order: Sequence[Sequence[Action]]) -> tuple[int, int]:
    """``(vpp_size, num_micro_batches)`` of a complete order, both 0 if it is empty."""
    return (
        1 + max((action.chunk for actions in order for action in actions), default=-1),
        1 + max((action.micro_batch for actions in order for action in actions), default=-1),
    )


def dataflow(order: Sequence[Sequence[Action]]) -> list[Task]:
    """All actions, each rank's in its order and each after the one whose output it waits for.

    A dry run with unbounded message buffers: each rank runs ahead until an input is missing.
    Raises :class:`PlanError` when no rank can go on (deadlock), naming what each waits for.
    """
    pp_size = len(order)
    last_stage = pp_size * sizes(order)[0] - 1
    done: dict[tuple[str, int, int], int] = {}  # (kind, virtual stage, micro-batch) -> task
    tasks: list[Task] = []
    position = [0] * pp_size
    num_actions = sum(map(len, order))
    while len(tasks) < num_actions:
        num_before = len(tasks)
        for rank, actions in enumerate(order):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                stage = action.chunk * pp_size + rank
                if action.kind == "F":
                    source = done.get(("F", stage - 1, action.micro_batch)) if stage else -1
                elif stage == last_stage:  # The loss of its own forward.
                    source = done.get(("F", stage, action.micro_batch))
                else:
                    source = done.get(("B", stage + 1, action.micro_batch))
                if source is None:
                    break
                done[action.kind, stage, action.micro_batch] = len(tasks)
                tasks.append(Task(rank, action, source))
                position[rank] += 1
        if len(tasks) == num_before:
            waiting = [
                f"rank {rank} at {actions[position[rank]]}"
                for rank, actions in enumerate(order)
                if position[rank] < len(actions)
            ]
            raise PlanError(
                f"the order deadlocks: {', '.join(waiting)} would wait for ever; "
                "run each input's producer earlier"
            )
    return tasks


def _forward_passes(vpp_size: int, num_micro_batches: int, group_size: int) -> list[Pass]:
    """What each rank runs forward, in order; backward is the same with the chunks reversed."""
    return [
        (chunk, micro_batch)
        for start in range(0, num_micro_batches, group_size)
        for chunk in range(vpp_size)
        for micro_batch in range(start, min(start + group_size, num_micro_batches))
    ]


def _warm_up_then_alternate(passes: Sequence[Pass], vpp_size: int, warm_up: int) -> list[Action]:
    """``warm_up`` forwards, then one forward and one backward in turn, then what is left."""
    forward = [Action("F", chunk, micro_batch) for chunk, micro_batch in passes]
    backward = [Action("B", vpp_size - 1 - chunk, micro_batch) for chunk, micro_batch in passes]
    num_alternating = max(len(passes) - warm_up, 0)
    actions = forward[:warm_up]
    for pair in zip(forward[warm_up:], backward, strict=False):
        actions.extend(pair)
    return actions + backward[num_alternating:]


def _check_sizes(pp_size: int, vpp_size: int, num_micro_batches: int) -> None:
    given = {"pp_size": pp_size, "vpp_size": vpp_size, "num_micro_batches": num_micro_batches}
    for name, size in given.items():
        if size < 1:
            raise ConfigError(f"{name} is {size}; it must be at least 1")
    if pp_size * vpp_size * num_micro_batches > MOST_PASSES:
        raise ConfigError(
            f"pp_size {pp_size} × vpp_size {vpp_size} × {num_micro_batches} micro-batches is above "
            f"{MOST_PASSES}, the most that is laid out; lower one of them"
        )


def _check_interleaved(
    pp_size: int, vpp_size: int, num_micro_batches: int, group_size: int
) -> None:
    """Raise :class:`ConfigError` where Megatron does, and for one rank or one chunk."""
    _check_sizes(pp_size, vpp_size, num_micro_batches)
    if pp_size < 2 or vpp_size < 2:
        raise ConfigError(
            f"interleaving {vpp_size} chunks over {pp_size} pipeline ranks needs 2 of each; "
            "set the virtual pipeline size to 1"
        )
    if not pp_size <= group_size <= num_micro_batches:
        raise ConfigError(
            f"group_size {group_size} is not between pp_size {pp_size} and num_micro_batches "
            f"{num_micro_batches}; raise the number of micro-batches or change the group size"
        )
    remainder = num_micro_batches % group_size
    if 0 < remainder < pp_size:
        raise ConfigError(
            f"{num_micro_batches} micro-batches in groups of {group_size} leave {remainder}, which "
            f"must be 0 or at least pp_size {pp_size}; change the number of micro-batches or the "
            "group size"
        )
