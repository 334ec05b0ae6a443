#!/usr/bin/env python3
"""The experiments of three papers, simulated, beside the numbers that the papers print.

WLB-LLM (OSDI 2025): Table 2 and Figures 6, 7, 10 and 12-15. SlimPack (2025): the throughput of
Figure 13, the spread of unit times of Figures 14-16, cuts against an integer programme, numbers
of units of each replica's own, what backward units of their own could gain, and slim packing beside
`hold` with interleaved schedules. Hydraulis (2024): Figures 10, 13 and 17, Tables 1 and 2, and what
strategies gain on other lengths. Optima are found by OR-tools.

Writes a Markdown page and PNG pictures. Everything is simulated on modelled GPUs and synthetic
distributions of lengths; only the time that packing takes is measured, on this machine.

    scripts/evidence/reproduce_paper.py                    # docs/results/paper.md, its pictures
    scripts/evidence/reproduce_paper.py --paper slimpack   # docs/results/slimpack.md, its pictures
    scripts/evidence/reproduce_paper.py --paper slimpack --small --out /tmp/slim  # a quick look
    scripts/evidence/reproduce_paper.py --paper hydraulis  # docs/results/hydraulis.md, its pictures
    scripts/evidence/reproduce_paper.py --steps 20 --out /tmp/paper --json > /tmp/paper.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from _common import add_seeds, parser_of
from _papers.hydraulis_page import HYDRAULIS
from _papers.paper import Effort
from _papers.slimpack_page import SLIMPACK
from _papers.wlb_llm_page import WLB_LLM
from _sections import Paper, Section, json_of, lines_of, plot, wrapped
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_wlb.cli.flags import flag
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.files import write_text
from megatron_wlb.reading import whole_number

PAPERS: dict[str, Paper] = {"wlb-llm": WLB_LLM, "slimpack": SLIMPACK, "hydraulis": HYDRAULIS}
SMALL = Effort(2, (1,), warm_up=1, solver=False)


def main() -> int:
    options = _options()
    paper = PAPERS[options.paper]
    options.hardware = options.hardware or paper.hardware
    steps = paper.steps if options.steps is None else options.steps
    effort = Effort(
        steps, tuple(options.seeds), paper.warm_up, options.solver, hardware=options.hardware
    )
    if options.small:
        effort = replace(SMALL, hardware=options.hardware)
    whole_number("--steps", steps, 1)
    whole_number("--jobs", options.jobs, 1)
    for name in ("only", "small"):
        if getattr(options, name) and options.out is None:
            raise ConfigError(
                f"--{name} makes a page of less; give it a folder of its own with --out"
            )
    for key in options.only or ():
        if key not in paper.makers:
            raise ConfigError(
                f"--only {key}: no section of {options.paper}; give {', '.join(paper.makers)}"
            )
    options.out = options.out or Path("docs/results")
    images = options.out / "images"
    images.mkdir(parents=True, exist_ok=True)
    keys = [key for key in paper.makers if not options.only or key in options.only]
    sections, seconds = [], 0.0
    console = Console(stderr=True)
    with (
        Progress(
            TextColumn("simulating"), BarColumn(), TimeRemainingColumn(), console=console,
            transient=True, disable=not console.is_terminal,
        ) as bars,
        ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool,
    ):  # fmt: skip
        bar = bars.add_task("", total=len(keys))
        make = partial(_make, options.paper, effort=effort)
        for section, took_s in pool.map(make, keys):
            plot(section, images / f"{paper.page}-{section.key}.png")
            sections.append(section)
            seconds += took_s
            bars.advance(bar)
    page = options.out / f"{paper.page}.md"
    write_text(page, _page(paper, sections, effort, _command(options, effort), seconds))
    out = sys.stderr if options.json else sys.stdout
    for section in sections:
        for claim, holds in section.claims:
            print(
                f"{'yes' if holds else 'NO ':3}  {section.title.split(':')[0]}: {claim}", file=out
            )
    print(f"{page}: {seconds:.0f} s of CPU time", file=out)
    if options.json:
        print(json.dumps({"simulated": True, "sections": json_of(sections)}))
    return 0


def _command(options: argparse.Namespace, effort: Effort) -> str:
    """What makes the same page again."""
    words = ["scripts/evidence/reproduce_paper.py"]
    if options.paper != "wlb-llm":
        words += ["--paper", options.paper]
    if options.small:
        words.append("--small")
    else:
        words += ["--steps", str(effort.steps), "--seeds", *map(str, effort.seeds)]
    if options.hardware != PAPERS[options.paper].hardware:
        words += ["--hardware", options.hardware]
    if options.only:
        words += ["--only", *options.only]
    if not options.solver:
        words.append("--no-solver")
    return shlex.join(words)


def _make(paper: str, key: str, effort: Effort) -> tuple[Section, float]:
    """A section, and the CPU seconds that it took."""
    started_s = time.process_time()
    section = PAPERS[paper].makers[key](effort)
    return section, time.process_time() - started_s


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    flag(parser, "--paper", "whose experiments", "wlb-llm", choices=PAPERS)
    steps = ", ".join(f"{one.steps} of {name}" for name, one in PAPERS.items())
    flag(parser, "--steps N", f"of each seed (default: {steps})")
    flag(parser, "--jobs N", "processes", 2)
    keys = "; ".join(f"of {name}: {', '.join(one.makers)}" for name, one in PAPERS.items())
    flag(parser, "--only KEY", keys, of=str)
    about = "steps of one seed, without the solver: to look at, not to quote"
    flag(parser, "--small", f"{SMALL.steps} {about}")
    add_seeds(parser)
    machines = ", ".join(f"{one.hardware} of {name}" for name, one in PAPERS.items())
    about = f"such as one with attention that wlb profile measured (default: {machines})"
    flag(parser, "--hardware NAME|FILE", about)
    parser.add_argument(
        "--no-solver", dest="solver", action="store_false", help="leave the slow packing out"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: docs/results")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON to stdout")
    return parser.parse_args()


def _page(
    paper: Paper, sections: list[Section], effort: Effort, command: str, seconds: float
) -> str:
    lines = [
        f"# {paper.title}'s experiments, simulated",
        "",
        f"Made by `{command}` in {seconds / 60:.1f} minutes of CPU time; do "
        "not edit it by hand. **Every speed-up and imbalance here is simulated** "
        "([how to read that](../simulator.md)).",
        "",
        *paper.notes(effort),
        "",
        *lines_of(sections, paper.page),
    ]
    return "\n".join(map(wrapped, lines)) + "\n"


if __name__ == "__main__":
    sys.exit(run_program(main))
