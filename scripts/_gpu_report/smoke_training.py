"""Short trainings from the same weights: the losses on the GPU are those on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helpers.pretrain import EMULATED, UNFUSED
from test_gpu_smoke import FIRST, THEN, train

from _gpu_report import training
from _gpu_report.drawing import Pictures, table
from _gpu_report.results import CPU, Results
from megatron_wlb.runtime.saving.newest import TRACKER

PACKINGS = ("original", "hold", "slim")
NUM_STEPS, TINY_STEPS = 20, 2
WINDOW = 512
FP32_RELATIVE = 3e-3
"""Sums in another order; Adam's steps are as long for the smallest gradients as for others."""
BF16_ABSOLUTE = 0.15
"""Rounding of weights and activations, in nats."""


def measure(results: Results) -> None:
    folder = results.out.absolute() / "smoke_training"
    prefix = training.corpus(folder, WINDOW, 100)
    steps = f"--train-iters {TINY_STEPS if results.tiny else NUM_STEPS}"
    # Where there is no GPU a second run on the CPU stands in for it: the path is the same.
    device = EMULATED if results.device == CPU else UNFUSED
    kinds = {"cpu": EMULATED, "fp32": device, "bf16": f"{device} --bf16"}
    if results.tiny:
        kinds.pop("bf16")
    if not (folder / "weights" / TRACKER).exists():
        train(folder, prefix, "first", EMULATED, FIRST)
    for packing in PACKINGS[-1:] if results.tiny else PACKINGS:
        for kind, flags in kinds.items():
            own = f"{flags} --wlb-packing {packing} {steps}"
            results.once(
                f"{packing}, {kind}",
                lambda n=f"{packing}-{kind}", f=own: train(folder, prefix, n, THEN, f),
            )


def distance(figures: Mapping[str, Any], packing: str, kind: str) -> float:
    """The largest distance of losses from the CPU's: relative of fp32, in nats of bf16."""
    expected, found = (figures[f"{packing}, {name}"] for name in ("cpu", kind))
    return max(
        abs(a - b) / (b if kind == "fp32" else 1.0) for a, b in zip(found, expected, strict=True)
    )


def compared(figures: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """Packing, kind and distance, of runs that are there with their CPU's."""
    names = [key.split(", ") for key in figures]
    return [
        (packing, kind, distance(figures, packing, kind))
        for packing, kind in names
        if kind != "cpu" and f"{packing}, cpu" in figures
    ]


def wrong(figures: Mapping[str, Any]) -> list[str]:
    limits = {"fp32": FP32_RELATIVE, "bf16": BF16_ABSOLUTE}
    return [
        f"{packing} in {kind}: losses are off the CPU's by {found:.2g}, over {limits[kind]:g}"
        for packing, kind, found in compared(figures)
        if not found <= limits[kind]
    ]


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    del pictures
    rows = []
    for packing, kind, found in compared(figures):
        losses = figures[f"{packing}, {kind}"]
        unit = "nats" if kind == "bf16" else "of the loss"
        rows.append([packing, kind, str(len(losses)), f"{losses[0]:.4f} → {losses[-1]:.4f}",
                     f"{found:.1e} {unit}"])  # fmt: skip
    columns = ["packing", "numbers", "steps", "loss", "largest distance from the CPU"]
    return [
        "A small model from the same weights over the same documents, on this device and under the "
        f"CPU emulation. Allowed are {FP32_RELATIVE:g} of the loss in fp32 and {BF16_ABSOLUTE:g} "
        "nats in bf16.",
        "",
        *table(columns, rows),
    ]
