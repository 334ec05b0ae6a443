#!/usr/bin/env python3
"""Measures the packings: balance and delay, planning time over N, and a million documents.

    scripts/evidence/bench_packing.py balance    # imbalance and delay of each set-up
    scripts/evidence/bench_packing.py speed      # time and memory of a step over N = 4 … 4096
    scripts/evidence/bench_packing.py stream     # a million documents: is any lost?

Balance and delay are computed from modelled times; planning times are process CPU time, measured on
this machine, of each step the best of several repeats. Memory is what Python's tracemalloc counts,
numpy's arrays included. ``--json`` prints the figures to stdout, and tables to
stderr; ``--plot`` draws the figures of ``speed``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _common import add_distribution, add_seeds, parser_of, verdict
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich.progress import Progress
from rich.table import Table

from megatron_wlb.cli import output
from megatron_wlb.cli.flags import flag
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import sample_lengths
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.files import replacing
from megatron_wlb.plan import Document
from megatron_wlb.planning.packing import PACKINGS, Packer, PackingSettings
from megatron_wlb.planning.packing.reference import REFERENCE_COST, REFERENCE_WINDOW
from megatron_wlb.planning.run import Workload
from megatron_wlb.simulator.trial import packed

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from helpers.ledger import Ledger

FAST = tuple(name for name in PACKINGS if name != "fixed-solver")
WARM_UP_STEPS = 50
METRICS = ("imbalance", "tw", "p95", "worst", "delay", "p99", "max", "CV")
console = output.console()


@dataclass(frozen=True)
class Case:
    """A set-up of ``balance``, and what is wanted of it: upper limits by metric."""

    packing: str
    num_micro_batches: int = 4
    max_windows: float = 2.0
    step_windows: float | None = None
    """Most tokens of a step, in mean steps; 0 is any number, None what the packing has."""
    look_ahead: int = 0
    fixed_batches: int = 1
    wanted: tuple[tuple[str, float], ...] = ()

    @property
    def title(self) -> str:
        parts = [self.packing]
        if self.step_windows:
            parts.append(f"tokens ≤ {self.step_windows} ×")
        elif self.step_windows == 0:
            parts.append("any step")
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
    Case("hold", step_windows=0, max_windows=1.25),
    Case("hold", step_windows=0, max_windows=1.5, wanted=wanted(1.02, 0.40)),
    Case("hold", step_windows=0, wanted=wanted(1.01, 0.30, tw=1.015)),
    Case("hold", step_windows=1.25, wanted=wanted(1.025, cv=0.22)),
    Case("hold", wanted=wanted(1.015, 0.80, cv=0.15)),
    Case("hold", step_windows=0, look_ahead=1),
    Case("hold", step_windows=0, look_ahead=4, wanted=wanted(1.01, 0.20)),
    Case("wlb", 16),
    Case("hold", 16, step_windows=0, wanted=wanted(1.01, 0.40)),
    *(Case("hold", 16, step_windows=cap) for cap in (1.5, 1.25, 1.1)),
    Case("hold", 16, wanted=wanted(1.04, 0.90, cv=0.15)),
    Case("wlb", 64),
    Case("hold", 64, step_windows=0, wanted=wanted(1.01, 0.40)),
]


def settings_of(case: Case) -> PackingSettings:
    step_tokens = case.num_micro_batches * REFERENCE_WINDOW
    return PackingSettings(
        case.packing,
        int(case.max_windows * REFERENCE_WINDOW),
        max_step_tokens=None if case.step_windows is None else int(case.step_windows * step_tokens),
        look_ahead=case.look_ahead,
        fixed_batches=case.fixed_batches,
    )


def workload_of(case: Case, distribution: str = "reference", seed: int = 1) -> Workload:
    source, number = LengthSource.of_distribution(distribution), case.num_micro_batches
    return Workload(source, REFERENCE_WINDOW, number, REFERENCE_COST, seed)


def make_packer(case: Case) -> Packer:
    return workload_of(case).packer(settings_of(case))


def figures_of(case: Case, distribution: str, steps: int, seed: int) -> dict[str, Any]:
    """Of ``steps`` steps after the warm-up, in which queues fill."""
    found = packed(workload_of(case, distribution, seed), settings_of(case), steps, WARM_UP_STEPS)
    return {
        "imbalance_mean": found.imbalance_mean,
        "imbalance_time_weighted": found.imbalance_weighted,
        "imbalance_p95": found.imbalance_p95,
        "imbalance_worst": found.imbalance_worst,
        "delay_mean": found.delay_mean_steps,
        "delay_p99": found.delay_p99_steps,
        "delay_max": found.delay_max_steps,
        "tokens_cv": found.tokens_cv,
        "padding": found.padding_share,
        "documents": found.num_documents,
    }


def balance(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a case: means over the seeds."""
    cases = [case for case in CASES if case.packing in options.packing]
    if options.num_micro_batches:
        cases = [case for case in cases if case.num_micro_batches in options.num_micro_batches]
    if not cases:
        numbers = sorted({case.num_micro_batches for case in CASES})
        raise ConfigError(f"no set-up has such a packing and N; give N of {numbers}")
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
                runs.append(figures_of(case, options.distribution, options.steps, seed))
                progress.advance(task)
            row = summary(case, runs)
            rows.append(row)
            table.add_row(
                str(case.num_micro_batches),
                f"{case.max_windows:g}",
                case.title,
                spread(runs, "imbalance_mean", 4),
                spread(runs, "imbalance_time_weighted", 4),
                f"{row['imbalance_p95']:.3f}",
                f"{row['imbalance_worst']:.2f}",
                spread(runs, "delay_mean", 3),
                str(row["delay_p99"]),
                str(row["delay_max"]),
                f"{row['tokens_cv']:.2f}",
                judged(row, case),
            )
    console.print(table)
    return rows


