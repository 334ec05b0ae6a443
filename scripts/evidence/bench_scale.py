#!/usr/bin/env python3
"""Tells whether planning stays cheap, and replicas stay balanced, on thousands of GPUs.

    scripts/evidence/bench_scale.py                           # 64 to 65,536 GPUs
    scripts/evidence/bench_scale.py --dp-sizes 1 16 --packing original,slim --seeds 1 2 3
    scripts/evidence/bench_scale.py --small                   # a moment: to see what it prints

LLaMA2-7B on H100 with TP 8, CP 2 and PP 4: a replica is 64 GPUs. Each has 8 windows of 131,072
tokens a step, so a step grows with the replicas (weak scaling). Every packing plans the same
documents, as every rank of a training run would, sharding included.

*Simulated*: speed, in work a second over original at the same size, and the slowest replica's work
over the mean. *Measured*, on this machine: CPU time of planning a step and of its digest, means
over the steps, and the bytes that a plan takes. The first two are of the steps after ``--warm-up``.
``--json`` prints the figures to stdout.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from _common import add_distribution, parser_of
from rich.table import Table

from megatron_wlb.cli import output
from megatron_wlb.cli.flags import flag
from megatron_wlb.cost import Execution, Parallelism, load_hardware
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import run_program
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.planner import Planner
from megatron_wlb.planning.run import Run
from megatron_wlb.reading import whole_number
from megatron_wlb.simulator.step import Simulator

DP_SIZES = (1, 8, 64, 256, 1024)
WINDOW = 131_072
EACH = 8
"""Windows of a replica, a step: the fewest with which PP 4 is worth its bubbles."""
SHARDING: Final = "adaptive"
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """How a packing does at a size."""

    num_devices: int
    packing: str
    speed: float
    """Simulated work a second, over original's."""
    dp_imbalance: float
    """Simulated: work of the slowest replica over the mean."""
    plan_ms: float
    """Measured CPU time of a step's plan."""
    digest_ms: float
    plan_mib: float
    """Measured memory of a plan."""


def run_of(dp_size: int) -> Run:
    """The run whose steps are planned and simulated."""
    layout = Parallelism(8, 2, 4, dp_size=dp_size, sequence_parallel=True)
    shape = padded_vocabulary(load_model("7b"), layout.tp_size)
    return Run(shape, Execution(layout), load_hardware("h100-sxm"), WINDOW, EACH * dp_size)


def steps_of(
    run: Run, planner: Planner, options: argparse.Namespace, on_step: Callable[[], object]
) -> Iterator[tuple[float, float, float, float, float]]:
    """Of each step: FLOPs, simulated µs, replicas' imbalance, ms of its plan and of its digest."""
    simulator, choose = Simulator(run.costs, run.parallelism), run.choose_each(SHARDING)
    for _ in range(options.warm_up):
        planner.skip()
        on_step()
    for _ in range(options.steps):
        start_s = time.process_time()
        plan = planner.next_plan()
        planned_s = time.process_time()
        assert plan is not None
        _ = plan.digest
        digested_s = time.process_time()
        rows = [[m.lengths for m in rank] for rank in plan.micro_batches]
        scales = [list(map(run.attention_scale, own, choose(own))) for own in rows]
        line = simulator.step(plan, scales)
        flops = run.flops([document.length for document in plan.documents])
        ms = 1e3 * (planned_s - start_s), 1e3 * (digested_s - planned_s)
        yield flops, line.step_us, line.dp_imbalance, *ms
        on_step()


def plan_bytes(planner: Planner) -> int:
    """The memory that goes with the next plan, of which a step before it is planned, too."""
    tracemalloc.start()
    try:
        planner.skip()  # documents that wait are made here
        plan = planner.next_plan()
        with_plan, _ = tracemalloc.get_traced_memory()
        del plan
        return with_plan - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def measure(dp_size: int, options: argparse.Namespace, on_step: Callable[[], object]) -> list[Row]:
    """One size, each packing."""
    run, source = run_of(dp_size), LengthSource.of_distribution(options.distribution)
    max_tokens = min(2 * WINDOW, run.max_tokens())
    total = options.warm_up + options.steps + 2
    result: list[Row] = []
    original = 1.0
    for name in options.packing:
        setting = PackingSettings.parse(name, WINDOW, max_tokens)
        steps: list[tuple[float, float, float, float, float]] = []
        num_bytes = []
        for seed in options.seeds:
            planner = run.workload(source, seed=seed).planner(
                setting, total, costs=run.costs, selector=run.selector(SHARDING)
            )
            steps += steps_of(run, planner, options, on_step)
            num_bytes.append(plan_bytes(planner))
            on_step()
        flops, us, *sums = (sum(each) for each in zip(*steps, strict=True))
        original = original if result else flops / us
        imbalance, plan_ms, digest_ms = (each / len(steps) for each in sums)
        size = sum(num_bytes) / len(num_bytes) / MIB
        speed = flops / us / original
        result.append(
            Row(run.num_devices, setting.title, speed, imbalance, plan_ms, digest_ms, size)
        )
    return result


def table_of(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    table = Table(
        title=f"7b, TP 8 × CP 2 × PP 4, {EACH} windows of {WINDOW:,} tokens a replica",
        caption=f"{options.steps} steps of each of {len(options.seeds)} seeds; speed and balance "
        "are simulated, ms and MiB are measured",
    )
    for name in ("GPUs", "packing", "speed", "DP imbalance", "plan ms", "digest ms", "plan MiB"):
        table.add_column(name, justify="left" if name == "packing" else "right")
    for number, row in enumerate(rows):
        if number and row.num_devices != rows[number - 1].num_devices:
            table.add_section()
        table.add_row(
            f"{row.num_devices:,}",
            row.packing,
            f"{row.speed:.3f}×",
            f"{row.dp_imbalance:.3f}",
            f"{row.plan_ms:,.1f}",
            f"{row.digest_ms:,.1f}",
            f"{row.plan_mib:,.2f}",
        )
    return table


def main() -> int:
    parser = parser_of(__doc__)
    flag(parser, "--dp-sizes N", "replicas of 64 GPUs", [*DP_SIZES], of=int)
    packings = ["original", "wlb", "hold", "slim"]
    flag(parser, "--packing a,b", "as for wlb pack; the first is compared with", packings)
    add_distribution(parser)
    flag(parser, "--seeds N", "of the random lengths", [1], of=int)
    flag(parser, "--steps N", "of each seed", 3)
    flag(parser, "--warm-up N", "steps before, in which queues fill", 10)
    flag(parser, "--manual-gc", "without Python's collector of cycles, as Megatron's flag has it")
    flag(parser, "--small", "1 and 2 replicas, one step, seed 1")
    parser.add_argument("--json", action="store_true", help='print {"rows": […]} to stdout')
    options = parser.parse_args()
    if options.manual_gc:
        gc.disable()
    if options.small:
        options.dp_sizes, options.seeds, options.steps, options.warm_up = [1, 2], [1], 1, 2
    whole_number("--steps", options.steps, 1, 1000)
    whole_number("--warm-up", options.warm_up, 0, 1000)
    for dp_size in options.dp_sizes:
        whole_number("--dp-sizes", dp_size, 1, DP_SIZES[-1])
    each = len(options.packing) * len(options.seeds) * (options.warm_up + options.steps + 1)
    rows: list[Row] = []
    with output.counting_bar("planning", each * len(options.dp_sizes)) as on_step:
        for dp_size in options.dp_sizes:
            rows += measure(dp_size, options, on_step)
    output.console(stderr=True).print(table_of(rows, options))
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
