"""Pictures of measured attention: what a kernel reaches by length, and how shardings compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib import colormaps

from megatron_wlb.cost.attention import AttentionProfile
from megatron_wlb.study import plot
from megatron_wlb.study.plot import BLUE, GREY, INK, ORANGE, PALE_INK, Path

SKY, GREEN = "#56B4E9", "#009E73"  # Okabe and Ito's, as those of the other pictures

MAX_LINES = 6
"""The most key lengths to draw; more could not be told apart."""


def plot_attention(profile: AttentionProfile, path: Path) -> None:
    """Figure 10 of WLB-LLM for a measured kernel: latency and achieved TFLOP/s over query length.

    One line a key length, of chunks with keys before their first query; only measured points are
    drawn. The latency is a chunk's share of a call that fills the device.
    """
    lengths = profile.lengths
    like = replace(profile, unlike_forward_us=0.0, unlike_backward_us=0.0)
    keys = [n for n in lengths if n >= 64] or list(lengths)
    at = np.unique(np.linspace(0, len(keys) - 1, MAX_LINES).round().astype(int))
    keys = [keys[i] for i in at]
    figure = plot.new_figure("Attention by query and key length (measured)", height=8)
    axes = figure.subplots(2, 2, sharex=True)
    for row, (name, backward) in enumerate((("Forward", False), ("Backward", True))):
        left, right = axes[row]
        for number, k in enumerate(keys):
            queries = [q for q in lengths if q < k] or [k]
            at = np.array(queries)
            times_us = like.chunk_us(at, np.full_like(at, k))[row]
            rates = [profile.tflops(q, k, backward=backward) for q in queries]
            style = {
                "color": colormaps["viridis_r"](0.08 + 0.92 * number / max(1, len(keys) - 1)),
                "marker": "o", "ms": 3.5, "lw": 1.8,
            }  # fmt: skip
            left.plot(queries, times_us, **style, label=plot.shown_tokens(k))
            right.plot(queries, rates, **style)
        left.set_ylabel("µs a chunk")
        left.set_yscale("log")
        right.set_ylabel("TFLOP/s of causal pairs")
        right.set_ylim(bottom=0)
        plot.set_title(left, f"{name}: latency")
        plot.set_title(right, f"{name}: achieved rate")
        for panel in (left, right):
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: plot.shown_tokens(value))
            panel.grid(axis="y", color=GREY, lw=0.8)
    for panel in axes[1]:
        panel.set_xlabel("queries of a chunk (tokens)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, title="keys", loc="outside right upper")
    figure.supxlabel(
        f"{profile.kernel}, {profile.dtype}, {profile.num_heads} query and {profile.num_groups} "
        f"key/value heads of {profile.head_dim}; {profile.machine}",
        fontsize=8.5,
        color=INK,
    )
    plot.save(figure, path)


def plot_shardings(figures: Mapping[str, Any], path: Path) -> None:
    """Figure 15 of WLB-LLM: speedup over per-sequence by sharding, a panel a model.

    ``figures`` are those of ``scripts/evidence/bench_cp.py --json``: ``cases`` with ``model``,
    ``window``, ``cp`` and ``speedup_over_per_sequence`` by name; ``machine``; ``clock``, empty if
    modelled.
    """
    cases = figures["cases"]
    models = list(dict.fromkeys(case["model"] for case in cases))
    names = [n for n in cases[0]["speedup_over_per_sequence"] if n != "per-sequence"]
    colours = dict(zip(names, (SKY, ORANGE, BLUE, GREEN, PALE_INK), strict=True))
    how = "measured" if figures["clock"] else "modelled"
    title = f"Attention of one layer, slowest CP rank, forward and backward ({how})"
    figure = plot.new_figure(title, height=1.4 + 3.2 * len(models))
    panels = figure.subplots(len(models), 1, squeeze=False, sharey=True)[:, 0]
    for axes, model in zip(panels, models, strict=True):
        own = [case for case in cases if case["model"] == model]
        for number, name in enumerate(names):
            speedups = [case["speedup_over_per_sequence"][name] for case in own]
            at = np.arange(len(own)) + (number - (len(names) - 1) / 2) * 0.16
            axes.bar(at, speedups, 0.15, color=colours[name], label=name, zorder=2)
        axes.axhline(1.0, color=INK, lw=1.2, zorder=3)
        axes.set_xticks(
            range(len(own)),
            [f"{plot.shown_tokens(case['window'])}, CP {case['cp']}" for case in own],
        )
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel("speedup over per-sequence")
        axes.grid(axis="y", color=GREY, lw=0.8, zorder=0)
        plot.set_title(
            axes, f"{model}{' (scaled down)' if figures['small'] else ''}, {figures['machine']}"
        )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names))
    plot.save(figure, path)
