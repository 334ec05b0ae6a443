"""``wlb simulate``: what steps would take, for several packings and shardings side by side."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import cast

from rich.table import Table

from megatron_wlb.cli import scenario
from megatron_wlb.cli.choice import num_steps
from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.inputs import (
    SOURCES,
    Job,
    add_packing_rules,
    add_source,
    source,
)
from megatron_wlb.cli.model import MODELS
from megatron_wlb.cli.output import (
    OVER,
    check_file,
    check_picture,
    console,
    counting_bar,
    marked,
    remark,
    say,
    table_of,
)
from megatron_wlb.cost.memory import GIB
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.plan.sharding.select import MODES, Mode
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.settings import run_with, sliced
from megatron_wlb.planning.run import Run, title
from megatron_wlb.reading import unknown, whole_number
from megatron_wlb.study.advice import UNFIT
from megatron_wlb.study.compare import WARM_UP_STEPS, Outcome, compare

DEFAULT_PACKINGS = "original,fixed-greedy,wlb,hold"
STEPS = 50
SAMPLE_TOKENS = 1 << 25
"""Tokens of the documents whose lengths the report shows."""

_EPILOG = f"""\
{SOURCES}
{MODELS}\
{scenario.MACHINES}
columns:
  speed-up   work (model FLOPs) a second over original with per-sequence sharding; in brackets
             the lowest and highest seed
  MFU        model FLOPs over the devices' peak: linear and causal attention, nothing twice
  bubble     share of the ranks' time in the pipeline that they wait
  peak       the most that a device held in any step; ! where it is above the limit
  PP, CP, DP imbalance, 1 is perfect: the slowest micro-batch of a pipeline, the slowest attention
             of the ranks that share a sequence, the slowest replica, each over the mean
  experts    share of the ranks' time that they wait for a replica with more work, with which they
             exchange tokens; a part of the bubble
  delay      steps between a token's arrival and its run, in the mean

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
    add_source(parser)
    scenario.add_model(parser)
    scenario.add_layout(parser)
    group = parser.add_argument_group("what is compared")
    flag(
        group,
        "--packing a,b,…",
        "as for wlb pack, like wlb:3; hold+shape has shaped steps, hold+auto chooses N (default: "
        f"{DEFAULT_PACKINGS}; with stages hold+shape and slim too)",
    )
    about = f"of {', '.join(MODES)} (default: per-sequence,adaptive where CP is above 1)"
    flag(group, "--sharding a,b,…", about)
    about = "S_max in windows (default: --model's, 2 × --micro-batch-size, or what fits)"
    flag(group, "--max-windows X", about)
    add_packing_rules(group)
    about = f"of each seed, after {WARM_UP_STEPS} that fill queues (default: {STEPS})"
    flag(group, "--steps N", about)
    flag(group, "--num-seeds N", "--seed and those after", 3)
    output = parser.add_argument_group("output")
    flag(output, "--report FILE.html", "one page to look at, without a network")
    flag(
        output, "--trace FILE", "a step of each packing: .json for Perfetto, .csv has every action"
    )
    flag(output, "--plot FILE", "a step of each packing, PNG or SVG")
    output.add_argument("--json", action="store_true", help='print {"rows": […]} instead')
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_file("--report", args.report)
    check_file("--trace", args.trace)
    check_picture("--plot", args.plot)
    job = scenario.read_job(args)
    documents, base = source(args, job.window, job.config), scenario.run_of(job)
    documents.check(window=base.window, long_documents=args.long_documents)
    whole_number("--num-seeds", args.num_seeds, 1, 1000)
    if base.hardware.attention and base.measured_attention is None:
        remark(
            f"--hardware {job.config.wlb.wlb_hardware} has no attention table of bfloat16 heads of "
            f"{base.shape.kv_channels}: whole tiles at its attention_share are assumed"
        )
    packings = _packings(job, job.max_tokens(base))
    shardings = _shardings(args, base.parallelism.cp_size)
    stock = [base.overlapped] if base.more_overlap and len(packings) > 1 else []
    num_cases = (len(packings) + len(stock)) * args.num_seeds
    most, default = base.step_tokens, (WARM_UP_STEPS, STEPS)
    warm_up, steps = num_steps(
        args,
        documents,
        window=job.window,
        step_tokens=most,
        num_cases=num_cases,
        default=default,
    )
    with counting_bar("simulating", num_cases * (warm_up + steps)) as on_step:
        compared = partial(
            compare,
            source=documents,
            steps=steps,
            warm_up=warm_up,
            seeds=[args.seed + number for number in range(args.num_seeds)],
            long_documents=args.long_documents,
            on_step=on_step,
        )
        outcomes = compared(base, settings=packings, shardings=shardings)
        best = [compared(run, settings=packings[:1], shardings=shardings[:1])[0] for run in stock]
    heading = scenario.machine_title(args.model, job.config.wlb.wlb_hardware, base.num_devices)
    written = _write(args, base, documents, outcomes, heading)
    original = outcomes[0]
    if args.json:
        rows = [outcome.row(original) for outcome in outcomes]
        stocks = [one.row(original) for one in best]
        fits = not original.out_of_memory
        said = {"simulated": True, "original_fits": fits, "rows": rows, "overlapped": stocks}
        print(json.dumps(said, indent=1))
        return 0
    out = console()
    out.print(_table(args, base, outcomes, heading))
    too_large = [f"{one.title}, {one.out_of_memory}" for one in outcomes if one.out_of_memory]
    for line in [*too_large[:1], *_unfit(original), *_net(base, outcomes, best), *written]:
        say(out, line)
    return 0


