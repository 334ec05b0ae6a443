"""``wlb tune``: the settings of `wlb` and `hold` that suit the user's documents."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence

from rich.table import Table

from megatron_wlb.cli.inputs import (
    COSTS,
    SOURCES,
    add_source,
    add_workload,
    fill_defaults,
    max_tokens,
    numbers_of_micro_batches,
    source,
    workload,
)
from megatron_wlb.cli.output import check_picture, console, progress_bar, remark, save_file, say
from megatron_wlb.data.length_source import MIN_TO_SPLIT
from megatron_wlb.errors import ConfigError
from megatron_wlb.packing.base import MOST_STEPS
from megatron_wlb.packing.evaluate import Evaluation
from megatron_wlb.packing.tune import TUNABLE, WARM_UP_STEPS, Tuning, frontier, tune
from megatron_wlb.reading import Several, decimal, path_of_flag, whole_number

MOST_ROWS = 12
"""Of the trade-off curve, in the table."""

_EPILOG = f"""\
{SOURCES}
{COSTS}
how it chooses:
  The documents are parted at random. One half is packed with about a hundred settings (number and
  thresholds of wlb's queues; tau and delay price of hold; S_max up to --max-windows), and of those
  with a mean delay within --max-delay the one with the highest modelled throughput is taken. The
  other half judges it, together with the defaults: if one of them is better, it is recommended,
  and original if that is faster than all.

examples:
  wlb tune --distribution reference --max-delay 0.3 --plot trade-off.png
  wlb tune corpora/books --window 32768 --num-micro-batches 16 --packing wlb
  wlb tune --lengths lengths.npy --model 7b.yaml --hardware h200 --pp-size 4 --dp-size 2
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add_source(parser)
    add_workload(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--packing", action=Several, default=list(TUNABLE), metavar="a,b", help="default: wlb,hold"
    )
    group.add_argument(
        "--max-delay",
        type=decimal,
        default=0.5,
        metavar="STEPS",
        help="most that a token may be delayed in the mean (default: 0.5, as in the paper)",
    )
    group.add_argument(
        "--look-ahead", type=int, default=0, metavar="K", help="let hold look so many steps ahead"
    )
    group.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"of each setting that count, after {WARM_UP_STEPS} (default: 50 to 250, fewer where "
        "they are large)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--plot", type=path_of_flag, metavar="FILE", help="trade-off curve, PNG")
    output.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_picture("--plot", args.plot)
    fill_defaults(args)
    documents = source(args)
    number, *others = numbers_of_micro_batches(args)
    if others:
        raise ConfigError(f"--num-micro-batches {number}, {others[0]}: tune one at a time")
    steps = args.steps
    if steps is None:
        steps = max(50, min(250, 1600 // number))
    whole_number("--steps", steps, 1, MOST_STEPS)
    base = workload(args, documents, number)
    tokens = 2 * (WARM_UP_STEPS + steps) * base.step_tokens
    for text in documents.remarks(tokens, window=args.window, long_documents=args.long_documents):
        remark(text)
    if documents.num_documents < MIN_TO_SPLIT:
        remark(
            f"{documents.num_documents} documents are too few to part: settings are judged on the "
            "ones they were chosen on, in another order"
        )
    sampled = documents.sampled(tokens, window=args.window, seed=args.seed)
    halves = [dataclasses.replace(base, source=half) for half in sampled.halves(args.seed)]
    with _no_warnings_of_backlogs(), progress_bar("trying settings") as progress:
        tuning = tune(
            *halves,
            packings=args.packing,
            max_tokens=max_tokens(args),
            max_delay=args.max_delay,
            steps=steps,
            look_ahead=args.look_ahead,
            progress=progress,
        )
    title = (
        f"{documents.title}, N={number}, window {args.window:,}, S_max up to "
        f"{args.max_windows:g} windows"
    )
    if args.plot:
        from megatron_wlb.packing.plot import plot_trade_off

        save_file("--plot", args.plot, lambda path: plot_trade_off(tuning, title, path))
    if args.json:
        print(json.dumps(as_dict(tuning), indent=1))
        return 0
    out = console()
    out.print(_curve(tuning, f"{title}: the best of {len(tuning.tried)} settings, modelled"))
    out.print(_judged(tuning, f"on {steps} held-out steps, seed {args.seed}, modelled"))
    say(out, _advice(tuning))
    out.print(" ".join(tuning.chosen.setting.flags()), style="bold", soft_wrap=True)
    if args.plot:
        say(out, f"picture: {args.plot}")
    return 0


def as_dict(tuning: Tuning) -> dict[str, object]:
    """JSON-able: what is recommended, what it was judged against, the curve, all that was tried."""
    original = tuning.original
    return {
        "max_delay": tuning.max_delay,
        "recommended": tuning.chosen.row(original),
        "flags": tuning.chosen.setting.flags(),
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
    for evaluation in tuning.baselines:
        if evaluation is not tuning.chosen:
            table.add_row(*_cells(evaluation, tuning.original))
    for evaluation in tuning.defaults:
        if evaluation.setting != tuning.chosen.setting:
            table.add_row(*_cells(evaluation, tuning.original, "default"))
    table.add_row(*_cells(tuning.chosen, tuning.original, "recommended"), style="bold green")
    return table


def _empty_table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("setting", no_wrap=True)
    for header in ("S_max", "work/s", "imbalance tw", "p95", "delay", "p99", "max"):
        table.add_column(header, justify="right")
    return table


def _cells(evaluation: Evaluation, original: Evaluation, role: str = "") -> Sequence[str]:
    setting, metrics = evaluation.setting, evaluation.metrics
    has_s_max = setting.packing in TUNABLE
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
    logger = logging.getLogger("megatron_wlb.planner")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _advice(tuning: Tuning) -> str:
    chosen, original = tuning.chosen, tuning.original
    if chosen is original:
        best = max(e.efficiency for e in tuning.defaults) / original.efficiency
        return (
            "Nothing that was tried within the limit is as fast as original here (the defaults do "
            f"{best:.2f} × its work a second, modelled); keep it:"
        )
    kept = "The defaults cannot be bettered here; a" if tuning.keeps_default else "A"
    return (
        f"{kept}dd this to the training command for {chosen.efficiency / original.efficiency:.2f} "
        f"× the work a second of original, modelled, at a mean delay of {chosen.delay:.2f} steps:"
    )
