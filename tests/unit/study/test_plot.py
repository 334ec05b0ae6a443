from __future__ import annotations

import struct
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex

from megatron_wlb.data.length_statistics import LengthStatistics
from megatron_wlb.errors import ConfigError
from megatron_wlb.schedule.graph import graph_of
from megatron_wlb.schedule.order import Action
from megatron_wlb.simulator.engine import Interval, Timeline, timeline
from megatron_wlb.study import plot
from megatron_wlb.study.plot import plot_lengths, plot_micro_batches, plot_timelines

LENGTHS = [3, 40, 40, 500, 900, 1000, 2000, 4096, 6000, 8192]
WORK = {
    "original": [[1.0, 4.0, 1.0], [2.0, 1.0, 1.0]],
    "hold": [[2.0, 2.0, 2.1], [1.4, 1.3, 1.2]],
}
FLAT, UNEVEN = [4.0, 4.0, 4.0, 4.0], [1.0, 9.0, 2.0, 4.0]


def of(lengths: list[int], window: int) -> LengthStatistics:
    return LengthStatistics.of(np.array(lengths), window)


def timelines(vpp_size=1, scale_us=1e5):
    def one(times):
        graph = graph_of(2, vpp_size, 4, sends="buffered")
        times_us = np.full((2, graph.num_stages, 4), [scale_us * t for t in times])
        return timeline(graph, graph.replay(times_us, np.zeros(4)))

    return {"original": one(UNEVEN), "hold": one(FLAT)}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, and still are."""
    figures = []
    save = plot.save

    def keep(figure, path):
        save(figure, path)
        figures.append(figure)

    monkeypatch.setattr(plot, "save", keep)
    return figures


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def draw(name, path):
    if name == "lengths":
        plot_lengths(of(LENGTHS, 8192), 8192, path)
    elif name == "micro_batches":
        plot_micro_batches(WORK, path)
    else:
        plot_timelines(timelines(vpp_size=2), path, "A step", measured=False)


@pytest.mark.parametrize("name", ["lengths", "micro_batches", "timelines"])
def test_plot_is_a_png_with_named_axes_and_its_legend_beside_the_data(name, drawn, tmp_path):
    before = dict(matplotlib.rcParams)
    draw(name, tmp_path / "plot.png")
    assert dict(matplotlib.rcParams) == before
    header = (tmp_path / "plot.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", header[16:20]) == (1500,)
    (figure,) = drawn
    assert figure.get_suptitle()
    assert figure.axes[-1].get_xlabel() and all(axes.get_ylabel() for axes in figure.axes)
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in figure.axes)


def test_plots_do_not_load_pyplot():
    code = "import sys, megatron_wlb.study.plot; sys.exit('matplotlib.pyplot' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plot_lengths_counts_every_document_and_states_the_shares(drawn, tmp_path):
    plot_lengths(of(LENGTHS, 8192), 8192, tmp_path / "plot.png")
    above, below = drawn[0].axes
    assert sum(bar.get_height() for bar in above.containers[0]) == len(LENGTHS)
    assert titles(drawn[0])[0] == "10 documents, 22,771 tokens"
    long = np.array([4096.0, 6000.0, 8192.0])
    tokens = long.sum() / sum(LENGTHS)
    work = (long**2).sum() / sum(d * d for d in LENGTHS)
    assert titles(drawn[0])[1] == (
        f"Half a window and longer: 30.0% of the documents, {tokens:.1%} of the tokens, "
        f"{work:.1%} of the attention work"
    )
    for line, power in zip(below.get_lines()[:3], (0, 1, 2), strict=True):
        weights = np.array(LENGTHS, dtype=float) ** power
        distinct, last = np.unique(LENGTHS[::-1], return_index=True)
        shares = weights.cumsum() / weights.sum()
        assert line.get_xdata().tolist() == distinct.tolist()
        assert line.get_ydata() == pytest.approx(shares[len(LENGTHS) - 1 - last])


def test_plot_lengths_shows_documents_longer_than_the_window(drawn, tmp_path):
    plot_lengths(of([5, 100, 5000], 64), 64, tmp_path / "plot.png")
    assert drawn[0].axes[0].get_xlim()[1] > 5000


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


def test_plot_micro_batches_draws_as_many_steps_of_each_packing(drawn, tmp_path):
    work = {"original": [[1.0, 2.0]] * 9, "slim": [[1.0, 2.0] * 20] * 9}
    plot_micro_batches(work, tmp_path / "plot.png")
    assert [len(axes.patches) for axes in drawn[0].axes] == [3 * 2, 3 * 40]
    assert all("the first 3 are drawn" in title for title in titles(drawn[0]))


def test_plot_micro_batches_draws_what_can_be_told_apart_and_says_so(drawn, tmp_path):
    steps = [[1.0, 2.0] * 16] * 9 + [[1.0, 1.0] * 16]
    plot_micro_batches({"original": steps}, tmp_path / "plot.png")
    assert len(drawn[0].axes[0].patches) == 4 * 32
    degree = (9 * 2 / 1.5 + 1) / 10
    title = f"original: imbalance degree {degree:.3f} (mean of 10 steps; the first 4 are drawn)"
    assert titles(drawn[0]) == [title]


@pytest.mark.parametrize(("measured", "said"), [(True, "measured"), (False, "simulated")])
def test_plot_timelines_says_measured_or_simulated(measured, said, drawn, tmp_path):
    plot_timelines(timelines(), tmp_path / "plot.png", "One step", measured)
    assert drawn[0].get_suptitle() == f"One step ({said})"
    assert drawn[0].axes[-1].get_xlabel() == f"time in the step, {said} (s)"


def test_plot_timelines_shares_one_time_axis_and_states_the_bubble(drawn, tmp_path):
    lines = timelines(scale_us=1e3)
    plot_timelines(lines, tmp_path / "plot.png", "One step", measured=False)
    original, hold = drawn[0].axes
    assert original.get_xlim() == hold.get_xlim()
    assert original.get_xlim()[1] >= lines["original"].step_us / 1e3 > lines["hold"].step_us / 1e3
    assert titles(drawn[0])[1] == "hold: step 40 ms, bubble 20.0%"  # (P-1)/(N+P-1)
    assert f"bubble {lines['original'].bubble_share:.1%}" in titles(drawn[0])[0]


def test_plot_timelines_draws_each_action_where_it_ran(drawn, tmp_path):
    recorded = Timeline(
        (
            (Interval(100.0, 103.0, Action("F", 0, 0)), Interval(110.0, 117.0, Action("B", 0, 0))),
            (Interval(104.0, 109.0, Action("F", 0, 0)), Interval(109.0, 110.0, Action("B", 0, 0))),
        )
    )
    plot_timelines({"original": recorded}, tmp_path / "plot.png", "One step", measured=True)
    (axes,) = drawn[0].axes
    bubble_0, actions_0, bubble_1, actions_1 = axes.collections
    for bubble in (bubble_0, bubble_1):
        assert bubble.get_datalim(axes.transData).width == 17.0
        assert to_hex(bubble.get_facecolor()[0]) == plot.GREY.lower()
    for actions, starts in ((actions_0, (0.0, 10.0)), (actions_1, (4.0, 9.0))):
        assert tuple(path.vertices[:, 0].min() for path in actions.get_paths()) == starts
        colours = [to_hex(colour) for colour in actions.get_facecolors()]
        assert colours == [plot.BLUE.lower(), plot.ORANGE.lower()]


def test_plot_is_svg_where_it_is_called_so_and_the_same_file_each_time(tmp_path):
    for name in ("one.svg", "other.svg"):
        plot_micro_batches(WORK, tmp_path / name)
    one, other = ((tmp_path / name).read_text() for name in ("one.svg", "other.svg"))
    assert "<svg" in one and one == other
    with pytest.raises(ConfigError, match=r"cannot draw .*plot\.gif; call it \.png or \.svg"):
        plot_micro_batches(WORK, tmp_path / "plot.gif")
    with pytest.raises(ConfigError, match="cannot write"):
        plot_micro_batches(WORK, tmp_path / "no" / "plot.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.svg", "other.svg"]


def test_plots_of_nothing_are_errors(tmp_path):
    path = tmp_path / "plot.png"
    with pytest.raises(ConfigError, match="no packings"):
        plot_micro_batches({}, path)
    for steps in ([], [[]], [[1.0], [0.0]]):
        with pytest.raises(ConfigError, match="'wlb' has"):
            plot_micro_batches({"original": [[1.0]], "wlb": steps}, path)
    for empty in ({}, {"original": Timeline(((), ()))}):
        with pytest.raises(ConfigError, match="no timelines"):
            plot_timelines(empty, path, "One step", measured=False)
    assert not path.exists()
