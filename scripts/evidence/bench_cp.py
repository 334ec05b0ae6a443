#!/usr/bin/env python3
"""Figure 15 of WLB-LLM on one device: attention of one layer under each CP sharding.

    scripts/evidence/bench_cp.py --json > figures.json                        # a GPU, full size
    OMP_NUM_THREADS=1 scripts/evidence/bench_cp.py --device cpu --small       # a quarter of an hour
    scripts/evidence/bench_cp.py --modelled --micro-batches 64                # full size, seconds

For CP = 2, 4 and 8 every rank's attention runs in turn, forward and backward, one variable-length
call on the keys that the rank has gathered; the slowest rank counts. Micro-batches are windows of
the reference length distribution. All shardings run side by side, in another order each time, so
that a busy or hot machine is so for all. `adaptive` and `hybrid` choose by an attention profile:
that of --profile FILE (see `wlb profile`), or one measured here first.

Measured is the kernel, without communication and without gathering keys by index. Latencies of a
rank are the median of the repeats on a GPU; on a CPU the least, of processor time where torch has
one thread. With --small lengths and heads are scaled down: other sizes, so other figures. With
--modelled nothing is measured: latencies are those of whole 128 x 128 tiles at one rate, by which
`adaptive` and `hybrid` then choose too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from _common import parser_of
from _shardings import plot_shardings
from rich.table import Table

from megatron_wlb.cli import output
from megatron_wlb.cli.flags import flag
from megatron_wlb.cost import load_hardware
from megatron_wlb.cost.attention_latency import (
    AnalyticAttention,
    AttentionLatency,
    AttentionProfile,
    Ints,
    pairs,
)
from megatron_wlb.data.lengths import sample_lengths
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.plan.sharding import Selector, Sharding, predict, shard_arrays
from megatron_wlb.runtime.gpt.attention.kernels import Demand, choose_kernel
from megatron_wlb.runtime.measuring.attention_rates import AttentionTimer, measure_attention
from megatron_wlb.runtime.measuring.rates import machine_name

FIXED = ("per-sequence", "per-document", "per-document-remainder")
SHARDINGS = (*FIXED, "adaptive", "hybrid", "best-of")
WINDOWS = (65536, 131072)
MODELS = {"7B": (32, 32, 128), "70B": (64, 8, 128)}
SMALL_MODELS = {"7B": (2, 2, 64), "70B": (8, 1, 32)}
SMALL_SCALE = 16
"""By which --small divides lengths."""
MODELLED_TFLOPS = 400.0
"""A rate for latencies in µs; their ratios do not depend on it."""

Timer: TypeAlias = Callable[[Ints, Ints], tuple[float, float]]
"""µs forward and backward of one call, by its chunks' queries and keys."""


@dataclass(frozen=True)
class Case:
    """One set-up: a row of the table."""

    model: str
    window: int
    """In tokens, as scaled."""
    cp_size: int
    micro_batches: tuple[tuple[int, ...], ...]
    """Lengths of documents."""


@dataclass(frozen=True)
class Latency:
    """Of the slowest rank, in µs."""

    forward_us: float
    backward_us: float

    @property
    def total_us(self) -> float:
        return self.forward_us + self.backward_us


@dataclass(frozen=True)
class Result:
    """Of one micro-batch, by sharding."""

    imbalance: dict[str, float]
    """Exact FLOPs of the rank with the most, over the mean."""
    latency: dict[str, Latency]
    loss: float
    """Of `adaptive` over the faster of the two that it chooses from: 0 is none."""
    predicted: float
    """Prediction over measurement, of what `adaptive` chose."""


