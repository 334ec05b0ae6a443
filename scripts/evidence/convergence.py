#!/usr/bin/env python3
r"""Does a packing change what is learned? The same model and text, several seeds, equal tokens.

Each packing trains with each seed; runs with one seed start from the same weights and take the same
documents in the same order. Held-out documents are whole modules of the interpreter's library that
no run trains on, and the loss on them is by length. A run that is there is kept, so that a study
that was stopped goes on, and one can be given more seeds: the table is of all runs in the folder,
and with --page of those in the file of runs beside the page, which it writes anew.
--minutes gives each run equal time on two cores (PP=2) instead. --small trains a smaller model, for
many seeds, beside controls: `fixed-greedy:64` delays much, `fewer` trains a tenth less.

    scripts/evidence/convergence.py --out runs/learning       # hours: 3 seeds of 7 packings
    scripts/evidence/convergence.py --out /tmp/short --tokens 1e5 --seeds 1 --packings original hold
    scripts/evidence/convergence.py --small --tokens 6e5 --seeds 1 2 3 4 5 6 7 8 --packings \
        original hold-default slim fewer    # an hour
    scripts/evidence/convergence.py --out runs/learning --page docs/learning.md  # page anew
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from _common import add_seeds, parser_of
from _convergence import study
from _quickstart.corpus import EXCLUDED
from _quickstart.recording import SMALL_MODEL
from rich.console import Console

from megatron_wlb.cli.flags import flag
from megatron_wlb.data.corpus import build_corpus
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.files import write_text
from megatron_wlb.planning.packing import PackingSettings

HERE = Path(__file__).parent
PACKINGS = {
    "original": "original",
    "fixed-greedy:8": "fixed-greedy:8",
    "wlb": "wlb:3",
    "hold": "hold",
    "hold:4": "hold:4",
    "hold-cap": "hold",
    "hold-default": "hold",
    "slim": "slim",
    "fixed-greedy:64": "fixed-greedy:64",
    "fewer": "original",
}
"""What is trained, and its packing. K is batches, queues, or steps of look-ahead."""
ALL = [name for name in PACKINGS if name not in ("hold-default", "fixed-greedy:64", "fewer")]
TRAINED = {"fewer": 0.9}
"""The share of the tokens that a control trains, with a schedule as much shorter."""
MOST_OF_A_STEP = {"hold": 0.0, "hold:4": 0.0, "hold-cap": 1.1}
"""The most tokens of a step, in global batches; 0 is no bound."""
FLAGS = (
    *("--split", "90,10,0", "--lr", "2e-3", "--min-lr", "2e-4"),
    *("--weight-decay", "0.1", "--wlb-device", "cpu"),
)


@dataclass(frozen=True)
class Setting:
    """What runs train with, beyond :data:`FLAGS`."""

    window: int
    num_micro_batches: int
    num_processes: int
    flags: tuple[str, ...]


TOKENS = Setting(
    window=2048,
    num_micro_batches=8,
    num_processes=1,
    flags=(
        *("--num-layers", "4", "--hidden-size", "96", "--num-attention-heads", "4"),
        *("--wlb-cost", "analytic", "--wlb-hardware", "cpu"),
    ),
)
"""With equal tokens: the same plans in each run."""
SMALL = Setting(
    window=1536,
    num_micro_batches=4,
    num_processes=1,
    flags=(
        *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2"),
        *("--wlb-cost", "analytic", "--wlb-hardware", "cpu"),
    ),
)
"""With equal tokens and a smaller model, for many seeds."""
TIME = Setting(
    window=8192,
    num_micro_batches=4,
    num_processes=2,
    flags=(*SMALL_MODEL, "--pipeline-model-parallel-size", "2", "--wlb-cost", "measured"),
)
"""With equal time: where packings differ in speed, as in the quickstart."""


@dataclass(frozen=True)
class Job:
    """One run of the study."""

    packing: str
    seed: int
    result: Path

    def command(self, options: argparse.Namespace, prefix: str) -> list[str]:
        setting = TIME if options.minutes else SMALL if options.small else TOKENS
        window, num_micro_batches = setting.window, setting.num_micro_batches
        tokens = options.tokens * TRAINED.get(self.packing, 1)
        steps = round(tokens / (window * num_micro_batches))
        packing = PackingSettings.parse(PACKINGS[self.packing], window, 2 * window)
        batch = window * num_micro_batches
        cap = MOST_OF_A_STEP.get(self.packing)
        return [
            *(sys.executable, "-m", "megatron_wlb.torchrun", "--standalone"),
            *("--nproc-per-node", str(setting.num_processes)),
            *(str(HERE / "_convergence/learn.py"), "--result", str(self.result)),
            *("--tokens", str(tokens), "--seconds", str(60 * options.minutes)),
            *("--looks", str(options.looks), "--seed", str(self.seed)),
            *("--data-path", prefix, "--train-iters", str(steps)),
            *("--lr-warmup-iters", str(steps // 20)),
            *("--seq-length", str(window), "--global-batch-size", str(num_micro_batches)),
            *FLAGS, *setting.flags, *packing.flags(),
            *([] if cap is None else ["--wlb-max-step-tokens", str(round(cap * batch))]),
        ]  # fmt: skip

    def run(self, options: argparse.Namespace, prefix: str, console: Console) -> None:
        """Raises :class:`ConfigError` for a run that fails: names its log."""
        start_s, log = time.monotonic(), self.result.with_suffix(".log")
        with log.open("w", encoding="utf-8") as file:
            command, env = self.command(options, prefix), {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, check=False
            )
        if done.returncode:
            raise ConfigError(f"{self.packing}, seed {self.seed} failed; see {log}")
        loss = json.loads(self.result.read_text(encoding="utf-8"))["looks"][-1]["loss"]
        console.print(
            f"{self.packing}, seed {self.seed}: held-out loss {loss:.4f} after "
            f"{time.monotonic() - start_s:.0f} s"
        )


def result_of(kind: str, packing: str, seed: object) -> str:
    return f"{kind}_{packing.replace(':', '-')}_{seed}.json"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="folder")
    parser.add_argument("--packings", nargs="+", choices=PACKINGS, default=ALL)
    add_seeds(parser)
    flag(parser, "--tokens X", "of each run", 4e6)
    flag(parser, "--minutes X", "of each run on two cores", 0.0)
    parser.add_argument("--small", action="store_true", help="a smaller model, for many seeds")
    flag(parser, "--looks N", "at held-out documents", 8)
    flag(parser, "--jobs N", "runs at once (default: one a core)", 0)
    parser.add_argument(
        "--page", type=Path, help="page to write, its runs beside it, its picture in images/"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    options = parser.parse_args()
    console = Console(stderr=options.json, highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    prefix = build_corpus(
        [sysconfig.get_path("stdlib")], options.out / "corpus", python_definitions=True,
        exclude=EXCLUDED, force=True, reuse=True,
    ).prefix  # fmt: skip
    kind = f"pp2-{options.minutes:g}min" if options.minutes else f"{options.tokens:g}"
    kind = f"small-{kind}" if options.small else kind
    jobs = [
        Job(packing, seed, options.out / result_of(kind, packing, seed))
        for seed in options.seeds
        for packing in options.packings
    ]
    missing = [job for job in jobs if not job.result.exists()]
    console.print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them there", highlight=False)
    at_once = 1 if options.minutes else options.jobs or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(lambda job: job.run(options, prefix, console), missing))
        except ConfigError:
            pool.shutdown(cancel_futures=True)
            raise
    beside = options.page and options.page.with_name(f"{options.page.stem}-{kind}.json")
    runs = study.kept(beside) if beside else {}
    for packing in PACKINGS:
        for path in options.out.glob(result_of(kind, packing, "*")):
            runs[packing, int(path.stem.rpartition("_")[2])] = study.Run.read(path)
    found = study.Study(
        {key: runs[key] for name in PACKINGS for key in sorted(runs) if key[0] == name}
    )
    write_text(options.out / f"{kind}.json", json.dumps(found.summary(), indent=2) + "\n")
    console.print(found.table())
    if options.page:
        picture = options.page.parent / "images" / f"learning-{kind}.png"
        found.keep(beside)
        found.draw(picture)
        found.write(options.page, picture, kind)
    if options.json:
        sys.stdout.write(json.dumps(found.summary()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, place_flag="--out"))
