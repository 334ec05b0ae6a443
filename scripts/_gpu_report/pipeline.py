"""Megatron-LM's pipeline of four stages on one GPU, each on a quarter of its SMs."""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.pretrain import SCRIPT, UNFUSED

from _gpu_report import launcher, sharing
from _gpu_report.drawing import Pictures, table
from _gpu_report.results import Results
from _gpu_report.running import StartedError, run_together, world
from megatron_wlb.errors import CompatibilityError

STAGES, TINY_STAGES = 4, 2
WINDOW, NUM_WINDOWS, VOCAB_SIZE = 24576, 8, 8191
TINY_WINDOW = 64
LAYERS_OF_STAGE = 2
LARGE = "--hidden-size 1536 --ffn-hidden-size 4096 --num-attention-heads 12 --bf16"
SMALL = launcher.SMALL.replace("--num-layers 1 ", "")
TIMED = "--timing-log-level 2 --timing-log-option all"
MEMORY_SHARE = 0.3
"""Of the GPU's memory: the first stage's tensors, with as many micro-batches under way as there are
stages. The next ones have one less each. All together leave a tenth to NCCL and CUDA."""
STEPS, WARM_UP = 8, 2
TINY_STEPS, TINY_WARM_UP = 3, 1
ALONE, AT_ONCE = "one stage alone", "all stages at once, without messages"
RUNS = (
    "original, turn 1", "hold, turn 1", "slim, turn 1", ALONE, AT_ONCE,
    "slim, turn 2", "hold, turn 2", "original, turn 2",
)  # fmt: skip
TINY_RUNS = ("original, turn 1", "slim, turn 1", ALONE, AT_ONCE)
RUN_S = 150.0
PASSES = ("forward-compute", "backward-compute")
MS = re.compile(r"elapsed time per iteration \(ms\): +([\d.]+)")
RANK = re.compile(r" +rank +(\d+): +([\d.]+)")


def measure(results: Results) -> None:
    results.figures.pop("obstacle", None)
    on_gpu = torch.cuda.is_available() and not results.tiny
    try:
        if on_gpu:
            sharing.check_nccl()
        with contextlib.ExitStack() as opened:
            own = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
            if on_gpu:
                own = sharing.environment(STAGES) | opened.enter_context(sharing.mps(STAGES))
            _measure(results, own, on_gpu=on_gpu)
    except CompatibilityError as error:
        results.put("obstacle", str(error))


def _measure(results: Results, environment: Mapping[str, str], *, on_gpu: bool) -> None:
    stages = TINY_STAGES if results.tiny else STAGES
    steps, warm_up = (TINY_STEPS, TINY_WARM_UP) if results.tiny else (STEPS, WARM_UP)
    results.put("stages", stages)
    results.put("warm-up", warm_up)
    flags = [*_flags(on_gpu=on_gpu), "--train-iters", str(steps)]
    train = partial(_train, results.out.absolute() / "pipeline", flags, environment)

    def run(packing: str) -> list[dict[str, Any]]:
        own = f"--pipeline-model-parallel-size {stages} --num-layers {stages * LAYERS_OF_STAGE}"
        (*_, last) = train(world(stages), f"{own} --wlb-packing {packing}", metrics=True)
        return last

    def stage(number: int) -> float:
        """Milliseconds a step of so many stages, each a model of its own."""
        own = f"--num-layers {LAYERS_OF_STAGE} --wlb-packing original"
        worlds = [one for _ in range(number) for one in world(1)]
        found = train(worlds, own, metrics=False)
        return statistics.fmean(step["ms"] for one in found for step in one[warm_up:])

    makers = {ALONE: partial(stage, 1), AT_ONCE: partial(stage, stages)}
    for name in TINY_RUNS if results.tiny else RUNS:
        make = makers.get(name) or partial(run, name.partition(",")[0])
        results.attempt(name, make, StartedError)


def _flags(*, on_gpu: bool) -> list[str]:
    """What all runs have in common."""
    window = WINDOW if on_gpu else TINY_WINDOW
    vocab_size = VOCAB_SIZE if on_gpu else 127
    flags = f"{LARGE if on_gpu else SMALL} {launcher.FLAGS} {TIMED} --wlb-cost measured "
    flags += f"--mock-data --wlb-mock-lengths reference --vocab-size {vocab_size} "
    flags += f"--seq-length {window} --max-position-embeddings {window} "
    flags += f"--global-batch-size {NUM_WINDOWS} "
    if on_gpu:
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        flags += f"--wlb-memory-gib {MEMORY_SHARE * gib:.1f} "
    if not launcher.is_fused():
        flags += UNFUSED
    return flags.split()


