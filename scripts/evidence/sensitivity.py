#!/usr/bin/env python3
"""Shows what the gain of `hold` and `slim` depends on: one thing after another is changed.

    scripts/evidence/sensitivity.py                                # some minutes
    scripts/evidence/sensitivity.py --page docs/results/sensitivity.md
    scripts/evidence/sensitivity.py --steps 4 --only "host, high"  # a moment

Each row is `wlb simulate` on the reference lengths. *stock* is `original` with Megatron's own
sharding, as our flags need it; *overlapped* is the same with `--tp-comm-overlap`, which plans turn
off. Ours have the sharding that is faster. Low and high are what may be assumed of a machine
besides what was fitted; all else is as in the first row. Everything is simulated.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from _common import parser_of
from rich.progress import track

from megatron_wlb.cli import output
from megatron_wlb.cli.main import main as wlb
from megatron_wlb.cost.hardware import read_hardware
from megatron_wlb.errors import run_program

BASE = {
    "model": "7b", "tp-size": 8, "cp-size": 2, "pp-size": 4, "dp-size": 1, "num-micro-batches": 16,
    "window": 131072, "memory-gib": 1000,
}  # fmt: skip
HEAD = "| changed | `hold` over stock | `slim` over stock | `hold` over overlapped | `slim` |"
CASES: dict[str, dict[str, Any]] = {
    "nothing: 7B, TP 8, CP 2, PP 4, N 16": {},
    **{f"N {n}": {"num-micro-batches": n} for n in (4, 8, 32, 64)},
    **{f"PP {n}": {"pp-size": n, "num-micro-batches": 4 * n} for n in (1, 2, 8)},
    "VPP 2": {"vpp-size": 2},
    "TP 4, CP 1": {"tp-size": 4, "cp-size": 1},
    "TP 4, CP 2": {"tp-size": 4},
    "TP 8, CP 4": {"cp-size": 4},
    "window 64K": {"window": 65536},
    "window 32K": {"window": 32768},
    "70B, CP 4": {"model": "70b", "cp-size": 4},
    "kernels, low": {"kernel_us": 5.0},
    "kernels, high": {"kernel_us": 15.0},
    "host, low": {"launch_us": 5},
    "host, high": {"launch_us": 20},
    "host, very high": {"launch_us": 100},
    "overlap of TP, low": {"tp_overlap": 0.5},
    "overlap of TP, high": {"tp_overlap": 0.9},
    "attention, slow": {"attention_share": 0.3},
    "attention, fast": {"attention_share": 0.5},
    "all overheads, low": {"kernel_us": 5.0, "launch_us": 5, "tp_overlap": 0.5},
    "all overheads, high": {"kernel_us": 15.0, "launch_us": 20, "tp_overlap": 0.9},
    "rates of one H100": {"hardware": "h100-sxm-measured"},
    "rates of one H100, N 4": {
        "hardware": "h100-sxm-measured", "num-micro-batches": 4,
    },
}  # fmt: skip
"""What is changed: flags of `wlb simulate`, or figures of the machine, or all of these."""


def simulated(changes: dict[str, Any], options: argparse.Namespace, folder: Path) -> list[float]:
    """The gains of ``hold`` and ``slim``, over both baselines; NaN for what cannot run."""
    changes = {"hardware": options.hardware, **changes}
    content = dict(read_hardware(changes.pop("hardware"))[1])
    figures = {name: value for name, value in changes.items() if name in content}
    for name, value in figures.items():
        content[name] = {"value": value, "source": "assumed: another"}
    machine = folder / "machine.yaml"
    machine.write_text(yaml.safe_dump(content))
    flags = {**BASE, **{name: value for name, value in changes.items() if name not in figures}}
    packings = ["original", "hold", "slim"]
    shardings = ["per-sequence", *(["adaptive"] if flags["cp-size"] > 1 else [])]
    words = " ".join(f"--{name} {value}" for name, value in flags.items())
    run = (
        f"simulate --distribution reference {words} --hardware {machine} --json "
        f"--packing {' '.join(packings)} --sharding {' '.join(shardings)} "
        f"--steps {options.steps} --num-seeds {options.num_seeds}"
    )
    told = StringIO()
    with redirect_stdout(told):
        wlb(shlex.split(run))
    found = json.loads(told.getvalue())
    # Rows are over the original of the last sharding, the page's over Megatron's own. What overlap
    # gains is taken to be the same for both.
    (own,) = (
        row["speedup"]
        for row in found["rows"]
        if (row["packing"], row["sharding"]) == ("original", "per-sequence")
    )
    stock = max(1.0, found["frame"]["overlapped_speedup"] or 1.0)
    best = [
        max(
            (row["speedup"] / own for row in found["rows"] if row["packing"] == packing),
            default=None,
        )
        for packing in ("hold", "slim")
    ]
    nothing = float("nan")
    return [nothing if one is None else one / over for over in (1.0, stock) for one in best]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--hardware", default="h100-sxm", help="machine (default: h100-sxm)")
    parser.add_argument("--steps", type=int, default=32, help="of each seed (default: 32)")
    parser.add_argument("--num-seeds", type=int, default=2, help="of the lengths (default: 2)")
    parser.add_argument("--only", choices=CASES, metavar="ROW", help="one row")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    chosen = {args.only: CASES[args.only]} if args.only else CASES
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in track(chosen.items(), console=output.console(stderr=True)):
            rows[name] = simulated(changes, args, Path(folder))
    if args.json:
        print(json.dumps({"simulated": True, "rows": rows}, indent=1))
    lines = [HEAD, "| --- | --- | --- | --- | --- |"]
    for name, gains in rows.items():
        cells = ("-" if gain != gain else f"{gain:.2f}" for gain in gains)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if args.page:
        args.page.write_text(PAGE.format(table="\n".join(lines), steps=args.steps))
    elif not args.json:
        print("\n".join(lines))
    return 0


PAGE = """# What the gain depends on

Made by `scripts/evidence/sensitivity.py --page docs/results/sensitivity.md`; do not edit it by
hand. **Every figure is simulated** ([how to read that](../simulator.md)): {steps} steps of each of
two seeds, on the reference lengths.

*stock* is `original` with Megatron's own sharding over context-parallel ranks, as our flags need
it. *overlapped* is stock with `--tp-comm-overlap`, which lengths that vary turn off. `hold` and
`slim` have the sharding that is faster. Memory is not limited. One thing is changed in each row.

{table}

- **kernels**: what each kernel takes besides its work (`kernel_us`: 5, 10.3 and 15 µs). It was
  fitted to published runs; fitted to the other half of them it is 6.8 µs.
- **host**: what a kernel takes the host to launch (`launch_us`: 5, 10, 20 and 100 µs). On
  one H100 it was 15 to 17 ([gpu.md](gpu.md)).
- **overlap of TP**: what matrix products hide of the collectives (`tp_overlap`: 0.5, 0.70, 0.9).
- **attention**: the share of the peak that it reaches (`attention_share`: 0.3, 0.36, 0.5).
- **rates of one H100**: all that `wlb profile` measured on one H100 with flash-attn 3, whose
  attention reaches 0.66 of the peak and matrix products 0.79 ([gpu.md](gpu.md#the-profile)).
"""


if __name__ == "__main__":
    sys.exit(run_program(main))
