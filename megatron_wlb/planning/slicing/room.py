"""Which micro-batches of slices are recomputed, so that a device has room for their step.

All slices of a document keep their activations until its last one is through. Where that is more
than a device holds, some micro-batches keep the inputs of their layers alone, and run these forward
once more in backward. Others, and the steps without long documents, recompute nothing. SlimPack
recomputes in parts, too (§4.3.3, §6.1), and does not say which.

Dense MLPs are less work than layers, the more so the later a slice lies in its document, and keep
about half of the bytes. Taken first is what saves most bytes, over most of the time that there are
too many, for the time that it takes: slices of many tokens that are kept long.

If the host has memory for it, micro-batches may wait there instead of being recomputed
(:mod:`megatron_wlb.cost.schedule.hosting`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from megatron_wlb.cost import MemoryModel
from megatron_wlb.cost.document import LEAST_US
from megatron_wlb.cost.memory import GIB, Integers
from megatron_wlb.cost.program import Program, UnitBytes
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.schedule.hosting import SLAB_BYTES
from megatron_wlb.cost.slices import (
    HOST,
    LAYERS,
    MLPS,
    NOTHING,
    Recomputed,
    Slice,
    Unit,
    UnitTable,
)
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import NO_SHARING, Sharing, Span, TreePart, Units
from megatron_wlb.planning.planner import merged_multiple

MOST_ROUNDS = 4
"""Rounds in which more is recomputed. Within one, what working memory a pass has is taken to stay
as it is."""

SHORT_DOCUMENTS = 64
"""Short documents in the longest one, for the steps that need most memory."""


def unit_of(
    spans: Sequence[Span],
    num_tokens: int,
    sharing: Sharing = NO_SHARING,
    ranks: tuple[int, ...] = (),
    recomputed: Recomputed = NOTHING,
    divided: bool = False,
) -> Unit:
    """What memory is counted of in a micro-batch: also the slice that it runs first, if any."""
    cut = _slice_of(spans, sharing.tree)
    divided = divided and cut is not None
    return Unit(num_tokens, cut, ranks, recomputed, divided, _states_of(spans, sharing))


def rows_seen(
    micro_batches: Iterable[tuple[Sequence[Span], Sharing]],
) -> tuple[Floats, list[list[tuple[int, int]]]]:
    """What times ask of rows that others run (:meth:`.StageCosts.times_us`): ``[N]``, those that
    micro-batches before have run, and each one's branches.
    """
    starts, branches = [], []
    for spans, sharing in micro_batches:
        alone = sharing.tree is None
        starts.append(spans[0].start if alone and spans else sharing.rows_before)
        branches.append(sharing.branches(spans))
    return np.array(starts, dtype=np.float64), branches


def _states_of(spans: Sequence[Span], sharing: Sharing) -> tuple[int, int] | None:
    """See :attr:`.Unit.states`. What several take waits beside the first of its gradients."""
    if not sharing.above:
        return None
    start, left = (sharing.tree.start, sharing.tree.left) if sharing.tree else (0, ())
    begun = [above[-1].stop for above in sharing.above if above]
    cuts = {row for row in [*begun, *(state.row for state in left)] if row > start}
    inner = cuts.difference(accumulate([span.length for span in spans], initial=start))
    return len(begun) + len(inner), sum(min(2, state.takers) for state in left)


def _slice_of(spans: Sequence[Span], tree: TreePart | None) -> Slice | None:
    if tree is not None:
        stop = tree.start + sum(span.length for span in spans)
        return Slice(tree.name, tree.start, stop, tree.length)
    if not spans:
        return None
    document, start, stop = spans[0]
    is_slice = start > 0 or stop < document.length
    return Slice(document.arrival, start, stop, document.length) if is_slice else None


def units_of(units: Units, length_multiple: int) -> list[Unit]:
    """What time and memory are counted of, padded to such a multiple."""
    found = []
    again = units.recomputed or [NOTHING] * len(units.spans)
    sharing = units.sharing or [NO_SHARING] * len(units.spans)
    replicas = units.replicas or [()] * len(units.spans)
    rows = zip(units.spans, replicas, again, sharing, strict=True)
    for spans, ranks, recomputed, shared in rows:
        multiple = merged_multiple(length_multiple, len(ranks))
        multiples = max(1, -(-sum([stop - start for _, start, stop in spans]) // multiple))
        num_tokens = multiples * multiple // (len(ranks) or 1)
        found.append(unit_of(spans, num_tokens, shared, ranks, recomputed, units.divided))
    return found


def worst_steps(longest: int, num_tokens: int) -> list[list[int]]:
    """Lengths with which slices need most memory: a few of the longest documents, whose slices are
    held until the last has run, and short ones behind them, of which a unit has many tokens.

    A step has the documents that begin in it: the last of them may be as long as any.
    """
    steps = []
    short = max(1, longest // SHORT_DOCUMENTS)
    for num_long, beyond in ((1, longest), (max(1, num_tokens // 2 // longest), 0)):
        rest = max(0, num_tokens + beyond - num_long * longest)
        steps.append([longest] * num_long + [short] * (rest // short))
    return steps


class MemoryLimit(NamedTuple):
    """What a device may hold."""

    model: MemoryModel
    limit_bytes: float
    multiple: int = 1
    """What units are padded to a multiple of."""
    given: bool = True
    """Whether it was asked for; else it is what the machine has."""
    recomputes: bool = False
    """Whether micro-batches of slices may be recomputed one by one: not where layers are anyhow."""
    exact: bool = True
    """Whether the worst steps are known by what is recomputed in them. If not, by what they hold if
    all layers are, which is less, and fewer ways are tried: enough to see what cannot fit."""

    @property
    def host_bytes(self) -> float:
        """The part of the host's memory in which activations of this device may wait."""
        return self.model.execution.host_gib * GIB

    def check_document(self, num_tokens: int) -> None:
        """Raises :class:`ConfigError` where the activations of a document of so many tokens do not
        fit, however it is cut: none of its slices runs backward before all have run forward.
        """
        model, limit_bytes = self.model, self.limit_bytes
        again, divided = LAYERS if self.recomputes else NOTHING, model.parallelism.cp_size > 1
        whole = Slice(0, 0, num_tokens, num_tokens)
        units = UnitTable.of([Unit(num_tokens, whole, recomputed=again, divided=divided)])
        for rank in range(model.parallelism.pp_size):
            held_bytes = model.alive_bytes(rank, model.kept_bytes(rank, units))
            if held_bytes > limit_bytes and not self.host_bytes:
                raise ConfigError(
                    f"slices of a document of {num_tokens} tokens take {held_bytes / GIB:.2f} GiB "
                    f"at least, above the {limit_bytes / GIB:.2f} GiB that tensors may take"
                )

    def peak_bytes(self, units: Units) -> float:
        """The most that any rank of the pipeline holds in a step of these units."""
        table = UnitTable.of(units_of(units, self.multiple))
        program = Program(self.model, units.chains, table, window_bytes=units.window_bytes)
        return self.program_bytes(program, table.recomputed.astype(np.int64))

    def program_bytes(self, program: Program, again: Integers) -> float:
        """The same of a program of :meth:`programs`, if that is recomputed of its units."""
        return max(
            self.model.alive_bytes(rank, float(program.peaks(rank, again).max(initial=0.0)))
            for rank in range(self.model.parallelism.pp_size)
        )

    def programs(self, replicas: Sequence[Units]) -> list[Program]:
        """What replicas hold, whatever of their units is recomputed."""
        if not replicas:
            return []
        plain = [units._replace(recomputed=()) for units in replicas]
        tables = [UnitTable.of(units_of(units, self.multiple)) for units in plain]
        bytes_of = UnitBytes(self.model, tables)
        # Megatron cannot recompute MLPs with biases.
        kinds = [LAYERS] if self.model.shape.linear_bias else [MLPS, LAYERS]
        return [
            Program(
                self.model, units.chains, table, [*kinds, *([HOST] if units.window_bytes else [])],
                bytes_of=partial(bytes_of, at),
            )
            for at, (units, table) in enumerate(zip(replicas, tables, strict=True))
        ]  # fmt: skip

    def recomputed(
        self, program: Program, units: Units, given: Sequence[Recomputed], prices_us: Floats
    ) -> list[Recomputed]:
        """What of units is to be recomputed, besides what is ``given``, for a step to fit.

        ``program`` is theirs, of :meth:`programs`. ``prices_us`` ``[kinds, units]`` are what that
        takes, by :attr:`.Unit.recomputed`. Where a step does not fit with all of it, all that helps
        is. Nothing is hosted where it does not fit so.
        """
        again, kinds = np.array(given, dtype=np.int64), program.kinds
        ranks = range(self.model.parallelism.pp_size)
        left = [self.limit_bytes - self.model.state_bytes(rank).total for rank in ranks]
        hosted = np.zeros(len(again))
        if HOST in kinds:
            peaks = (program.peaks(rank, again).max(initial=0.0) for rank in ranks)
            if HOST not in again and all(
                peak <= most for peak, most in zip(peaks, left, strict=True)
            ):
                return [*given]
            left = [num_bytes - 2 * units.window_bytes for num_bytes in left]
            kept = [-(-program.saved(rank)[HOST] // SLAB_BYTES).sum(axis=1) for rank in ranks]
            hosted = SLAB_BYTES * np.max(kept, axis=0)
        seen: dict[int, Integers] = {}  # what was recomputed when a rank was looked at
        for _ in range(MOST_ROUNDS):
            before = again.copy()
            for rank in ranks:
                if rank in seen and (seen[rank] == again).all():
                    continue
                seen[rank] = again.copy()
                excess = program.peaks(rank, again) - left[rank]
                if excess.max(initial=0.0) > 0:
                    _choose(program, rank, excess, prices_us, again, hosted, self.host_bytes)
            if (again == before).all():
                break
        if HOST in again and any(
            program.peaks(rank, again).max(initial=0.0) > left[rank] for rank in ranks
        ):  # what waits in the host's memory is on the device while it runs
            without = [LAYERS if kind == HOST else kind for kind in given]
            units = units._replace(window_bytes=0.0)
            return self.recomputed(self.programs([units])[0], units, without, prices_us)
        return [*map(Recomputed, again.tolist())]


def _choose(
    program: Program,
    rank: int,
    excess: Floats,
    prices_us: Floats,
    again: Integers,
    hosted: Floats,
    host_bytes: float,
) -> None:
    """Sets ``again`` of units until a rank's ``excess`` ``[actions]`` is nowhere above 0, or
    nothing helps.

    Those that wait in the host's memory take ``hosted`` of its ``host_bytes``.
    """
    (begins, ends), every = program.passes(rank), program.saved(rank)
    kinds, now = program.kinds, (again, np.arange(len(again)))
    saved = every[kinds]
    # What a hosted unit keeps is there while it runs.
    while_run = saved * (np.array(kinds) != HOST)[:, None, None]
    more, own_more = saved - every[now], while_run - every[now] * (again != HOST)[:, None]
    prices_us = np.maximum(prices_us[kinds] - prices_us[now], LEAST_US)
    while (over := excess > 0).any():
        count = np.concatenate([[0], np.cumsum(over)])
        # Of a unit's passes the forward is over before, and the backward frees what it takes.
        saves = more * (count[ends + 1] - count[begins])
        saves += (own_more - more) * (over[begins].astype(np.int64) + over[ends])
        gains = saves.sum(axis=2) / prices_us
        if HOST in kinds:
            full = hosted > host_bytes - float(hosted[again == HOST].sum())
            gains[kinds.index(HOST), full | (again > 0)] = 0.0
        kind, best = divmod(int(gains.argmax()), len(again))
        if gains[kind, best] <= 0:
            return
        passes = begins[best], ends[best], more[kind, best], own_more[kind, best]
        for begin, end, num_bytes, own_bytes in zip(*passes, strict=True):
            excess[begin + 1 : end] -= num_bytes
            excess[begin] -= own_bytes
            excess[end] -= own_bytes
        for table, of in ((more, saved), (own_more, while_run)):
            table[:, best] = of[:, best] - of[kind, best]
        prices_us[:, best] = np.maximum(prices_us[:, best] - prices_us[kind, best], LEAST_US)
        again[best] = kinds[kind]
