"""Pictures of packings: what balance costs in delay, and several side by side; PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron_wlb.simulator.trial import Outcome
from megatron_wlb.study import plot
from megatron_wlb.study.advice import steps_of
from megatron_wlb.study.plot import BLUE, GREY, INK, ORANGE, VERMILION, Path
from megatron_wlb.study.tune import Tuning, frontier

COLOURS = {"wlb": ORANGE, "hold": BLUE}


def plot_trade_off(tuning: Tuning, title: str, path: Path) -> None:
    """Work a second over delay: all that was tried, the best of it, and what was chosen.

    The dots and lines are of the steps that settings were chosen on, each relative to `original` on
    them; the large marks are of the steps that judge.
    """
    figure = plot.new_figure(title, height=6.2)
    axes = figure.subplots()
    for packing, colour in COLOURS.items():
        tried = [e for e in tuning.tried if e.setting.name == packing]
        if not tried:
            continue
        front = frontier(tried)
        _points(axes, tried, tuning.tried_base.original, color=colour, s=14, alpha=0.45, lw=0)
        axes.plot(
            [e.delay_steps for e in front],
            [e.mfu / tuning.tried_base.original.mfu for e in front],
            color=colour,
            lw=2,
            label=f"{packing}: best of {len(tried)} settings tried",
        )
    marks: list[tuple[Sequence[Outcome], str, dict[str, Any]]] = [
        ([tuning.chosen], "recommended", {"marker": "*", "color": VERMILION, "s": 330}),
        ([tuning.original], "original", {"marker": "s", "color": INK}),
    ]
    # Named in the legend: settings that do alike lie on each other, and so would their names.
    for outcome, marker in zip(tuning.baselines[1:], "^v<>", strict=False):
        marks.append(([outcome], outcome.setting.title, {"marker": marker, "color": INK}))
    for outcome in tuning.defaults:
        colour = COLOURS[outcome.setting.name]
        label = f"default: {outcome.setting.title}"
        marks.append(([outcome], label, {"marker": "D", "color": colour}))
    for outcomes, label, style in marks:
        style = {"s": 70, "edgecolors": "white", "zorder": 5} | style
        _points(axes, outcomes, tuning.original, label=label, **style)
    axes.axvline(
        tuning.max_delay, color=INK, lw=1.2, ls="--", label=f"limit, {steps_of(tuning.max_delay)}"
    )
    chosen = tuning.chosen
    speedup = chosen.mfu / tuning.original.mfu
    plot.set_title(
        axes,
        f"recommended: {chosen.setting.title}{' (the default)' if tuning.keeps_default else ''}, "
        f"{speedup:.2f} × the work a second of original, delay {chosen.delay_steps:.2f} steps",
    )
    # Settings that are far worse would squeeze all others.
    drawn = (*tuning.baselines, *tuning.defaults, chosen, *frontier(tuning.tried))
    farthest = max(tuning.max_delay, *(e.delay_steps for e in drawn))
    axes.set_xlim(-0.03 * farthest, 1.3 * farthest or 1)
    axes.set_xlabel(
        "mean delay of a token (steps); dots: steps that choose, large marks: steps that judge"
    )
    axes.set_ylabel("work a second, simulated (original = 1)")
    axes.grid(color=GREY, lw=0.8)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    plot.save(figure, path)


def plot_packings(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Draws the imbalance of each packing, its delay, and how its steps vary in tokens."""
    figure = plot.new_figure(title, height=1.9 + 0.42 * len(outcomes))
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=[1.5, 1, 1])
    several = len({e.run.num_micro_batches for e in outcomes}) > 1
    labels = [
        f"{e.setting.title}, N={e.run.num_micro_batches}" if several else e.setting.title
        for e in outcomes
    ]
    places = range(len(outcomes))
    tw = [e.imbalance for e in outcomes]
    p95 = [e.metrics.imbalance_p95 for e in outcomes]
    worst = [e.metrics.imbalance_worst for e in outcomes]
    left.hlines(places, 1, worst, color=GREY, lw=9, label="worst step")
    left.hlines(places, 1, p95, color=ORANGE, lw=9, label="95 % of the steps")
    left.scatter(tw, places, color=INK, s=46, zorder=3, label="time-weighted mean")
    left.set_xlim(left=1)
    left.set_xlabel("imbalance degree (1 is perfect)")
    left.set_yticks(places, labels)
    left.invert_yaxis()
    for place, value in zip(places, tw, strict=True):
        left.annotate(
            f"{value:.3f}", (value, place), xytext=(7, -3), textcoords="offset points", fontsize=9
        )
    variations = [e.metrics.tokens_cv for e in outcomes]
    for axes, values, name in (
        (middle, [e.delay_steps for e in outcomes], "mean delay of a token (steps)"),
        (right, variations, "tokens of a step\n(standard deviation ÷ mean)"),
    ):
        axes.barh(places, values, color=BLUE, height=0.5)
        for place, value in zip(places, values, strict=True):
            axes.annotate(
                f"{value:.2f}", (value, place), xytext=(5, -3), textcoords="offset points",
                fontsize=9,
            )  # fmt: skip
        axes.set_xlim(0, 1.25 * max(values) or 1)
        axes.set_xlabel(name)
        axes.tick_params(axis="y", length=0)
    for axes in (left, middle, right):
        axes.grid(axis="x", color=GREY, lw=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    plot.save(figure, path)


def _points(axes: Axes, outcomes: Sequence[Outcome], original: Outcome, **style: Any) -> None:
    axes.scatter(
        [e.delay_steps for e in outcomes],
        [e.mfu / original.mfu for e in outcomes],
        **style,
    )