MEANS = (
    "imbalance_mean", "imbalance_time_weighted", "imbalance_p95", "delay_mean", "tokens_cv",
    "padding",
)  # fmt: skip
WORST = ("imbalance_worst", "delay_p99", "delay_max")


def named(case: Case) -> dict[str, Any]:
    """What every row says of its case."""
    names = "packing", "num_micro_batches", "max_windows", "look_ahead"
    return {name: getattr(case, name) for name in names}


def summary(case: Case, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        **named(case),
        "step_windows": case.step_windows,
        "fixed_batches": case.fixed_batches,
        **{name: float(np.mean([run[name] for run in runs])) for name in MEANS},
        **{name: max(run[name] for run in runs) for name in WORST},
        "documents": sum(run["documents"] for run in runs),
        "wanted": dict(case.wanted),
    }


def spread(runs: Sequence[dict[str, Any]], name: str, digits: int) -> str:
    values = [run[name] for run in runs]
    return f"{np.mean(values):.{digits}f} ({max(values):.{digits}f})"


def judged(row: dict[str, Any], case: Case) -> str:
    misses = [f"{name} {row[name]:.3f} > {most}" for name, most in case.wanted if row[name] > most]
    return verdict(misses) if case.wanted else ""


def timed_cases(options: argparse.Namespace, numbers: Sequence[int]) -> list[list[Case]]:
    """Of speed and stream: a list over N for each packing; ``hold`` with each look-ahead."""
    return [
        [Case(name, number, options.max_windows, look_ahead=ahead) for number in numbers]
        for name in options.packing
        for ahead in (options.look_ahead if name == "hold" else [0])
    ]


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a packing and N: the time and the memory of a step."""
    series = timed_cases(options, options.num_micro_batches or [4, 16, 64, 256, 1024, 4096])
    table = Table(
        "packing", "N", "documents", "ms a step", "median", "ms per 1,000", "growth", "MB"
    )
    table.title = (
        f"{options.distribution}, S_max {options.max_windows:g} windows: CPU time of pack() on "
        f"this machine, of each step the best of {options.repeats}; median: of whole repeats"
    )
    table.caption = (
        "growth: exponent of time over documents against the row above; n log n is 1.1\n"
        "MB: most traced memory in a step beyond what was there before it"
    )
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("speed", total=sum(map(len, series)))
        for cases in series:
            previous = None
            for case in cases:
                row = time_of(case, options.distribution, options.repeats, options.seeds[0])
                if previous:
                    times = row["ms_per_step"] / previous["ms_per_step"]
                    sizes = row["documents_per_step"] / previous["documents_per_step"]
                    row["growth"] = math.log(times) / math.log(sizes)
                previous = row
                rows.append(row)
                table.add_row(
                    case.title,
                    str(case.num_micro_batches),
                    f"{row['documents_per_step']:.0f}",
                    f"{row['ms_per_step']:.3f}",
                    f"{row['ms_per_step_median']:.3f}",
                    f"{row['ms_per_1000']:.3f}",
                    f"{row['growth']:.2f}" if "growth" in row else "",
                    f"{row['peak_bytes'] / 1e6:.2f}",
                )
                progress.advance(task)
            table.add_section()
    console.print(table)
    if options.plot:
        plot_speed(rows, options)
    return rows


def time_of(case: Case, distribution: str, repeats: int, seed: int) -> dict[str, Any]:
    """Time of ``pack`` alone: what arrives is made before. Queues fill in a warm-up."""
    steps = warm_up = min(500, max(4, 8000 // case.num_micro_batches))
    documents = workload_of(case, distribution, seed)
    stream = documents.stream(settings_of(case), warm_up + steps + case.look_ahead + 1)
    ahead = make_packer(case).look_ahead
    arriving = [stream.next_step() for _ in range(warm_up + steps + ahead)]
    given = [[*chain(*arriving[: ahead + 1])], *arriving[ahead + 1 :]]
    gc.collect()
    gc.freeze()  # The collector would look through all that is made here beforehand.
    cpu_s = np.zeros((repeats, steps))
    for repeat in cpu_s:
        packing = make_packer(case)
        for step in range(warm_up):
            packing.pack(given[step], step)
        for number in range(steps):
            start_s = time.process_time()
            packing.pack(given[warm_up + number], warm_up + number)
            repeat[number] = time.process_time() - start_s
    gc.unfreeze()
    num_documents = sum(map(len, arriving[warm_up : warm_up + steps])) / steps
    packing = make_packer(case)
    packing.pack(given[0], 0)
    tracemalloc.start()
    packing.pack(given[1], 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ms_per_step = float(cpu_s.min(axis=0).mean()) * 1e3
    return {
        **named(case),
        "documents_per_step": num_documents,
        "ms_per_step": ms_per_step,
        "ms_per_step_median": float(np.median(cpu_s.mean(axis=1))) * 1e3,
        "ms_per_1000": ms_per_step / num_documents * 1e3,
        "peak_bytes": peak_bytes,
        "documents": sum(map(len, arriving)),
    }


def plot_speed(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Time and memory of a step over its documents, with n log n to compare."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    columns = (("ms_per_step", 1.0, "CPU ms a step"), ("peak_bytes", 1e-6, "MB a step"))
    for axes, (column, unit, label) in zip(panels, columns, strict=True):
        for key in dict.fromkeys((row["packing"], row["look_ahead"]) for row in rows):
            some = [row for row in rows if (row["packing"], row["look_ahead"]) == key]
            sizes = [row["documents_per_step"] for row in some]
            name = f"{key[0]}, look-ahead {key[1]}" if key[1] else key[0]
            axes.plot(sizes, [row[column] * unit for row in some], ".-", label=name)
        axes.set(xscale="log", yscale="log", xlabel="documents a step", ylabel=label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    counts = [row["documents_per_step"] for row in rows]
    ends = np.geomspace(min(counts), max(counts), 50)
    last = ends[-1]
    panels[0].plot(ends, ends / 1e3, "k--", lw=1, label="1 ms per 1,000")
    n_log_n = ends * np.log(ends) / (last * np.log(last)) * last / 1e3
    panels[0].plot(ends, n_log_n, "k:", lw=1, label="n log n")
    panels[0].legend(fontsize="small")
    figure.suptitle(f"Planning a step on this machine: {options.distribution} lengths, one core")
    with replacing(options.plot) as draft:
        figure.savefig(draft, format="png", dpi=130)


def stream(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a packing: documents and tokens that went in and out, and memory on the way."""
    number = (options.num_micro_batches or [64])[0]
    table = Table(
        "packing", "documents", "tokens", "lost", "CPU s", "MB, first", "MB, last", "MB, all"
    )
    table.title = (
        f"{options.documents} documents streamed with N = {number}: each token runs exactly once"
    )
    table.caption = (
        "MB: most traced memory while the first tenth ran, the last tenth, and all\n"
        "CPU s: with tracing, which makes it several times as slow"
    )
    lengths = sample_lengths(
        options.distribution,
        windows_for(options.distribution, options.documents, number, options.seeds[0]),
        seed=options.seeds[0],
    )
    rows = []
    for (case,) in timed_cases(options, [number]):
        row = run_through(case, lengths)
        rows.append(row)
        table.add_row(
            case.title,
            str(row["documents"]),
            str(row["tokens"]),
            f"[{'red' if row['lost_tokens'] else 'green'}]{row['lost_tokens']}",
            f"{row['cpu_s']:.1f}",
            f"{row['peak_bytes_first_tenth'] / 1e6:.2f}",
            f"{row['peak_bytes_last_tenth'] / 1e6:.2f}",
            f"{row['peak_bytes'] / 1e6:.2f}",
        )
    console.print(table)
    return rows


