"""Each attention kernel that runs: right by the definition, and how fast packed documents are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from bench_cp import windows
from helpers.attention import errors_over_bf16

from _gpu_report.drawing import Pictures, curves, table
from _gpu_report.machine import TINY, demand, heads, in_turns
from _gpu_report.results import Results
from megatron_wlb.cost.attention_latency import BACKWARD_FLOPS, forward_flops, pairs
from megatron_wlb.runtime.gpt.attention.kernels import CANDIDATES, Demand, Segments, VarlenKernel
from megatron_wlb.runtime.measuring.attention_rates import AttentionTimer

WINDOWS = tuple(8192 * 2**n for n in range(5))
NUM_WINDOWS, REPEATS = 4, 5
LENGTHS_Q, LENGTHS_K = (5, 300, 1, 64, 129), (5, 700, 90, 64, 131)
"""Segments that kernels are compared on: whole documents, and later parts of some."""
MOST_ERROR = 2.0
"""Errors over those of the definition itself in bf16, as ``tests/gpu`` has it."""
SCALE = 0.1
PARTS_OF_RESULT = ("output", "dQ", "dK", "dV")
SEED = 1


def measure(results: Results) -> None:
    for shape, of in heads(results).items():
        wanted = demand(results, of)
        for name, candidate in CANDIDATES.items():
            key, made = f"{name}, {shape}", candidate.make(wanted)
            if isinstance(made, str):
                results.put(key, {"obstacle": made})
                continue
            if "obstacle" in results.figures.get(key, {}):
                del results.figures[key]  # of a start before its package was there
            results.once(key, lambda k=made, w=wanted: tried(lambda: {"errors": errors(k, w)}))
            scale, number, repeats = (TINY, 1, 1) if results.tiny else (1, NUM_WINDOWS, REPEATS)
            for window in WINDOWS:
                documents = windows(window, number, scale, SEED)
                results.once(
                    f"{key}, {window}",
                    lambda k=made, w=wanted, d=documents, n=repeats: tried(
                        lambda: speeds(k, w, d, n)
                    ),
                )


def tried(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``run`` returns, or why it failed: one kernel's error leaves the others to measure."""
    try:
        return run()
    except (RuntimeError, ValueError) as error:  # memory that does not suffice is one
        return {"obstacle": f"it fails ({' '.join(str(error).split())[:200]})"}


def errors(kernel: VarlenKernel, wanted: Demand) -> dict[str, float]:
    """By part of the result: how far the kernel is off, over how far bf16 itself is."""
    generator = torch.Generator(wanted.device).manual_seed(SEED)
    shapes = (
        (sum(LENGTHS_Q), wanted.num_heads), (sum(LENGTHS_K), wanted.num_groups),
        (sum(LENGTHS_K), wanted.num_groups), (sum(LENGTHS_Q), wanted.num_heads),
    )  # fmt: skip
    inputs = [
        torch.randn(*s, wanted.head_dim, generator=generator, device=wanted.device).to(wanted.dtype)
        for s in shapes
    ]
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = kernel(*leaves, Segments.of(LENGTHS_Q, LENGTHS_K, wanted.device), SCALE)
    found = [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]
    ratios = errors_over_bf16(found, inputs, LENGTHS_Q, LENGTHS_K, SCALE)
    return dict(zip(PARTS_OF_RESULT, ratios, strict=True))


def one_by_one(kernel: VarlenKernel, lengths: Sequence[int], device: torch.device) -> VarlenKernel:
    """Runs a kernel in a call for each document, as where nothing is packed."""
    alone = [Segments.of([n], device=device) for n in lengths]

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Segments, scale: float
    ) -> torch.Tensor:
        parts = (t.split(list(lengths)) for t in (query, key, value))
        documents = zip(*parts, alone, strict=True)
        return torch.cat([kernel(q, k, v, own, scale) for q, k, v, own in documents])

    return run


