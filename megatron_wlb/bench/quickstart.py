"""See it work: real text, a real Megatron GPT, three packings side by side, in minutes on a CPU.

Builds a corpus from the interpreter's own standard library, trains on it once as a pipeline
(PP=2) and once data-parallel (DP=2), with steps of each packing in turns, and shows what came out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_wlb.bench import report
from megatron_wlb.bench.train_packings import PROGRESS
from megatron_wlb.data.corpus import Corpus, CorpusInfo, build_corpus
from megatron_wlb.errors import ConfigError, WLBError
from megatron_wlb.files import write_text
from megatron_wlb.settings.command_line import Parser

PACKINGS = ("original", "wlb", "hold")
NUM_PROCESSES = 2
MODEL = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2"]
LAYOUTS = {
    # Name -> (what it is, windows a step, rounds, flags). DP=2 runs one micro-batch a rank.
    "pp2": ("pipeline, PP=2, 8 micro-batches", 8, 20, ["--pipeline-model-parallel-size", "2"]),
    "dp2": ("data-parallel, DP=2, 1 micro-batch a rank", 2, 60, []),
}
SKIP_SHARE = 4
"""One in so many rounds is run first and not counted: pools and caches fill."""
EXCLUDED = ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3")


def corpus(folder: Path, console: Console) -> Path:
    """Builds the corpus, or finds the one of an earlier start; returns its prefix."""
    prefix = folder / f"stdlib-{sysconfig.get_python_version()}"
    if CorpusInfo.load(prefix) is not None:
        try:
            Corpus.open(prefix)
            console.print(f"corpus: found in {prefix}.bin")
            return prefix
        except WLBError as error:
            console.print(f"corpus: built again ({error})")
    with console.status("corpus: reading the interpreter's standard library"):
        info = build_corpus(
            [sysconfig.get_path("stdlib")],
            prefix,
            python_definitions=True,
            exclude=EXCLUDED,
            force=True,
        )
    console.print(
        f"corpus: {info.num_documents:,} documents (functions and classes), "
        f"{info.num_tokens:,} tokens (bytes), in {prefix}.bin"
    )
    return prefix


def train(arguments: Sequence[str], log: Path, advance: Callable[[str], None]) -> None:
    """Runs a comparison under torchrun; ``advance`` gets each line of progress.

    Raises:
        ConfigError: it failed; names the cause and the log.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        str(NUM_PROCESSES),
        "-m",
        "megatron_wlb.bench.train_packings",
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    error = ""
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                if line.startswith("error"):
                    error = line.strip().removeprefix("error: ")
                advance(line)
        except KeyboardInterrupt:
            process.terminate()
            raise
    if process.returncode != 0:
        raise ConfigError(f"training failed: {error or 'see the log'} ({log})")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the quickstart; returns the exit code."""
    parser = Parser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder")
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="which to run"
    )
    parser.add_argument("--rounds", type=int, help="steps of each packing (default: 20 and 60)")
    parser.add_argument("--seq-length", type=int, default=8192, help="the window, in tokens")
    parser.add_argument("--seed", type=int, default=1234, help="of weights and document order")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    start = time.monotonic()
    try:
        options = parser.parse_args(argv)
        console = Console(stderr=options.json, highlight=False)
        summary = run(options, console)
    except WLBError as error:
        sys.stderr.write(error.report())
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"error: {error.filename}: {error.strerror}; choose another --out\n")
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(f"done in {time.monotonic() - start:.0f} s")
    if options.json:
        sys.stdout.write(json.dumps(summary) + "\n")
    return 0


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Corpus, training, summary, table, pictures; returns the summary."""
    fewest = next(n for n in range(1, 99) if n - n // SKIP_SHARE >= report.NUM_BLOCKS)
    if options.rounds is not None and options.rounds < fewest:
        raise ConfigError(f"--rounds is {options.rounds}; use at least {fewest}")
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    prefix = corpus(out / "corpus", console)
    recordings = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} rounds"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {
            layout: progress.add_task(
                f"training {layout}: {LAYOUTS[layout][0]}",
                total=options.rounds or LAYOUTS[layout][2],
            )
            for layout in options.layouts
        }
        for layout, task in tasks.items():
            _, batch, rounds, flags = LAYOUTS[layout]
            recordings[layout] = out / f"{layout}.json"

            def advance(line: str, task=task) -> None:  # type: ignore[no-untyped-def]
                if line.startswith(PROGRESS):
                    done = int(line.removeprefix(PROGRESS).split("/")[0])
                    progress.update(task, completed=done)

            train(
                [
                    *("--packings", ",".join(PACKINGS), "--rounds", str(options.rounds or rounds)),
                    *("--recording", str(recordings[layout]), "--data-path", str(prefix)),
                    *("--split", "1", "--seq-length", str(options.seq_length)),
                    *("--global-batch-size", str(batch), "--seed", str(options.seed)),
                    *("--train-iters", str(options.rounds or rounds), "--wlb-cost", "measured"),
                    *("--wlb-device", "cpu", *MODEL, *flags),
                ],
                out / f"{layout}.log",
                advance,
            )
    return present(prefix, recordings, options.seq_length, out, console)


def present(
    prefix: Path, recordings: dict[str, Path], window: int, out: Path, console: Console
) -> dict[str, object]:
    """Summarises the recordings into tables, pictures and ``summary.json``."""
    from megatron_wlb.study.plot import plot_lengths

    lengths_path = out / "lengths.png"
    plot_lengths(Corpus.open(prefix).lengths, window, lengths_path)
    pictures = [lengths_path]
    summary: dict[str, object] = {}
    for layout, path in recordings.items():
        recording = report.Recording.read(path)
        rounds = len(recording.of(PACKINGS[0]))
        skip = rounds // SKIP_SHARE
        summary[layout] = figures = report.summarize(recording, skip)
        console.print(report.table(f"{layout}: {LAYOUTS[layout][0]}", figures))
        pictures += report.draw(recording, skip, out, layout)
    write_text(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    console.print(f"figures:  {out / 'summary.json'}")
    for picture in pictures:
        console.print(f"picture:  {picture}")
    return summary


if __name__ == "__main__":
    sys.exit(main())
