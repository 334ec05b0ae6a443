"""A picture of how shardings compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_wlb.study import plot
from megatron_wlb.study.plot import BLUE, GREY, INK, ORANGE, PALE_INK, Path

SKY, GREEN = "#56B4E9", "#009E73"  # Okabe and Ito's, as those of the other pictures


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
