#!/usr/bin/env python3
r"""Puts a step's samples through the planners of other trainers and through ours.

    scripts/evidence/arena.py --slime ~/slime --verl ~/verl --nemo-rl ~/RL \
        --megatron ~/Megatron-LM --prime-rl ~/prime-rl --torchtitan ~/torchtitan --distca ~/DistCA

The planners of the checkouts run as they are, with this step's lengths and one cap of tokens:

* slime: `build_dp_schedule`, first fit, and with `--balance-by-flops`;
* verl: samples to ranks and then to micro-batches by `get_seqlen_balanced_partitions`, as its
  trainer and `rearrange_micro_batches` do. Its file runs alone, without ray and tensordict;
* NeMo-RL: `modified_first_fit_decreasing`, its bins to ranks in turns;
* Megatron-LM's branch dev: `DpBalancedScheduler`;
* prime-rl: `packed_samples_into_micro_bs`, its bins to ranks by FLOPs;
* torchtitan: the RL trainer's `Batcher`, next fit, its rows to ranks in turns;
* DistCA: `balance_data_for_wlbllm`, which it compares itself with, in as few micro-batches as fit;
* ours: `plan_batch` with whole samples and with slices.

*Simulated*: the time of a step of a 7B model on H100s, with our model of costs, once for each time
of a launch in `--kernel-us`, and the peak of memory. *Counted*: micro-batches above the cap, and
steps whose peak is above a device's memory. *Measured*: CPU time of planning. ``--json`` prints the
figures to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from _common import add_seeds, parser_of, verdict
from _rivals import (
    Planner,
    Schedule,
    distca,
    megatron,
    nemo_rl,
    prime_rl,
    slime,
    torchtitan,
    verl,
)
from rich.table import Table

from megatron_wlb.cli import output
from megatron_wlb.cli.flags import flag
from megatron_wlb.cost import Execution, Parallelism, load_hardware
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.data.lengths import DISTRIBUTIONS, sample_lengths
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.plan import StepPlan, Units
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts
from megatron_wlb.planning.balance.samples import (
    plan_of,
    plan_samples,
    replica_of,
    sample,
    slice_samples,
)
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.step import Simulator

LAYOUTS = {
    "PP 1, DP 8": Parallelism(tp_size=8, dp_size=8, sequence_parallel=True),
    "PP 4, DP 4": Parallelism(tp_size=4, pp_size=4, dp_size=4, sequence_parallel=True),
    "PP 4, DP 2, CP 2": Parallelism(4, 2, 4, dp_size=2, sequence_parallel=True),
}
LENGTHS = ("reference", "slimpack", "stdlib", "magi", "conversations", "rollouts")
"""Four of pretraining, one of fine-tuning, one of reinforcement learning."""
WINDOW = 65536
"""The longest sample; longer ones are left out."""
MOST = 64
"""A plan is simulated though a micro-batch is above the cap, up to so many times."""
RIVALS = (
    "--slime", "--verl", "--nemo-rl", "--megatron", "--prime-rl", "--torchtitan", "--distca",
)  # fmt: skip


@dataclass
class Row:
    """What a planner came to in one layout, over all lengths and seeds."""

    layout: str
    planner: str
    kernel_us: float
    ratio: float
    """Simulated time of a step over that of ours with whole samples, geometric mean."""
    lowest: float
    highest: float
    over_cap: int
    """Micro-batches above the cap."""
    most_of_cap: float
    over_memory: int
    """Steps whose peak is above a device's memory."""
    plan_ms: float
    """Median."""


@dataclass
class Against:
    """Ours against the fastest rival of each step."""

    layout: str
    planner: str
    kernel_us: float
    ratio: float
    """Simulated time over the fastest rival's, geometric mean over all steps."""
    within_cap: float
    """The same over the fastest rival that keeps the cap."""
    by_lengths: dict[str, float]


@dataclass
class Step:
    """A planner's step of one distribution and seed."""

    lengths: str
    step_us: float
    over_cap: int
    most_of_cap: float
    over_memory: bool
    seconds: float


def draw(name: str, seed: int) -> list[int]:
    """Lengths up to ``WINDOW``, in an order of their own.

    Conversations are lognormal with median 600 and σ 1.1. Rollouts are a prompt of 256 and an
    answer, lognormal with median 5000 and σ 1, that ends at 32768. Both are assumed.
    """
    random = np.random.default_rng(seed)
    if name == "conversations":
        drawn = np.maximum(8, random.lognormal(np.log(600), 1.1, 4096).astype(int)).tolist()
    elif name == "rollouts":
        answers = np.minimum(32768, random.lognormal(np.log(5000), 1.0, 4096).astype(int))
        drawn = (256 + answers).tolist()
    else:
        assert name in DISTRIBUTIONS
        drawn = sample_lengths(name, 400, seed=seed, window=WINDOW).tolist()
    return [n for n in drawn if n <= WINDOW]