def speeds(
    kernel: VarlenKernel, wanted: Demand, batches: Sequence[tuple[int, ...]], repeats: int
) -> dict[str, Any]:
    """µs and TFLOP/s of windows of documents, of these one by one, and of one as long as a window.

    All in turns; each window's median counts. FLOPs are those of exact causal pairs.
    """
    window = sum(batches[0])
    calls = [
        call
        for lengths in batches
        for call in (
            ("packed", kernel, lengths),
            ("one by one", one_by_one(kernel, lengths, wanted.device), lengths),
            ("one document", kernel, (window,)),
        )
    ]
    timers = [
        (AttentionTimer(one, wanted, window, window, SEED), np.array(lengths))
        for _, one, lengths in calls
    ]
    times_us: list[list[tuple[float, float]]] = [[] for _ in timers]
    for number in in_turns(len(timers), repeats + 1):
        timer, lengths = timers[number]
        times_us[number].append(timer(lengths, lengths))
    found: dict[str, Any] = {"window": window, "documents": sum(map(len, batches)) / len(batches)}
    for name in ("packed", "one by one", "one document"):
        own = [n for n, call in enumerate(calls) if call[0] == name]
        # The first turn warms up.
        us = np.sum([np.median(times_us[n][1:], axis=0) for n in own], axis=0)
        num_pairs = sum(float(pairs(timers[n][1], timers[n][1]).sum()) for n in own)
        flops = forward_flops(wanted.num_heads, wanted.head_dim, num_pairs)
        found[name] = {
            "forward_us": float(us[0]),
            "backward_us": float(us[1]),
            "forward_tflops": flops / us[0] / 1e6,
            "backward_tflops": flops * BACKWARD_FLOPS / us[1] / 1e6,
            "tflops": flops * (1 + BACKWARD_FLOPS) / float(us.sum()) / 1e6,
        }
    return found


def wrong(figures: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: the error of {part} is {ratio:.2f} of bf16's own, over {MOST_ERROR:g}"
        for key, found in figures.items()
        for part, ratio in found.get("errors", {}).items()
        if not ratio <= MOST_ERROR
    ]


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    right, speed = [], []
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for key, found in figures.items():
        if "obstacle" in found:
            right.append([key, f"does not run: {found['obstacle']}"])
        elif "errors" in found:
            told = ", ".join(f"{part} {ratio:.2f}" for part, ratio in found["errors"].items())
            right.append([key, told])
        else:
            packed, alone, dense = (found[n] for n in ("packed", "one by one", "one document"))
            total_us = [one["forward_us"] + one["backward_us"] for one in (packed, alone)]
            kernel = key.rpartition(", ")[0]
            speed.append([
                kernel, f"{found['window']:,}", f"{found['documents']:.1f}",
                f"{packed['forward_tflops']:.1f}", f"{packed['backward_tflops']:.1f}",
                f"{dense['tflops']:.1f}", f"{packed['tflops'] / dense['tflops']:.0%}",
                f"{total_us[1] / total_us[0]:.2f}",
            ])  # fmt: skip
            for name, one in (("packed", packed), ("one by one", alone), ("one document", dense)):
                points = panels.setdefault(kernel, {}).setdefault(name, {})
                points[found["window"]] = one["tflops"]
    text = [
        "Errors are over those of the definition itself in bf16; 2 or less is right.",
        "",
        *table(["kernel", "errors of"], right),
    ]
    if not speed:
        return text
    columns = ["kernel", "window, tokens", "documents", "forward, TFLOP/s", "backward, TFLOP/s",
               "one document, TFLOP/s", "packed over it", "packed over one by one"]  # fmt: skip
    text += ["", "Windows of reference documents, each packed in one call. FLOPs "
             "are those of exact causal pairs. Rates of one document of the whole window stand "
             "beside, and how much faster the packed call is than a call for each document.", "",
             *table(columns, speed)]  # fmt: skip
    return text + pictures.add(
        "kernels", "Attention of reference documents, both passes (measured)",
        lambda path, title: curves(path, title, panels, "window", "TFLOP/s", of_tokens=True),
    )  # fmt: skip
