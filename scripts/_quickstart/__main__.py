"""See it work: real text, a real Megatron GPT, packings side by side, in minutes on a CPU.

Builds a corpus from the interpreter's own standard library, trains on it once as a pipeline
(PP=2) and once data-parallel (DP=2), with steps of each packing in turns, and shows what came out
of each as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from _quickstart import report
from _quickstart.corpus import corpus
from _quickstart.recording import SMALL_MODEL, Recording, make
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.length_statistics import LengthStatistics
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.files import write_text
from megatron_wlb.settings.command_line import Parser

NUM_PROCESSES = 2


class Layout(NamedTuple):
    """How the processes train."""

    what: str
    window: int
    """Tokens."""
    num_windows: int
    """Windows a step."""
    rounds: int
    """Steps of each packing, if not given."""
    start_s: float
    round_s: float
    """What they take on two quiet cores: all before the first, which warms up, and one."""
    packings: tuple[str, ...]
    flags: tuple[str, ...] = ()


PP2 = "--pipeline-model-parallel-size", "2"
LAYOUTS = {
    # So long a window that what a micro-batch takes besides its documents is small.
    "pp2": Layout("pipeline, PP=2", 16384, 4, 8, 25, 12.0, ("original", "hold", "slim"), PP2),
    # Without a pipeline, slices have no bubble to fill.
    "dp2": Layout("data-parallel, DP=2", 8192, 2, 28, 18, 1.5, ("original", "hold")),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder")
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="which to run"
    )
    parser.add_argument("--rounds", type=int, help="steps of each packing (default: 8 and 28)")
    parser.add_argument("--windows", type=int, help="windows a step (default: 4 and 2)")
    parser.add_argument("--seq-length", type=int, help="tokens of a window (default: 16384, 8192)")
    parser.add_argument("--seed", type=int, default=1234, help="of weights and document order")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")

    def program() -> int:
        start_s = time.monotonic()
        options = parser.parse_args(argv)
        console = Console(stderr=options.json, highlight=False)
        summary = run(options, console)
        console.print(f"done in {time.monotonic() - start_s:.0f} s")
        if options.json:
            sys.stdout.write(json.dumps(summary) + "\n")
        return 0

    return run_program(program, place_flag="--out")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Corpus, then for each layout training, table and pictures; returns the summary."""
    if options.rounds is not None and options.rounds < report.NUM_BLOCKS:
        raise ConfigError(f"--rounds is {options.rounds}; use at least {report.NUM_BLOCKS}")
    if options.windows is not None and options.windows < 1:
        raise ConfigError(f"--windows is {options.windows}; use at least 1")
    if options.windows is options.seq_length is None:
        chosen = [LAYOUTS[name] for name in options.layouts]
        seconds = sum(x.start_s + (options.rounds or x.rounds) * x.round_s for x in chosen)
        console.print(f"training takes {seconds:.0f} s on two quiet cores, longer beside others")
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    prefix = corpus(out / "corpus", console)
    summary: dict[str, Any] = {}
    pictures: list[Path] = []
    for layout in options.layouts:
        own, path = LAYOUTS[layout], out / f"{layout}.json"
        batch, rounds = options.windows or own.num_windows, options.rounds or own.rounds
        window = own.window if options.seq_length is None else options.seq_length
        what = f"{own.what}, {batch} windows of {window:,} tokens a step"
        console.print(
            f"training {layout}: {what}; {rounds} steps in turns of {', '.join(own.packings)}",
            soft_wrap=True,
        )
        make(
            f"training {layout}",
            NUM_PROCESSES,
            path,
            console,
            own.packings,
            [
                *("--data-path", str(prefix), "--split", "1", "--seed", str(options.seed)),
                *("--seq-length", str(window), "--global-batch-size", str(batch)),
                *(*SMALL_MODEL, *own.flags),
            ],
            rounds=rounds,
        )
        recording = Recording.read(path)
        figures = report.summarize(recording)
        explained = "" if summary else f"\n{report.WORK}"
        console.print(f"\n{report.headline(figures)}{explained}", soft_wrap=True)
        summary[layout] = figures
        console.print(report.table(f"{layout}: {what}", figures))
        from megatron_wlb.study.plot import plot_lengths

        pictures += [out / f"{layout}-lengths.png", *report.draw(recording, out, layout)]
        statistics = LengthStatistics.of(Corpus.open(prefix).lengths, window)
        plot_lengths(statistics, window, out / f"{layout}-lengths.png")
    write_text(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    console.print(f"figures:  {out / 'summary.json'}", soft_wrap=True)
    for picture in pictures:
        console.print(f"picture:  {picture}", soft_wrap=True)
    return summary


if __name__ == "__main__":
    sys.exit(main())
