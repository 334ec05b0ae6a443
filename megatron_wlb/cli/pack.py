"""``wlb pack``: how unbalanced documents are, and what each packing makes of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from megatron_wlb.cli import inputs
from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.model import given, settings, spellings
from megatron_wlb.cli.output import (
    about_columns,
    check_picture,
    console,
    remark,
    say,
    table_of_outcomes,
)
from megatron_wlb.planning.packing import PACKINGS
from megatron_wlb.planning.packing.settings import unread
from megatron_wlb.simulator.baseline import Baseline, row
from megatron_wlb.simulator.trial import Outcome
from megatron_wlb.study.advice import check_max_delay, gain, nothing_fits, recommended, steps_of

COLUMNS = (
    "num_micro_batches", "title", "recompute", "imbalance_mean", "imbalance_time_weighted",
    "imbalance_p95", "imbalance_worst", "speedup", "net_speedup", "tokens_speedup", "delay_mean",
    "delay_p99", "delay_max", "tokens_cv", "padding", "peak_gib", "ms_per_step", "documents",
)  # fmt: skip
EXTRA = ("imbalance_p95", "imbalance_worst", "tokens_speedup", "delay_p99", "tokens_cv")

_EPILOG = f"""\
{inputs.SOURCES}
{inputs.MACHINES}
packings (--packing a,b,…):
  {", ".join(PACKINGS)}; with a number: fixed-greedy:4 and
  fixed-solver:4 repack 4 global batches together, wlb:3 has 3 queues, hold:4 looks 4 steps
  ahead; slim:32 cuts a data-parallel rank's step into 32 units; with --pp-size hold+shape has
  shaped steps, and hold+auto numbers of micro-batches chosen step by step. Default: all but the
  solver, which takes seconds a step.

columns:
{about_columns(COLUMNS)}

Without --model it is 7b with TP 8 and CP 2, as in the paper's Table 2. All of it is simulated.

examples:
  wlb pack --distribution reference
  wlb pack corpora/books --window 32768 --num-micro-batches 8,16 --plot packings.png
  wlb pack --lengths lengths.txt --packing original,wlb:3,hold --model 7b.yaml \\
      --tp-size 4 --cp-size 2 --pp-size 4
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    inputs.add_source(parser)
    inputs.add_model(parser)
    inputs.add_layout(parser)
    group = parser.add_argument_group("what is compared")
    inputs.add_packings(group)
    inputs.add_packing_rules(group)
    settings(group, "wlb_queue_thresholds", "wlb_hold_tau", "wlb_delay_price", "wlb_solver_limit")
    inputs.add_max_delay(group)
    inputs.add_steps(group)
    output = parser.add_argument_group("output")
    flag(output, "--plot FILE", "picture of the table, PNG")
    output.add_argument("--json", action="store_true", help='print {"rows": […], …}')
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_picture("--plot", args.plot)
    check_max_delay(args.max_delay)
    job = inputs.read_job(args)
    runs = [job.run(number) for number in job.numbers]
    max_tokens = job.max_tokens(runs[-1])
    cases = [(run, job.settings(job.named, run)) for run in runs]
    steps = job.steps(max(run.step_tokens for run in runs))
    packings = list(dict.fromkeys(setting.name for _, settings in cases for setting in settings))
    wlb = job.config.wlb
    idle = [unread(replace(wlb, wlb_packing=packing)) for packing in packings]
    for name in given(args):
        if all(name in one for one in idle):
            remark(f"{spellings(name)[0]} has no effect: {', '.join(packings)} do not read it")
    pairs = job.compared(cases, steps, [job.sharding], "packing")
    base = pairs[-1][1]
    title = f"{job.title(runs[-1])}, {job.documents.title}"
    if args.plot:
        from megatron_wlb.study.plot_packings import plot_packings

        plot_packings([outcome for outcome, _ in pairs], title, args.plot)
    if args.json:
        told = {"frame": base.as_dict(), "layout": runs[-1].parallelism.sizes}
        print(json.dumps(told | {"rows": [row(*pair) for pair in pairs]}, indent=1))
        return 0
    out = console()
    caption = f"simulated: {steps.num} steps of each, seed {steps.seeds[0]}"
    head = f"{title}, S_max {max_tokens / job.window:g} windows"
    out.print(table_of_outcomes(head, COLUMNS, pairs, caption, EXTRA))
    say(out, base.said)
    say(out, _advice([outcome for outcome, own in pairs if own is base], base, args.max_delay))
    if args.plot:
        say(out, f"picture: {args.plot}")
    return 0


def _advice(outcomes: Sequence[Outcome], base: Baseline, max_delay: float) -> str:
    """One sentence on what to train with, for the last N."""
    best = recommended(outcomes, max_delay, base.original)
    at = f"At N={base.original.run.num_micro_batches}"
    limit = f"a mean delay of {steps_of(max_delay)} (--max-delay)"
    assert best is not None  # `original` delays nothing
    if best.out_of_memory:
        return nothing_fits(best)
    if best is base.original:
        return (
            f"{at} nothing within {limit} is faster than original, which has imbalance "
            f"{best.imbalance:.3f}: keep it ('wlb tune' looks for settings that are)."
        )
    memory = ""
    if best.setting.kind.slices:
        memory = "; long documents run in slices, which need less memory"
    elif not best.setting.kind.windows:
        memory = f"; it needs memory for micro-batches of {best.setting.max_tokens:,} tokens"
    return (
        f"{at} and within {limit} train with {' '.join(best.flags)}: imbalance "
        f"{best.imbalance:.3f} instead of {base.original.imbalance:.3f}; it does "
        f"{gain(best, base.original, base.name)}{memory}; it delays a token by "
        f"{best.delay_steps:.3f} steps in the mean ('wlb tune' looks for better settings)."
    )
