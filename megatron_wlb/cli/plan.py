"""``wlb plan``: the layout, batch and packing that train a model fastest on so many devices."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_wlb.cli import inputs
from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.inputs import RECOMPUTE, machine_title
from megatron_wlb.cli.model import Model, given, settings
from megatron_wlb.cli.output import (
    OVER,
    check_file,
    console,
    marked,
    progress_bar,
    say,
    table_of,
)
from megatron_wlb.cost import Parallelism, load_hardware
from megatron_wlb.cost.memory import GIB
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.planning.extension import strategies
from megatron_wlb.planning.from_config import execution
from megatron_wlb.planning.packing.base import MOST_STEPS
from megatron_wlb.planning.run import Run, title
from megatron_wlb.reading import MOST_DEVICES, whole_number
from megatron_wlb.settings.config import Config, flag_of, table
from megatron_wlb.settings.megatron import ParallelConfig
from megatron_wlb.simulator.baseline import COLUMNS, row
from megatron_wlb.simulator.trial import Steps
from megatron_wlb.study import write_recipe as recipe
from megatron_wlb.study.advice import DIGITS, check_max_delay, gain, steps_of
from megatron_wlb.study.found import Rejected, Search, by_reason
from megatron_wlb.study.search import PASSES, Space, search
from megatron_wlb.study.workers import MOST, usual_number

STEP_TOKENS = 1 << 22
"""Tokens of a step if N is not given."""
HEADROOM = 0.05
UNFIT_ANYWHERE = "no gain over original is told, which fits memory in no layout here"
SHOWN = ("step_ms", "tokens_per_s", "bubble_share", "peak_gib", "delay_mean")

_EPILOG = f"""\
{inputs.SOURCES}
{inputs.MACHINES}
how it searches:
  Every way to divide the devices over TP, CP, PP, VPP and DP, with each N and as little
  recomputation as fits, is checked against the model, Megatron's schedule and the memory limit.
  What can run gets one simulated step of even micro-batches; the best --refine layouts, and at most
  as many for slices, many steps of your documents; and the best three of those every packing and
  S_max. Ranked by work (model FLOPs) a second among those within --max-delay; of equals that with
  less delay. The same command gives the same ranking.

strategies (docs/strategies.md):
  With --strategies each replica may have a layout of its own, and each step chooses among a few
  such strategies by its documents. They are proposed from one half of your documents and judged on
  the other. The launcher runs what --out writes (--wlb-strategies); give --fp32 where that
  run is without --bf16. --packing, --sharding, --refine and --max-delay do not matter to them: no
  document waits.

table:
  the best packing and S_max of each layout, and then the other packings on the best layout; --json
  has all that was simulated

columns:
  coarse     MFU by the coarse pass, of even micro-batches of an average mix: it ranks layouts
  over best  work a second over the fastest of original packing in whichever layout
  MFU        simulated over steps of your documents
  others as for wlb simulate

All of it is simulated (docs/simulator.md): measure the first few before a long run.