def _unfit(original: Outcome) -> Iterator[str]:
    """What speed-ups are worth where the run that they are over cannot be."""
    if original.out_of_memory:
        yield (
            f"all speed-ups are over {UNFIT}: recompute more (--recompute full), or use more TP, "
            "CP or PP, and compare with a run that can be"
        )


def _net(base: Run, outcomes: Sequence[Outcome], best: Sequence[Outcome]) -> Iterator[str]:
    """What is left of the gains over stock Megatron with all that it may overlap."""
    for stock in best:
        gains = (
            f"{title} {max(one.speedup(stock) for one in alike):.2f}×"
            for title, alike in groupby(outcomes[1:], attrgetter("title"))
        )
        yield (
            f"{f'{UNFIT},' if stock.out_of_memory else 'original'} with {base.more_overlap}, which "
            f"plans turn off: {stock.speedup(outcomes[0]):.2f}×; net of that {', '.join(gains)}"
        )


def _packings(job: Job, max_tokens: int) -> list[PackingSettings]:
    """What is asked for, after `original`, which all are compared with."""
    named, p = job.args.packing, job.config.parallel
    if named is None:
        named = [
            *DEFAULT_PACKINGS.split(","),
            *(["hold+shape"] if p.pipeline_model_parallel_size > 1 else []),
        ]
        named += run_with(p.pipeline_model_parallel_size, sliced())
    names = ["original", *named]
    return [
        PackingSettings.parse(name, job.window, max_tokens, **job.limits)
        for name in dict.fromkeys(names)
    ]


def _shardings(args: argparse.Namespace, cp_size: int) -> list[Mode]:
    """What is asked for, after per-sequence, which all are compared with."""
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
    modes = dict.fromkeys(["per-sequence", *(named or ["adaptive"])])
    return [cast(Mode, name) for name in modes]


def _write(
    args: argparse.Namespace,
    base: Run,
    documents: LengthSource,
    outcomes: Sequence[Outcome],
    heading: str,
) -> list[str]:
    """The files that are asked for; what to say of them."""
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
        page = Page(
            base,
            outcomes,
            documents.sampled(SAMPLE_TOKENS, window=base.window, seed=args.seed).lengths(
                max(1, SAMPLE_TOKENS // base.window), window=base.window, seed=args.seed
            ),
            heading,
            title(base.parallelism),
            (
                ("window", f"{base.window:,} tokens"),
                ("N", f"{base.num_micro_batches:,}{_of_windows(base)}"),
                ("S_max", f"{outcomes[0].setting.max_tokens:,} tokens"),
                ("recompute", base.recompute.granularity or "none"),
                ("documents", documents.title),
                ("seeds", " ".join(str(args.seed + n) for n in range(args.num_seeds))),
            ),
            shlex.join(["wlb", *sys.argv[1:]]),
        )
        write_text(args.report, page.html())
        written.append(f"report: {args.report}")
    return written


def _of_windows(base: Run) -> str:
    return f" of {base.micro_batch_size} windows" if base.micro_batch_size > 1 else ""


def _table(args: argparse.Namespace, base: Run, outcomes: Sequence[Outcome], heading: str) -> Table:
    original = outcomes[0]
    with_sharding = base.parallelism.cp_size > 1
    with_experts = base.costs.experts is not None
    words = ("packing", "sharding") if with_sharding else ("packing",)
    table = table_of(
        f"{heading}, {title(base.parallelism)}, "
        f"window {base.window:,}, N {base.num_micro_batches}{_of_windows(base)}, "
        f"S_max {original.setting.max_tokens / base.window:.3g} windows",
        (*words, "speed-up", "step ms", "tokens/s", "MFU", "bubble", "peak GiB", "PP", "CP", "DP",
         *(["experts"] if with_experts else []), "delay"),
        words,
        f"simulated: {original.num_steps} steps of each, {args.num_seeds} seeds; memory limit "
        f"{base.limit_gib:.1f} GiB; {OVER}",
    )  # fmt: skip
    for number, outcome in enumerate(outcomes):
        if number and outcome.setting != outcomes[number - 1].setting and with_sharding:
            table.add_section()
        lowest, highest = outcome.speedup_by_seed(original)
        spread = f" ({lowest:.2f}-{highest:.2f})" if args.num_seeds > 1 and number else ""
        peak = f"{outcome.peak_bytes / GIB:.1f}"
        table.add_row(
            outcome.title,
            *([outcome.sharding] if with_sharding else []),
            f"{outcome.speedup(original):.3f}×{spread}",
            f"{outcome.step_us / 1e3:,.1f}",
            f"{outcome.tokens_per_s:,.0f}",
            f"{outcome.mfu:.1%}",
            f"{outcome.bubble_share:.1%}",
            marked(peak, over=bool(outcome.out_of_memory)),
            f"{outcome.pp_imbalance:.3f}",
            f"{outcome.cp_imbalance:.3f}",
            f"{outcome.dp_imbalance:.3f}",
            *([f"{outcome.expert_wait_share:.1%}"] if with_experts else []),
            f"{outcome.delay_steps:.2f}",
        )
    return table
