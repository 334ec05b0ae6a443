#!/usr/bin/env python3
"""Judges the simulator by runs on H100s that others have published.

    scripts/evidence/published_runs.py                          # h100-sxm, as it comes
    scripts/evidence/published_runs.py --hardware mine.yaml     # another machine file
    scripts/evidence/published_runs.py --fit --out fitted.yaml  # fits anew on every second run

``_published/runs.csv`` has tokens a second and GPU, printed by NVIDIA for DGX-H100: NeMo 24.07
(``docs/source/performance/performance_summary.md``), its table of long sequences (24.03, from
TFLOP/s by NeMo's formula, which counts attention as not causal), Megatron-LM (``examples/llama``)
and Megatron-Bridge (``docs/performance-summary-archive.md``). Runs of TRL with FSDP2, torch's ring
attention and all layers recomputed (huggingface/trl, pull requests 6845 and 6846: seconds of a step
of one document) are held out: no half has them. All windows are full. Of several releases of one
model in one layout the fastest is judged, as only software differs; the others are shown. Left out
are Megatron's FSDP, Mamba, and DeepSeek-V3, which recomputes what no flag of ours names.

What recipes overlap is in the table: ``tp_overlap`` is ``--tp-comm-overlap``, ``ep_overlap`` the
exchange of experts beside another micro-batch; ``once`` a dispatcher that sends a token to a node
once (HybridEP, as ``src/megatron/bridge/perf_recipes`` has it). Runs with experts, with context
parallelism, with virtual stages and all others are dealt in turn: one fits, the next is judged.
Fitting keeps to the assumed values where runs say little (``PRIOR``). Figures are *simulated*
against *read*.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from _common import parser_of
from rich.progress import track
from rich.table import Table

from megatron_wlb.cli import output
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.fp8 import fp8_products
from megatron_wlb.cost.hardware import Hardware, load_hardware, read_hardware
from megatron_wlb.cost.layers import Precisions
from megatron_wlb.cost.parts import Attention, Experts
from megatron_wlb.cost.shape import ModelShape, Parallelism, Recompute, padded_vocabulary
from megatron_wlb.errors import run_program
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.baseline import FULL
from megatron_wlb.simulator.step import Simulator

DATA = Path(__file__).parent / "_published"
PRIOR = {
    "linear_share": (0.61, 0.05),
    "fp8_linear_share": (0.55, 0.10),
    "attention_share": (0.40, 0.05),
    "tp_overlap": (0.70, 0.15),
    "product_overlap": (0.50, 0.25),
    "kernel_us": (5.0, 2.5),
    "link_share": (0.78, 0.05),
}
"""What is fitted: where it begins, and by how much it may go from there as easily as a run's error
by :data:`ERROR`."""
ERROR = 0.05
MOST_MEAN, MOST_WORST = 0.08, 0.20
"""The errors that are wanted of runs that were not fitted."""
console = output.console(stderr=True)


@dataclass(frozen=True)
class Published:
    """A run that somebody printed."""

    source: str
    model: str
    num_devices: int
    batch: int
    micro_batch: int
    window: int
    layout: Parallelism
    precision: str
    tp_overlapped: bool
    ep_overlapped: bool
    sends_once: bool
    tokens_per_s: float
    """Of each GPU."""
    held_out: bool
    """By FSDP2 with all layers recomputed, never fitted and no part of the halves."""

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Published:
        names = "gpus", "batch", "micro_batch", "window", "tp", "pp", "cp", "vp", "ep"
        gpus, batch, micro_batch, window, tp, pp, cp, vp, ep = (int(row[name]) for name in names)
        layers, stages = models()[row["model"]]["layers"], pp * vp
        stage_layers = None
        if layers % stages:  # The ends have a layer less: embedding and loss count as one.
            each = (layers + 2) // stages
            stage_layers = (each - 1, *[each] * (stages - 2), each - 1)
        layout = Parallelism(
            tp, cp, pp, vp, gpus // (tp * pp * cp), tp > 1, stage_layers=stage_layers,
            ep_size=ep, etp_size=1 if ep > 1 else None,
        )  # fmt: skip
        flags = (row[name] == "yes" for name in ("tp_overlap", "ep_overlap", "once"))
        tp_overlapped, ep_overlapped, sends_once = flags
        return cls(
            row["source"], row["model"], gpus, batch, micro_batch, window, layout,
            row["precision"], tp_overlapped, ep_overlapped, sends_once, float(row["tokens_per_s"]),
            row["held"] == "yes",
        )  # fmt: skip

    @property
    def title(self) -> str:
        p = self.layout
        sizes = {"TP": p.tp_size, "CP": p.cp_size, "PP": p.pp_size, "VP": p.vpp_size,
                 "EP": p.ep_size, "DP": p.dp_size}  # fmt: skip
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)

    @property
    def kind(self) -> int:
        """Runs of a kind are in both halves."""
        p = self.layout
        return [p.ep_size > 1, p.cp_size > 1, p.vpp_size > 1, True].index(True)

    @property
    def same(self) -> tuple[object, ...]:
        """What releases of software differ in nothing but."""
        p = self.layout
        sizes = p.tp_size, p.pp_size, p.cp_size, p.ep_size
        return self.model, self.num_devices, self.window, sizes

    def shape(self) -> ModelShape:
        m = models()[self.model]
        heads = m["heads"]
        shape = ModelShape(
            m["hidden"], m["ffn"], m["layers"], heads, m.get("groups", heads),
            m.get("channels", m["hidden"] // heads), m["vocab"], m.get("gated", False),
            rms_norm=True, linear_bias=False, tied_embeddings=False,
        )  # fmt: skip
        if "experts" in m:
            experts = Experts(m["experts"], m["topk"], m["ffn"], shape.gated)
            shape = shape.with_experts(experts, [True] * shape.num_layers)
        if "window" in m:
            shape = _every_second(shape, m["window"])
        if self.precision != "bf16":
            matrix = fp8_products(self.precision, param_gather=True, element_bytes=2)
            fp8 = replace(Precisions.same(2), matrix=matrix)
            runs = tuple((num, replace(layer, precisions=fp8)) for num, layer in shape.runs)
            shape = replace(shape, layers=runs)
        return padded_vocabulary(shape, self.layout.tp_size)

    def predicted(self, hardware: Hardware) -> float:
        """Tokens a second of each GPU, simulated."""
        execution = Execution(
            self.layout, tp_overlapped=self.tp_overlapped, ep_overlapped=self.ep_overlapped,
            sends_once=self.sends_once, recompute=FULL if self.held_out else Recompute(),
        )  # fmt: skip
        number = self.batch // self.micro_batch
        run = Run(
            self.shape(), execution, hardware, window=self.window, num_micro_batches=number,
            micro_batch_size=self.micro_batch,
        )  # fmt: skip
        rank = [[self.window] * self.micro_batch] * (number // self.layout.dp_size)
        step = Simulator(run.costs, self.layout).step([rank] * self.layout.dp_size)
        return self.batch * self.window / step.step_us * 1e6 / self.num_devices


def _every_second(shape: ModelShape, reach_tokens: int) -> ModelShape:
    """``shape`` with a sliding window in each second layer."""
    ((num, layer),) = shape.runs
    attention, *others = layer.parts
    assert isinstance(attention, Attention)
    windowed = replace(layer, parts=(replace(attention, reach_tokens=reach_tokens), *others))
    pairs = ((1, windowed), (1, layer)) * (num // 2)
    return replace(shape, layers=pairs, reach_tokens=reach_tokens)


def models() -> dict[str, dict[str, Any]]:
    if not _MODELS:
        _MODELS.update(yaml.safe_load((DATA / "models.yaml").read_text()))
    return _MODELS


_MODELS: dict[str, dict[str, Any]] = {}


def published() -> dict[str, list[Published]]:
    """Runs to fit, runs to judge, slower releases of these, and what is held out."""
    with (DATA / "runs.csv").open() as stream:
        known = [Published.of(row) for row in csv.DictReader(stream)]
    runs = [run for run in known if not run.held_out]
    fastest: dict[tuple[object, ...], Published] = {}
    for run in runs:
        if run.tokens_per_s > fastest.setdefault(run.same, run).tokens_per_s:
            fastest[run.same] = run
    halves: tuple[list[Published], list[Published]] = ([], [])
    for _, alike in groupby(sorted(fastest.values(), key=lambda run: run.kind), lambda r: r.kind):
        for number, run in enumerate(alike):
            halves[number % 2].append(run)
    slower = [run for run in runs if run not in fastest.values()]
    held = [run for run in known if run.held_out]
    return {"fitted": halves[0], "judged": halves[1], "slower": slower, "held out": held}


def errors(runs: Iterable[Published], hardware: Hardware) -> np.ndarray[Any, np.dtype[np.float64]]:
    """``predicted ÷ published - 1`` of each."""
    return np.array([run.predicted(hardware) / run.tokens_per_s - 1 for run in runs])


def fit(runs: Sequence[Published], hardware: Hardware, rounds: int = 6) -> Hardware:
    """The least squares of errors, in units of :data:`ERROR`, and of steps from :data:`PRIOR`: by
    Gauss and Newton's method.
    """
    start, scale = np.array(list(PRIOR.values())).T
    at = np.zeros(len(start))

    def made(steps: Any) -> Hardware:
        values: dict[str, Any] = dict(zip(PRIOR, map(float, start + scale * steps), strict=True))
        return replace(hardware, **values)

    most = np.array([20.0 if name.endswith("_us") else 1.0 for name in PRIOR])
    for _ in track(range(rounds), "fitting", console=console, transient=True):
        base = errors(runs, made(at)) / ERROR
        slope = 0.02
        columns = [
            (errors(runs, made(at + slope * own)) / ERROR - base) / slope
            for own in -np.eye(len(at))
        ]
        jacobian = np.vstack([-np.array(columns).T, np.eye(len(at))])
        residuals = np.concatenate([base, at])
        at = at - np.linalg.lstsq(jacobian, residuals, rcond=None)[0]
        at = np.clip(start + scale * at, 0.0, most - 1e-9)
        at = (at - start) / scale
    return made(at)


def table(named: Mapping[str, Sequence[Published]], hardware: Hardware) -> tuple[Table, list[Any]]:
    shown = Table(title="tokens a second and GPU")
    for column in ("run", "layout", "window", "read", "simulated", "ratio", "half"):
        shown.add_column(column, justify="left" if column in ("run", "layout") else "right")
    rows = []
    for half, runs in named.items():
        for run in runs:
            found = run.predicted(hardware)
            ratio = found / run.tokens_per_s
            rows.append({"source": run.source, "model": run.model, "layout": run.title,
                         "window": run.window, "read": run.tokens_per_s, "simulated": found,
                         "half": half})  # fmt: skip
            shown.add_row(
                f"{run.model} ({run.source})", run.title, f"{run.window}",
                f"{run.tokens_per_s:.0f}", f"{found:.0f}", f"{ratio:.2f}", half,
            )  # fmt: skip
    return shown, rows


def write(hardware: Hardware, base: str, path: Path) -> None:
    """The machine file ``base`` with what was fitted."""
    _, content = read_hardware(base)
    figures: dict[str, Any] = dict(content)
    for name in PRIOR:
        source = "fitted: scripts/evidence/published_runs.py --fit"
        figures[name] = {"value": round(getattr(hardware, name), 3), "source": source}
    path.write_text(yaml.safe_dump(figures, sort_keys=False, width=100, allow_unicode=True))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--hardware", default="h100-sxm", help="machine; default: h100-sxm")
    parser.add_argument("--fit", action="store_true", help="fit its shares on one half of the runs")
    parser.add_argument("--swap", action="store_true", help="exchange the halves")
    parser.add_argument("--out", type=Path, metavar="FILE", help="machine file to write")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    hardware = load_hardware(args.hardware)
    named = published()
    if args.swap:
        named |= {"fitted": named["judged"], "judged": named["fitted"]}
    if args.fit:
        hardware = fit(named["fitted"], hardware)
    if args.out:
        write(hardware, args.hardware, args.out)
    shown, rows = table(named, hardware)
    found = {half: np.abs(errors(runs, hardware))
             for half, runs in named.items() if half != "slower"}  # fmt: skip
    figures = {half: {"runs": len(own), "mean": float(own.mean()), "worst": float(own.max())}
               for half, own in found.items()}  # fmt: skip
    values = {name: round(getattr(hardware, name), 3) for name in PRIOR}
    if args.json:
        print(json.dumps({"errors": figures, "values": values, "runs": rows}, indent=1))
    else:
        output.console().print(shown)
        for half, own in figures.items():
            errs = f"mean error {own['mean']:.1%}, worst {own['worst']:.1%}"
            print(f"{half}: {own['runs']} runs, {errs}")
        print("values:", ", ".join(f"{name} {value}" for name, value in values.items()))
    judged_errors = figures["judged"]
    return int(judged_errors["mean"] > MOST_MEAN or judged_errors["worst"] > MOST_WORST)


if __name__ == "__main__":
    sys.exit(run_program(main))
