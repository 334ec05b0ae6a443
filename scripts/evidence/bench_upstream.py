#!/usr/bin/env python3
"""Puts the same documents through Megatron-LM's own packing and through ours.

    M=~/Megatron-LM
    scripts/evidence/bench_upstream.py $M --model 7b --tp-size 8 --cp-size 2 --pp-size 4 --dp-size 4
    scripts/evidence/bench_upstream.py $M --model 7b --tp-size 8 --cp-size 4 --dp-size 4 --json

The checkout's schedulers run as they are: `dp_balanced` (packs in order, up to a window a replica),
`default_dynamic_cp` where it has one (branch `dev`: a CP size for each document), and without a
pipeline `--hybrid-context-parallel`. They get the documents of one step after another, as
`original` packing has them. Python needs what that checkout's megatron.core imports
(`scripts/test-megatron main --collect-only` makes such an environment).

*Simulated* from the model of costs that our own plans use: the time of the slowest pipeline of a
step, without transfers, reduction and update, which are no packing's matter. Context parallelism
divides perfectly. For Megatron's packings ranks of unlike CP groups never wait for each other
inside a step, so their figures are upper bounds; padding of documents to 2 × CP × TP tokens counts.
*Measured*: CPU time of planning a step on this machine. ``--json`` prints the figures to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from _common import add_distribution, add_seeds, parser_of
from rich.table import Table

from megatron_wlb.cli import inputs, model, output
from megatron_wlb.cli.flags import flag
from megatron_wlb.cost.schedule.graph import graph_of
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.reading import whole_number
from megatron_wlb.simulator.step import slowest_us

WARM_UP_STEPS = 20
"""Steps in which queues fill."""
OURS = ("original", "wlb", "hold", "slim")


class Part(NamedTuple):
    """What a rank runs as one micro-batch, with the ranks of its context-parallel group."""

    documents: tuple[int, ...]
    """Numbers of documents in the step."""
    cp_size: int


Schedule = Callable[[Sequence[int]], list[list[Part]]]
"""Of a step's lengths the micro-batches of each data × context-parallel rank, in order."""


@dataclass(frozen=True)
class Row:
    """How a packing does."""

    packing: str
    speed: float
    """Simulated work a second, over `original`'s."""
    lowest: float
    """Of the seeds."""
    highest: float
    tflops: float
    """Simulated 10¹² model FLOPs a second and GPU."""
    delay_steps: float
    """Token-weighted mean."""
    longest: int
    """Tokens of a rank's longest micro-batch."""
    plan_ms: float
    """Measured CPU time of a step's plan."""


