#!/usr/bin/env python3
"""Measures shaped plans: how much shorter simulated steps get, and how long shaping takes.

    scripts/evidence/bench_shape.py                   # the reference set-ups
    scripts/evidence/bench_shape.py --pp 8 --vpp 2 --num-micro-batches 64 --seeds 5 --steps 50
    scripts/evidence/bench_shape.py --num-micro-batches 16 --plot shaped.png    # draws a step

The documents are those of ``hold`` with S_max of two windows on a synthetic heavy-tailed
distribution, the cost that of LLaMA2-7B (attention 2.5 and all else 2 times as long backward as
forward), equal stages, no time for transfers; the time of a document of a window without attention
is a second. *packed* is the order in which the packing gives its balanced micro-batches, *small
ends* the one in which they run without shaping: smallest first and last. Step times are simulated,
with sends as Megatron's schedule has them; ms of planning are process CPU time on this machine.
``--json`` prints the figures to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from _common import add_distribution, add_seeds, parser_of, verdict
from rich.progress import track
from rich.table import Table

from megatron_wlb.cli import output
from megatron_wlb.cli.flags import flag
from megatron_wlb.cost import DocumentCost, Parallelism
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.data.lengths import REFERENCE_WINDOW, sample_lengths
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.plan import Document, MicroBatchPlan
from megatron_wlb.planning.balance.shaping import Shaper
from megatron_wlb.planning.packing import packer
from megatron_wlb.planning.planner import Planner
from megatron_wlb.reading import whole_number
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.study.plot import plot_timelines

COST = DocumentCost(
    forward_linear_us=1e6 / REFERENCE_WINDOW,
    forward_quadratic_us=3.27e6 / REFERENCE_WINDOW**2,
    backward_linear_us=2e6 / REFERENCE_WINDOW,
    backward_quadratic_us=2.5 * 3.27e6 / REFERENCE_WINDOW**2,
)
WARM_UP_STEPS = 30
console = output.console(stderr=True)


@dataclass(frozen=True)
class Case:
    """A set-up, and by how much its shaped steps are to be faster than packed ones."""

    num_micro_batches: int
    """Of all data-parallel ranks."""
    pp: int = 4
    vpp: int = 1
    dp: int = 1
    wanted: float | None = None


CASES = (
    Case(4, wanted=0.03),
    Case(16, wanted=0.04),
    Case(16, vpp=2, wanted=0.02),
    Case(64),
    Case(64, dp=4),
    Case(64, vpp=2),
    Case(64, pp=16, vpp=4),
)
WANTED_MS = 50.0
"""Of CPU time, at 64 micro-batches."""


@dataclass(frozen=True)
class Step:
    """Simulated times of one step's documents, and the time that shaping them took."""

    packed_us: float
    small_ends_us: float
    shaped_us: float
    shaping_ms: float
    imbalance: float
    """Of the shaped micro-batches."""


Ranks: TypeAlias = list[list[list[Document]]]


def balanced_steps(
    case: Case, options: argparse.Namespace, seed: int
) -> Iterator[tuple[Ranks, Ranks]]:
    """One after another, in the packing's order and in that in which the planner runs them."""
    num, total = case.num_micro_batches, WARM_UP_STEPS + options.steps
    stream = DocumentStream(
        [sample_lengths(options.distribution, num * (total + 1), seed=seed)],
        window=REFERENCE_WINDOW,
        step_tokens=num * REFERENCE_WINDOW,
        seed=seed,
    )
    packing = packer(
        "hold",
        num_micro_batches=num,
        window=REFERENCE_WINDOW,
        cost=COST,
        max_tokens=s_max(options),
    )
    planner = Planner(stream, packing, COST, dp_size=case.dp)
    for number in range(total):
        plan = planner.next_plan()
        assert plan is not None
        if number >= WARM_UP_STEPS:
            packed = [sorted(rank, key=lambda m: m.index) for rank in plan.micro_batches]
            yield documents_of(packed), documents_of(plan.micro_batches)


def documents_of(ranks: Sequence[Sequence[MicroBatchPlan]]) -> Ranks:
    return [[[span.document for span in m.spans] for m in rank] for rank in ranks]


def s_max(options: argparse.Namespace) -> int:
    return int(options.max_windows * REFERENCE_WINDOW)


def costs_of(case: Case) -> tuple[StepCosts, Parallelism]:
    layout = Parallelism(pp_size=case.pp, vpp_size=case.vpp, dp_size=case.dp)
    return StepCosts(StageCosts.even(COST, layout.num_stages)), layout


def shaper_of(case: Case, options: argparse.Namespace) -> Shaper:
    costs, layout = costs_of(case)
    return Shaper(
        costs,
        layout,
        num_micro_batches=case.num_micro_batches // case.dp,
        max_tokens=s_max(options),
        window=REFERENCE_WINDOW,
    )


def steps_of(case: Case, options: argparse.Namespace, seed: int) -> list[Step]:
    shaper = shaper_of(case, options)
    result = []
    for packed, small_ends in balanced_steps(case, options, seed):
        start_s = time.process_time()
        shaped = shaper.shape(small_ends)
        shaping_s = time.process_time() - start_s
        check(small_ends, shaped, s_max(options))
        work = [COST.total_us(d.length for d in m) for rank in shaped for m in rank]
        result.append(
            Step(
                shaper.step_us(packed),
                shaper.step_us(small_ends),
                shaper.step_us(shaped),
                shaping_s * 1e3,
                max(work) * len(work) / sum(work),
            )
        )
    return result


