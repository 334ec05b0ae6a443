"""``wlb simulate``: what steps would take, for several packings and shardings side by side."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import cast

from megatron_wlb.cli import inputs
from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.output import (
    OVER,
    about_columns,
    check_file,
    check_picture,
    console,
    remark,
    say,
    table_of_outcomes,
)
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.plan.sharding.select import MODES, Mode
from megatron_wlb.planning.run import Run, title
from megatron_wlb.reading import unknown, whole_number
from megatron_wlb.simulator.baseline import Baseline, row
from megatron_wlb.simulator.trial import Outcome

COLUMNS = (
    "title", "sharding", "recompute", "speedup", "net_speedup", "step_ms", "tokens_per_s", "mfu",
    "bubble_share", "peak_gib", "pp_imbalance", "cp_imbalance", "dp_imbalance",
    "expert_wait_share", "delay_mean",
)  # fmt: skip
SAMPLE_TOKENS = 1 << 25
"""Tokens of the documents whose lengths the report shows."""

_EPILOG = f"""\
{inputs.SOURCES}
{inputs.MACHINES}
columns:
{about_columns(COLUMNS)}

All of it is simulated: Megatron's schedule replayed with modelled times (docs/simulator.md).

examples:
  wlb simulate --distribution reference --model 7b --tp-size 8 --cp-size 2 --pp-size 4
  wlb simulate corpora/books --model 7b.yaml --hardware h200 --pp-size 4 --vpp-size 2 \\
      --num-micro-batches 32 --window 32768 --report step.html --trace step.json
  wlb simulate --lengths lengths.txt --model 30b --tp-size 8 --cp-size 4 --pp-size 4 \\
      --packing original,wlb:3,hold --sharding per-sequence,adaptive,hybrid --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    inputs.add_source(parser)
    inputs.add_model(parser, required=True)
    inputs.add_layout(parser)
    group = parser.add_argument_group("what is compared")
    inputs.add_packings(group)
    about = f"of {', '.join(MODES)} (default: per-sequence,adaptive where CP is above 1)"
    flag(group, "--sharding a,b,…", f"{about}; gains are over original with the last")
    inputs.add_packing_rules(group)
    inputs.add_steps(group)
    flag(group, "--num-seeds N", "--seed and those after", 1)
    output = parser.add_argument_group("output")
    flag(output, "--report FILE.html", "one page to look at, without a network")
    flag(
        output, "--trace FILE", "a step of each packing: .json for Perfetto, .csv has every action"
    )
    flag(output, "--plot FILE", "a step of each packing, PNG or SVG")
    output.add_argument("--json", action="store_true", help='print {"rows": […], …} instead')
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_file("--report", args.report)
    check_file("--trace", args.trace)
    check_picture("--plot", args.plot)
    whole_number("--num-seeds", args.num_seeds, 1, 1000)
    job = inputs.read_job(args)
    if len(job.numbers) > 1:
        raise ConfigError(f"--num-micro-batches {job.numbers[0]}, …: simulate one at a time")
    run = job.run(job.numbers[0])
    if run.hardware.attention and run.measured_attention is None:
        remark(
            f"--hardware {job.hardware} has no attention table of bfloat16 heads of "
            f"{run.shape.kv_channels}: whole tiles at its attention_share are assumed"
        )
    max_tokens, settings = job.max_tokens(run), job.settings(job.named, run)
    shardings = _shardings(args, run.parallelism.cp_size, job.sharding)
    steps = job.steps(run.step_tokens)
    pairs = job.compared([(run, settings)], steps, shardings, "simulating")
    base, outcomes = pairs[0][1], [outcome for outcome, _ in pairs]
    heading = job.title(run)
    written = _write(job, run, base, outcomes, heading)
    if args.json:
        told = {"frame": base.as_dict(), "layout": run.parallelism.sizes}
        rows = [row(outcome, base) for outcome in outcomes]
        print(json.dumps({"simulated": True} | told | {"rows": rows}, indent=1))
        return 0
    out = console()
    caption = (
        f"simulated: {steps.num} steps of each, {args.num_seeds} seeds from {steps.seeds[0]}; "
        f"memory limit {run.limit_gib:.1f} GiB; {OVER}"
    )
    head = f"{heading}, S_max {max_tokens / run.window:.3g} windows"
    out.print(table_of_outcomes(head, COLUMNS, pairs, caption))
    too_large = [f"{one.title}, {one.out_of_memory}" for one in outcomes if one.out_of_memory]
    for line in [base.said, *too_large[:1], *written]:
        say(out, line)
    return 0


def _shardings(args: argparse.Namespace, cp_size: int, usual: Mode) -> list[Mode]:
    """What is asked for, after Megatron's own, per-sequence; gains are over the last one."""
    named = args.sharding or []
    for name in named:
        if name not in MODES:
            raise unknown("sharding", name, MODES)
    if cp_size == 1:
        if set(named) - {"per-sequence"}:
            raise ConfigError(
                f"--sharding {args.sharding} needs context parallelism; give --cp-size 2 or more"
            )
        return ["per-sequence"]
    modes = dict.fromkeys(["per-sequence", *(named or [usual])])
    return [cast(Mode, name) for name in modes]


def _write(
    job: inputs.Job, run: Run, base: Baseline, outcomes: Sequence[Outcome], heading: str
) -> list[str]:
    """The files that are asked for; what to say of them."""
    args, documents = job.args, job.documents
    if not (args.trace or args.plot or args.report):
        return []
    # Not at the top: matplotlib takes a second.
    from megatron_wlb.simulator.trace import program, trace
    from megatron_wlb.study.page import Page, examples, name
    from megatron_wlb.study.plot import plot_timelines

    drawn = {name(outcome): outcome.example.timeline for outcome in examples(outcomes)}
    written = []
    if args.trace:
        if args.trace.suffix.lower() == ".csv":
            write_text(args.trace, program(drawn))
            written.append(f"actions: {args.trace}")
        else:
            write_text(args.trace, json.dumps(trace(drawn)))
            written.append(f"trace: {args.trace} (open it in https://ui.perfetto.dev)")
    if args.plot:
        lines = {key: max(line.replicas, key=lambda r: r.step_us) for key, line in drawn.items()}
        plot_timelines(lines, args.plot, heading, measured=False)
        written.append(f"picture: {args.plot}")
    if args.report:
        seed = job.config.training.seed
        page = Page(
            run,
            outcomes,
            base,
            documents.sampled(SAMPLE_TOKENS, window=run.window, seed=seed).lengths(
                max(1, SAMPLE_TOKENS // run.window), window=run.window, seed=seed
            ),
            heading,
            title(run.parallelism),
            (
                ("over", base.name),
                ("machine", base.hardware),
                ("recompute", run.recompute.title),
                ("documents", documents.title),
                ("seeds", " ".join(str(seed + n) for n in range(args.num_seeds))),
            ),
            shlex.join(["wlb", *sys.argv[1:]]),
        )
        write_text(args.report, page.html())
        written.append(f"report: {args.report}")
    return written
