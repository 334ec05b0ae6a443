"""Figure 15 of WLB-LLM at full size: the attention of all CP ranks in turn on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bench_cp
import numpy as np
from _shardings import plot_shardings

from _gpu_report.drawing import Pictures, table
from _gpu_report.machine import TINY, demand, heads, measured_attention
from _gpu_report.results import Results
from megatron_wlb.cost.attention_latency import AttentionProfile
from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.gpt.attention.kernels import CANDIDATES
from megatron_wlb.runtime.measuring.attention_rates import AttentionTimer

WINDOWS = (64 * 1024, 128 * 1024)
CP_SIZES = (2, 4, 8)
NUM_MICRO_BATCHES, REPEATS = 12, 5
WANTED_SHARE = 0.95
"""Of choices that are right."""
SEED = 1


def measure(results: Results) -> None:
    for shape, of in heads(results).items():
        profile, wanted = measured_attention(results.out, of), demand(results, of)
        kernel = CANDIDATES[profile.kernel].make(wanted)
        if isinstance(kernel, str):
            raise CompatibilityError(
                f"{profile.kernel}, of the profile, cannot run now: {kernel}; give --again "
                "--parts profile"
            )
        longest = max(WINDOWS) // (TINY if results.tiny else 1)
        # Single rows of the remainder see their whole document again: 2 windows more keys.
        timer = AttentionTimer(kernel, wanted, longest, 4 * longest, SEED)
        results.put("clock", timer.clock)
        results.put("machine", profile.machine)
        for window in WINDOWS:
            for cp_size in CP_SIZES[: 1 if results.tiny else None]:
                results.once(
                    f"{shape}, {window}, CP {cp_size}",
                    lambda n=shape, w=window, c=cp_size, p=profile, t=timer: (
                        {"model": n} | case(w, c, p, t, tiny=results.tiny)
                    ),
                )


def case(
    window: int, cp_size: int, profile: AttentionProfile, timer: AttentionTimer, *, tiny: bool
) -> dict[str, Any]:
    """All shardings of some windows; the tiny form divides lengths."""
    scale, number, repeats = (TINY, 1, 1) if tiny else (1, NUM_MICRO_BATCHES, REPEATS)
    typical = np.min if tiny else np.median
    found = [
        bench_cp.run_micro_batch(lengths, cp_size, profile, timer, repeats, typical)
        for lengths in bench_cp.windows(window, number, scale, SEED)
    ]
    return {"window": window // scale, "cp": cp_size, **bench_cp.summary(found)}


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    cases = [found for found in figures.values() if isinstance(found, dict)]
    if not cases:
        return ["No case was measured to its end."]
    names = bench_cp.SHARDINGS[1:]
    rows = []
    for one in cases:
        speedup, degree = one["speedup_over_per_sequence"], one["exact_flop_imbalance"]
        rows.append([
            f"{one['model']}, {one['window']:,} tokens, CP {one['cp']}",
            f"{degree['per-sequence']:.2f} / {degree['per-document']:.3f}",
            *(f"{speedup[name]:.3f}" for name in names),
            f"{one['adaptive_picks_winner']:.0%}",
        ])  # fmt: skip
    losses = [loss for one in cases for loss in one["adaptive_losses"]]
    right = sum(loss == 0 for loss in losses) / len(losses)
    near = sum(loss < 0.01 for loss in losses) / len(losses)
    verdict = "as wanted" if right >= WANTED_SHARE else f"{WANTED_SHARE:.0%} are wanted"
    machine = pictures.said_of(figures["machine"])
    shown = {"cases": cases, "clock": figures["clock"], "small": False, "machine": machine}
    return [
        "Speed-up of attention over per-sequence sharding: forward and backward, the slowest rank, "
        f"{cases[0]['num_micro_batches']} windows of the reference distribution a case. FLOPs: the "
        "rank with the most over the mean, per-sequence / per-document. Communication is not in "
        "it.",
        "",
        *table(["case", "FLOPs", *names, "adaptive right"], rows),
        "",
        f"`adaptive` chose the faster of its two in {right:.0%} of {len(losses)} micro-batches "
        f"({verdict}), and lost less than 1 % in {near:.0%}. The ring of TransformerEngine is not "
        "measured: it needs a GPU for each rank.",
        *pictures.add("cp", "Attention of one layer under each sharding",
                      lambda path, _: plot_shardings(shown, path)),
    ]  # fmt: skip
