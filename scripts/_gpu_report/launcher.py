"""Steps of ``pretrain_gpt.py`` on one GPU: what each packing takes, and what was predicted."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.pretrain import EMULATED, UNFUSED, flash_if_there, pretrain
from helpers.whole_windows import two_corpora

from _gpu_report.drawing import Pictures, table
from _gpu_report.machine import hardware_path
from _gpu_report.results import Results

SEED = 1234
ALONE, UNEVEN, WHOLE = "Megatron alone", "uneven documents", "whole windows"
RUNS = (
    (WHOLE, ALONE), (WHOLE, "slim"), (UNEVEN, "slim"), (UNEVEN, "hold"), (WHOLE, "original"),
    (UNEVEN, "original"),
)  # fmt: skip
"""In order of worth."""
TINY_RUNS = ((UNEVEN, "slim"),)
LARGE = "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --bf16"
"""Layers of 7B's size."""
SMALL = f"--num-layers 1 --hidden-size 32 --num-attention-heads 2 {EMULATED}"
FLAGS = (
    "--micro-batch-size 1 --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 "
    "--swiglu --disable-bias-linear --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --init-method-std 0.02 --lr 1e-4 "
    "--lr-decay-style constant --no-gradient-accumulation-fusion --tokenizer-type NullTokenizer "
    f"--split 1 --log-interval 1 --eval-interval 1000 --eval-iters 0 --num-workers 0 --seed {SEED}"
)
NUM_WINDOWS, WARM_UP = 4, 4


def measure(results: Results) -> None:
    fused = is_fused()
    results.put("layers", "TransformerEngine's" if fused else "Megatron's own")
    window, end, steps = (64, 127, 6) if results.tiny else (16384, 8191, 12)
    folder = results.out / "launcher"
    folder.mkdir(exist_ok=True)
    prefixes = two_corpora(folder, window, seed=SEED, end=end)
    flags = f"{SMALL if results.tiny else LARGE} {FLAGS} --vocab-size {end} --seq-length {window} "
    flags += f"--max-position-embeddings {window} --global-batch-size {NUM_WINDOWS} "
    flags += f"--train-iters {steps} " + ("" if fused else UNFUSED)
    hardware = hardware_path(results.out)
    for documents, packing in TINY_RUNS if results.tiny else RUNS:
        if packing == ALONE and not fused:
            continue  # attention that is not fused is nobody's baseline
        if packing == ALONE:
            own = f"--data-path {prefixes['alone']} --eod-mask-loss --data-cache-path cache "
            # Without the second its host builds a mask of the window's square.
            own += f"{flash_if_there()} --no-create-attention-mask-in-dataloader"
        else:
            own = f"--data-path {prefixes['ours']}"
            if documents == UNEVEN:
                own = "--mock-data --wlb-mock-lengths reference"
            own += f" --wlb-packing {packing} --wlb-metrics metrics.jsonl"
            own += f" --wlb-hardware {hardware.absolute()}" if hardware.exists() else ""
        results.once(f"{documents}, {packing}", lambda o=own: steps_of(folder, flags, o))


def is_fused() -> bool:
    """Whether layers are TransformerEngine's."""
    return importlib.util.find_spec("transformer_engine") is not None


def steps_of(folder: Path, *flags: str) -> list[dict[str, float]]:
    """What Megatron's log says of each step, and what our metrics do, if there are any."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    said = pretrain(folder, *flags)
    times = re.findall(r"elapsed time per iteration \(ms\): +([\d.]+)", said)
    steps = [{"ms": float(ms)} for ms in times]
    if metrics.exists():
        for step, line in zip(steps, metrics.read_text().splitlines(), strict=True):
            found = json.loads(line)
            step |= {name: found[name] for name in ("predicted_ms", "tokens") if name in found}
    return steps


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    del pictures
    rows = []
    for key, steps in figures.items():
        if key == "layers" or len(steps) <= WARM_UP:
            continue
        own = steps[WARM_UP:]
        ms, tokens, predicted = (sum(s.get(n, 0) for s in own) for n in
                                 ("ms", "tokens", "predicted_ms"))  # fmt: skip
        ranged = f"{min(s['ms'] for s in own):,.0f}-{max(s['ms'] for s in own):,.0f}"
        rows.append([key, f"{ms / len(own):,.0f}", ranged,
                     f"{tokens / ms * 1e3:,.0f}" if tokens else "",
                     f"{predicted / ms:.2f}" if predicted else ""])  # fmt: skip
    columns = ["documents, packing", "ms a step", "range", "tokens a second",
               "predicted over measured"]  # fmt: skip
    return [
        f"`pretrain_gpt.py` with 4 layers of 7B's size ({figures['layers']}), {NUM_WINDOWS} "
        f"windows a step, by Megatron's clock, without the first {WARM_UP} steps. Whole windows "
        "are the same work for all, so they show what a packing costs. With one pipeline stage and "
        "one replica a packing has nothing to gain.",
        "",
        *table(columns, rows),
    ]
