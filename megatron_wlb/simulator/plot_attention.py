"""Pictures of measured attention: what a kernel reaches by length, and how shardings compare."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps

from megatron_wlb.cost.attention import AttentionProfile
from megatron_wlb.simulator.plot import GREY, Path, _figure, _save, _title, _tokens

MAX_LINES = 6
"""So many key lengths are drawn; more could not be told apart."""


def plot_attention(profile: AttentionProfile, path: Path) -> None:
    """Figure 10 of WLB-LLM for a measured kernel: latency and achieved TFLOP/s over query length.

    One line a key length, of chunks with keys before their first query; only measured points are
    drawn. The latency is a chunk's share of a call that fills the device.
    """
    lengths = profile.lengths
    keys = [n for n in lengths if n >= 64] or list(lengths)
    at = np.unique(np.linspace(0, len(keys) - 1, MAX_LINES).round().astype(int))
    keys = [keys[i] for i in at]
    figure = _figure("Attention by query and key length (measured)", height=8)
    axes = figure.subplots(2, 2, sharex=True)
    for row, (name, backward) in enumerate((("Forward", False), ("Backward", True))):
        left, right = axes[row]
        for number, k in enumerate(keys):
            queries = [q for q in lengths if q < k] or [k]
            times_us = [float(profile.chunk_us(np.array(q), np.array(k))[row]) for q in queries]
            rates = [profile.tflops(q, k, backward=backward) for q in queries]
            style = {
                "color": colormaps["viridis_r"](0.08 + 0.92 * number / max(1, len(keys) - 1)),
                "marker": "o", "ms": 3.5, "lw": 1.8,
            }  # fmt: skip
            left.plot(queries, times_us, **style, label=_tokens(k))
            right.plot(queries, rates, **style)
        left.set_ylabel("µs a chunk")
        left.set_yscale("log")
        right.set_ylabel("TFLOP/s of causal pairs")
        right.set_ylim(bottom=0)
        _title(left, f"{name}: latency")
        _title(right, f"{name}: achieved rate")
        for panel in (left, right):
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: _tokens(value))
            panel.grid(axis="y", color=GREY, lw=0.8)
            panel.set_axisbelow(True)
    for panel in axes[1]:
        panel.set_xlabel("queries of a chunk (tokens)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, title="keys", loc="outside right upper")
    figure.text(
        0.012, -0.012,
        f"{profile.kernel}, {profile.dtype}, {profile.num_heads} query and {profile.num_groups} "
        f"key/value heads of {profile.head_dim}; {profile.machine}",
        fontsize=8.5, va="top",
    )  # fmt: skip
    _save(figure, path)
