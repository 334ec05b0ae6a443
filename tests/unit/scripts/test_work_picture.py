"""The quickstart's picture of the work of each micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
from _quickstart.work import plot_micro_batches
from matplotlib.colors import to_hex

from megatron_wlb.study import plot

WORK = {
    "original": [[1.0, 4.0, 1.0], [2.0, 1.0, 1.0]],
    "hold": [[2.0, 2.0, 2.1], [1.4, 1.3, 1.2]],
}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were to be saved."""
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, path: figures.append(figure))
    return figures


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_plot_micro_batches_shows_each_one_and_marks_the_heaviest(drawn, tmp_path):
    plot_micro_batches(WORK, tmp_path / "plot.png")
    assert titles(drawn[0]) == [
        "original: imbalance degree 1.750 (mean of 2 steps)",  # (4·3/6 + 2·3/4) / 2
        f"hold: imbalance degree {(2.1 * 3 / 6.1 + 1.4 / 1.3) / 2:.3f} (mean of 2 steps)",
    ]
    for axes, steps in zip(drawn[0].axes, WORK.values(), strict=True):
        flat = np.concatenate(steps)
        heights = [patch.get_height() for patch in axes.patches]
        assert heights == pytest.approx(flat / flat.mean())
        marked = [to_hex(patch.get_facecolor()) == plot.VERMILION.lower() for patch in axes.patches]
        assert marked == [work == max(step) for step in steps for work in step]
        assert [patch.get_x() for patch in axes.patches] == sorted(p.get_x() for p in axes.patches)
    original, hold = drawn[0].axes
    assert original.get_ylim() == hold.get_ylim()


def test_plot_micro_batches_shows_slices_of_one_document_in_one_colour(drawn, tmp_path):
    slices = {"hold": [[0, 0, None], [None, 1, 0]]}
    plot_micro_batches(WORK, tmp_path / "plot.png", slices)
    original, hold = (
        [to_hex(patch.get_facecolor()) for patch in axes.patches] for axes in drawn[0].axes
    )
    first, second = (colour.lower() for colour in plot.SLICES[:2])
    blue, heaviest = plot.BLUE.lower(), plot.VERMILION.lower()
    assert hold == [first, first, heaviest, heaviest, second, first]
    assert original == [blue, heaviest, blue, heaviest, blue, blue]
    assert len(set(plot.SLICES) & {plot.BLUE, plot.ORANGE, plot.VERMILION}) == 0
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert "slices of one document" in labels