def plot(case: Case, options: argparse.Namespace) -> None:
    """The first step of the first seed, balanced and shaped."""
    costs, layout = costs_of(case)
    _, balanced = next(balanced_steps(case, options, options.seeds[0]))
    lines = {}
    shaped = shaper_of(case, options).shape(balanced)
    for name, ranks in (("balanced", balanced), ("shaped", shaped)):
        lengths = [[[d.length for d in m] for m in rank] for rank in ranks]
        lines[name] = Simulator(costs, layout).step(lengths).timeline
    title = f"One step of hold, PP={case.pp}, {case.num_micro_batches} micro-batches"
    plot_timelines(lines, options.plot, title, measured=False)


def check(
    before: Sequence[Sequence[Sequence[Document]]],
    after: Sequence[Sequence[Sequence[Document]]],
    max_tokens: int,
) -> None:
    """Raises AssertionError if a document was lost, doubled, or a micro-batch is too long."""

    def keys(ranks: Sequence[Sequence[Sequence[Document]]]) -> list[tuple[int, int]]:
        return sorted(d.key for rank in ranks for m in rank for d in m)

    assert keys(before) == keys(after)
    assert max(sum(d.length for d in m) for rank in after for m in rank) <= max_tokens


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """One row: over all steps of all seeds."""
    runs = [steps_of(case, options, seed) for seed in options.seeds]
    steps = [step for run in runs for step in run]

    def gain(name: str, over: Sequence[Step]) -> float:
        """Speed: total time before ÷ after, less 1."""
        before_us: float = sum(getattr(s, name) for s in over)
        return before_us / sum(s.shaped_us for s in over) - 1

    by_seed = [gain("packed_us", run) for run in runs]
    return {
        "num_micro_batches": case.num_micro_batches,
        "pp": case.pp,
        "vpp": case.vpp,
        "dp": case.dp,
        "gain_over_packed": gain("packed_us", steps),
        "gain_over_packed_lowest_seed": min(by_seed),
        "gain_over_packed_highest_seed": max(by_seed),
        "gain_over_small_ends": gain("small_ends_us", steps),
        "worst_step_over_small_ends": min(s.small_ends_us / s.shaped_us - 1 for s in steps),
        "imbalance_shaped": float(np.mean([s.imbalance for s in steps])),
        "shaping_ms_mean": float(np.mean([s.shaping_ms for s in steps])),
        "shaping_ms_p95": float(np.percentile([s.shaping_ms for s in steps], 95)),
        "steps": len(steps),
        "wanted_gain": case.wanted,
    }


def cases_of(options: argparse.Namespace) -> Sequence[Case]:
    given = (options.num_micro_batches, options.pp, options.vpp, options.dp)
    if given == (None,) * 4:
        return CASES
    sizes = [own if size is None else size for size, own in zip(given, (16, 4, 1, 1), strict=True)]
    for name, size in zip(("num-micro-batches", "pp", "vpp", "dp"), sizes, strict=True):
        whole_number(f"--{name}", size, 1)
    case = Case(*sizes)
    if case.num_micro_batches % case.dp:
        raise ConfigError(
            f"{case.num_micro_batches} micro-batches do not divide over DP {case.dp}; give a "
            "multiple"
        )
    return [case]


def main() -> int:
    parser = parser_of(__doc__)
    flag(parser, "--num-micro-batches N", "over all DP ranks")
    flag(parser, "--pp N", "pipeline ranks (default: 4)")
    flag(parser, "--vpp N", "chunks a pipeline rank (default: 1)")
    flag(parser, "--dp N", "data-parallel ranks (default: 1)")
    flag(parser, "--max-windows X", "S_max", 2.0)
    add_distribution(parser)
    add_seeds(parser)
    flag(parser, "--steps N", "of each seed", 60)
    flag(parser, "--plot FILE", "PNG or SVG of one step")
    parser.add_argument("--json", action="store_true", help='print {"rows": […]} to stdout')
    options = parser.parse_args()
    table = Table("N", "PP", "VPP", "DP", "over packed", "seeds", "over small ends",
                  "worst step", "imbalance", "ms (p95)", "wanted")  # fmt: skip
    table.title = f"shaped steps, simulated: how much faster ({options.distribution} lengths)"
    whole_number("--steps", options.steps, 1)
    rows = []
    for case in track(cases_of(options), "shaping", console=console, transient=True):
        row = measure(case, options)
        rows.append(row)
        misses = []
        if case.wanted is not None and row["gain_over_packed"] < case.wanted:
            misses.append(f"gain < {case.wanted:.0%}")
        if case.num_micro_batches <= 64 and row["shaping_ms_p95"] > WANTED_MS:
            misses.append(f"ms > {WANTED_MS:.0f}")
        table.add_row(
            str(case.num_micro_batches), str(case.pp), str(case.vpp), str(case.dp),
            f"{row['gain_over_packed']:.2%}",
            f"{row['gain_over_packed_lowest_seed']:.2%} … "
            f"{row['gain_over_packed_highest_seed']:.2%}",
            f"{row['gain_over_small_ends']:.2%}",
            f"{row['worst_step_over_small_ends']:.2%}",
            f"{row['imbalance_shaped']:.2f}",
            f"{row['shaping_ms_mean']:.1f} ({row['shaping_ms_p95']:.1f})",
            verdict(misses),
        )  # fmt: skip
    console.print(table)
    if options.plot:
        plot(cases_of(options)[0], options)
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