def _train(
    folder: Path,
    flags: Sequence[str],
    environment: Mapping[str, str],
    ranks: Sequence[Mapping[str, str]],
    more: str,
    *,
    metrics: bool,
) -> list[list[dict[str, Any]]]:
    """The steps of each process, whose last one of a world logs them."""
    path = folder / "metrics.jsonl"
    path.unlink(missing_ok=True)
    own = [*more.split(), *(("--wlb-metrics", str(path)) if metrics else ())]
    command = [sys.executable, "-m", "_gpu_report.staged", *SCRIPT]
    given = [{**one, **environment} for one in ranks]
    said = run_together([*command, *flags, *own], given, folder, RUN_S)
    lines = path.read_text().splitlines() if metrics else []
    return [steps_of(one, lines if one is said[-1] else ()) for one in said]


def steps_of(said: str, metrics: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Of what a process printed: the milliseconds of each step and of each rank's passes; and our
    figures of it.
    """
    steps: list[dict[str, Any]] = []
    kind = ""
    for line in said.splitlines():
        if found := MS.search(line):
            steps.append({"ms": float(found[1]), "busy_ms": {}})
        elif (rank := RANK.fullmatch(line)) and kind in PASSES and steps:
            busy = steps[-1]["busy_ms"]
            busy[rank[1]] = busy.get(rank[1], 0.0) + float(rank[2])
        elif not rank:
            kind = line.strip().removesuffix(":")
    names = ("tokens", "predicted_ms", "tflops_per_device")
    for step, line in zip(steps, metrics, strict=bool(metrics)):
        figures = json.loads(line)
        step |= {name: figures[name] for name in names if name in figures}
    return steps


def summary(steps: Sequence[Mapping[str, Any]], stages: int) -> dict[str, float]:
    """Work and tokens a second, idle share, predicted over measured, of steps together."""
    ms, tokens, predicted = (
        sum(step.get(name, 0.0) for step in steps) for name in ("ms", "tokens", "predicted_ms")
    )
    work = sum(step.get("tflops_per_device", 0.0) * step["ms"] for step in steps) * stages
    busy = sum(sum(step["busy_ms"].values()) for step in steps)
    return {
        "ms": ms / len(steps),
        "TFLOP/s": work / ms,
        "tokens/s": tokens / ms * 1e3,
        "idle": 1 - busy / (ms * stages),
        "predicted": predicted / ms,
    }


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    del pictures
    if "obstacle" in figures:
        return [f"Not run: {figures['obstacle']}."]
    stages, warm_up = figures["stages"], figures["warm-up"]
    found: dict[str, list[Any]] = {}
    missing = []
    for name, steps in figures.items():
        if isinstance(steps, dict):
            missing.append(f"- {name}: {steps['obstacle'].splitlines()[0]}")
        elif isinstance(steps, list) and len(steps) > warm_up:
            found.setdefault(name.partition(",")[0], []).extend(steps[warm_up:])
    told = {packing: summary(steps, stages) for packing, steps in found.items()}
    base = told.get("original", {}).get("TFLOP/s")
    rows = [
        [packing, str(len(found[packing])), f"{one['ms']:,.0f}", f"{one['TFLOP/s']:.3g}",
         f"{one['TFLOP/s'] / base:.2f}" if base else "", f"{one['tokens/s']:,.0f}",
         f"{one['idle']:.0%}", f"{one['predicted']:.2f}" if one["predicted"] else ""]
        for packing, one in told.items()
    ]  # fmt: skip
    columns = ["packing", "steps", "ms a step", "TFLOP/s, all stages", "over `original`",
               "tokens a second", "stages wait", "predicted over measured"]  # fmt: skip
    text = [
        f"`pretrain_gpt.py` with PP={stages}, {stages * LAYERS_OF_STAGE} layers and {NUM_WINDOWS} "
        f"windows a step, the same documents for all, without the first {warm_up} steps of each "
        "run. Each stage is a process with its share of one GPU's SMs. They share its memory's "
        "bandwidth, so the last line stands beside each ratio. Work is that of the documents.",
        "",
        *table(columns, rows),
    ]
    if isinstance(figures.get(AT_ONCE), float) and isinstance(figures.get(ALONE), float):
        text += ["", f"Interference: with {stages} at once, without messages, a stage's step takes "
                 f"{figures[AT_ONCE] / figures[ALONE]:.2f} times what it takes alone."]  # fmt: skip
    return [*text, *[""] * bool(missing), *missing]
