"""What does this project gain on my GPU? One command, one GPU, 55 minutes: a page of evidence.

    scripts/gpu_report                                  # all parts; the page is docs/results/gpu.md
    scripts/gpu_report --minutes 9 --out runs/gpu       # what fits 9 minutes; again for the rest
    scripts/gpu_report --parts probe,ranks,pipeline --limit-s 800   # several ranks on one GPU
    scripts/gpu_report --tiny --out /tmp/report         # the same path on a CPU, in minutes
    scripts/gpu_report --list                           # the parts, and how long each may take

Each part runs in a process of its own with a limit of its own. Its result is OUT/PART.json, written
as it grows, and its output OUT/PART.log. A part that is done is not done again; one that was cut
off goes on where it was. The page is made of the results at the end of each start. What you write
into OUT/notes.md is on it, too.

Exit status: 1 if something was computed wrong; 0 also where a part failed or was cut off, which the
page says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from _common import parser_of

from _gpu_report import page, results, sharing
from _gpu_report.parts import PARTS, Part, parts_called
from _gpu_report.running import run_part
from megatron_wlb.errors import ConfigError, run_program

ROOT = Path(__file__).parents[2]
LEAST_S = 5.0
"""Seconds without which no part is started."""


def main() -> int:
    options = _options()
    chosen = parts_called([name for names in options.parts for name in names.split(",")])
    if options.list:
        for part in chosen:
            print(f"{part.name:17} up to {part.limit_s / 60:3.0f} min  {part.tells}")
        return 0
    for flag in ("minutes", "limit", "limit_s"):
        value = getattr(options, flag)
        if value is not None and value <= 0:
            raise ConfigError(f"--{flag.replace('_', '-')} is {value:g}; give more than 0")
    if options.nccl is not None:
        if not options.nccl.is_file():
            raise ConfigError(f"--nccl {options.nccl} is not a file; give a libnccl.so.2")
        os.environ[sharing.NCCL] = str(options.nccl.absolute())
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    if not options.page:
        _measure(chosen, options)
    found = page.found_in(out)
    is_tiny = options.tiny or any(one["tiny"] for one in found.values())
    has_news = found or options.page
    docs = options.docs or (ROOT / "docs" / "results" if has_news and not is_tiny else out)
    print(f"page: {page.make(found, docs, out)}")
    wrong = [f"{name}: {line}" for name, one in found.items()
             for line in PARTS[name].wrong(one["figures"])]  # fmt: skip
    for line in wrong:
        print(f"WRONG  {line}")
    return 1 if wrong else 0


def _measure(chosen: list[Part], options: argparse.Namespace) -> None:
    gpu = torch.cuda.is_available()
    needing = [part.name for part in chosen if part.needs_gpu]
    if needing and not (options.tiny or gpu):
        raise ConfigError(
            f"torch sees no GPU, which {', '.join(needing)} need; give --tiny to try the report on "
            "a CPU, or --page to make the page of results that are there"
        )
    start_s = time.monotonic()
    for number, part in enumerate(chosen, 1):
        place = f"[{number}/{len(chosen)}] {part.name}"
        path = options.out / f"{part.name}.json"
        found = results.read(path)
        if options.again:
            _forget(options.out, part)
        elif found is not None and found["status"] == "done" and found["tiny"] == options.tiny:
            print(f"{place}: done before ({path})", flush=True)
            continue
        limit_s = options.limit or part.limit_s
        passed_s = time.monotonic() - start_s
        left_s = (options.minutes or 1e9) * 60 - passed_s
        if options.limit_s:
            left_s = min(left_s, options.limit_s - passed_s)
            limit_s = min(limit_s, max(left_s, LEAST_S))
        if limit_s > left_s:
            print(f"{place}: not started; it may take {limit_s / 60:.1f} min, {left_s / 60:.1f} "
                  "are left", flush=True)  # fmt: skip
            continue
        print(f"{place}: up to {limit_s / 60:.1f} min", flush=True)
        ended = run_part(part, options.out, tiny=options.tiny, limit_s=limit_s)
        print(f"{place}: {ended}", flush=True)


def _forget(out: Path, part: Part) -> None:
    """Removes what earlier starts left of a part."""
    (out / f"{part.name}.json").unlink(missing_ok=True)
    shutil.rmtree(out / part.name, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.prog = "scripts/gpu_report"
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER",
        help="results (default: runs/gpu)",
    )  # fmt: skip
    parser.add_argument(
        "--parts", nargs="+", default=[], metavar="PART",
        help=f"of {', '.join(PARTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="start no part whose limit no longer fits"
    )
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="of each part (default: see --list)"
    )
    parser.add_argument(
        "--limit-s", type=float, metavar="SECONDS",
        help="of all parts: what is at work then is cut off, and keeps what it has",
    )  # fmt: skip
    parser.add_argument(
        "--nccl", type=Path, metavar="FILE",
        help="libnccl.so.2 of 2.30 or later, for several ranks on one GPU",
    )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="redo parts that are done")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, tiny: says nothing of a GPU")
    parser.add_argument("--page", action="store_true", help="make the page only")
    parser.add_argument(
        "--docs", type=Path, metavar="FOLDER",
        help="where the page goes (default: docs/results; of the tiny form --out)",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="name the parts and do nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run_program(main, place_flag="--out"))
