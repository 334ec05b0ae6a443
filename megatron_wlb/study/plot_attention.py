"""A picture of measured attention: what a kernel reaches by length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from matplotlib import colormaps

from megatron_wlb.cost.attention import AttentionProfile
from megatron_wlb.study import plot
from megatron_wlb.study.plot import GREY, INK, Path

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