examples:
  wlb plan corpora/books --model 7b --num-devices 64 --num-micro-batches 16 32
  wlb plan --distribution reference --model 30b --num-devices 128 --tp-size 8 --out 30b.yaml
  wlb plan corpora/books --model 7b --num-devices 64 --strategies --out strategies.yaml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    inputs.add_source(parser)
    inputs.add_model(parser, required=True)
    group = parser.add_argument_group("what is searched")
    flag(group, "--num-devices N", "GPUs", required=True)
    about = "of a step over all replicas: --global-batch-size; several are compared"
    about = f"{about} (default: what has {STEP_TOKENS:,} tokens)"
    flag(group, "--num-micro-batches N", about, of=int)
    settings(group, *inputs.SIZES, about="only this one")
    flag(group, "--dp-size N", "only this one")
    flag(group, "--max-tp N", "most tensor-parallel ranks (default: a node)")
    flag(group, "--recompute", "only this (default: as little as fits)", choices=RECOMPUTE)
    about = f"as for wlb simulate (default: {','.join(Space.packings)})"
    flag(group, "--packing a,b,…", about)
    settings(group, "wlb_cp_sharding", "wlb_expert_imbalance", "wlb_long_documents")
    flag(group, "--refine N", "layouts to simulate, and at most as many for slices", 8)
    flag(group, "--strategies", "replicas of unlike layouts instead, which follow the documents")
    flag(group, "--fp32", "strategies of a run without --bf16: what fits memory is less")
    inputs.add_steps(group)
    inputs.add_max_delay(group)
    flag(group, "--workers N", f"processes that simulate (default: processors, {MOST} at most)")
    flag(group, "--headroom SHARE", "of the memory limit that is left free", HEADROOM)
    output = parser.add_argument_group("output")
    flag(output, "--out FILE.yaml", "recipe of the best, for wlb recipe run")
    flag(output, "--rows N", "of the table", 12)
    output.add_argument("--json", action="store_true", help="print everything, also the rejected")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    _check(args)
    model = inputs.asked(args)
    config = model.config
    if config.model.position_embedding_type == "yarn":
        raise ConfigError(
            f"--model {args.model} has --position-embedding-type yarn, which no run with "
            "--wlb-packing takes, as positions are by document; use rope, learned_absolute or none"
        )
    if args.strategies and config.parallel.hybrid_layer_pattern is not None:
        raise ConfigError(
            f"--strategies is for a GPT, but --model {args.model} is a HybridModel; leave it out"
        )
    documents = inputs.source(args, config)
    space = _space(args, model)
    job = inputs.Job(args, model, space.num_micro_batches, documents)
    steps = job.steps(max(space.num_micro_batches) * space.window)
    if args.strategies:
        return strategies().advise(args, steps, space, model)
    found = _search(args, space, steps)
    sections = _sections(found, model)
    flags = {flag: value for section in sections.values() for flag, value in section.items()}
    machine = space.num_devices, space.hardware.devices_per_node
    command = recipe.command(flags, *machine, model.environment, model.variables)
    title = f"{Path(args.model).stem} on {machine_title(args.num_devices, config.wlb.wlb_hardware)}"
    if args.out:
        remarks = _remarks(title, found, recipe.to_add(flags))
        write_text(args.out, recipe.recipe(sections, *machine, remarks, model.environment))
    if args.json:
        print(json.dumps(_json(found, flags, command), indent=1))
        return 0
    out = console()
    out.print(_table(args, title, space, found, steps.seeds[0]))
    out.print(_rejected(found))
    for line in [_verdict(found), found.base.said, *_best_of_each(found)]:
        say(out, line)
    out.print(f"\ntrain it with Megatron-LM, left to add: {recipe.to_add(flags)}")
    out.print(command, soft_wrap=True)
    if args.out:
        out.print(f"recipe: {args.out}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises :class:`ConfigError` for flags that cannot be, before anything is read."""
    check_file("--out", args.out)
    check_max_delay(args.max_delay)
    if not 0 <= args.headroom < 1:
        raise ConfigError(f"--headroom is {args.headroom:g}; give a share from 0 to below 1")
    for name in ("refine", "rows", "workers"):
        if (value := getattr(args, name)) is not None:
            whole_number(f"--{name}", value, 1, MOST_STEPS)
    if "wlb_cost" in given(args):
        raise ConfigError(
            "--cost holds for the layout it was measured with, but layouts are searched here; "
            "leave it out, and check the best with wlb simulate --cost"
        )
    if args.fp32 and not args.strategies:
        raise ConfigError(
            "--fp32 is for --strategies, but layouts are searched for a run with --bf16; leave it "
            "out, or give --strategies"
        )


def _search(args: argparse.Namespace, space: Space, steps: Steps) -> Search:
    with progress_bar("searching") as progress:
        return search(
            space,
            steps,
            num_refined=args.refine,
            max_delay=args.max_delay,
            workers=args.workers or usual_number(),
            # Each pass takes about as long as the others.
            progress=lambda what, done, total: progress(
                PASSES.index(what) * 100 + 100 * done // total,
                100 * len(PASSES),
                f"searching ({what})",
            ),
        )


def _sections(found: Search, model: Model) -> dict[str, recipe.Flags]:
    """The flags that train the best, by what they are about."""
    run, outcome = found.best.candidate.scenario, found.best.outcome
    balance = recipe.balance_settings(run, outcome.setting, model.config.wlb)
    return {
        **model.flags,
        "Layout": recipe.flags_of(recipe.layout_settings(run, model.config.parallel.split.pattern)),
        "Batch": model.batch_flags(run.num_micro_batches),
        "Workload balance": recipe.flags_of(balance),
    }


def _space(args: argparse.Namespace, model: Model) -> Space:
    config, numbers = model.config, args.num_micro_batches
    window = config.data.seq_length
    if numbers is None:
        numbers = [max(1, STEP_TOKENS // window)]
    for name in ("num_devices", "max_tp", "dp_size"):
        if getattr(args, name) is not None:
            whole_number(flag_of(name), getattr(args, name), 1, MOST_DEVICES)
    sizes = {table()[name].short: size for name, size in given(args).items()}
    sizes["dp_size"] = args.dp_size
    fixed = {name: sizes[name] for name in Parallelism().sizes if sizes.get(name)}
    hardware = load_hardware(config.wlb.wlb_hardware)
    node = hardware.devices_per_node
    if args.num_devices > node and args.num_devices % node:
        whole = args.num_devices // node * node
        raise ConfigError(
            f"--num-devices is {args.num_devices}, but nodes have {node} devices each, and "
            f"torchrun fills whole nodes; give {whole} or {whole + node}"
        )
    recompute = [args.recompute] if args.recompute else RECOMPUTE
    return Space(
        shape=model.shape,
        execution=execution(_undivided(config)),
        hardware=hardware,
        num_devices=args.num_devices,
        machine=config.wlb.wlb_hardware,
        memory_gib=config.wlb.wlb_memory_gib,
        headroom=args.headroom,
        max_tp=max(filter(None, (args.max_tp, fixed.get("tp_size"))), default=None),
        window=window,
        num_micro_batches=inputs.numbers_of_micro_batches(numbers),
        packings=tuple(dict.fromkeys(args.packing or Space.packings)),
        sharding=config.wlb.wlb_cp_sharding,
        recomputes=tuple(RECOMPUTE[name] for name in recompute),
        extrapolate=config.wlb.wlb_cost_extrapolate,
        fixed=fixed,
    )


def _undivided(config: Config) -> Config:
    """``config`` without its layout, on GPUs and in 16 bits, as the flags that are printed say."""
    parallel = ParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, distributed_backend="nccl"
    )
    training = replace(config.training, bf16=True)
    return replace(config, parallel=parallel, training=training)


def _remarks(machine: str, found: Search, to_add: str) -> str:
    best = found.best
    scenario, outcome = best.candidate.scenario, best.outcome
    return (
        f"{machine}: {title(scenario.parallelism)}, "
        f"{outcome.title}.\n"
        f"Simulated, not measured: MFU {outcome.mfu:.1%}, {outcome.tokens_per_s:,.0f} tokens/s, "
        f"{outcome.step_us / 1e3:,.0f} ms a step, peak {outcome.peak_bytes / GIB:.1f} GiB.\n"
        f"{_verdict(found)}\n{found.base.said}\n"
        f"Made by: {shlex.join(['wlb', *sys.argv[1:]])}\n"
        f"Left to add: {to_add};\n"
        "and as you like --split, --save, --load, --save-interval and the optimizer."
    )


def _json(found: Search, flags: recipe.Flags, command: str) -> dict[str, Any]:
    best = found.original or found.best
    return {
        "simulated": True,
        "frame": found.base.as_dict(),
        "original_fits": found.original is not None,
        "ranked": [
            _layout(choice.candidate.scenario)
            | {
                "coarse_mfu": choice.candidate.mfu,
                "most_tokens_that_fit": choice.candidate.max_tokens,
                "fits": choice.fits,
                "speedup_over_best": choice.outcome.speedup(best.outcome),
            }
            | row(choice.outcome, found.base if found.is_beside(choice) else None)
            for choice in found.ranked
        ],
        "coarse": [
            _layout(one.scenario) | {"coarse_mfu": one.mfu, "max_tokens": one.max_tokens}
            for one in found.candidates
        ],
        "rejected": [
            _layout(one) | {"why": one.why, "reason": one.reason} for one in found.rejected
        ],
        "flags": dict(flags),
        "command": command,
    }


def _layout(of: Run | Rejected) -> dict[str, Any]:
    return of.parallelism.sizes | {
        "stage_layers": of.parallelism.stage_layers,
        "num_micro_batches": of.num_micro_batches,
        "recompute": of.recompute.title,
    }


def _table(args: argparse.Namespace, machine: str, space: Space, found: Search, seed: int) -> Table:
    table = table_of(
        f"{machine}, window {space.window:,}: "
        f"{found.num_simulated} simulated of {len(found.candidates)} that can run",
        ("", "layout", "N", "recompute", "packing", "S_max", "coarse", "MFU", "over best",
         *(COLUMNS[name].header for name in SHOWN)),
        ("", "layout", "packing"),
        f"simulated: {found.best.outcome.metrics.num_steps} steps of each, seed {seed}; mean "
        f"delay up to {steps_of(found.max_delay)} (--max-delay), memory up to "
        f"{found.best.candidate.scenario.limit_gib:.1f} GiB ({args.headroom:.0%} left free); "
        f"{OVER}",
    )  # fmt: skip
    base = (found.original or found.best).outcome
    layouts = found.layouts[: args.rows]
    for number, choice in enumerate([*layouts, *found.packings], start=1):
        scenario, outcome = choice.candidate.scenario, choice.outcome
        *others, peak, delay = (COLUMNS[name].cell(outcome) for name in SHOWN)
        if number == len(layouts) + 1:
            table.add_section()
        table.add_row(
            str(number) if number <= len(layouts) else "",
            title(scenario.parallelism),
            str(scenario.num_micro_batches),
            scenario.recompute.title,
            outcome.title,
            f"{outcome.setting.max_tokens / space.window:.2f}",
            f"{choice.candidate.mfu:.1%}",
            f"{outcome.mfu:.1%}",
            f"{outcome.speedup(base):.{DIGITS}f}",
            *others,
            marked(peak, over=not choice.fits),
            marked(delay, over=outcome.delay_steps > found.max_delay),
        )
    return table


def _rejected(found: Search) -> Table:
    """How many layouts each reason rules out, and the reason of one of them."""
    headers = "because of", "layouts", "such as"
    table = table_of("What cannot run", headers, ("because of", "such as"))
    for why, count in by_reason(found.rejected).items():
        # The last is the most divided one, so the nearest to fitting.
        one = [r for r in found.rejected if r.why == why][-1]
        such = f"{title(one.parallelism)}: {one.reason}"
        if why == "memory" and one.recompute.granularity:
            such += f", even with {one.recompute.granularity} recomputation"
        table.add_row(why, str(count), such)
    slower = len(found.candidates) - found.num_simulated
    if slower:
        last = found.candidates[-1]
        table.add_row(
            "slower by the coarse pass",
            str(slower),
            f"down to {title(last.scenario.parallelism)}: MFU {last.mfu:.1%}, against "
            f"{found.candidates[0].mfu:.1%}",
        )
    return table


def _best_of_each(found: Search) -> list[str]:
    """A line of each packing: the best layout that was simulated with it."""
    base = (found.original or found.best).outcome
    over = "original's best" if found.original else "the best"
    return [
        f"{choice.outcome.title}: best on {title(choice.candidate.scenario.parallelism)}, MFU "
        f"{choice.outcome.mfu:.1%}, {choice.outcome.speedup(base):.2f} × {over}"
        for choice in found.of_each
        if choice.fits
    ]


def _verdict(found: Search) -> str:
    best, original = found.best, found.original
    outcome = best.outcome
    limit = f"a mean delay of {steps_of(found.max_delay)}"
    said = f"Fastest within {limit}"
    if outcome.delay_steps > found.max_delay:
        said = f"Nothing that was simulated keeps within {limit} (--max-delay); fastest"
    said += f": {title(best.candidate.scenario.parallelism)}, {outcome.title}"
    if "original" in {choice.outcome.title for choice in found.ranked} and original is None:
        said += f"; {UNFIT_ANYWHERE}"
    if original is best:
        return f"{said}."
    did = f"{said}: on this layout it does {gain(outcome, found.base.original, found.base.name)}"
    if found.base.stock:
        did += f", net {found.base.net_speedup(outcome):.{DIGITS}f} ×"
    if original is None:
        return f"{did}."
    where = title(original.candidate.scenario.parallelism)
    return (
        f"{did}; it does {outcome.speedup(original.outcome):.{DIGITS}f} × that of original's best "
        f"layout, {where}."
    )