def ours(run: Run, cap: int) -> dict[str, Planner]:
    def with_slices(lengths: list[int]) -> StepPlan:
        return slice_samples(lengths, cap, run.cost, run.costs, run.parallelism)

    def of_whole(lengths: list[int]) -> StepPlan:
        return plan_samples(lengths, cap, run.costs, run.parallelism)

    return {"ours, whole": of_whole, "ours, slices": with_slices}


def check(title: str, schedule: Schedule, lengths: Sequence[int]) -> None:
    """Raises :class:`ConfigError` where a sample is lost or runs twice."""
    if sorted(n for rank in schedule for one in rank for n in one) != list(range(len(lengths))):
        raise ConfigError(f"{title} does not run each of {len(lengths)} samples once")


def steps_of(
    runs: dict[float, Run], planners: dict[float, dict[str, Planner]], args: argparse.Namespace
) -> dict[tuple[float, str], list[Step]]:
    """Each planner's steps by what a launch takes. Plans of others do not depend on that."""
    found: dict[tuple[float, str], list[Step]] = defaultdict(list)
    cap = args.cap
    for distribution in LENGTHS:
        for seed in args.seeds:
            lengths = draw(distribution, seed)[: args.samples]
            known: dict[str, tuple[Schedule, float]] = {}
            for kernel_us, run in runs.items():
                replica = replica_of(run.costs, run.parallelism, MOST * cap)
                simulator = Simulator(run.costs, run.parallelism, memory=run.memory)
                for name, planner in planners[kernel_us].items():
                    if name in known:
                        given, seconds = known[name]
                        plan = plan_of(name, units_of(given, lengths, replica), replica)
                    else:
                        start_s = time.process_time()
                        made = planner(lengths)
                        seconds = time.process_time() - start_s
                        if isinstance(made, StepPlan):
                            plan = made
                        else:
                            check(name, made, lengths)
                            known[name] = made, seconds
                            plan = plan_of(name, units_of(made, lengths, replica), replica)
                    step_us = simulator.step(plan, with_memory=False).step_us
                    peak = max(one.peak_bytes for one in simulator.plan_memory(plan))
                    tokens = [m.length for m in plan]
                    found[kernel_us, name].append(
                        Step(
                            distribution, step_us, sum(n > cap for n in tokens), max(tokens) / cap,
                            peak > run.limit_gib * GIB, seconds,
                        )
                    )  # fmt: skip
    return found


def units_of(schedule: Schedule, lengths: Sequence[int], replica: ReplicaCosts) -> list[Units]:
    return [
        replica.units([[sample(n, lengths[n]) for n in one] for one in rank]) for rank in schedule
    ]


def mean(ratios: Iterable[float]) -> float:
    """Geometric."""
    return float(np.exp(np.mean(np.log(list(ratios)))))


def rows_of(layout: str, found: dict[tuple[float, str], list[Step]]) -> list[Row]:
    rows = []
    for (kernel_us, name), steps in found.items():
        base = found[kernel_us, "ours, whole"]
        ratios = [one.step_us / whole.step_us for one, whole in zip(steps, base, strict=True)]
        rows.append(
            Row(
                layout, name, kernel_us, mean(ratios), min(ratios), max(ratios),
                sum(one.over_cap for one in steps), max(one.most_of_cap for one in steps),
                sum(one.over_memory for one in steps),
                1e3 * float(np.median([one.seconds for one in steps])),
            )
        )  # fmt: skip
    return rows


def against(layout: str, found: dict[tuple[float, str], list[Step]]) -> list[Against]:
    """Empty without rivals."""
    result = []
    for kernel_us in dict.fromkeys(kernel_us for kernel_us, _ in found):
        rivals = [
            steps
            for (other_us, name), steps in found.items()
            if other_us == kernel_us and not name.startswith("ours")
        ]
        if not rivals:
            continue
        best = [min(one.step_us for one in turn) for turn in zip(*rivals, strict=True)]
        kept = [
            min((one.step_us for one in turn if not one.over_cap), default=float("nan"))
            for turn in zip(*rivals, strict=True)
        ]
        for name in ("ours, whole", "ours, slices"):
            own = found[kernel_us, name]
            ratios = [one.step_us / us for one, us in zip(own, best, strict=True)]
            by_lengths = {
                which: mean(r for one, r in zip(own, ratios, strict=True) if one.lengths == which)
                for which in LENGTHS
            }
            within = mean(one.step_us / us for one, us in zip(own, kept, strict=True))
            result.append(Against(layout, name, kernel_us, mean(ratios), within, by_lengths))
    return result


