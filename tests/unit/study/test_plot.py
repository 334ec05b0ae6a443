from __future__ import annotations

import struct
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex

from megatron_wlb.cost.schedule.graph import graph_of
from megatron_wlb.cost.schedule.order import Action
from megatron_wlb.data.length_statistics import LengthStatistics
from megatron_wlb.errors import ConfigError
from megatron_wlb.simulator.engine import Interval, Timeline, timeline
from megatron_wlb.study import plot
from megatron_wlb.study.plot import plot_lengths, plot_timelines

LENGTHS = [3, 40, 40, 500, 900, 1000, 2000, 4096, 6000, 8192]
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
    else:
        plot_timelines(timelines(vpp_size=2), path, "A step", measured=False)


@pytest.mark.parametrize("name", ["lengths", "timelines"])
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
        draw("lengths", tmp_path / name)
    one, other = ((tmp_path / name).read_text() for name in ("one.svg", "other.svg"))
    assert "<svg" in one and one == other
    with pytest.raises(ConfigError, match=r"cannot draw .*plot\.gif; call it \.png or \.svg"):
        draw("lengths", tmp_path / "plot.gif")
    with pytest.raises(ConfigError, match="cannot write"):
        draw("lengths", tmp_path / "no" / "plot.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.svg", "other.svg"]


def test_plots_of_nothing_are_errors(tmp_path):
    path = tmp_path / "plot.png"
    for empty in ({}, {"original": Timeline(((), ()))}):
        with pytest.raises(ConfigError, match="no timelines"):
            plot_timelines(empty, path, "One step", measured=False)
    assert not path.exists()
