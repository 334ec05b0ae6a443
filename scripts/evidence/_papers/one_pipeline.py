"""Slim packing on one pipeline of reference lengths, beside `hold` and other backward units.

SlimPack (2025) makes backward units of their own (§4.1.2), as attention's backward costs more than
twice its forward. :func:`unlike` says what that could gain over units that serve both passes.
Everything here is *simulated*.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

from _papers.paper import TABLE_1, Effort, max_tokens, scenario
from megatron_wlb.cost import DocumentCost, Parallelism
from megatron_wlb.cost.analytic import BACKWARD_ATTENTION, BACKWARD_LINEAR
from megatron_wlb.cost.schedule.graph import Graph
from megatron_wlb.cost.schedule.order import run_ahead
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.plan.sharding.select import Mode
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.reference import REFERENCE_COST, REFERENCE_WINDOW
from megatron_wlb.planning.run import Workload
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.simulator.trial import Outcome, trial, trials

UNLIKE_COST = DocumentCost(
    REFERENCE_COST.forward_linear_us,
    REFERENCE_COST.forward_quadratic_us,
    BACKWARD_LINEAR * REFERENCE_COST.forward_linear_us,
    BACKWARD_ATTENTION * REFERENCE_COST.forward_quadratic_us,
)
"""The reference cost, but attention's backward takes 2.5 forwards and all else's takes 2."""
PP_SIZE = 4
SLICE_MULTIPLE = 128
LEAST_CUT = 256
"""Documents of fewer tokens are left whole."""


def drawn(
    num_micro_batches: int,
    seed: int,
    data: str = "reference",
    window: int = REFERENCE_WINDOW,
    pp_size: int = PP_SIZE,
) -> Workload:
    """Lengths of a distribution on one pipeline."""
    source, layout = LengthSource.of_distribution(data), Parallelism(pp_size=pp_size)
    return Workload(source, window, num_micro_batches, UNLIKE_COST, seed, layout=layout)


def pipeline(
    packing: str,
    num_micro_batches: int,
    vpp_size: int,
    effort: Effort,
    shardings: Sequence[Mode] = ("adaptive",),
    *,
    overlapped: bool = False,
) -> list[Outcome]:
    """Simulates steps of 7B in its layout of Table 1, once with each sharding.

    ``overlapped``: tensor-parallel collectives as stock Megatron can overlap them.
    """
    base = scenario("7b", REFERENCE_WINDOW, TABLE_1["7b", REFERENCE_WINDOW], vpp_size)
    run = replace(base, num_micro_batches=num_micro_batches)
    limit = max_tokens(run) if packing == "hold" else REFERENCE_WINDOW
    return trials(
        run.overlapped if overlapped else run,
        PackingSettings.parse(packing, REFERENCE_WINDOW, limit),
        effort.of("reference"),
        shardings,
    )


BEST_FOR_ORIGINAL = Parallelism(2, 8, 2, 8, 2, sequence_parallel=True)
"""What `wlb plan` finds for `original`: 7B on 64 GPUs, N = 16 (docs/results/slices.md)."""


def overlap_gain(effort: Effort) -> float:
    """What overlapped tensor-parallel collectives gain `original` in the layout best for it."""
    base = scenario("7b", REFERENCE_WINDOW, TABLE_1["7b", REFERENCE_WINDOW])
    execution = replace(base.execution, parallelism=BEST_FOR_ORIGINAL)
    run = replace(base, execution=execution, num_micro_batches=16)
    setting = PackingSettings.parse("original", REFERENCE_WINDOW, REFERENCE_WINDOW)
    without, with_overlap = (
        trial(one, setting, effort.of("reference")) for one in (run, run.overlapped)
    )
    return with_overlap.speedup(without)


class Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a document."""

    document: int
    start: int
    stop: int


class Pass(NamedTuple):
    """What a pass over pieces of documents takes: their tokens, and the pairs that they make."""

    us_per_token: float
    us_per_pair: float

    def us(self, piece: Piece) -> float:
        pairs = piece.stop**2 - piece.start**2
        return self.us_per_token * (piece.stop - piece.start) + self.us_per_pair * pairs


FORWARD = Pass(UNLIKE_COST.forward_linear_us, UNLIKE_COST.forward_quadratic_us)
BACKWARD = Pass(UNLIKE_COST.backward_linear_us, UNLIKE_COST.backward_quadratic_us)
BOTH = Pass(*map(sum, zip(FORWARD, BACKWARD, strict=True)))
UNLIKE = ("own cuts", "cuts of the sum", "unions of 2", "unions of 4", "no bubbles")


class Unlike(NamedTuple):
    """Other units than slim packing's, on one pipeline."""

    num_units: float
    """Units that slim packing chooses, in the mean over seeds."""
    speedup: dict[str, tuple[float, ...]]
    """What each of :data:`UNLIKE` gains over slim packing, by seed."""


