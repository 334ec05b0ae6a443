"""``wlb pack``: how unbalanced documents are, and what each packing makes of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from megatron_wlb.cli import inputs
from megatron_wlb.cli.choice import add_max_delay, num_steps
from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.output import check_picture, console, counting_bar, remark, say, table_of
from megatron_wlb.cost.step_costs import StepCosts
from megatron_wlb.planning.packing import PACKINGS, PackingSettings, kind_of, reads
from megatron_wlb.planning.packing.settings import run_with, sliced
from megatron_wlb.planning.run import Workload
from megatron_wlb.study.advice import check_max_delay, gain, recommended, steps_of
from megatron_wlb.study.evaluate import WARM_UP_STEPS, Evaluation, evaluate

STEPS, SOLVER_STEPS = 400, 20
EXTRA_COLUMNS = ("p95", "worst", "tokens/s", "p99", "CV", "documents")
MIN_WIDTH = 130
"""Columns of a terminal that has room for them."""

_EPILOG = f"""\
{inputs.SOURCES}
{inputs.COSTS}
packings (--packing a,b,…):
  {", ".join(PACKINGS)}; with a number: fixed-greedy:4 and
  fixed-solver:4 repack 4 global batches together, wlb:3 has 3 queues, hold:4 looks 4 steps
  ahead; slim:32 cuts a data-parallel rank's step into 32 units; with --pp-size hold+shape has
  shaped steps, and hold+auto numbers of micro-batches chosen step by step. Default: all but the
  solver, which takes seconds a step, and without a pipeline (--pp-size) slim, which gains in one.

columns:
  imbalance  max · N / Σ of the modelled times of a step's micro-batches, 1 is perfect: mean over
             the steps, weighted by time (tw), 95th percentile, worst step
  work/s     work of the documents by modelled time, over original: 1 / tw, or simulated with
             --pp-size; tokens/s gains less, as original cuts documents and so does less work
  delay      steps that a token runs before or after the step it arrived in: mean, 99th
             percentile of the tokens, longest
  CV         standard deviation ÷ mean of the tokens of a step
  ms         measured CPU time of packing one step on this machine
  padding    share of the tokens computed, where there is any

examples:
  wlb pack --distribution reference
  wlb pack corpora/books --window 32768 --num-micro-batches 8,16 --plot packings.png
  wlb pack --lengths lengths.txt --packing original,wlb:3,hold --model 7b.yaml \\
      --tp-size 4 --cp-size 2 --pp-size 4
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    inputs.add_source(parser)
    inputs.add_workload(parser)
    group = parser.add_argument_group("what is compared")
    flag(
        group,
        "--packing a,b,…",
        f"default: all but fixed-solver; {', '.join(sliced())} only with --pp-size",
    )
    flag(group, "--queue-thresholds L", "of wlb, in tokens", [], of=int)
    flag(group, "--hold-tau X", "of hold", 1.0)
    flag(group, "--delay-price X", "of hold")
    add_max_delay(group)
    about = f"that count, after {WARM_UP_STEPS} (default: {STEPS}; the solver's {SOLVER_STEPS})"
    flag(group, "--steps N", about)
    flag(group, "--solver-limit S", "of fixed-solver: about so many seconds a search", 1.0)
    output = parser.add_argument_group("output")
    flag(output, "--plot FILE", "picture of the table, PNG")
    output.add_argument("--json", action="store_true", help='print {"rows": […], …}')
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_picture("--plot", args.plot)
    check_max_delay(args.max_delay)
    job = inputs.read_job(args)
    documents = inputs.source(args, job.window, job.config)
    runs = {number: job.known_run(number) for number in job.numbers}
    max_tokens = job.max_tokens(runs[max(job.numbers)])
    cases = [
        (job.workload(documents, number, run), setting)
        for number, run in runs.items()
        for setting in _settings(job, max_tokens)
    ]
    for case, setting in cases:
        case.check([setting])
    packings = list(dict.fromkeys(setting.name for _, setting in cases))
    for flag_name, name, value, default in (
        ("--queue-thresholds", "queue_thresholds", args.queue_thresholds, []),
        ("--hold-tau", "tau", args.hold_tau, 1.0),
        ("--delay-price", "delay_price", args.delay_price, None),
        ("--solver-limit", "solver_limit", args.solver_limit, 1.0),
    ):
        if value != default and not any(reads(packing, name) for packing in packings):
            remark(f"{flag_name} has no effect: {', '.join(packings)} do not read it")
    costs = next((run.costs for run in runs.values() if run is not None), None)
    most = max(case.step_tokens for case, _ in cases)
    warm_up, steps = num_steps(
        args,
        documents,
        window=job.window,
        step_tokens=most,
        num_cases=len(cases),
        default=(WARM_UP_STEPS, STEPS),
    )
    evaluations = _evaluate(args, cases, warm_up, steps, costs)
    # The solver packs other steps, so nothing is over `original` there.
    fits = job.original_fits(runs[max(job.numbers)])
    originals = {e.num_micro_batches: e for e in evaluations if e.setting.is_plain}
    rows = [
        e.row(None if e.setting.name == "fixed-solver" else originals.get(e.num_micro_batches))
        for e in evaluations
    ]
    title = f"{documents.title}, window {job.window:,}, S_max {max_tokens / job.window:g} windows"
    cost = job.title
    if args.plot:
        from megatron_wlb.study.plot_packings import plot_packings

        plot_packings(evaluations, f"{title}\n{cost}", args.plot)
    if args.json:
        print(json.dumps({"layout": job.sizes, "original_fits": fits, "rows": rows}, indent=1))
        return 0
    out = console()
    out.print(
        _table(rows, f"{title}, {cost}: {steps} steps, seed {args.seed}; modelled", out.width)
    )
    say(out, _advice(evaluations, args.max_delay, fits=fits is not False))
    if args.plot:
        say(out, f"picture: {args.plot}")
    return 0


