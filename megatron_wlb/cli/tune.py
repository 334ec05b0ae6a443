"""``wlb tune``: the settings of `wlb` and `hold` that suit the user's documents."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator

from megatron_wlb.cli import inputs
from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.model import settings
from megatron_wlb.cli.output import (
    check_picture,
    console,
    progress_bar,
    remark,
    say,
    table_of_outcomes,
)
from megatron_wlb.data.length_source import MIN_TO_SPLIT
from megatron_wlb.errors import ConfigError
from megatron_wlb.simulator.baseline import Baseline, baseline, row
from megatron_wlb.simulator.trial import Outcome
from megatron_wlb.study.advice import check_max_delay, gain, nothing_fits, steps_of
from megatron_wlb.study.tune import TUNABLE, Tuning, frontier, tune

MOST_ROWS = 12
"""The most rows of the trade-off curve in the table."""
COLUMNS = (
    "title", "recompute", "max_windows", "speedup", "net_speedup", "imbalance_time_weighted",
    "imbalance_p95", "peak_gib", "delay_mean", "delay_p99", "delay_max",
)  # fmt: skip

_EPILOG = f"""\
{inputs.SOURCES}
{inputs.MACHINES}
how it chooses:
  One half of the documents, at random, is packed with about a hundred settings (number and
  thresholds of wlb's queues; tau and delay price of hold; S_max up to --max-windows), and of those
  with a mean delay within --max-delay the one with the most work a second is taken. The steps that
  all commands simulate judge it, together with the defaults, original, fixed-greedy and slim, which
  have nothing to tune: the fastest there within --max-delay is recommended; of equals that with
  less delay.

examples:
  wlb tune --distribution reference --max-delay 0.3 --plot trade-off.png
  wlb tune corpora/books --window 32768 --num-micro-batches 16 --packing wlb
  wlb tune --lengths lengths.npy --model 7b.yaml --hardware h200 --tp-size 4 --pp-size 4 \\
      --dp-size 2
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    inputs.add_source(parser)
    inputs.add_model(parser)
    inputs.add_layout(parser)
    group = parser.add_argument_group("search")
    flag(group, "--packing a,b", "what is tuned", list(TUNABLE))
    inputs.add_packing_rules(group)
    inputs.add_max_delay(group)
    settings(group, "wlb_look_ahead")
    inputs.add_steps(group)
    output = parser.add_argument_group("output")
    flag(output, "--plot FILE", "trade-off curve, PNG")
    output.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_picture("--plot", args.plot)
    check_max_delay(args.max_delay)
    job = inputs.read_job(args)
    documents = job.documents
    wlb, (number, *others) = job.config.wlb, job.numbers
    if others:
        raise ConfigError(
            f"--num-micro-batches has {number} and {others[0]}; wlb tune takes one number"
        )
    run = job.run(number)
    max_tokens, steps = job.max_tokens(run), job.steps(run.step_tokens)
    if documents.num_documents < MIN_TO_SPLIT:
        remark(
            f"{documents.num_documents} documents are too few to part: settings are judged on the "
            "ones they were chosen on, in another order"
        )
    sampled = documents.sampled(2 * len(steps) * run.step_tokens, window=job.window, seed=1)
    choosing = dataclasses.replace(steps, source=sampled.halves(1)[1])
    with _no_warnings_of_backlogs(), progress_bar("trying settings") as progress:
        base = baseline(run, steps, job.sharding, job.hardware)
        tuning = tune(
            run,
            choosing,
            steps,
            base,
            packings=args.packing,
            max_tokens=job.asked_tokens,
            max_delay=args.max_delay,
            sharding=job.sharding,
            look_ahead=wlb.wlb_look_ahead,
            limits={"max_age": wlb.wlb_max_age, "max_step_tokens": wlb.wlb_max_step_tokens},
            progress=progress,
        )
    title = f"{job.title(run)}, {documents.title}, S_max up to {max_tokens / job.window:g} windows"
    if args.plot:
        from megatron_wlb.study.plot_packings import plot_trade_off

        plot_trade_off(tuning, title, args.plot)
    if args.json:
        told = {"frame": base.as_dict(), "layout": run.parallelism.sizes}
        print(json.dumps(told | as_dict(tuning, base), indent=1))
        return 0
    out = console()
    front = frontier(tuning.tried)
    every = -(-len(front) // MOST_ROWS)
    shown = [one for at, one in enumerate(front) if at % every == 0 or one is front[-1]]
    caption = f"one in {every} of {len(front)}; --json and --plot have all" if every > 1 else ""
    head = f"{title}: the best of {len(tuning.tried)} settings of {', '.join(args.packing)}"
    pairs = [(one, tuning.tried_base) for one in shown]
    out.print(table_of_outcomes(head, COLUMNS, pairs, caption))
    caption = f"simulated: {steps.num} steps of each, seed {steps.seeds[0]}; mean delay up to "
    caption += f"{steps_of(args.max_delay)} (--max-delay); recommended stands last"
    judged = [one for one in tuning.judged if one is not tuning.chosen]
    pairs = [(one, base) for one in [*judged, tuning.chosen]]
    out.print(table_of_outcomes("The best beside what is there", COLUMNS, pairs, caption))
    say(out, base.said)
    say(out, _advice(tuning, base))
    if not tuning.chosen.out_of_memory:
        out.print(" ".join(tuning.chosen.flags), style="bold", soft_wrap=True)
    if args.plot:
        say(out, f"picture: {args.plot}")
    return 0


def as_dict(tuning: Tuning, base: Baseline) -> dict[str, object]:
    """JSON-able: what is recommended, what it was judged against, the curve, all that was tried."""

    def rows(outcomes: Iterable[Outcome], over: Baseline) -> list[dict[str, object]]:
        return [row(outcome, over) for outcome in outcomes]

    return {
        "max_delay": tuning.max_delay,
        "recommended": row(tuning.chosen, base),
        "flags": list(tuning.chosen.flags),
        "judged": rows(tuning.judged, base),
        "is_default": tuning.keeps_default,
        "defaults": rows(tuning.defaults, base),
        "baselines": rows(tuning.baselines, base),
        "frontier": rows(frontier(tuning.tried), tuning.tried_base),
        "tried": rows(tuning.tried, tuning.tried_base),
    }


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


def _advice(tuning: Tuning, base: Baseline) -> str:
    chosen = tuning.chosen
    limit = f"a mean delay of {steps_of(tuning.max_delay)} (--max-delay)"
    if chosen.out_of_memory:
        return nothing_fits(chosen)
    if chosen is base.original:
        return f"Nothing that was tried within {limit} is faster than original here; keep it:"
    kept = "The defaults cannot be bettered here; a" if tuning.keeps_default else "A"
    return (
        f"{kept}dd this to the training command; within {limit} it does "
        f"{gain(chosen, base.original, base.name)}; it delays a token by "
        f"{chosen.delay_steps:.3f} steps:"
    )
