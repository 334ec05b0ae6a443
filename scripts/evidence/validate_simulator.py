#!/usr/bin/env python3
"""Holds simulated steps against real ones: trains small GPTs on this machine's CPU, then compares.

    scripts/evidence/validate_simulator.py                # every layout, some minutes each
    scripts/evidence/validate_simulator.py --layouts pp2 --repeats 1 --json > figures.json
    scripts/evidence/validate_simulator.py --keep runs/validation --reuse   # judges again

Each layout trains every packing on the interpreter's own standard library, one step of each in
turns, with each pipeline rank pinned to a core; all steps are run several times over, in another
order each time, and the middle time of each counts. Costs are calibrated on the first third of the
steps; the others are simulated from their plans alone and compared: step time, single operations,
work and tokens a second, and which of two packings does more work a second; closer ones than two
standard errors of the measurement are a tie. Further rounds count the bytes of all tensors and hold
the predicted peak of activations against them. Where a machine has fewer cores than pipeline ranks,
operations are calibrated by CPU time and the simulation shares the cores too.
Wants a quiet machine: what others do on it meanwhile cannot be foreseen.

``--json`` prints ``step_time_mape``, ``memory_mape``, ``ranking_agrees`` (none is contradicted) and
``rows``, one for each packing and layout, to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import parser_of
from _quickstart.corpus import corpus
from _quickstart.recording import SMALL_MODEL, Recording, make
from _validation.judge import FEWEST_ROUNDS, summarize
from rich.table import Table

from megatron_wlb.cli import output
from megatron_wlb.cli.flags import flag
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.planning import guards
from megatron_wlb.planning.packing.settings import SHAPED
from megatron_wlb.settings.command_line import parse

PACKINGS = ("original", "wlb", "hold", "slim")
WANTED_STEP_MAPE, WANTED_MEMORY_MAPE = 0.08, 0.03
console = output.console(stderr=True)


@dataclass(frozen=True)
class Layout:
    """Processes and flags of a run."""

    what: str
    num_processes: int
    flags: tuple[str, ...]
    slices: bool = True
    """Whether documents can run in slices: not with virtual stages."""

    def packings(self, wanted: Sequence[str]) -> list[str]:
        return [name for name in wanted if self.slices or name != "slim"]


def pipeline(pp: int, *more: str) -> tuple[str, ...]:
    return ("--pipeline-model-parallel-size", str(pp), *more)


LAYOUTS = {
    "pp2": Layout("PP=2", 2, pipeline(2)),
    "pp2-vpp2": Layout(
        "PP=2, VPP=2",
        2,
        pipeline(2, "--num-virtual-stages-per-pipeline-rank", "2"),
        slices=False,
    ),
    "pp4": Layout("PP=4", 4, pipeline(4)),
    "cp2-pp2": Layout("CP=2, PP=2", 4, pipeline(2, "--context-parallel-size", "2")),
}


def flags_of(layout: Layout, prefix: str, options: argparse.Namespace) -> list[str]:
    return [
        *("--data-path", prefix, "--split", "1", "--seq-length", str(options.seq_length)),
        *("--global-batch-size", str(options.micro_batches), "--seed", str(options.seed)),
        *(*SMALL_MODEL, *layout.flags),
    ]


def check(layouts: Sequence[str], prefix: str, options: argparse.Namespace) -> list[str]:
    """The layouts that this version can run, of those asked for; says which it cannot, and why.

    Raises :class:`ConfigError` if the settings are wrong for all.
    """
    runnable, error = [], None
    for name in layouts:
        config = parse(flags_of(LAYOUTS[name], prefix, options))
        try:
            if not LAYOUTS[name].packings(options.packings):
                raise ConfigError(
                    f"slim packing does not run with {LAYOUTS[name].what}; give others of "
                    "--packings too"
                )
            guards.check(config, LAYOUTS[name].num_processes)
            guards.check_micro_batches(config, LAYOUTS[name].num_processes)
            runnable.append(name)
        except ConfigError as refused:
            error = refused
            console.print(f"[yellow]{name} is left out:[/] {refused}")
    if error is not None and not runnable:
        raise error
    return runnable


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Records what is to be recorded; returns the summary."""
    for name, least in (("rounds", FEWEST_ROUNDS), ("repeats", 1), ("memory_rounds", 0)):
        if (number := getattr(options, name)) < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {number}; use at least {least}")
    if options.reuse and options.keep is None:
        raise ConfigError("--reuse needs the folder of the recordings; give --keep FOLDER")
    with folder_of(options) as folder:
        recordings = {}
        if options.reuse:
            wanted = [name for name in options.layouts if (folder / f"{name}.json").exists()]
            if not wanted:
                raise ConfigError(f"--keep {folder} has no recording; leave --reuse out")
        else:
            prefix = options.corpus or str(corpus(folder / "corpus", console))
            wanted = check(options.layouts, prefix, options)
            for name in wanted:
                layout = LAYOUTS[name]
                make(
                    layout.what,
                    layout.num_processes,
                    folder / f"{name}.json",
                    console,
                    layout.packings(options.packings),
                    flags_of(layout, prefix, options),
                    rounds=options.rounds,
                    repeats=options.repeats,
                    shuffled_by=options.seed,
                    memory_rounds=options.memory_rounds,
                )
        for name in wanted:
            recordings[name] = Recording.read(folder / f"{name}.json")
        return summarize(recordings)


