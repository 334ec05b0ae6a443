"""A picture of the work of each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megatron_wlb.errors import ConfigError
from megatron_wlb.study import plot

MAX_BARS = 128
"""The most micro-batches of a packing to draw, in whole steps; more could not be told apart."""


def plot_micro_batches(
    work: Mapping[str, Sequence[Sequence[float]]],
    path: plot.Path,
    slices: Mapping[str, Sequence[Sequence[int | None]]] | None = None,
    note: str = "",
) -> None:
    """The predicted work of each micro-batch, per packing (key), step and micro-batch.

    Any unit: a packing is shown relative to its mean micro-batch. The heaviest micro-batch of a
    step, which the others wait for, stands out. The imbalance degree ``max · N / Σ`` is the mean
    over all steps given, also over those that are not drawn, as a packing would have more than
    ``MAX_BARS``. ``slices`` has for packings the document that each micro-batch runs a slice of:
    those of one have one colour, the heaviest too. The ``note`` stands below.

    Raises :class:`ConfigError` if a packing has no work.
    """
    if not work:
        raise ConfigError("there are no packings to plot; give the work of at least one")
    figure = plot.new_figure("Work of each micro-batch (predicted)", height=1.4 + 1.75 * len(work))
    panels = figure.subplots(len(work), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    highest = 0.0
    bars = [np.cumsum(list(map(len, steps))) for steps in work.values()]
    num_fitting = max(1, min(int(np.sum(upto <= MAX_BARS)) for upto in bars))
    documents = slices or {}
    for axes, (packing, steps) in zip(panels, work.items(), strict=True):
        values = [np.asarray(step, dtype=np.float64) for step in steps]
        if not values or not all(value.size and value.sum() for value in values):
            raise ConfigError(
                f"packing {packing!r} has a step without work; give each step its micro-batches"
            )
        mean = float(np.mean(np.concatenate(values)))
        imbalance = float(np.mean([value.max() / value.mean() for value in values]))
        num_drawn, own = min(num_fitting, len(values)), documents.get(packing)
        for number, value in enumerate(values[:num_drawn]):
            width = 1 / (value.size + 1.5)  # The gap between two steps is 1.5 bars.
            left, right = number - width * value.size / 2, number + width * value.size / 2
            centres = left + width * (np.arange(value.size) + 0.5)
            colours = [plot.BLUE] * value.size
            colours[int(value.argmax())] = plot.VERMILION
            for bar, document in enumerate(own[number] if own else ()):
                if document is not None:
                    colours[bar] = plot.SLICES[document % len(plot.SLICES)]
            axes.bar(centres, value / mean, width * 0.86, color=colours, zorder=2)
            axes.hlines(value.mean() / mean, left, right, color=plot.INK, lw=1.6, zorder=3)
            highest = max(highest, float(value.max()) / mean)
        drawn = f"; the first {num_drawn} are drawn" if num_drawn < len(values) else ""
        over = f"mean of {len(values)} steps{drawn}" if len(values) > 1 else "one step"
        plot.set_title(axes, f"{packing}: imbalance degree {imbalance:.3f} ({over})")
        axes.set_ylabel("predicted work\n(overall mean = 1)")
        axes.grid(axis="y", color=plot.GREY, lw=0.8, zorder=0)
        axes.margins(x=0.01)
    panels[0].set_ylim(0, highest * 1.08)
    panels[-1].set_xlabel(f"step, counted from the first one drawn\n{note}".rstrip())
    panels[-1].xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    plot.add_legend(
        figure,
        Patch(color=plot.BLUE, label="micro-batch"),
        Patch(color=plot.VERMILION, label="heaviest of its step"),
        *([Patch(color=plot.SLICES[0], label="slices of one document")] if documents else []),
        Line2D([], [], color=plot.INK, lw=1.6, label="mean of the step"),
    )
    plot.save(figure, path)
