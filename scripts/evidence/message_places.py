#!/usr/bin/env python3
"""Shows what it costs that slices send their outputs by the plan's timeline.

    scripts/evidence/message_places.py                # a minute
    scripts/evidence/message_places.py --noise 0.2

Real plans of 7B run with passes that take other times than the plan's, under NCCL's rules with one
queue: a pass or a message starts behind all that its rank called before, and a message when the one
before it on its communicator is done. Told is the time of a step over that of the same passes whose
messages wait for nothing. Everything is simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

import numpy as np
from _common import parser_of

from megatron_wlb import Parallelism, model_cost, plan_steps, sample_lengths
from megatron_wlb.cost.schedule.graph import Floats, Graph
from megatron_wlb.cost.schedule.messages import AHEAD, departures
from megatron_wlb.cost.schedule.order import Order, sliced
from megatron_wlb.errors import run_program

LAYOUTS = ((4, 1, 16), (8, 1, 32), (2, 2, 16), (4, 2, 16), (8, 2, 32), (4, 4, 4), (4, 8, 16),
           (2, 8, 16))  # fmt: skip
"""PP, VPP and N; with as many data-parallel replicas as make 64 devices at TP 2, CP 2."""
STEPS = 4


class Call(NamedTuple):
    """A pass of a rank, by its number, or a message, by the rank and number of its pass."""

    kind: str
    number: int
    message: tuple[int, int] | None = None


def programs(order: Order) -> list[list[Call]]:
    """What each rank calls, one after another."""
    places = [(rank, at) for rank, own in enumerate(order) for at in range(len(own))]
    pairs = zip(*Graph(order).inputs(), strict=True)
    needs = {places[needed]: places[source] for source, needed in pairs}
    result = []
    for rank, own in enumerate(order):
        calls, called, leaving = list[Call](), 0, departures(order, rank)
        for at in range(len(own)):
            for later in range(called, min(at + AHEAD, len(own) - 1) + 1):
                if (rank, later) in needs:
                    calls.append(Call("recv", later, needs[rank, later]))
            called = at + AHEAD + 1
            calls.append(Call("pass", at, needs.get((rank, at))))
            calls += [Call("send", source, (rank, source)) for source in leaving[at]]
        result.append(calls)
    return result


def step_us(order: Order, times_us: Floats, gap_us: float) -> float:
    """The time of a step under the rules, of passes that take ``times_us`` ``[2, S, N]``."""
    pp_size, ranks = len(order), programs(order)
    done: dict[tuple[int, int], float] = {}
    started: dict[tuple[str, tuple[int, int]], float] = {}
    before: dict[tuple[int, str, str], tuple[int, int]] = {}  # on a communicator
    free, called, place = [0.0] * pp_size, [0.0] * pp_size, [0] * pp_size

    def run(rank: int, call: Call) -> bool:
        """Lets a rank come past a call, if what that waits for is known."""
        action = order[rank][call.number]
        if call.kind == "pass":
            if call.message is not None and call.message not in done:
                return False
            came_us = 0.0 if call.message is None else done[call.message]
            own_us = times_us[int(action.kind == "B"), action.chunk * pp_size + rank]
            start_us = max(free[rank], called[rank], came_us)
            free[rank] = start_us + float(own_us[action.micro_batch])
            return True
        assert call.message is not None
        channel = rank, call.kind, action.kind
        if (last := before.get(channel)) is not None:
            if last not in done:
                return False
            called[rank] = max(called[rank], done[last])
        called[rank] = max(called[rank], free[rank])
        before[channel], started[call.kind, call.message] = call.message, called[rank]
        other = started.get(("send" if call.kind == "recv" else "recv", call.message))
        if other is not None:
            done[call.message] = max(other, called[rank]) + gap_us
        return True

    moved = True
    while moved:
        moved = False
        for rank, calls in enumerate(ranks):
            while place[rank] < len(calls) and run(rank, calls[place[rank]]):
                place[rank] += 1
                moved = True
    assert place == [len(calls) for calls in ranks], "the plan hangs"
    return max(free)


def ratios(
    pp_size: int, vpp_size: int, num: int, noise: float, gap: float, seed: int
) -> Iterator[float]:
    """Of some steps of a layout; messages take ``gap`` of a mean forward."""
    layout = Parallelism(2, 2, pp_size, vpp_size, dp_size=16 // pp_size, sequence_parallel=True)
    drawn = np.random.default_rng(seed)
    plans = plan_steps(
        sample_lengths("reference", STEPS * num, seed=seed), window=131072, num_micro_batches=num,
        packing="slim", cost=model_cost("7b", layout, hardware="h100-sxm"), layout=layout,
    )  # fmt: skip
    for plan in plans:
        for own, chains in list(zip(plan.micro_batches, plan.chains, strict=True))[:2]:
            work = np.array([m.predicted_us for m in own])
            times_us = np.array([1.0, 2.0])[:, None, None] * work / work.mean()
            times_us = times_us * drawn.lognormal(0, noise, (2, layout.num_stages, len(own)))
            order = sliced(pp_size, chains, vpp_size)
            free_us = Graph(order).step_us(times_us, np.full(len(own), gap))
            yield step_us(order, times_us, gap) / float(free_us)


def main() -> int:
    """Prints a line for each layout."""
    parser = parser_of(__doc__)
    parser.add_argument("--noise", type=float, default=0.1, help="spread of passes' times (0.1)")
    parser.add_argument("--gap", type=float, default=0.1, help="of a message, in forwards (0.1)")
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    for layout in LAYOUTS:
        found = [*ratios(*layout, args.noise, args.gap, args.seed)]
        print(
            "PP {} VPP {} N {}: ".format(*layout)
            + f"{fmean(found):.4f} (mean of {len(found)}), {max(found):.3f} at most"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
