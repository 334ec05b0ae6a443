"""Whole training steps: waits of the host, gaps on the GPU, and memory over ragged steps."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from _gpu_report import training
from _gpu_report.drawing import Pictures, curves, table
from _gpu_report.results import CPU, Results
from megatron_wlb.runtime.trainer import distributed

ROOT = Path(__file__).parents[2]
LARGE = (
    "--num-layers", "4", "--hidden-size", "4096", "--num-attention-heads", "32",
    "--seq-length", "8192", "--global-batch-size", "8", "--wlb-packing", "hold",
)  # fmt: skip
"""Layers of 7B's size, to see gaps between kernels of real length."""
SMALL = (
    "--num-layers", "2", "--hidden-size", "256", "--num-attention-heads", "4",
    "--seq-length", "2048", "--global-batch-size", "4", "--wlb-packing", "wlb",
)  # fmt: skip
TINY_MODEL = (
    "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2",
    "--seq-length", "256", "--global-batch-size", "2", "--wlb-packing", "wlb",
)  # fmt: skip
WARM_UP, LOOKED_AT = 3, 4
"""Steps before any figure; steps under the profiler."""
RAGGED, EVERY = 500, 25
"""Steps over which memory is followed, and how often it is read."""
SYNCHRONIZES = "called a synchronizing CUDA operation"


def measure(results: Results) -> None:
    tiny = results.tiny
    folder = results.out / "host"
    flags = ["--train-iters", "100000", "--lr", "0.0001", "--wlb-cost", "analytic"]
    flags += [] if tiny else ["--bf16"]
    flags += ["--wlb-device", results.device, "--data-path", str(folder / training.CORPUS)]
    large, small = (TINY_MODEL, TINY_MODEL) if tiny else (LARGE, SMALL)
    distributed.choose_device(results.device)  # before the corpus imports Megatron
    training.corpus(folder, 256 if tiny else 8192, 40 if tiny else 400)
    if "steps" not in results.figures:
        one = training.trainer([*flags, *large])
        training.train(one, 1 if tiny else WARM_UP)
        results.put("model", " ".join(large))
        results.put("waits", waits(one) if results.device != CPU else None)
        results.put("steps", busy(one, 1 if tiny else LOOKED_AT))
        del one
        if results.device != CPU:
            torch.cuda.empty_cache()
    if "memory" not in results.figures:
        one = training.trainer([*flags, *small])
        rows: list[dict[str, float]] = []
        number, every = (4, 2) if tiny else (RAGGED, EVERY)
        for step in range(0, number, every):
            training.train(one, every)
            rows.append({"steps": step + every, **used(results.device)})
            results.put("memory so far", rows)
        results.put("memory", rows)


def waits(one: Any) -> dict[str, int]:
    """Where one step waits for the GPU, and how often."""
    places: Counter[str] = Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.train(one, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for said in caught:
        if SYNCHRONIZES in str(said.message):
            path = Path(said.filename)
            inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
            places[f"{inside}:{said.lineno}"] += 1
    return dict(places.most_common())


def busy(one: Any, num_steps: int) -> list[dict[str, float]]:
    """Each step's time from its first kernel to its last, and the share in which any runs.

    On the CPU operations stand for kernels.
    """
    on_gpu = torch.cuda.is_available()
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    rows = []
    for _ in range(num_steps):
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            training.train(one, 1)
            torch.cuda.synchronize()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profiler.events()
            # Ranges that somebody named lie over kernels, and over the gaps between them.
            if event.device_type == kind and not event.is_user_annotation
        ]
        rows.append(covered(spans))
    return rows


def covered(spans: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Of spans in µs: the whole from first to last, what is covered, how many, the longest gap."""
    busy_us = gap_us = 0.0
    first = last = None
    number = 0
    for start, stop in sorted(spans):
        number += 1
        if last is None:
            first = last = start
        gap_us = max(gap_us, start - last)
        busy_us += max(0.0, stop - max(start, last))
        last = max(last, stop)
    whole_us = 0.0 if last is None or first is None else last - first
    return {"whole_us": whole_us, "busy_us": busy_us, "spans": number, "longest_gap_us": gap_us}


def used(device: str) -> dict[str, float]:
    """Bytes that the allocator holds and that tensors take; on the CPU those of the process."""
    if device == CPU:
        resident = float(psutil.Process().memory_info().rss)
        return {"reserved_bytes": resident, "allocated_bytes": resident, "retries": 0}
    return {
        "reserved_bytes": float(torch.cuda.memory_reserved()),
        "allocated_bytes": float(torch.cuda.max_memory_allocated()),
        "retries": float(torch.cuda.memory_stats().get("num_alloc_retries", 0)),
    }


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    text = []
    if "steps" in figures:
        rows = [
            [str(n), f"{one['whole_us'] / 1e3:,.1f}", f"{one['busy_us'] / one['whole_us']:.1%}",
             f"{one['spans']:,}", f"{one['longest_gap_us']:,.0f}"]
            for n, one in enumerate(figures["steps"], 1) if one["whole_us"]
        ]  # fmt: skip
        text += [f"Training steps with `{figures['model']}`, under torch's profiler, which slows "
                 "the host.", "",
                 *table(["step", "first to last kernel, ms", "a kernel runs", "kernels",
                         "longest gap, µs"], rows)]  # fmt: skip
        if not rows:
            text.append("The profiler saw no kernel.")
    if figures.get("waits") is not None:
        total = sum(figures["waits"].values())
        places = [[place, str(number)] for place, number in figures["waits"].items()]
        text += ["", f"The host waits for the GPU {total} times in a step:", "",
                 *table(["at", "times"], places)]  # fmt: skip
    elif "waits" in figures:
        text += ["", "Whether the host waits for a GPU cannot be seen on a CPU."]
    memory = figures.get("memory", figures.get("memory so far"))
    if memory:
        gib = {
            name: {int(one["steps"]): one[f"{name}_bytes"] / 2**30 for one in memory}
            for name in ("reserved", "allocated")
        }
        growth = gib["reserved"][int(memory[-1]["steps"])] - next(iter(gib["reserved"].values()))
        text += ["", f"Over {memory[-1]['steps']} steps of unequal lengths the allocator's memory "
                 f"grows by {growth:.2f} GiB after the first {memory[0]['steps']}, with "
                 f"{memory[-1]['retries']:.0f} retries. (On a CPU: the process's.)"]  # fmt: skip
        text += pictures.add(
            "memory", "Memory over ragged steps of a small model (measured)",
            lambda path, title: curves(path, title, {"": gib}, "steps", "GiB"),
        )  # fmt: skip
    return text or ["No step was measured to its end."]