def main() -> int:
    parser = parser_of(__doc__)
    for rival in RIVALS:
        about = f"a checkout of {rival.strip('-')}"
        parser.add_argument(rival, type=Path, metavar="FOLDER", help=about)
    flag(parser, "--samples N", "of a step", 512)
    flag(parser, "--cap TOKENS", "of a micro-batch", WINDOW)
    flag(
        parser,
        "--kernel-us US",
        "what a kernel takes besides its work",
        [5.0, 10.288, 15.0],
        of=float,
    )
    add_seeds(parser)
    parser.add_argument(
        "--json", action="store_true", help='print {"rows": […], "against": […]} to stdout'
    )
    args = parser.parse_args()
    rows: list[Row] = []
    ratios: list[Against] = []
    for title, layout in LAYOUTS.items():
        shape = padded_vocabulary(load_model("7b"), layout.tp_size)
        number = layout.dp_size * layout.pp_size
        runs = {
            us: Run(
                shape,
                Execution(layout),
                replace(load_hardware("h100-sxm"), kernel_us=us),
                args.cap,
                number,
            )
            for us in args.kernel_us
        }
        others: dict[str, Planner] = {}
        if args.slime:
            others["slime"] = slime(args.slime, layout, args.cap, shape, balance_by_flops=False)
            others["slime, by FLOPs"] = slime(
                args.slime, layout, args.cap, shape, balance_by_flops=True
            )
        if args.verl:
            others["verl"] = verl(args.verl, layout, args.cap)
        if args.nemo_rl:
            others["NeMo-RL"] = nemo_rl(args.nemo_rl, layout, args.cap)
        if args.megatron:
            others["Megatron-LM, dp_balanced"] = megatron(args.megatron, layout, args.cap)
        if args.prime_rl:
            others["prime-rl"] = prime_rl(args.prime_rl, layout, args.cap, shape)
        if args.torchtitan:
            others["torchtitan"] = torchtitan(args.torchtitan, layout, args.cap)
        if args.distca:
            others["DistCA, WLB-LLM"] = distca(args.distca, layout, args.cap)
        planners = {us: ours(run, args.cap) | others for us, run in runs.items()}
        found = steps_of(runs, planners, args)
        rows += rows_of(title, found)
        ratios += against(title, found)
    print_tables(rows, ratios, args)
    if args.json:
        told = {"rows": [*map(asdict, rows)], "against": [*map(asdict, ratios)]}
        print(json.dumps(told, indent=1))
    return 0


def print_tables(rows: list[Row], ratios: list[Against], args: argparse.Namespace) -> None:
    launches = [f"{us:g} µs" for us in args.kernel_us]
    table = Table(
        caption=f"{args.samples} samples; time is simulated, over ours with whole samples, by what "
        "a launch takes"
    )
    for head in ("layout", "planner", *launches, "above the cap", "above memory", "plan ms"):
        table.add_column(head, justify="left" if head in ("layout", "planner") else "right")
    each: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        each[row.layout, row.planner].append(row)
    for (layout, planner), own in each.items():
        most = max(own, key=lambda row: row.over_cap)
        above = f"{most.over_cap} (up to {most.most_of_cap:.2f} ×)"
        table.add_row(
            layout, planner, *(f"{row.ratio:.3f}" for row in own),
            verdict([above]) if most.over_cap else "0",
            str(max(row.over_memory for row in own)),
            f"{float(np.median([row.plan_ms for row in own])):.1f}",
        )  # fmt: skip
    output.console(stderr=True).print(table)
    if not ratios:
        return
    table = Table(caption="ours over each step's fastest rival; in brackets: that keeps the cap")
    for head in ("layout", "planner", "launch", "all", *LENGTHS):
        table.add_column(head, justify="left" if head in ("layout", "planner") else "right")
    for one in ratios:
        table.add_row(
            one.layout, one.planner, f"{one.kernel_us:g} µs",
            f"{one.ratio:.3f} ({one.within_cap:.3f})",
            *(f"{ratio:.3f}" for ratio in one.by_lengths.values()),
        )  # fmt: skip
    output.console(stderr=True).print(table)


if __name__ == "__main__":
    sys.exit(run_program(main))
