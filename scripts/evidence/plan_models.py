#!/usr/bin/env python3
"""What packings gain for models of today: ``wlb plan`` for each, and a table of what it finds.

    scripts/evidence/plan_models.py --out runs/models                              # hours
    scripts/evidence/plan_models.py --out runs/models --models 7b --windows 32768  # minutes
    scripts/evidence/plan_models.py --out runs/models --page docs/results/models.md

What ``wlb plan --json`` printed for a row is kept in the folder, so that a run that was stopped
goes on, and the table is of all rows that are there. N is one window for each 4 devices. Documents
for fine-tuning are lognormal (median 1,500 tokens, sigma 1.1), with a window for each device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from _common import parser_of, put

from megatron_wlb.errors import run_program
from megatron_wlb.planning.from_words import settings_of_script
from megatron_wlb.settings.recipe import read_recipe
from megatron_wlb.simulator.choose import CANDIDATES, choose_packing
from megatron_wlb.simulator.forecast import forecast
from megatron_wlb.study.advice import MAX_DELAY_STEPS

MODELS = {
    "7b": "7B (LLaMA2)", "llama-3-8b": "Llama-3-8B", "llama-3-70b": "Llama-3-70B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B", "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "deepseek-v3": "DeepSeek-V3", "qwen3.5-35b-a3b": "Qwen3.5-35B-A3B",
    "nemotron-3-super": "Nemotron 3 Super",
}  # fmt: skip
WINDOWS = (32768, 65536, 131072, 262144)
LARGE = ("qwen3-235b-a22b", "deepseek-v3")
"""Models that do not fit 64 devices."""
AXES = ("tp", "cp", "pp", "vpp", "ep")
FIGURES = ("speedup", "step_ms", "mfu", "peak_gib", "imbalance_mean", "delay_mean")
NUM_DOCUMENTS, MEDIAN, SIGMA, SEED = 60_000, 1500, 1.1, 1


@dataclass(frozen=True)
class Row:
    """One search."""

    model: str
    num_devices: int
    window: int
    lengths: str

    def kept(self, folder: Path) -> Path:
        return folder / f"{self.model}-{self.num_devices}-{self.window}-{self.lengths}.json"

    def command(self, folder: Path) -> list[str]:
        each, source = 4, ["--distribution", self.lengths]
        if self.lengths == "tuning":
            path, random, each = folder / "tuning.txt", np.random.default_rng(SEED), 1
            drawn = np.exp(random.normal(np.log(MEDIAN), SIGMA, NUM_DOCUMENTS))
            path.write_text("\n".join(map(str, np.clip(drawn, 16, 32768).astype(int))))
            source = ["--lengths", str(path)]
        return [
            *("wlb", "plan", *source, "--model", self.model, "--json"),
            *("--num-devices", str(self.num_devices), "--window", str(self.window)),
            *("--num-micro-batches", str(self.num_devices // each)),
        ]

    def said(self, folder: Path) -> dict[str, list[float]]:
        """What `plan` says of the row's best layout and packing, and what `simulate`, a dry run and
        `auto` say of the command that it prints.
        """
        best = json.loads(self.kept(folder).read_text())["ranked"][0]
        shaped = "+shape" if best["shaped"] else ""
        source, recipe = self.command(folder), self.kept(folder).with_suffix(".yaml")
        packings = ["--packing", f"original,{best['packing']}{shaped}", "--json"]
        sizes = [(f"--{axis}-size", str(best[f"{axis}_size"])) for axis in AXES]
        plan = answered([*source, *chain(*sizes), "--recompute", best["recompute"], *packings])
        row = next(one for one in plan["ranked"] if one["title"] == best["title"])
        machine = {"NUM_NODES": self.num_devices // 8, "GPUS_PER_NODE": 8}
        recipe.write_text(yaml.safe_dump({"ENV_VARS": machine, "MODEL_ARGS": plan["flags"]}))
        given = [*source[2 : source.index("--model")], "--model", str(recipe), *packings]
        simulated = answered(
            ["wlb", "simulate", *given, "--sharding", "adaptive", "--steps", str(row["steps"])]
        )
        found = {"plan": row, "simulate": simulated["rows"][-1]}
        if self.lengths == "reference":  # as recipes without documents have them
            config = settings_of_script(read_recipe(str(recipe), {}).arguments)
            found["dry run"] = forecast(config, self.num_devices)
            if not shaped and best["packing"] in CANDIDATES:
                open_config = replace(config, wlb=replace(config.wlb, wlb_packing="auto"))
                gains = choose_packing(open_config, self.num_devices).gains
                found["auto"] = row | {"speedup": gains[best["packing"]]}
        return {who: [round(one[name], 9) for name in FIGURES] for who, one in found.items()}

    def cells(self, found: dict[str, Any]) -> list[str]:
        """The line of the table: the best of all, and what others do beside it."""
        best: dict[str, dict[str, Any]] = {}
        for one in found["ranked"]:
            if not one["fits"] or one["delay_mean"] > MAX_DELAY_STEPS:
                continue
            known = best.setdefault(one["packing"], one)
            if one["speedup_over_best"] > known["speedup_over_best"]:
                best[one["packing"]] = one
        fastest = max(best.values(), key=lambda one: float(one["speedup_over_best"]))
        sizes = {"TP": "tp_size", "CP": "cp_size", "PP": "pp_size", "V": "vpp_size",
                 "DP": "dp_size", "EP": "ep_size"}  # fmt: skip
        shown = {name: fastest[size] for name, size in sizes.items() if fastest[size] > 1}
        layout = " ".join(f"{name}{size}" for name, size in shown.items())

        def gain(packing: str) -> str:
            return f"{best[packing]['speedup_over_best']:.2f}" if packing in best else "–"

        original = f"{best['original']['mfu']:.0%}" if found["original_fits"] else "none fits"
        documents = "fine-tuning" if self.lengths == "tuning" else "long"
        return [
            MODELS[self.model], str(self.num_devices), f"{self.window // 1024}K", documents,
            f"`{fastest['packing']}`: {layout or 'DP only'}",
            f"{fastest['speedup_over_best']:.2f}", gain("hold"), gain("slim"),
            f"{found['frame']['overlapped_speedup'] or 1:.2f}",
            f"{fastest['mfu']:.0%}, {original}",
        ]  # fmt: skip


def answered(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def check(folder: Path, chosen: Iterable[Row]) -> int:
    """Prints what commands say of each row that is there; 1 where they differ."""
    differ = 0
    for row in chosen:
        if row.kept(folder).exists():
            said = row.said(folder)
            alike = len({*map(tuple, said.values())}) == 1
            differ += not alike
            shown = said["plan"] if alike else said
            print(row.kept(Path()).stem, *said, "alike:" if alike else "DIFFER:", shown, flush=True)
    return int(differ > 0)


def table(folder: Path) -> str:
    """Of all rows that are there."""
    head = ("Model", "GPUs", "Window", "Documents", "Fastest, and its layout", "Gain", "`hold`",
            "`slim`", "Overlap", "MFU, of `original`")  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for row in rows([*MODELS], WINDOWS, (64, 256)):
        if (path := row.kept(folder)).exists():
            lines.append(row.cells(json.loads(path.read_text())))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def rows(models: list[str], windows: tuple[int, ...], devices: tuple[int, ...]) -> Iterator[Row]:
    for model in models:
        for number in devices:
            yield from (Row(model, number, window, "reference") for window in windows)
        number = 256 if model in LARGE else 64
        if 32768 in windows and number in devices:
            yield Row(model, number, 32768, "tuning")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="what is kept")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    about = "tokens (default: all of 32K to 256K)"
    parser.add_argument(
        "--windows", nargs="+", type=int, default=WINDOWS, choices=WINDOWS, help=about
    )
    parser.add_argument("--devices", nargs="+", type=int, default=(64, 256), choices=(64, 256))
    parser.add_argument("--page", type=Path, help="page whose table is written, without a search")
    about = "whether other commands say the same of rows that are there, without a search"
    parser.add_argument("--check", action="store_true", help=about)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = rows(args.models, tuple(args.windows), tuple(args.devices))
    if args.check:
        return check(args.out, chosen)
    if args.page is None:
        for row in chosen:
            if (path := row.kept(args.out)).exists():
                continue
            print(row.kept(Path()).stem, file=sys.stderr)
            done = subprocess.run(row.command(args.out), stdout=subprocess.PIPE, check=True)
            path.write_bytes(done.stdout)
    made = table(args.out)
    if args.page is not None:
        put(args.page, "plans", made.rstrip())
    print(made, end="")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