def unlike(
    num_micro_batches: int,
    effort: Effort,
    data: str = "reference",
    window: int = REFERENCE_WINDOW,
    pp_size: int = PP_SIZE,
) -> Unlike:
    """Tries other units for the backward pass, of the same documents and as many forward units.

    ``own cuts``: both passes have cuts of their own, at equal cost of that pass. ``cuts of the
    sum``: the same at equal cost of both passes together, so the difference is due to the cost.
    ``unions``: backward units of so many forward slices, of equal backward cost as far as these
    give it. ``no bubbles``: what no packing exceeds. All but slim packing's units may hold the end
    of a document and the beginning of the next. For each step two orders are tried: the lead over
    the backward passes is worked off, or stays. The better one counts.
    """
    found: dict[str, list[float]] = {name: [] for name in UNLIKE}
    counts = []
    costs = StepCosts(StageCosts.even(UNLIKE_COST, pp_size))
    simulator = Simulator(costs, Parallelism(pp_size=pp_size))
    for seed in effort.seeds:
        slim_us, total_us = 0.0, dict.fromkeys(UNLIKE, 0.0)
        workload = drawn(num_micro_batches, seed, data, window, pp_size)
        planner = workload.planner(PackingSettings("slim", window), effort.steps)
        for plan in planner.plans(effort.steps):
            line = simulator.step(plan)
            slim_us += line.step_us
            total_us["no bubbles"] += float(line.times_us[0].sum()) / pp_size
            lengths = sorted((document.length for document in plan.documents), reverse=True)
            num = len(plan.micro_batches[0])
            counts.append(num)
            forward = cut(lengths, num, FORWARD)
            for name, units in (
                ("own cuts", (forward, cut(lengths, num, BACKWARD, last_first=True))),
                ("cuts of the sum",
                 (cut(lengths, num, BOTH), cut(lengths, num, BOTH, last_first=True))),
                ("unions of 2", (forward, _unions(forward, num // 2))),
                ("unions of 4", (forward, _unions(forward, num // 4))),
            ):  # fmt: skip
                total_us[name] += step_us(*units, pp_size)
        for name, us in total_us.items():
            found[name].append(slim_us / us)
    return Unlike(float(np.mean(counts)), {name: tuple(each) for name, each in found.items()})


Cut: TypeAlias = list[list[Piece]]
"""Units of pieces, in running order."""


def step_us(forward: Cut, backward: Cut, pp_size: int = PP_SIZE) -> float:
    """A step in which each backward unit follows the forwards of all its documents.

    There are at least as many forward units as backward ones.
    """
    last = {piece.document: at for at, unit in enumerate(forward) for piece in unit}
    num = max(len(forward), len(backward))
    times_us, needed = np.zeros((2, num)), list(range(1, num + 1))
    for row, units, cost in ((0, forward, FORWARD), (1, backward, BACKWARD)):
        for at, unit in enumerate(units):
            # The fewer units stand evenly among those of no time.
            place = (at + 1) * num // len(units) - 1
            times_us[row, place] = sum(map(cost.us, unit))
            if row:
                needed[place] = max(place + 1, 1 + max(last[p.document] for p in unit))
    steady = list(accumulate(needed, lambda before, own: min(num, max(own, before + 1))))
    stages_us = np.repeat(times_us[:, None] / pp_size, pp_size, axis=1)
    lead = max(1, round(len(forward) / len(backward)))
    orders = (run_ahead(pp_size, range(num), each, lead) for each in (needed, steady))
    return min(float(Graph(order).step_us(stages_us, np.zeros(num))) for order in orders)


def cut(lengths: Sequence[int], num_units: int, cost: Pass, *, last_first: bool = False) -> Cut:
    """Units of equal cost, of documents in a line; within each forwards run first to last."""
    unit_us = sum(cost.us(Piece(0, 0, length)) for length in lengths) / num_units
    units: Cut = [[]]
    done_us = 0.0
    for document, length in enumerate(lengths):
        start, stop = 0, length
        while start < stop:
            piece = Piece(document, start, stop)
            missing_us = len(units) * unit_us - done_us
            if len(units) < num_units and cost.us(piece) > missing_us:
                at = _cut_at(piece, missing_us, cost, last_first)
                piece = Piece(document, at, stop) if last_first else Piece(document, start, at)
            if piece.start < piece.stop:
                units[-1].append(piece)
                done_us += cost.us(piece)
                start, stop = (start, piece.start) if last_first else (piece.stop, stop)
            if len(units) < num_units and (start < stop or done_us >= len(units) * unit_us):
                units.append([])
    return [unit for unit in units if unit]


def _cut_at(piece: Piece, us: float, cost: Pass, last_first: bool) -> int:
    """The multiple nearest to ``us`` from where the piece begins to run, or one of its ends."""
    document, start, stop = piece
    us = cost.us(piece) - us if last_first else us
    places = [start, stop]
    if stop - start >= LEAST_CUT:
        places[1:1] = range(
            -(-(start + 1) // SLICE_MULTIPLE) * SLICE_MULTIPLE, stop, SLICE_MULTIPLE
        )

    def us_to(place: int) -> float:
        return cost.us(Piece(document, start, place))

    at = bisect_left(places, us, key=us_to)
    return min(places[max(0, at - 1) : at + 1], key=lambda place: abs(us_to(place) - us))


def _unions(forward: Cut, num_units: int) -> Cut:
    """Backward units of whole forward pieces, as near to equal cost as they give."""
    pieces = [piece for unit in forward for piece in unit]
    pieces.sort(key=lambda piece: (piece.document, -piece.start))
    total_us, done_us = sum(map(BACKWARD.us, pieces)), 0.0
    units: Cut = [[] for _ in range(num_units)]
    for piece in pieces:
        us = BACKWARD.us(piece)
        units[min(num_units - 1, int((done_us + us / 2) / total_us * num_units))].append(piece)
        done_us += us
    return [unit for unit in units if unit]
