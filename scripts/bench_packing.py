#!/usr/bin/env python3
"""Measures the packings: balance and delay, planning time over N, and a million documents.

    scripts/bench_packing.py balance    # imbalance and delay of each set-up, against what is wanted
    scripts/bench_packing.py speed      # time and memory of a step over N = 4 … 4096
    scripts/bench_packing.py stream     # a million documents: is any lost, does memory stay flat

Balance and delay are computed from modelled times; planning times are process CPU time, measured on
this machine, of each step the best of several repeats. ``--json`` keeps the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.data.lengths import DISTRIBUTIONS, sample_lengths
from megatron_wlb.errors import WLBError
from megatron_wlb.packing import PACKINGS, Packer, PackingMetrics, measure, packer
from megatron_wlb.packing.reference import REFERENCE_COST, REFERENCE_WINDOW
from megatron_wlb.plan import Document
from megatron_wlb.planner import Planner

WARM_UP_STEPS = 50
FAST = tuple(name for name in PACKINGS if name != "fixed-solver")
METRICS = ("imbalance", "tw", "p95", "worst", "delay", "p99", "max", "CV")
console = Console(width=None if sys.stdout.isatty() else 140)


@dataclass(frozen=True)
class Case:
    """A set-up of ``balance``, and what is wanted of it: upper limits by metric."""

    packing: str
    num_micro_batches: int = 4
    max_windows: float = 2.0
    step_windows: float | None = None
    """Most tokens of a step, in mean steps."""
    look_ahead: int = 0
    fixed_batches: int = 1
    wanted: tuple[tuple[str, float], ...] = ()

    @property
    def title(self) -> str:
        parts = [self.packing]
        if self.step_windows:
            parts.append(f"tokens ≤ {self.step_windows} ×")
        if self.look_ahead:
            parts.append(f"look-ahead {self.look_ahead}")
        if self.fixed_batches > 1:
            parts.append(f"{self.fixed_batches} batches")
        return ", ".join(parts)


def wanted(
    imbalance: float, delay: float | None = None, tw: float | None = None, cv: float | None = None
) -> tuple[tuple[str, float], ...]:
    limits = {
        "imbalance_mean": imbalance,
        "imbalance_time_weighted": tw,
        "delay_mean": delay,
        "tokens_cv": cv,
    }
    return tuple((name, limit) for name, limit in limits.items() if limit is not None)


CASES = [
    Case("original"),
    *(Case("fixed-greedy", fixed_batches=k) for k in (1, 2, 4, 8)),
    Case("wlb", max_windows=1.25, wanted=wanted(1.05)),
    Case("wlb", max_windows=1.5),
    Case("wlb"),
    Case("hold", max_windows=1.25),
    Case("hold", max_windows=1.5, wanted=wanted(1.02, 0.40)),
    Case("hold", wanted=wanted(1.01, 0.30, tw=1.015)),
    Case("hold", step_windows=1.25, wanted=wanted(1.025, cv=0.22)),
    Case("hold", look_ahead=1),
    Case("hold", look_ahead=4, wanted=wanted(1.01, 0.20)),
    Case("wlb", 16),
    Case("hold", 16, wanted=wanted(1.01, 0.40)),
    Case("wlb", 64),
    Case("hold", 64, wanted=wanted(1.01, 0.40)),
]


def make_packer(case: Case) -> Packer:
    step_tokens = case.num_micro_batches * REFERENCE_WINDOW
    return packer(
        case.packing,
        num_micro_batches=case.num_micro_batches,
        window=REFERENCE_WINDOW,
        cost=REFERENCE_COST,
        max_tokens=int(case.max_windows * REFERENCE_WINDOW),
        max_step_tokens=int(case.step_windows * step_tokens) if case.step_windows else None,
        look_ahead=case.look_ahead,
        fixed_batches=case.fixed_batches,
    )


def make_stream(distribution: str, num_micro_batches: int, steps: int, seed: int) -> DocumentStream:
    lengths = sample_lengths(distribution, steps * num_micro_batches, seed=seed)
    return DocumentStream(
        [lengths],
        window=REFERENCE_WINDOW,
        step_tokens=num_micro_batches * REFERENCE_WINDOW,
        seed=0,
        shuffle=False,
        num_epochs=1,
    )


def metrics_of(case: Case, distribution: str, steps: int, seed: int) -> PackingMetrics:
    """Of ``steps`` steps after the warm-up, in which queues fill."""
    total = WARM_UP_STEPS + steps
    stream = make_stream(distribution, case.num_micro_batches, total + 8, seed)
    planner = Planner(stream, make_packer(case), REFERENCE_COST, dp_size=1)
    for _ in range(WARM_UP_STEPS):
        planner.next_plan()
    plans = [plan for plan in (planner.next_plan() for _ in range(steps)) if plan is not None]
    return measure(plans, planner.packer.waiting)


def balance(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a case: means over the seeds."""
    cases = [case for case in CASES if case.packing in options.packing]
    if options.num_micro_batches:
        cases = [case for case in cases if case.num_micro_batches in options.num_micro_batches]
    table = Table("N", "S_max", "packing", *METRICS, "")
    table.title = (
        f"{options.distribution}: {options.steps} steps after {WARM_UP_STEPS}, seeds "
        f"{', '.join(map(str, options.seeds))}: mean, worst seed in brackets; times modelled"
    )
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("balance", total=len(cases) * len(options.seeds))
        for case in cases:
            runs = []
            for seed in options.seeds:
                runs.append(metrics_of(case, options.distribution, options.steps, seed))
                progress.advance(task)
            row = summary(case, runs)
            rows.append(row)
            table.add_row(
                str(case.num_micro_batches),
                f"{case.max_windows:g}",
                case.title,
                *spread([m.imbalance_mean for m in runs], 4),
                *spread([m.imbalance_weighted for m in runs], 4),
                f"{row['imbalance_p95']:.3f}",
                f"{row['imbalance_worst']:.2f}",
                *spread([m.delay_mean_steps for m in runs], 3),
                str(row["delay_p99"]),
                str(row["delay_max"]),
                f"{row['tokens_cv']:.2f}",
                verdict(row, case),
            )
    console.print(table)
    return rows


