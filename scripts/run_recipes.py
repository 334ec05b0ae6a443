#!/usr/bin/env python3
r"""Runs Megatron-LM's own recipes, made small, with plans: which train, and equal one process?

Each recipe of tests/functional_tests/test_cases/KIND is read and asked of the launcher as it
stands, with --wlb-packing hold or another. Those that are accepted are made small and train three
steps on this CPU: in their layout, in up to four processes, and once more in one process. Loss and
gradient norm of each step are compared.

    scripts/run_recipes.py ~/Megatron-LM --out runs/recipes.json
    scripts/run_recipes.py ~/Megatron-LM --only '*tp2_pp2*'      # some of them
    scripts/run_recipes.py ~/Megatron-LM --packing slim          # in slices
    scripts/run_recipes.py ~/Megatron-LM --only '*tp2_pp2' --spoil weight  # must fail
    scripts/run_recipes.py ~/Megatron-LM --kind nemotron \
        --change moe-token-dispatcher-type alltoall                      # what a refusal advises
    scripts/run_recipes.py --table gpt.json gpt-slim.json moe.json       # the tables of the docs

A folder with the recipes alone runs them on the training loop of the installed megatron-core.
Results are written after each recipe, so a start that was cut off goes on with --resume. Exit
status: 1 if an accepted recipe ran and did not equal one process.
"""

from __future__ import annotations

import os

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

import fnmatch
import sys
import tempfile
from pathlib import Path

from _run_recipes import pages
from _run_recipes.inside import SPOILS
from _run_recipes.outcome import UNEQUAL
from _run_recipes.ranks import import_megatron
from _run_recipes.recipes import Runner, make_corpus, recipes_of
from _run_recipes.results import Results
from rich.console import Console
from rich.progress import Progress

from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.settings.pattern import FLAG as PATTERN

sys.path.append(str(Path(__file__).parent / "evidence"))
from _common import parser_of

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = parser_of(__doc__)
    about = "a checkout, or its recipes alone"
    parser.add_argument("folder", type=Path, nargs="?", metavar="MEGATRON-LM", help=about)
    parser.add_argument("--kind", default="gpt", help="folder of recipes (default: gpt)")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="of names, as of files"
    )
    parser.add_argument("--packing", default="hold", help="as --wlb-packing (default: hold)")
    parser.add_argument(
        "--change", nargs="+", default=[], metavar="FLAG",
        help="a flag without dashes, and its value: what each recipe is given besides",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="results, as JSON")
    parser.add_argument(
        "--resume", action="store_true", help="leaves out what --out has, but failures"
    )
    parser.add_argument(
        "--table", type=Path, nargs="+", metavar="FILE",
        help="runs nothing, and writes docs/results/recipe-runs.md of files of --out",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS", help="of a run (default: 300)"
    )
    parser.add_argument("--spoil", choices=SPOILS, default="", help="makes the layout's runs wrong")
    options = parser.parse_args()
    if options.table:
        pages.write([Results.read(path) for path in options.table], ROOT / "docs" / "results")
        return 0
    if options.folder is None:
        raise ConfigError("no recipes are named; give the folder of a checkout of Megatron-LM")
    if options.resume and options.out is None:
        raise ConfigError("--resume goes by a file of results; give --out FILE")
    parent = options.folder.resolve()
    chosen = [
        path
        for path in recipes_of(parent, options.kind)
        if any(fnmatch.fnmatch(path.parent.name, pattern) for pattern in options.only)
    ]
    if not chosen:
        raise ConfigError(f"--only {' '.join(options.only)} is no recipe's name; give another")
    of_patterns = any(PATTERN in path.read_text() for path in chosen)
    script: Path | None = parent / ("pretrain_hybrid.py" if of_patterns else "pretrain_gpt.py")
    script = script if script.is_file() else None
    change = [f"--{flag}" for flag in options.change[:1]] + options.change[1:]
    kind = " ".join([options.kind, *change])
    found = Results(kind, import_megatron(script))
    if options.resume:
        found.resume(options.out)
    with tempfile.TemporaryDirectory(prefix="recipes-") as name:
        folder = Path(name)
        runner = Runner(
            script, folder, make_corpus(folder), options.limit, options.spoil, options.packing,
            tuple(change),
        )  # fmt: skip
        # Without a thread of its own: processes are forked.
        with Progress(console=Console(stderr=True), auto_refresh=False) as bar:
            task = bar.add_task("recipes", total=len(chosen))
            for path in chosen:
                bar.update(task, description=path.parent.name, refresh=True)
                if path.parent.name not in found.outcomes:
                    outcome = found.outcomes[path.parent.name] = runner.run(path)
                    said = f"{outcome}\n{outcome.tail}".rstrip()
                    bar.console.print(said, markup=False, highlight=False, soft_wrap=True)
                    if options.out is not None:
                        found.write(options.out)
                bar.update(task, advance=1, refresh=True)
    print(found.counts)
    return 1 if any(one.status == UNEQUAL for one in found.outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(run_program(main, place_flag="--out"))
