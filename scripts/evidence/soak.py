#!/usr/bin/env python3
"""Plans long runs that crash at random, and audits the ledger that they leave.

Each packing, and each with a blend, plans its share of --steps. At random a run is saved, or
crashes and goes on from its save, at times with a torn line in its ledger. At the end `wlb audit`'s
own code must find each token once; memory must be flat. Ends with status 1 if not.

With --train it trains so many steps of slices in one process instead, a tiny model on the CPU, with
--experts one that has experts: no key or value is left after a step, and memory is flat. With
--minutes it plans many short random runs, of all settings, whose planner is reloaded before every
step, and compares each with one left alone. The short forms are in the tests.

    scripts/evidence/soak.py --steps 100000 --seed 1
    scripts/evidence/soak.py --train 2000 --experts
    scripts/evidence/soak.py --minutes 10 --seed 1
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path

from _common import parser_of
from hypothesis import HealthCheck, given, seed, settings

from megatron_wlb.errors import run_program

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from helpers.long_soak import RUNS, flat, run
from helpers.soak import Soak, soaks
from helpers.trained_soak import train

ROUND = 200
SHORT_STEPS = 60


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="in all (default: %(default)s)")
    parser.add_argument("--train", type=int, help="steps of slices to train instead")
    parser.add_argument("--experts", action="store_true", help="--train a model that has experts")
    parser.add_argument("--minutes", type=float, help="short random runs instead, for so long")
    parser.add_argument("--seed", type=int, default=0, help="of the (first) run")
    parser.add_argument(
        "--packings", nargs="+", choices=RUNS, default=list(RUNS), help="default: all of them"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON a run")
    args = parser.parse_args()
    logging.disable()  # The planner warns of backlogs, which tight caps are to make.
    if args.train is not None:
        trained = train(args.train, args.seed, experts=args.experts)
        print(json.dumps(trained.flat() | {"refusal": trained.refusal()}))
        return int(bool(trained.refusal()))
    if args.minutes is not None:
        return _short_runs(args.seed, args.minutes)
    runs = [*product(args.packings, (False, True))]
    failed = False
    for packing, is_blend in runs:
        with tempfile.TemporaryDirectory() as folder:
            figures = run(packing, is_blend, args.steps // len(runs), args.seed, Path(folder))
        refusal, r = figures.refusal(), figures.report
        failed |= bool(refusal)
        if args.json:
            print(json.dumps(flat(figures) | {"refusal": refusal}), flush=True)
            continue
        name = packing + (", blend" if is_blend else "")
        print(
            f"{name:22} {figures.planned:,} steps, {r.restarts} restarts took back {r.rolled_back} "
            f"| {r.documents:,} documents, {r.tokens:,} tokens, lost {r.lost.number}, twice "
            f"{r.twice.number} | {figures.rss_mib[2]:.0f} to {figures.rss_mib[-1]:.0f} MiB, state "
            f"{max(figures.state_bytes):,} bytes | {figures.planned / figures.seconds:.0f} steps/s"
            + (f" | FAILED: {refusal}" if refusal else ""),
            flush=True,
        )
    return int(failed)


def _short_runs(first: int, minutes: float) -> int:
    stop_s = time.monotonic() + 60 * minutes
    steps: Counter[str] = Counter()

    @settings(
        max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(soaks(SHORT_STEPS))
    def run(soak: Soak) -> None:
        steps[soak.packing] += soak.run()

    number = first
    while number == first or time.monotonic() < stop_s:
        seed(number)(run)()
        number += 1
        print(f"seed {number - 1}: {steps.total()} steps reloaded, none differs", flush=True)
    for packing, count in sorted(steps.items()):
        print(f"{packing:24}{count:>10}")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
