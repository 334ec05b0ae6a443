#!/usr/bin/env python3
r"""Does a packing change what is learned? The same model and text, several seeds, equal steps.

Each packing trains with each seed, under the launcher, in Megatron's own loop; runs with one seed
start from the same weights and take the same documents in the same order. Held-out documents are of
modules of the interpreter's library that no run trains on, and the loss on them is by length. A run
that is there is kept, so that a study that was stopped goes on, and one can be given more seeds:
the table is of all runs in the folder, and with --page of those in the file of runs beside the
page, which it writes anew.
--minutes compares after equal time on two cores (PP=2) instead. --small trains a smaller model, for
many seeds, beside controls: `fixed-greedy:64` delays much, `fewer` trains a tenth less.

    scripts/evidence/convergence.py --out runs/learning       # hours: 3 seeds of 7 packings
    scripts/evidence/convergence.py --out /tmp/short --tokens 1e5 --seeds 1 --packings original hold
    scripts/evidence/convergence.py --small --tokens 6e5 --seeds 1 2 3 4 5 6 7 8 --packings \
        original hold-default slim fewer    # an hour
    scripts/evidence/convergence.py --out runs/learning --page PAGE.md  # its table too
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from _common import add_seeds, parser_of
from _convergence import noted_loss, study
from _quickstart.corpus import EXCLUDED
from rich.console import Console

from megatron_wlb.cli.flags import flag
from megatron_wlb.data.build_corpus import build_corpus
from megatron_wlb.data.corpus import Corpus, megatron_indexed_dataset
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.files import write_text
from megatron_wlb.planning.packing import PackingSettings

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
    *("--micro-batch-size", "1", "--position-embedding-type", "rope", "--hidden-dropout", "0"),
    *("--attention-dropout", "0", "--lr", "2e-3", "--min-lr", "2e-4", "--lr-decay-style", "cosine"),
    *("--weight-decay", "0.1", "--adam-beta2", "0.95", "--tokenizer-type", "NullTokenizer"),
    *("--log-interval", "100", "--eval-iters", "1", "--wlb-device", "cpu"),
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--no-rope-fusion"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
)
TRAINED_SHARE = 0.9
"""Of the text's documents, its first ones; held out are some of the others."""
HELD_OUT, HELD_OUT_SEED = 60, 20
"""Documents of each length, and what chooses them: the same ones for all runs."""


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
SMALL_ONES = {
    "dense": SMALL,
    "experts": replace(
        SMALL,
        flags=(
            *SMALL.flags,
            *("--num-experts", "8", "--moe-ffn-hidden-size", "128", "--moe-router-topk", "2"),
            *("--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "0.01"),
            *("--moe-router-load-balancing-type", "aux_loss", "--disable-bias-linear"),
        ),
    ),
    "samples": replace(SMALL, flags=(*SMALL.flags, "--wlb-loss-mean", "sample")),
}
"""Kinds of smaller models: with experts, or as in fine-tuning each document counting 1."""
TIME = Setting(
    window=8192,
    num_micro_batches=4,
    num_processes=2,
    flags=(
        *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2"),
        *("--pipeline-model-parallel-size", "2", "--wlb-cost", "measured"),
    ),
)
"""With equal time: where packings differ in speed, as in the quickstart."""


def setting_of(options: argparse.Namespace) -> Setting:
    return TIME if options.minutes else SMALL_ONES.get(options.small, TOKENS)


@dataclass(frozen=True)
class Texts:
    """Corpora that runs train on and are asked of, cut of one."""

    trained: str
    held_out: str
    vocab_size: int

    @classmethod
    def build(cls, folder: Path, window: int) -> Texts:
        """Held-out documents have at most a window, so that each is asked whole."""
        info = build_corpus(
            [sysconfig.get_path("stdlib")], folder / "corpus", python_definitions=True,
            exclude=EXCLUDED, force=True, reuse=True,
        )  # fmt: skip
        whole, random = Corpus.open(info.prefix), np.random.default_rng(HELD_OUT_SEED)
        first = round(TRAINED_SHARE * len(whole.lengths))
        lengths = np.minimum(whole.lengths[first:], window)
        kinds = np.searchsorted(study.BUCKETS, lengths)
        chosen = [
            random.permutation(np.flatnonzero((kinds == kind) & (lengths > 1)))[:HELD_OUT] + first
            for kind in range(len(study.LENGTHS))
        ]
        names = f"{folder}/trained", f"{folder}/held-out-{window}"
        for name, numbers in zip(names, (np.arange(first), np.concatenate(chosen)), strict=True):
            most = window if name == names[1] else whole.lengths.max()
            builder = megatron_indexed_dataset().IndexedDatasetBuilder(f"{name}.bin", np.uint16)
            for number in numbers.tolist():
                tokens = whole.tokens(number, 0, int(min(whole.lengths[number], most)))
                builder.add_document(tokens, [len(tokens)])
            builder.finalize(f"{name}.idx")
        return cls(*names, info.vocab_size)


@dataclass(frozen=True)
class Job:
    """One run of the study."""

    packing: str
    seed: int
    result: Path

    def steps(self, options: argparse.Namespace) -> tuple[int, int]:
        """Those of the run, and those between two looks."""
        setting = setting_of(options)
        tokens = options.tokens * TRAINED.get(self.packing, 1)
        steps = round(tokens / (setting.window * setting.num_micro_batches))
        return steps, math.ceil(steps / options.looks)

    def command(self, options: argparse.Namespace, texts: Texts) -> list[str]:
        setting, (steps, interval) = setting_of(options), self.steps(options)
        window, num_micro_batches = setting.window, setting.num_micro_batches
        batch = window * num_micro_batches
        packing = PackingSettings.parse(PACKINGS[self.packing], window, 2 * window)
        cap = MOST_OF_A_STEP.get(self.packing)
        held_out = Corpus.open(texts.held_out)
        windows = math.ceil(held_out.lengths.sum() / window) + 1  # which are one step
        return [
            *(sys.executable, "-m", "megatron_wlb.torchrun", "--standalone"),
            *("--nproc-per-node", str(setting.num_processes), "-m", "megatron_wlb.launch"),
            *("--train-data-path", texts.trained, "--valid-data-path", texts.held_out),
            *("--vocab-size", str(texts.vocab_size)),  # with the end of documents
            *("--seed", str(self.seed), "--train-iters", str(steps)),
            *("--lr-warmup-iters", str(steps // 20)),
            *("--eval-interval", str(interval)),
            *("--seq-length", str(window), "--max-position-embeddings", str(window)),
            *("--global-batch-size", str(num_micro_batches)),
            *("--eval-global-batch-size", str(windows)),
            *("--wlb-loss", noted_loss.__file__, "--wlb-metrics", str(self.metrics)),
            *FLAGS, *setting.flags, *packing.flags(),
            *([] if cap is None else ["--wlb-max-step-tokens", str(round(cap * batch))]),
        ]  # fmt: skip

    @property
    def metrics(self) -> Path:
        return self.result.with_suffix(".jsonl")

    def run(self, options: argparse.Namespace, texts: Texts, console: Console) -> None:
        """Raises :class:`ConfigError` for a run that fails: names its log."""
        start_s, log = time.monotonic(), self.result.with_suffix(".log")
        notes = self.result.with_suffix(".notes")
        for path in (self.metrics, notes):  # of a run that did not end
            path.unlink(missing_ok=True)
        with log.open("w", encoding="utf-8") as file:
            done = subprocess.run(
                self.command(options, texts), stdout=file, stderr=subprocess.STDOUT, check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1", noted_loss.NOTES: str(notes)},
            )  # fmt: skip
        if done.returncode:
            raise ConfigError(f"{self.packing}, seed {self.seed} failed; see {log}")
        lengths = Corpus.open(texts.held_out).lengths
        run = study.Run.of(self.metrics, notes, lengths, self.steps(options)[1])
        run.write(self.result)
        console.print(
            f"{self.packing}, seed {self.seed}: held-out loss {run.loss[-1]:.4f} after "
            f"{time.monotonic() - start_s:.0f} s"
        )


def result_of(kind: str, packing: str, seed: object) -> str:
    return f"{kind}_{packing.replace(':', '-')}_{seed}.json"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="folder")
    parser.add_argument("--packings", nargs="+", choices=PACKINGS, default=ALL)
    add_seeds(parser)
    flag(parser, "--tokens X", "of each run, in whole steps", 4e6)
    flag(parser, "--minutes X", "of steps after which runs on two cores are compared", 0.0)
    about = "a smaller model, for many seeds: dense, with experts, or with a mean over documents"
    parser.add_argument("--small", nargs="?", const="dense", choices=SMALL_ONES, help=about)
    flag(parser, "--looks N", "at held-out documents", 8)
    flag(parser, "--jobs N", "runs at once (default: one a core)", 0)
    parser.add_argument(
        "--page", type=Path, help="page to write, its runs beside it, its picture in images/"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    options = parser.parse_args()
    console = Console(stderr=options.json, highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    texts = Texts.build(options.out.absolute(), setting_of(options).window)
    kind = f"pp2-{options.minutes:g}min" if options.minutes else f"{options.tokens:g}-tokens"
    if options.small:
        kind = f"{'small' if options.small == 'dense' else options.small}-{kind}"
    jobs = [
        Job(packing, seed, options.out.absolute() / result_of(kind, packing, seed))
        for seed in options.seeds
        for packing in options.packings
    ]
    missing = [job for job in jobs if not job.result.exists()]
    console.print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them there", highlight=False)
    at_once = 1 if options.minutes else options.jobs or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(lambda job: job.run(options, texts, console), missing))
        except ConfigError:
            pool.shutdown(cancel_futures=True)
            raise
    beside = options.page and options.page.with_name(f"{options.page.stem}-{kind}.json")
    runs = study.kept(beside) if beside else {}
    for packing in PACKINGS:
        for path in options.out.glob(result_of(kind, packing, "*")):
            run = study.Run.read(path)
            run = run.until(60 * options.minutes) if options.minutes else run
            runs[packing, int(path.stem.rpartition("_")[2])] = run
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