def _settings(job: inputs.Job, max_tokens: int) -> list[PackingSettings]:
    args = job.args
    if not args.packing:
        job.without_slices("packed")
    every = [name + form for name in PACKINGS for form in kind_of(name).tried]
    named = args.packing or run_with(job.pp_size, every)
    own: dict[str, dict[str, Any]] = {
        "wlb": {"queue_thresholds": tuple(args.queue_thresholds)},
        "hold": {"tau": args.hold_tau, "delay_price": args.delay_price},
        "fixed-solver": {"solver_limit": args.solver_limit},
    }
    settings = []
    for name in dict.fromkeys(named):
        given = job.limits | own.get(name.partition(":")[0], {})
        settings.append(PackingSettings.parse(name, job.window, max_tokens, **given))
    return settings


def _evaluate(
    args: argparse.Namespace,
    cases: Sequence[tuple[Workload, PackingSettings]],
    warm_up: int,
    steps: int,
    costs: StepCosts | None,
) -> list[Evaluation]:
    """Each case; the solver over fewer steps, unless they were asked for."""

    def sizes(setting: PackingSettings) -> tuple[int, int]:
        if setting.name == "fixed-solver":  # holds nothing back, so nothing has to fill
            return 0, args.steps or min(steps, SOLVER_STEPS)
        return warm_up, steps

    evaluations = []
    total = sum(sum(sizes(setting)) for _, setting in cases)
    with counting_bar("packing", total) as on_step:
        for case, setting in cases:
            before, counted = sizes(setting)
            found = evaluate(case, setting, counted, warm_up=before, costs=costs, on_step=on_step)
            evaluations.append(found)
    return evaluations


def _table(rows: Sequence[dict[str, Any]], title: str, width: int) -> Table:
    """Columns that matter less are left out where there is no room."""
    padded = any(row["padding"] >= 0.00005 for row in rows)
    shown = [_cells(row) for row in rows]
    left_out = {"padding": not padded}
    left_out |= dict.fromkeys(EXTRA_COLUMNS, width < MIN_WIDTH)
    headers = [header for header in shown[0] if not left_out.get(header)]
    table = table_of(title, headers, ["packing"])
    for column, header in zip(table.columns, headers, strict=True):
        if header != "packing":
            column.min_width = max(len(header), *(len(cells[header]) for cells in shown))
    for number, cells in enumerate(shown):
        if number and cells["N"] != shown[number - 1]["N"]:
            table.add_section()
        table.add_row(*(cells[header] for header in headers))
    return table


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """By column, from left to right."""

    def number(name: str, form: str) -> str:
        return "" if row[name] is None else format(row[name], form)

    return {
        "N": number("num_micro_batches", ""),
        "packing": row["title"],
        "imbalance": number("imbalance_mean", ".3f"),
        "tw": number("imbalance_time_weighted", ".3f"),
        "p95": number("imbalance_p95", ".3f"),
        "worst": number("imbalance_worst", ".2f"),
        "work/s": number("work_speedup", ".3f"),
        "tokens/s": number("tokens_speedup", ".3f"),
        "delay": number("delay_mean", ".3f"),
        "p99": number("delay_p99", ""),
        "max": number("delay_max", ""),
        "CV": number("tokens_cv", ".2f"),
        "padding": number("padding", ".2%"),
        "ms": number("ms_per_step", ".2f"),
        "documents": number("documents", ","),
    }


def _advice(evaluations: Sequence[Evaluation], max_delay: float, *, fits: bool) -> str:
    """One sentence on what to train with, for the largest N."""
    number = max(e.num_micro_batches for e in evaluations)
    at_hand = [e for e in evaluations if e.num_micro_batches == number]
    # The solver packs other steps, so it compares with itself alone.
    same_steps = [e for e in at_hand if e.setting.name != "fixed-solver"]
    options = [e.option for e in same_steps or at_hand]
    original = next((o for o in options if o.of.setting.is_plain), None)
    best = recommended(options, max_delay, original)
    limit = f"a mean delay of {steps_of(max_delay)} (--max-delay)"
    if best is None:
        least = min(options, key=lambda option: option.delay_steps)
        return (
            f"At N={number} nothing here keeps within {limit}: the least is "
            f"{least.delay_steps:.3f}, of {least.of.setting.title}."
        )
    chosen = best.of
    if best is original:
        return (
            f"At N={number} nothing within {limit} is faster than original, which has imbalance "
            f"{chosen.imbalance:.3f}: keep it ('wlb tune' looks for settings that are)."
        )
    gained = "" if original is None else f"; it does {gain(best, original, fits=fits)}"
    was = "" if original is None else f" instead of {original.imbalance:.3f}"
    memory = ""
    if chosen.setting.kind.slices:
        memory = "; long documents run in slices, which need less memory ('wlb simulate' tells)"
    elif not chosen.setting.kind.windows:
        memory = f"; it needs memory for micro-batches of {chosen.setting.max_tokens:,} tokens"
    return (
        f"At N={number} and within {limit} train with {' '.join(chosen.flags)}: imbalance "
        f"{chosen.imbalance:.3f}{was}{gained}{memory}; it delays a token by {chosen.delay:.3f} "
        "steps in the mean ('wlb tune' looks for better settings)."
    )
