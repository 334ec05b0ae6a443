"""Pictures: lengths, timelines, what a measured attention kernel reaches; PNG or SVG.

Drawn on ``Figure`` objects, without pyplot, so no global state is read or left changed and no
display is needed. Colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from megatron_wlb.cost.attention_latency import AttentionProfile
from megatron_wlb.data.length_statistics import LengthStatistics, attention_work
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import replacing
from megatron_wlb.simulator.engine import Interval, Timeline

BLUE, ORANGE, VERMILION = "#0072B2", "#E69F00", "#D55E00"
SLICES = ("#009E73", "#CC79A7", "#56B4E9", "#B8A800")
"""Colours of documents that run in slices, in turn."""
GREY, INK, PALE_INK = "#E4E4E4", "#222222", "#666666"

Path: TypeAlias = str | os.PathLike[str]

MAX_LINES = 6
"""The most key lengths of attention to draw; more could not be told apart."""

FORMATS: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}}
"""Metadata that is written into a picture, by the ending of the file's name."""


def plot_lengths(statistics: LengthStatistics, window: int, path: Path) -> None:
    """Document lengths, and which share of the tokens and of the attention work they hold.

    The attention work of a document of ``d`` tokens is ``d²``, of one over the window that of its
    pieces. ``window`` is in tokens, and the one that the statistics are of.
    """
    ordered, documents = statistics.lengths.astype(np.float64), statistics.counts
    figure = new_figure("Document lengths", height=6.8)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.25])
    edges = np.geomspace(ordered[0] * 0.95, max(ordered[-1], window) * 1.05, 61)
    above.hist(ordered, bins=edges.tolist(), weights=documents, color=BLUE)
    above.set_ylabel("documents")
    above.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    set_title(above, f"{statistics.documents:,} documents, {statistics.tokens:,} tokens")
    long = statistics.part(window / 2)
    shares = []
    work = documents * attention_work(ordered, window)
    for name, weights, share, colour in (
        ("documents", documents, long.documents_share, BLUE),
        ("tokens", documents * ordered, long.tokens_share, ORANGE),
        ("attention work", work, long.attention_share, VERMILION),
    ):
        cumulative = np.cumsum(weights) / weights.sum()
        below.step(ordered, cumulative, where="post", color=colour, lw=2.2, label=name)
        shares.append(f"{share:.1%} of the {name}")
    below.set_ylabel("share up to this length")
    below.set_ylim(0, 1.03)
    below.yaxis.set_major_formatter(PercentFormatter(1.0))
    set_title(below, f"Half a window and longer: {', '.join(shares)}")
    for axes in (above, below):
        axes.set_xscale("log", base=2)
        axes.set_xlim(edges[0], edges[-1])
        axes.grid(axis="y", color=GREY, lw=0.8)
        axes.axvspan(window / 2, edges[-1], color=GREY, lw=0, zorder=0)
        axes.axvline(window, color=INK, lw=1.2, ls="--", zorder=1)
    below.xaxis.set_major_locator(LogLocator(base=2, numticks=24))
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown_tokens(value)))
    below.xaxis.set_minor_formatter(NullFormatter())
    below.set_xlabel("document length d (tokens, log scale)")
    add_legend(
        figure,
        *below.get_lines()[:3],
        Patch(color=GREY, label="half a window and longer"),
        Line2D([], [], color=INK, lw=1.2, ls="--", label=f"window, {shown_tokens(window)} tokens"),
    )
    save(figure, path)