class Upstream:
    """The schedulers of a checkout. They are imported, not copied.

    Raises :class:`ConfigError` where the checkout has none, or its megatron.core does not import.
    """

    def __init__(self, checkout: Path, run: Run) -> None:
        self.run = run
        p = run.parallelism
        self.num_ranks = p.dp_size * p.cp_size
        sys.path.insert(0, str(checkout.resolve()))
        try:
            self._module = importlib.import_module("megatron.core.datasets.data_schedule")
        except ImportError as error:
            raise ConfigError(
                f"{checkout} has no megatron/core/datasets/data_schedule.py that imports: {error}; "
                "give a checkout of Megatron-LM's branch main or dev, and its requirements"
            ) from None

    def schedules(self) -> Mapping[str, Schedule]:
        """What there is, by title."""
        p, window = self.run.parallelism, self.run.window
        result: dict[str, Schedule] = {}

        def add(title: str, name: str, rank_tokens: int) -> None:
            made = getattr(self._module, name, None)
            if made is not None:
                group = (p.group_size or p.pp_size) if p.vpp_size > 1 else None
                it = made(rank_tokens, p.cp_size, p.dp_size, group)
                result[title] = lambda lengths: self._parts(
                    it.get_groups_and_subsamples([*enumerate(lengths)])
                )

        each = -(-window // p.cp_size)
        add("dp_balanced", "DpBalancedScheduler", each)
        add("default_dynamic_cp", "DefaultDynamicCPScheduler", each)
        if p.dp_size > 1:
            title = "default_dynamic_cp, its default"
            add(title, "DefaultDynamicCPScheduler", -(-window // self.num_ranks))
        if p.pp_size == 1 and hasattr(self._module, "BalancedCPScheduler"):
            group = SimpleNamespace(size=lambda: self.num_ranks)
            hybrid = self._module.BalancedCPScheduler(each, group)
            result["hybrid-context-parallel"] = lambda lengths: self._parts(
                hybrid.get_groups_and_subsamples([*enumerate(lengths)], None)[1], alone=True
            )
        if not result:
            raise ConfigError(
                f"{self._module.__file__} has no packing for PP {p.pp_size}; give a checkout of "
                "Megatron-LM's branch main or dev"
            )
        return result

    def _parts(
        self, groups: Iterable[Sequence[Sequence[int]]], *, alone: bool = False
    ) -> list[list[Part]]:
        """Each rank's documents of a group in one micro-batch, or each ``alone`` in one, as the
        hybrid schedule runs them.
        """
        ranks: list[list[Part]] = [[] for _ in range(self.num_ranks)]
        for group in groups:
            for rank, documents in enumerate(group):
                for own in [(one,) for one in documents] if alone else [tuple(documents)]:
                    sharers = sum(own[0] in other for other in group)
                    ranks[rank].append(Part(own, sharers))
        return ranks


class Clock:
    """Tells how long the pipelines of a step take."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.stages = cache(self._stages)

    def _stages(self, cp_size: int) -> StageCosts:
        """Costs of a rank in a group of so many."""
        p = self.run.parallelism
        dp_size = max(1, p.dp_size * p.cp_size // cp_size)
        layout = dataclasses.replace(p, cp_size=cp_size, dp_size=dp_size)
        execution = dataclasses.replace(self.run.execution, parallelism=layout)
        number = dp_size * p.num_stages
        run = dataclasses.replace(self.run, execution=execution, num_micro_batches=number)
        return run.costs.stages

    def of_plan(self, plan: StepPlan) -> float:
        return slowest_us(plan, self.run.costs.stages, self.run.parallelism)

    def of_parts(self, ranks: Sequence[Sequence[Part]], lengths: Sequence[int]) -> float:
        p = self.run.parallelism
        known: dict[tuple[Part, ...], float] = {}
        for parts in map(tuple, ranks):
            if parts in known:  # ranks of a group run the same
                continue
            times = [
                self.stages(part.cp_size).times_us([self._padded(part, lengths)]) for part in parts
            ]
            graph = graph_of(p.pp_size, p.vpp_size, len(parts), p.group_size)
            known[parts] = float(graph.step_us(np.concatenate(times, axis=2), np.zeros(len(parts))))
        return max(known.values())

    def _padded(self, part: Part, lengths: Sequence[int]) -> list[int]:
        """Tokens of its documents; sequence parallelism divides each of a rank's two chunks."""
        multiple = self.run.parallelism.tp_size * (2 * part.cp_size if part.cp_size > 1 else 1)
        return [-(-lengths[i] // multiple) * multiple for i in part.documents]

    def longest(self, ranks: Sequence[Sequence[Part]], lengths: Sequence[int]) -> int:
        parts = (part for own in ranks for part in own)
        return max(-(-sum(self._padded(part, lengths)) // part.cp_size) for part in parts)


class Total:
    """What is added up of a packing's steps, by seed."""

    def __init__(self) -> None:
        self.flops: list[float] = []
        self.us: list[float] = []
        self.delays: list[float] = []
        self.longest = 0
        self.seconds = 0.0

    def seed(self) -> None:
        self.flops.append(0.0)
        self.us.append(0.0)

    def add(self, flops: float, us: float, delay: float, longest: int) -> None:
        self.flops[-1] += flops
        self.us[-1] += us
        self.delays.append(delay)
        self.longest = max(self.longest, longest)

    def row(self, title: str, original: Total, num_devices: int) -> Row:
        rates = np.divide(self.flops, self.us)
        by_seed = rates / np.divide(original.flops, original.us)
        rate = sum(self.flops) / sum(self.us)
        steps = len(self.delays)
        return Row(
            title,
            rate * sum(original.us) / sum(original.flops),
            by_seed.min(),
            by_seed.max(),
            rate / num_devices / 1e6,
            sum(self.delays) / steps,
            self.longest,
            1e3 * self.seconds / steps,
        )


def measure(
    run: Run,
    schedules: Mapping[str, Schedule],
    settings: Sequence[PackingSettings],
    options: argparse.Namespace,
    on_step: Callable[[], object],
) -> list[Row]:
    clock, source = Clock(run), LengthSource.of_distribution(options.distribution)
    cp_size, warm_up = run.parallelism.cp_size, options.warm_up
    totals = {name: Total() for name in [*(s.title for s in settings), *schedules]}
    for seed in options.seeds:
        workload = run.workload(source, seed=seed)
        for total in totals.values():
            total.seed()
        for setting in settings:
            total = totals[setting.title]
            planner = workload.planner(setting, warm_up + options.steps, costs=run.costs)
            for _ in range(warm_up):
                planner.skip()
            for _ in range(options.steps):
                start_s = time.process_time()
                plan = planner.next_plan()
                total.seconds += time.process_time() - start_s
                assert plan is not None
                flops = run.flops([d.length for d in plan.documents])
                longest = max(-(-m.padded_length // cp_size) for m in plan)
                total.add(flops, clock.of_plan(plan), plan.delay_steps, longest)
                on_step()
        for lengths in arrivals(run, source, seed, options):
            for title, schedule in schedules.items():
                start_s = time.process_time()
                ranks = schedule(lengths)
                totals[title].seconds += time.process_time() - start_s
                check(title, ranks, len(lengths))
                us, longest = clock.of_parts(ranks, lengths), clock.longest(ranks, lengths)
                totals[title].add(run.flops(lengths), us, 0.0, longest)
                on_step()
    original = next(iter(totals.values()))
    return [total.row(title, original, run.num_devices) for title, total in totals.items()]


def arrivals(
    run: Run, source: LengthSource, seed: int, options: argparse.Namespace
) -> Iterator[list[int]]:
    """Lengths of the documents that arrive in each counted step, in order, none cut.

    They are what `slim` would run, which neither delays nor cuts.
    """
    layout = dataclasses.replace(run.parallelism, vpp_size=1, group_size=None)
    workload = run.executed(parallelism=layout).workload(source, seed=seed)
    setting = PackingSettings.parse("slim", run.window, run.window)
    planner = workload.planner(setting, options.warm_up + options.steps)
    for _ in range(options.warm_up):
        planner.skip()
    for plan in planner.plans(options.steps):
        yield [d.length for d in sorted(plan.documents, key=lambda document: document.key)]


def check(title: str, ranks: Sequence[Sequence[Part]], num_documents: int) -> None:
    """Raises :class:`ConfigError` where a document is lost, or not on as many ranks as it says."""
    shares = [0.0] * num_documents
    for own in ranks:
        for part in own:
            for document in part.documents:
                shares[document] += 1 / part.cp_size
    wrong = [i for i, share in enumerate(shares) if abs(share - 1) > 1e-9]
    if wrong:
        raise ConfigError(
            f"{title} runs {len(wrong)} of {num_documents} documents not once; this script does "
            "not know that version of Megatron-LM"
        )


def table_of(rows: Sequence[Row], title: str, options: argparse.Namespace) -> Table:
    steps = f"{options.steps} steps of each of {len(options.seeds)} seeds"
    table = Table(title=title, caption=f"{steps}; speed is simulated, ms are measured")
    heads = "packing", "speed", "of seeds", "TFLOP/s", "delay, steps", "longest, tokens", "plan ms"
    for name in heads:
        table.add_column(name, justify="left" if name == "packing" else "right")
    for row in rows:
        table.add_row(
            row.packing,
            f"{row.speed:.2f}×",
            f"{row.lowest:.2f}-{row.highest:.2f}",
            f"{row.tflops:.0f}",
            f"{row.delay_steps:.2f}",
            f"{row.longest:,}",
            f"{row.plan_ms:.1f}",
        )
    return table


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("checkout", type=Path, help="of Megatron-LM, branch main or dev")
    inputs.add_model(parser, required=True)
    inputs.add_layout(parser)
    parser.set_defaults(prefixes=[], lengths=None)
    model.settings(parser, "seq_length")
    flag(parser, "--max-windows X", "S_max of wlb and hold, in windows")
    add_distribution(parser)
    add_seeds(parser)
    flag(parser, "--steps N", "of each seed", 40)
    flag(parser, "--warm-up N", "steps before them", WARM_UP_STEPS)
    parser.add_argument("--json", action="store_true", help='print {"rows": […]} to stdout')
    options = parser.parse_args()
    whole_number("--steps", options.steps, 1, 10_000)
    whole_number("--warm-up", options.warm_up, 0, 10_000)
    job = inputs.read_job(options)
    run = job.run(job.numbers[0])
    max_tokens = job.max_tokens(run)

    settings = [PackingSettings.parse(name, run.window, max_tokens) for name in OURS]
    schedules = Upstream(options.checkout, run).schedules()
    total = len(options.seeds) * options.steps * (len(settings) + len(schedules))
    with output.counting_bar("planning", total) as on_step:
        rows = measure(run, schedules, settings, options, on_step)
    title = job.title(run)
    output.console(stderr=True).print(table_of(rows, title, options))
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
