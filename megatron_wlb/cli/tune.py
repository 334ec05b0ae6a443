"""``wlb tune``: the settings of `wlb` and `hold` that suit the user's documents."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence

from rich.table import Table

from megatron_wlb.cli import inputs
from megatron_wlb.cli.choice import add_max_delay, num_steps
from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.output import check_picture, console, progress_bar, remark, say, table_of
from megatron_wlb.data.length_source import MIN_TO_SPLIT
from megatron_wlb.errors import ConfigError
from megatron_wlb.study.advice import check_max_delay, gain, steps_of
from megatron_wlb.study.evaluate import Evaluation
from megatron_wlb.study.tune import TUNABLE, WARM_UP_STEPS, Tuning, frontier, tune

MOST_ROWS = 12
"""The most rows of the trade-off curve in the table."""
NUM_SETTINGS = 120
"""About so many are tried."""

_EPILOG = f"""\
{inputs.SOURCES}
{inputs.COSTS}
how it chooses:
  The documents are parted at random. One half is packed with about a hundred settings (number and
  thresholds of wlb's queues; tau and delay price of hold; S_max up to --max-windows), and of those
  with a mean delay within --max-delay the one with the highest modelled throughput is taken. The
  other half judges it, together with the defaults, original, fixed-greedy and in a pipeline
  (--pp-size) slim, which has nothing to tune: the fastest there within --max-delay is recommended;
  of equals that with less delay.

examples:
  wlb tune --distribution reference --max-delay 0.3 --plot trade-off.png
  wlb tune corpora/books --window 32768 --num-micro-batches 16 --packing wlb
  wlb tune --lengths lengths.npy --model 7b.yaml --hardware h200 --tp-size 4 --pp-size 4 \\
      --dp-size 2
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    inputs.add_source(parser)
    inputs.add_workload(parser)
    group = parser.add_argument_group("search")
    flag(group, "--packing a,b", "what is tuned", list(TUNABLE))
    add_max_delay(group)
    flag(group, "--look-ahead K", "let hold look so many steps ahead", 0)
    about = f"of each setting that count, after {WARM_UP_STEPS}"
    flag(group, "--steps N", f"{about} (default: 50 to 250, fewer where they are large)")
    output = parser.add_argument_group("output")
    flag(output, "--plot FILE", "trade-off curve, PNG")
    output.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_picture("--plot", args.plot)
    check_max_delay(args.max_delay)
    job = inputs.read_job(args)
    documents = inputs.source(args, job.window, job.config)
    number, *others = job.numbers
    if others:
        raise ConfigError(f"--num-micro-batches {number}, {others[0]}: tune one at a time")
    run = job.known_run(number)
    max_tokens = job.max_tokens(run)
    base = job.workload(documents, number, run)
    warm_up, steps = num_steps(
        args,
        documents,
        window=job.window,
        step_tokens=base.step_tokens,
        num_cases=NUM_SETTINGS,
        default=(WARM_UP_STEPS, max(50, min(250, 1600 // number))),
        times=2,
    )
    if documents.num_documents < MIN_TO_SPLIT:
        remark(
            f"{documents.num_documents} documents are too few to part: settings are judged on the "
            "ones they were chosen on, in another order"
        )
    tokens = 2 * (warm_up + steps) * base.step_tokens
    sampled = documents.sampled(tokens, window=job.window, seed=args.seed)
    halves = [dataclasses.replace(base, source=half) for half in sampled.halves(args.seed)]
    with _no_warnings_of_backlogs(), progress_bar("trying settings") as progress:
        tuning = tune(
            *halves,
            packings=args.packing,
            max_tokens=max_tokens,
            max_delay=args.max_delay,
            steps=steps,
            warm_up=warm_up,
            look_ahead=args.look_ahead,
            limits=job.limits,
            costs=None if run is None else run.costs,
            progress=progress,
        )
    job.without_slices("judged")
    s_max = f"S_max up to {max_tokens / job.window:g} windows"
    title = f"{documents.title}, N={number}, window {job.window:,}, {s_max}"
    cost = job.title
    if args.plot:
        from megatron_wlb.study.plot_packings import plot_trade_off

        plot_trade_off(tuning, f"{title}\n{cost}", args.plot)
    fits = job.original_fits(run)
    if args.json:
        head = {"layout": job.sizes, "original_fits": fits}
        print(json.dumps(head | as_dict(tuning), indent=1))
        return 0
    out = console()
    out.print(
        _curve(
            tuning,
            f"{title}, {cost}: the best of {len(tuning.tried)} settings of "
            f"{', '.join(args.packing)}, modelled",
        )
    )
    held_out = f"on {steps} held-out steps, seed {args.seed}, modelled, {cost}"
    out.print(_judged(tuning, f"{held_out}; mean delay up to {steps_of(args.max_delay)}"))
    say(out, _advice(tuning, fits=fits is not False))
    out.print(" ".join(tuning.chosen.flags), style="bold", soft_wrap=True)
    if args.plot:
        say(out, f"picture: {args.plot}")
    return 0


def as_dict(tuning: Tuning) -> dict[str, object]:
    """JSON-able: what is recommended, what it was judged against, the curve, all that was tried."""
    original = tuning.original
    return {
        "max_delay": tuning.max_delay,
        "recommended": tuning.chosen.row(original),
        "flags": list(tuning.chosen.flags),
        "judged": [e.row(original) for e in tuning.judged],
        "is_default": tuning.keeps_default,
        "defaults": [e.row(original) for e in tuning.defaults],
        "baselines": [e.row(original) for e in tuning.baselines],
        "frontier": [e.row(tuning.tried_original) for e in frontier(tuning.tried)],
        "tried": [e.row(tuning.tried_original) for e in tuning.tried],
    }


def _curve(tuning: Tuning, title: str) -> Table:
    front = frontier(tuning.tried)
    every = -(-len(front) // MOST_ROWS)
    shown = [e for number, e in enumerate(front) if number % every == 0 or e is front[-1]]
    table = _empty_table(title)
    for evaluation in shown:
        style = "" if evaluation.delay <= tuning.max_delay else "dim"
        table.add_row(*_cells(evaluation, tuning.tried_original), style=style)
    if every > 1:
        table.caption = f"one in {every} of {len(front)}; --json and --plot have all"
    return table


def _judged(tuning: Tuning, title: str) -> Table:
    table = _empty_table(title)
    for evaluation in tuning.judged:
        if evaluation.setting != tuning.chosen.setting:
            role = "default" if evaluation in tuning.defaults else ""
            role = "tuned" if evaluation is tuning.tuned else role
            style = "" if evaluation.delay <= tuning.max_delay else "dim"
            table.add_row(*_cells(evaluation, tuning.original, role), style=style)
    table.add_row(*_cells(tuning.chosen, tuning.original, "recommended"), style="bold green")
    return table


def _empty_table(title: str) -> Table:
    headers = "setting", "S_max", "work/s", "imbalance tw", "p95", "delay", "p99", "max"
    table = table_of(title, headers, ["setting"])
    table.columns[0].no_wrap = True
    return table


def _cells(evaluation: Evaluation, original: Evaluation, role: str = "") -> Sequence[str]:
    setting, metrics = evaluation.setting, evaluation.metrics
    has_s_max = setting.name in TUNABLE
    return (
        f"{role}: {setting.title}" if role else setting.title,
        f"{setting.max_tokens:,}" if has_s_max else "",
        f"{evaluation.efficiency / original.efficiency:.3f}×",
        f"{evaluation.imbalance:.3f}",
        f"{metrics.imbalance_p95:.3f}",
        f"{evaluation.delay:.3f}",
        str(metrics.delay_p99_steps),
        str(metrics.delay_max_steps),
    )


@contextlib.contextmanager
def _no_warnings_of_backlogs() -> Iterator[None]:
    """One setting that lets documents pile up is no reason to warn: it will not be chosen."""
    logger = logging.getLogger("megatron_wlb.planning.planner")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _advice(tuning: Tuning, *, fits: bool) -> str:
    chosen, original = tuning.chosen, tuning.original
    limit = f"a mean delay of {steps_of(tuning.max_delay)} (--max-delay)"
    if chosen is original:
        return f"Nothing that was tried within {limit} is faster than original here; keep it:"
    kept = "The defaults cannot be bettered here; a" if tuning.keeps_default else "A"
    return (
        f"{kept}dd this to the training command; within {limit} it does "
        f"{gain(chosen.option, original.option, fits=fits)}; it delays a token by "
        f"{chosen.delay:.3f} steps:"
    )
