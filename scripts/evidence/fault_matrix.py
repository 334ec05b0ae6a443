#!/usr/bin/env python3
"""Puts faults into real runs of a few processes, starts them again, and counts what became of it.

Ranks are killed or stopped in each part of a step, disks are full, files damaged, folders shared.
A case ends as one of: resumed equal, refused clearly, hung, silent, lost; or not struck, where the
machine is too busy for it. Ends with status 1 unless all are of the first two. Outcomes are added
to those that --out has, and the table is of all of them.

    scripts/evidence/fault_matrix.py --seed 1 --out faults.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _common import parser_of

from megatron_wlb.errors import run_program
from megatron_wlb.files import write_text
from megatron_wlb.reading import read_text

TESTS = Path(__file__).parents[2] / "tests"
sys.path += [str(TESTS), str(TESTS / "integration")]
OUTCOMES = ("resumed equal", "refused clearly", "hung", "silent", "lost", "not struck")


def main() -> int:
    from fault_runs import CASES, LAYOUTS, Bench, Outcome, attempt

    parser = parser_of(__doc__)
    parser.add_argument(
        "--seed", type=int, default=1, help="draws rank, step and file that a fault strikes"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--trainers", nargs="+", choices=["launcher"], help="there is one")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no case after these")
    parser.add_argument("--out", type=Path, metavar="FILE", help="outcomes, as JSON; it grows")
    parser.add_argument("--missing", action="store_true", help="leave out cases that --out has")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON to stdout")
    args = parser.parse_args()
    stop_s = time.monotonic() + 60 * args.minutes
    done = known(args.out, Outcome)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder))
        for number, case in enumerate(args.cases):
            if time.monotonic() > stop_s:
                break
            layout = args.layouts[(number + args.seed) % len(args.layouts)]
            if args.missing and (case, layout, args.seed) in done:
                continue
            one = attempt(bench, case, layout, args.seed)
            done[case, layout, args.seed] = one
            tell(one)
            if args.out:
                write_text(args.out, as_json(done.values()))
    print(as_json(done.values()) if args.json else "\n" + table(done.values()))
    return int(any(one.outcome not in OUTCOMES[:2] for one in done.values()))


def known(file: Path | None, kind: type[Any]) -> dict[tuple[str, str, int], Any]:
    """The outcomes that the file has, by case, layout and seed."""
    if file is None or not file.exists():
        return {}
    read = (kind(**values) for values in json.loads(read_text(file)))
    return {(one.case, one.layout, one.seed): one for one in read}


def as_json(done: Iterable[Any]) -> str:
    return json.dumps([asdict(one) for one in done], indent=1) + "\n"


def tell(one: Any) -> None:
    """Says the outcome, and why it is a bad one, beside the result."""
    print(f"{one.case:20} {one.layout:9} {one.outcome}", file=sys.stderr)
    if one.outcome not in OUTCOMES[:2]:
        print(f"    {one.why}\n    {one.said}", file=sys.stderr)


def table(done: Collection[Any]) -> str:
    """A row for each case: its outcomes, counted, and the longest end. No column is empty."""
    total = Counter(one.outcome for one in done)
    outcomes = [outcome for outcome in OUTCOMES if total[outcome]]
    rows = [
        "| fault | " + " | ".join(outcomes) + " | longest end |",
        "| --- " * (len(outcomes) + 2) + "|",
    ]
    for case in dict.fromkeys(one.case for one in done):
        of_case = [one for one in done if one.case == case]
        counts = Counter(one.outcome for one in of_case)
        longest = max(one.ended_s or 0.0 for one in of_case)
        cells = [str(counts[outcome] or "") for outcome in outcomes]
        rows.append(f"| {case} | {' | '.join(cells)} | {f'{longest:.0f} s' if longest else ''} |")
    return "\n".join([*rows, f"| all | {' | '.join(str(total[o]) for o in outcomes)} | |"])


if __name__ == "__main__":
    sys.exit(run_program(main, place_flag="--out"))