def windows(window: int, number: int, scale: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Reference windows, each document divided by ``scale``."""
    lengths = sample_lengths("reference", number, seed=seed, window=window)
    stops = np.cumsum(lengths) // scale
    edges = range(0, number * window // scale + 1, window // scale)
    return tuple(
        tuple(np.diff(np.unique(np.append(stops[(stops > a) & (stops < b)], [a, b]))).tolist())
        for a, b in itertools.pairwise(edges)
    )


def imbalance(lengths: Sequence[int], cp_size: int, sharding: Sharding) -> float:
    ranks = shard_arrays(lengths, cp_size, sharding)
    work = [int(pairs(rows[:, 2] - rows[:, 1], rows[:, 2]).sum()) for rows in ranks]
    return max(work) * cp_size / sum(work)


def latencies(
    lengths: Sequence[int],
    cp_size: int,
    shardings: Sequence[Sharding],
    timer: Timer,
    repeats: int,
    typical: Callable[..., Any],
) -> dict[Sharding, Latency]:
    """Each sharding's, measured side by side; those of the same chunks are measured once."""
    ranks: dict[Sharding, tuple[Any, ...]] = {}
    same: dict[tuple[bytes, ...], Sharding] = {}
    alias: dict[Sharding, Sharding] = {}
    for sharding in shardings:
        chunks = shard_arrays(lengths, cp_size, sharding)
        alias[sharding] = same.setdefault(tuple(rows.tobytes() for rows in chunks), sharding)
        ranks[alias[sharding]] = chunks
    shardings = list(ranks)
    times_us = {s: np.empty((repeats, cp_size, 2)) for s in shardings}
    for turn in range(repeats):
        first = turn % len(shardings)
        for s in (*shardings[first:], *shardings[:first]):
            for rank, rows in enumerate(ranks[s]):
                times_us[s][turn, rank] = timer(rows[:, 2] - rows[:, 1], rows[:, 2])
    # [repeats, CP, 2] -> [CP, 2] -> the slowest of each pass
    slowest = {s: typical(us, axis=0).max(axis=0) for s, us in times_us.items()}
    found = {s: Latency(float(us[0]), float(us[1])) for s, us in slowest.items()}
    return {s: found[measured] for s, measured in alias.items()}


def run_micro_batch(
    lengths: Sequence[int],
    cp_size: int,
    profile: AttentionLatency,
    timer: Timer,
    repeats: int,
    typical: Callable[..., Any],
) -> Result:
    chosen: dict[str, Sharding] = {kind: Sharding(kind) for kind in FIXED}  # type: ignore[arg-type]
    for mode in ("adaptive", "hybrid"):
        chosen[mode] = Selector(mode, cp_size, profile).choose(lengths).sharding
    measured = latencies(
        lengths, cp_size, list(dict.fromkeys(chosen.values())), timer, repeats, typical
    )
    latency = {name: measured[sharding] for name, sharding in chosen.items()}
    degrees = {name: imbalance(lengths, cp_size, sharding) for name, sharding in chosen.items()}
    best = min(chosen, key=lambda name: latency[name].total_us)
    latency["best-of"], degrees["best-of"] = latency[best], degrees[best]
    adaptive_us = latency["adaptive"].total_us
    fastest_us = min(latency[kind].total_us for kind in ("per-sequence", "per-document"))
    predicted_us = predict(lengths, cp_size, chosen["adaptive"], profile).latency_us
    return Result(degrees, latency, adaptive_us / fastest_us - 1, predicted_us / adaptive_us)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """What the JSON holds of one case, or of all: means over micro-batches.

    The speedup is the ratio of summed latencies, forward and backward.
    """

    def mean_us(name: str, what: str) -> float:
        return float(np.mean([getattr(r.latency[name], what) for r in results]))

    losses = np.array([r.loss for r in results])
    total_us = {name: mean_us(name, "total_us") for name in SHARDINGS}
    return {
        "num_micro_batches": len(results),
        "exact_flop_imbalance": {
            name: float(np.mean([r.imbalance[name] for r in results])) for name in SHARDINGS
        },
        "latency_us": {
            name: {
                "forward": mean_us(name, "forward_us"),
                "backward": mean_us(name, "backward_us"),
            }
            for name in SHARDINGS
        },
        "speedup_over_per_sequence": {
            name: total_us["per-sequence"] / total_us[name] for name in SHARDINGS
        },
        "adaptive_picks_winner": float(np.mean(losses == 0)),
        "adaptive_picks_winner_or_within_1_percent": float(np.mean(losses < 0.01)),
        "adaptive_loss_mean": float(losses.mean()),
        "adaptive_loss_max": float(losses.max()),
        "adaptive_losses": losses.tolist(),
        "predicted_over_measured": float(np.median([r.predicted for r in results])),
    }


def profile_of(
    options: argparse.Namespace, demand: Demand, longest: int, machine: str, model: str
) -> AttentionProfile:
    """From --profile FILE, where it must be of these heads; else measured now."""
    dtype = str(demand.dtype).removeprefix("torch.")
    heads = (dtype, demand.num_heads, demand.num_groups, demand.head_dim)
    if options.profile is not None:
        for profile in load_hardware(str(options.profile)).attention:
            if (profile.dtype, profile.num_heads, profile.num_groups, profile.head_dim) == heads:
                return profile
        raise ConfigError(
            f"--profile {options.profile} has no table of {demand.num_heads}/{demand.num_groups}x"
            f"{demand.head_dim} in {dtype}; run `wlb profile --heads "
            f"{demand.num_heads}/{demand.num_groups}x{demand.head_dim}`, or leave it out"
        )
    with output.progress_bar(f"profile of {model}") as progress:
        return measure_attention(
            demand, options.kernel, longest=longest, repeats=options.profile_repeats,
            machine=machine, seed=options.seed, progress=progress,
        )  # fmt: skip


def modelled(latency: AttentionLatency) -> Timer:
    """What :class:`AttentionTimer` does, by prediction."""

    def predicted_us(queries: Ints, keys: Ints) -> tuple[float, float]:
        forward, backward = latency.chunk_us(queries, keys)
        return float(forward.sum()), float(backward.sum())

    return predicted_us


def cases_of(options: argparse.Namespace) -> list[Case]:
    scale = SMALL_SCALE if options.small else 1
    return [
        Case(model, window // scale, cp_size, micro_batches)
        for model in options.models
        for window in options.windows
        for micro_batches in [windows(window, options.micro_batches, scale, options.seed)]
        for cp_size in options.cp
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All cases; what the JSON holds."""
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    machine = "whole 128 x 128 tiles" if options.modelled else machine_name(options.device)
    typical = np.median if cuda else np.min
    models = SMALL_MODELS if options.small else MODELS
    repeats = 1 if options.modelled else options.repeats
    cases = cases_of(options)
    longest = max(case.window for case in cases)
    rows, everything, profiles, clock = [], [], {}, ""
    for model in options.models:
        profile: AttentionLatency
        timer: Timer
        if options.modelled:
            num_heads, _, head_dim = models[model]
            profile = AnalyticAttention(num_heads, head_dim, MODELLED_TFLOPS)
            timer = modelled(profile)
        else:
            demand = Demand(device, torch.bfloat16 if cuda else torch.float32, *models[model])
            profile = profile_of(options, demand, longest, machine, model)
            profiles[model] = {
                name: getattr(profile, name) for name in ("kernel", "machine", "spread", "error")
            }
            kernel = choose_kernel(profile.kernel, demand).kernel
            # Single rows of the remainder see their whole document again: 2 windows more keys.
            timer = AttentionTimer(kernel, demand, longest, 4 * longest, options.seed)
            clock = timer.clock
        own = [case for case in cases if case.model == model]
        with output.progress_bar(f"shardings of {model}") as progress:
            done, total = 0, sum(len(case.micro_batches) for case in own)
            for case in own:
                results = []
                for lengths in case.micro_batches:
                    results.append(
                        run_micro_batch(lengths, case.cp_size, profile, timer, repeats, typical)
                    )
                    done += 1
                    progress(done, total)
                everything += results
                rows.append(
                    {"model": model, "window": case.window, "cp": case.cp_size, **summary(results)}
                )
        del timer
    return {
        "machine": machine,
        "clock": clock,
        "small": options.small,
        "seed": options.seed,
        "repeats": repeats,
        "profiles": profiles,
        **summary(everything),
        "cases": rows,
    }


def table_of(figures: dict[str, Any]) -> Table:
    """The table of cases."""
    how = f"measured ({figures['clock']})" if figures["clock"] else "modelled"
    table = Table("model", "window", "CP", "exact-FLOP", *SHARDINGS[1:], "adaptive right")
    table.title = (
        f"{figures['machine']}: speedup of attention over per-sequence, forward and backward, "
        f"slowest rank, {how}"
    )
    table.caption = (
        "exact-FLOP: imbalance of per-sequence / per-document. adaptive right: share of "
        "micro-batches in which it took the faster one, in brackets or lost < 1 %"
    )
    for row in [*figures["cases"], {"model": "all", "window": 0, "cp": "", **figures}]:
        speedup, degree = row["speedup_over_per_sequence"], row["exact_flop_imbalance"]
        if row["model"] == "all":
            table.add_section()
        table.add_row(
            row["model"],
            f"{row['window'] / 1024:g}K" if row["window"] else "",
            str(row["cp"]),
            f"{degree['per-sequence']:.2f} / {degree['per-document']:.4f}",
            *(f"{speedup[name]:.3f}" for name in SHARDINGS[1:]),
            f"{row['adaptive_picks_winner']:.0%} "
            f"({row['adaptive_picks_winner_or_within_1_percent']:.0%})",
        )
    return table


def main() -> int:
    parser = parser_of(__doc__)
    flag(parser, "--device", "where to measure", "auto", choices=("auto", "cuda", "cpu"))
    flag(parser, "--small", "sizes that a CPU can run")
    flag(parser, "--modelled", "predict, and measure nothing")
    flag(parser, "--cp N", "ranks", [2, 4, 8], of=int)
    flag(parser, "--models", "heads of these", list(MODELS), choices=tuple(MODELS), nargs="+")
    about = f"in tokens; --small divides by {SMALL_SCALE}"
    flag(parser, "--windows N", about, list(WINDOWS), of=int)
    flag(parser, "--micro-batches N", "a case (default: 12; small: 4)")
    flag(parser, "--repeats N", "of each call", 10)
    flag(parser, "--profile FILE", "of `wlb profile`")
    flag(parser, "--profile-repeats N", "of each point", 10)
    flag(parser, "--kernel NAME", "as for `wlb profile`", "auto")
    flag(parser, "--seed N", "of lengths and inputs", 1)
    flag(parser, "--plot FILE", "picture (PNG)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON to stdout")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.micro_batches = options.micro_batches or (4 if options.small else 12)
    if options.device == "cpu" and not (options.small or options.modelled):
        raise ConfigError("a CPU would take days at full size; add --small, or --modelled")
    output.check_picture("--plot", options.plot)
    figures = run(options)
    output.console(stderr=options.json).print(table_of(figures))
    if options.json:
        print(json.dumps(figures, indent=1))
    if options.plot:
        plot_shardings(figures, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