def plot_timelines(
    timelines: Mapping[str, Timeline],
    path: Path,
    title: str,
    measured: bool,
    row: str = "pipeline rank",
    of: str = "step",
) -> None:
    """What each pipeline rank does during a step, per packing (key), on one time axis.

    ``measured`` says whether the times were recorded in a run or come from a replay, and the
    picture says it; ``row`` is what a row is called, ``of`` what is drawn. Raises
    :class:`ConfigError` if there is nothing to draw.
    """
    longest_us = max((timeline.step_us for timeline in timelines.values()), default=0.0)
    if not longest_us:
        raise ConfigError("there are no timelines to plot; give one that takes some time")
    units = ("s", 1e6), ("ms", 1e3), ("µs", 1.0)
    unit, unit_us = next((u for u in units if longest_us >= 2 * u[1]), units[-1])
    ranks = [rank for timeline in timelines.values() for rank in timeline.intervals]
    num_chunks = 1 + max(interval.action.chunk for rank in ranks for interval in rank)
    has_slices = any(interval.slice for rank in ranks for interval in rank)
    rows = [len(timeline.intervals) for timeline in timelines.values()]
    said = "measured" if measured else "simulated"
    height = 1.5 + sum(0.55 + 0.34 * num_rows for num_rows in rows)
    figure = new_figure(f"{title} ({said})", height)
    panels = figure.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=rows)[:, 0]
    for axes, (packing, timeline) in zip(panels, timelines.items(), strict=True):
        step = timeline.step_us / unit_us
        set_title(axes, f"{packing}: {of} {step:.4g} {unit}, bubble {timeline.bubble_share:.1%}")
        for rank, intervals in enumerate(timeline.intervals):
            axes.broken_barh([(0, step)], (rank - 0.42, 0.84), facecolors=GREY, zorder=1)
            axes.broken_barh(
                [
                    ((i.start_us - timeline.start_us) / unit_us, (i.stop_us - i.start_us) / unit_us)
                    for i in intervals
                ],
                (rank - 0.42, 0.84),
                facecolors=[_colour(i, num_chunks) for i in intervals],
                edgecolors="white",
                linewidths=min(0.7, 50 / max(len(intervals), 1)),
                zorder=2,
            )
            for i in intervals:
                number = str(i.action.micro_batch)
                # A digit is about 0.65 % of the picture wide.
                if i.stop_us - i.start_us < (0.004 + 0.0065 * len(number)) * longest_us:
                    continue
                centre_us = (i.start_us + i.stop_us) / 2 - timeline.start_us
                _, green, _ = _colour(i, num_chunks)
                axes.text(
                    centre_us / unit_us, rank, number, ha="center", va="center_baseline",
                    fontsize=8, zorder=3, color="white" if green < 0.5 else INK,
                )  # fmt: skip
        axes.axvline(step, color=INK, lw=1.2, zorder=4)
        axes.set_ylim(len(timeline.intervals) - 0.5, -0.5)
        axes.set_yticks(range(len(timeline.intervals)))
        axes.set_ylabel(row)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[-1].set_xlim(0, longest_us / unit_us * 1.01)
    panels[-1].set_xlabel(f"time in the {of}, {said} ({unit})")
    shades = ", darker: later chunk" if num_chunks > 1 else ""
    add_legend(
        figure,
        Patch(color=_shade("F", num_chunks - 1, num_chunks), label=f"forward{shades}"),
        Patch(color=_shade("B", num_chunks - 1, num_chunks), label=f"backward{shades}"),
        *([Patch(color=SLICES[0], label="slices of one document")] if has_slices else []),
        Patch(color=GREY, label="bubble"),
        Line2D([], [], color=INK, lw=1.2, label=f"end of the {of}"),
    )
    save(figure, path)


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
    figure = new_figure("Attention by query and key length (measured)", height=8)
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
            left.plot(queries, times_us, **style, label=shown_tokens(k))
            right.plot(queries, rates, **style)
        left.set_ylabel("µs a chunk")
        left.set_yscale("log")
        right.set_ylabel("TFLOP/s of causal pairs")
        right.set_ylim(bottom=0)
        set_title(left, f"{name}: latency")
        set_title(right, f"{name}: achieved rate")
        for panel in (left, right):
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: shown_tokens(value))
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
    save(figure, path)


def new_figure(title: str, height: float) -> Figure:
    """Makes a figure 1500 pixels wide: shown at 1000, text of 10 points is 14 pixels high."""
    figure = Figure(figsize=(10, height), dpi=150, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
    figure.suptitle(title, fontsize=13, fontweight="bold", color=INK)
    return figure


def add_legend(figure: Figure, *handles: Artist) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.set_axisbelow(True)  # the grid
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(PALE_INK)
        axes.tick_params(colors=PALE_INK, labelcolor=INK)
    for legend in figure.legends:
        legend.set_frame_on(False)
    kind = os.path.splitext(path)[1].lstrip(".").lower() or "png"
    if kind not in FORMATS:
        raise ConfigError(f"cannot draw {os.fspath(path)}; call it .{' or .'.join(FORMATS)}")
    # No date and no random names in an SVG: the same picture is the same file.
    with replacing(path) as draft, rc_context({"svg.hashsalt": "megatron-wlb"}):
        figure.savefig(draft, format=kind, dpi="figure", metadata=FORMATS[kind])


def set_title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11.5, color=INK)


def _colour(interval: Interval, num_chunks: int) -> tuple[float, float, float]:
    """The colour of :func:`_shade`, or of a slice its document's: paler in backward."""
    action, cut = interval.action, interval.slice
    if cut is None:
        return _shade(action.kind, action.chunk, num_chunks)
    share = 1.0 if action.kind == "F" else 0.6
    return _mixed(to_rgb(SLICES[cut.document % len(SLICES)]), share)


def _mixed(colour: tuple[float, float, float], share: float) -> tuple[float, float, float]:
    """A share of the colour, the rest white."""
    red, green, blue = (1.0 - share * (1.0 - value) for value in colour)
    return red, green, blue


def _shade(kind: str, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """The kind's colour, mixed with white for all chunks but the last. Dark where green is low."""
    colour = to_rgb(BLUE if kind == "F" else ORANGE)
    return _mixed(colour, 1.0 - 0.5 * (num_chunks - 1 - chunk) / max(num_chunks - 1, 1))


def shown_tokens(count: float) -> str:
    """64, 2K, 128K, 1.5M: in powers of 1024, as window sizes are named."""
    for size, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"
