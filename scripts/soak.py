#!/usr/bin/env python3
"""Reloads a planner before every step, in random runs, and compares it with one left alone.

All packings, blends, long documents, look-ahead, caps and ages; the short form is in the tests.
Ends with status 1 and the smallest run that fails, if one does.

    scripts/soak.py --minutes 10 --seed 1
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from pathlib import Path

from _common import parser_of
from hypothesis import HealthCheck, given, seed, settings

from megatron_wlb.errors import run_program

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from helpers.soak import Soak, soaks

ROUND = 200


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first round of runs")
    parser.add_argument("--steps", type=int, default=60, help="of a run at most")
    args = parser.parse_args()
    logging.disable()  # The planner warns of backlogs, which tight caps are to make.
    stop_s = time.monotonic() + 60 * args.minutes
    steps: Counter[str] = Counter()

    @settings(
        max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(soaks(args.steps))
    def run(soak: Soak) -> None:
        steps[soak.packing] += soak.run()

    number = args.seed
    while number == args.seed or time.monotonic() < stop_s:
        seed(number)(run)()
        number += 1
        print(f"seed {number - 1}: {steps.total()} steps reloaded, none differs", flush=True)
    for packing, count in sorted(steps.items()):
        print(f"{packing:24}{count:>10}")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