@contextlib.contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[Path]:
    """That of ``--keep``, or one that vanishes."""
    if options.keep is None:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
    else:
        options.keep.mkdir(parents=True, exist_ok=True)
        yield options.keep


def show(summary: dict[str, Any]) -> None:
    table = Table(
        "layout", "packing", "steps", "step time, MAPE", "bias", "replay", "operations",
        "memory, MAPE", "work/s simulated", "measured", "tokens/s simulated", "measured",
    )  # fmt: skip
    table.title = "simulated against measured: calibrated on the first third, judged on the rest"
    for row in summary["rows"]:
        memory = row["memory_mape"]
        table.add_row(
            row["layout"],
            row["packing"],
            str(row["num_steps"]),
            f"{row['step_time_mape']:.1%}",
            f"{row['step_time_bias']:+.1%}",
            f"{row['replay_error']:.1%}",
            f"{row['operation_mape']:.1%}",
            "" if memory is None else f"{memory:.1%}",
            f"{row['simulated_work_per_s']:.3f}",
            f"{row['measured_work_per_s']:.3f}",
            f"{row['simulated_tokens_per_s']:,.0f}",
            f"{row['measured_tokens_per_s']:,.0f}",
        )
    table.caption = (
        "bias: simulated longer than measured. replay: the schedule with each step's own measured "
        "times. operations: single forwards and backwards by the fitted cost. work/s: seconds of "
        "computation, by the fitted cost and over all ranks, that are done in a second"
    )
    console.print(table)
    for name, layout in summary["layouts"].items():
        console.print(
            f"{name}: clock: {layout['clock']}; repeats of a step are {layout['repeat_error']:.1%} "
            "off its middle one. Work a second:"
        )
        for pair in layout["pairs"]:
            first, second = pair["packings"]
            measured, error = pair["measured_ratio"], pair["error"]
            apart = abs(measured - 1) > 2 * error
            verdict = "a tie" if not apart else "agrees" if measured > 1 else "[red]contradicted[/]"
            console.print(
                f"  {first} over {second}: simulated {pair['simulated_ratio']:.3f}, "
                f"measured {measured:.3f} ± {error:.3f}: {verdict}"
            )
    verdicts = [("step time", summary["step_time_mape"], WANTED_STEP_MAPE)]
    if summary["memory_mape"] is not None:
        verdicts.append(("memory", summary["memory_mape"], WANTED_MEMORY_MAPE))
    for what, error, wanted in verdicts:
        colour = "green" if error <= wanted else "red"
        console.print(f"{what}: MAPE [{colour}]{error:.2%}[/], wanted at most {wanted:.0%}")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME",
        help=f"of {', '.join(LAYOUTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--packings", nargs="+", default=list(PACKINGS),
        choices=[*PACKINGS, "fixed-greedy", f"hold{SHAPED}", f"wlb{SHAPED}"], metavar="NAME",
        help=f"default: {' '.join(PACKINGS)} (slim not with VPP); {SHAPED}: with --wlb-shape on",
    )  # fmt: skip
    flag(parser, "--rounds N", "timed steps of each", 18)
    flag(parser, "--repeats N", "times that these are run", 3)
    flag(parser, "--memory-rounds N", "more, that count bytes", 3)
    flag(parser, "--seq-length N", "the window, in tokens", 4096)
    flag(parser, "--micro-batches N", "a step", 8)
    flag(parser, "--seed N", "of weights and document order", 1234)
    flag(parser, "--corpus PREFIX", "a .bin/.idx corpus to train on instead")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keeps recordings and logs")
    flag(parser, "--reuse", "judges the recordings in --keep")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON to stdout")
    options = parser.parse_args()
    summary = run(options)
    show(summary)
    if options.json:
        print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, place_flag="--keep"))