def windows_for(distribution: str, num_documents: int, multiple: int, seed: int) -> int:
    """How many windows have at least so many documents; about one in a hundred more."""
    windows = -(-num_documents * 1010 // len(sample_lengths(distribution, 1000, seed=seed)))
    return -(-windows // multiple) * multiple


def run_through(case: Case, lengths: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Runs every document of ``lengths``; raises AssertionError for a token that runs twice.

    Memory: what the packing keeps and takes for a step, the documents that it holds included.
    """
    packing, ledger = make_packer(case), Ledger(lengths)
    documents = DocumentStream(
        [lengths],
        window=REFERENCE_WINDOW,
        step_tokens=case.num_micro_batches * REFERENCE_WINDOW,
        seed=0,
        shuffle=False,
        num_epochs=1,
    )
    peaks: list[int] = []
    num_steps = -(-int(lengths.sum()) // documents.step_tokens)
    start_s = time.process_time()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(case.title, total=num_steps)
        tracemalloc.start()
        for given, step in _steps(packing, documents):
            tracemalloc.reset_peak()
            micro_batches = packing.flush(step) if given is None else packing.pack(given, step)
            peaks.append(tracemalloc.get_traced_memory()[1])
            ledger.run(chain(*micro_batches))
            progress.advance(task)
        tracemalloc.stop()
    first = max(1, len(peaks) // 10)
    return {
        **named(case),
        "documents": len(lengths),
        "documents_run": ledger.num_documents,
        "tokens": ledger.num_tokens,
        "lost_tokens": ledger.lost_tokens,
        "cpu_s": time.process_time() - start_s,
        "peak_bytes_first_tenth": max(peaks[:first]),
        "peak_bytes_last_tenth": max(peaks[-first:]),
        "peak_bytes": max(peaks),
    }


def _steps(
    packing: Packer, documents: DocumentStream
) -> Iterator[tuple[list[Document] | None, int]]:
    """What each step is given, and its number; None after the end, for as long as any waits."""
    given = [document for _ in range(packing.look_ahead) for document in documents.next_step()]
    for step in count():
        if not documents.exhausted:
            yield [*given, *documents.next_step()], step
            given = []
        elif packing.waiting:
            yield None, step
        else:
            return


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("balance", "speed", "stream"))
    about = f"of {', '.join(PACKINGS)}"
    parser.add_argument(
        "--packing", nargs="+", choices=PACKINGS, default=list(FAST), metavar="NAME",
        help=f"{about} (default: all but the solver)",
    )  # fmt: skip
    flag(parser, "--num-micro-batches N", "default: all that apply", of=int)
    flag(parser, "--max-windows X", "speed, stream: S_max in windows", 2.0)
    flag(parser, "--look-ahead K", "speed, stream: of hold", [0, 4], of=int)
    add_distribution(parser)
    add_seeds(parser, "; others use the 1st")
    flag(parser, "--steps N", "balance: steps that count", 400)
    flag(parser, "--repeats N", "speed: best of these", 5)
    flag(parser, "--documents N", "stream: how many", 1_000_000)
    flag(parser, "--plot FILE", "speed: time and memory over N, PNG")
    parser.add_argument("--json", action="store_true", help='print {"rows": […]} to stdout')
    options = parser.parse_args()
    console.stderr = options.json
    rows = {"balance": balance, "speed": speed, "stream": stream}[options.what](options)
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