def summary(case: Case, runs: Sequence[PackingMetrics]) -> dict[str, Any]:
    def mean(name: str) -> float:
        return float(np.mean([getattr(run, name) for run in runs]))

    def most(name: str) -> Any:
        return max(getattr(run, name) for run in runs)

    return {
        "packing": case.packing,
        "num_micro_batches": case.num_micro_batches,
        "max_windows": case.max_windows,
        "step_windows": case.step_windows,
        "look_ahead": case.look_ahead,
        "fixed_batches": case.fixed_batches,
        "imbalance_mean": mean("imbalance_mean"),
        "imbalance_time_weighted": mean("imbalance_weighted"),
        "imbalance_p95": mean("imbalance_p95"),
        "imbalance_worst": most("imbalance_worst"),
        "delay_mean": mean("delay_mean_steps"),
        "delay_p99": most("delay_p99_steps"),
        "delay_max": most("delay_max_steps"),
        "tokens_cv": mean("tokens_cv"),
        "padding": mean("padding_share"),
        "documents": sum(run.num_documents for run in runs),
        "wanted": dict(case.wanted),
    }


def spread(values: Sequence[float], digits: int) -> list[str]:
    return [f"{np.mean(values):.{digits}f} ({max(values):.{digits}f})"]


def verdict(row: dict[str, Any], case: Case) -> str:
    misses = [f"{name} {row[name]:.3f} > {most}" for name, most in case.wanted if row[name] > most]
    return "[red]" + ", ".join(misses) if misses else "[green]as wanted" if case.wanted else ""


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a packing and N: the time and the memory of a step."""
    numbers = options.num_micro_batches or [4, 16, 64, 256, 1024, 4096]
    table = Table("packing", "N", "documents", "ms a step", "ms per 1,000", "growth", "peak MB")
    table.title = (
        f"{options.distribution}, S_max {options.max_windows:g} windows: CPU time of pack() on "
        f"this machine, of each step the best of {options.repeats}"
    )
    table.caption = "growth: exponent of time over documents against the row above; n log n is 1.1"
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("speed", total=len(options.packing) * len(numbers))
        for name in options.packing:
            previous = None
            for number in numbers:
                case = Case(name, number, options.max_windows, look_ahead=options.look_ahead)
                row = time_of(case, options.distribution, options.repeats, options.seeds[0])
                growth = ""
                if previous:
                    times = row["ms_per_step"] / previous["ms_per_step"]
                    sizes = row["documents_per_step"] / previous["documents_per_step"]
                    growth = f"{math.log(times) / math.log(sizes):.2f}"
                previous = row
                rows.append(row)
                table.add_row(
                    name,
                    str(number),
                    f"{row['documents_per_step']:.0f}",
                    f"{row['ms_per_step']:.3f}",
                    f"{row['ms_per_1000']:.3f}",
                    growth,
                    f"{row['peak_bytes'] / 1e6:.2f}",
                )
                progress.advance(task)
    console.print(table)
    return rows


def time_of(case: Case, distribution: str, repeats: int, seed: int) -> dict[str, Any]:
    """Time of ``pack`` alone: what arrives is made before. Queues fill in a warm-up."""
    steps = warm_up = min(500, max(4, 8000 // case.num_micro_batches))
    stream = make_stream(distribution, case.num_micro_batches, warm_up + steps + 8, seed)
    ahead = make_packer(case).look_ahead
    arriving = [stream.next_step() for _ in range(warm_up + steps + ahead)]
    given = [[*chain(*arriving[: ahead + 1])], *arriving[ahead + 1 :]]
    gc.collect()
    gc.freeze()  # The collector would look through all that is made here beforehand.
    best_s = [math.inf] * steps
    for _ in range(repeats):
        packing = make_packer(case)
        for step in range(warm_up):
            packing.pack(given[step], step)
        for number in range(steps):
            start_s = time.process_time()
            packing.pack(given[warm_up + number], warm_up + number)
            best_s[number] = min(best_s[number], time.process_time() - start_s)
    gc.unfreeze()
    documents = sum(map(len, arriving[warm_up : warm_up + steps])) / steps
    packing = make_packer(case)
    packing.pack(given[0], 0)
    tracemalloc.start()
    packing.pack(given[1], 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "packing": case.packing,
        "num_micro_batches": case.num_micro_batches,
        "max_windows": case.max_windows,
        "look_ahead": case.look_ahead,
        "documents_per_step": documents,
        "ms_per_step": sum(best_s) / steps * 1e3,
        "ms_per_1000": sum(best_s) / steps / documents * 1e6,
        "peak_bytes": peak_bytes,
        "documents": sum(map(len, arriving)),
    }


def stream(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a packing: documents and tokens that went in and out, and memory on the way."""
    number = (options.num_micro_batches or [64])[0]
    table = Table("packing", "documents", "lost tokens", "s", "MB after a tenth", "MB at the end")
    table.title = f"{options.documents} documents streamed with N = {number}; traced memory"
    rows = []
    for name in options.packing:
        case = Case(name, number, options.max_windows, look_ahead=options.look_ahead)
        windows = sum_to_windows(options.distribution, options.documents, options.seeds[0])
        documents = make_stream(
            options.distribution, number, -(-windows // number), options.seeds[0]
        )
        tracemalloc.start()
        start_s = time.process_time()
        ran, lost, memory = run_through(make_packer(case), documents, name)
        row = {
            "packing": name,
            "num_micro_batches": number,
            "max_windows": case.max_windows,
            "documents": ran,
            "lost_tokens": lost,
            "cpu_s": time.process_time() - start_s,
            "bytes_after_a_tenth": memory[0],
            "bytes_at_the_end": memory[1],
        }
        tracemalloc.stop()
        rows.append(row)
        table.add_row(
            name,
            str(ran),
            str(lost),
            f"{row['cpu_s']:.1f}",
            f"{memory[0] / 1e6:.1f}",
            f"{memory[1] / 1e6:.1f}",
        )
    console.print(table)
    return rows


def sum_to_windows(distribution: str, num_documents: int, seed: int) -> int:
    """How many windows have at least so many documents; about one in a hundred more."""
    return -(-num_documents * 1010 // len(sample_lengths(distribution, 1000, seed=seed)))


def run_through(
    packing: Packer, documents: DocumentStream, name: str
) -> tuple[int, int, tuple[int, int]]:
    """Documents that ran, tokens that did not, and traced bytes early and late."""
    ran = tokens = 0
    held: list[int] = []
    for micro_batches in track(_steps(packing, documents), name, console=console, transient=True):
        for micro_batch in micro_batches:
            ran += len(micro_batch)
            tokens += sum(document.length for document in micro_batch)
        held.append(tracemalloc.get_traced_memory()[0])
    tenth = len(held) // 10
    lost = documents.tokens_per_epoch - tokens
    return ran, lost, (max(held[tenth : 2 * tenth]), max(held[-tenth:]))


def _steps(packing: Packer, documents: DocumentStream) -> Iterator[list[list[Document]]]:
    step = 0
    ahead: Iterable[Document] = [
        document for _ in range(packing.look_ahead) for document in documents.next_step()
    ]
    while not documents.exhausted:
        yield packing.pack([*ahead, *documents.next_step()], step)
        ahead = ()
        step += 1
    while packing.waiting:
        yield packing.flush(step)
        step += 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("balance", "speed", "stream"))
    parser.add_argument(
        "--packing", nargs="+", choices=PACKINGS, default=list(FAST), metavar="NAME",
        help=f"of {', '.join(PACKINGS)} (default: all but the solver)",
    )  # fmt: skip
    parser.add_argument(
        "--num-micro-batches", nargs="+", type=int, metavar="N", help="default: all that apply"
    )
    parser.add_argument(
        "--max-windows", type=float, default=2.0, metavar="X",
        help="speed, stream: S_max in windows (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--look-ahead", type=int, default=0, metavar="K", help="speed, stream: of hold (default: 0)"
    )
    parser.add_argument(
        "--distribution", choices=DISTRIBUTIONS, default="reference", help="default: reference"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[1, 2, 3], help="default: 1 2 3; others use the 1st"
    )
    parser.add_argument(
        "--steps", type=int, default=400, help="balance: steps that count (default: 400)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="speed: best of these (default: 5)")
    parser.add_argument(
        "--documents", type=int, default=1_000_000, help="stream: how many (default: 1000000)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help='keep the figures: {"rows": […]}')
    options = parser.parse_args()
    try:
        rows = {"balance": balance, "speed": speed, "stream": stream}[options.what](options)
        if options.json:
            options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    except (WLBError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
