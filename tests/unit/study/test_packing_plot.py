from __future__ import annotations

import numpy as np
import pytest
from helpers.machines import H100

from megatron_wlb.cost import Execution, Parallelism
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.baseline import Baseline
from megatron_wlb.simulator.trial import Outcome, Steps, trial
from megatron_wlb.study import plot_packings as module
from megatron_wlb.study.plot_packings import plot_packings, plot_trade_off
from megatron_wlb.study.tune import Tuning

WINDOW = 1024
LENGTHS = np.random.default_rng(2).lognormal(4, 1.4, 500).astype(np.int64).clip(1, WINDOW)


RUN = Run(load_model("550m"), Execution(Parallelism(dp_size=2)), H100, WINDOW, 4)


def run(setting: PackingSettings, seed: int = 1) -> Outcome:
    steps = Steps(LengthSource("made up", LENGTHS), num=10, warm_up=3, seeds=(seed,))
    return trial(RUN, setting, steps)


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    held = [PackingSettings("hold", 2 * WINDOW, delay_price=price) for price in (0.05, 0.2, 1.0)]
    queues = [PackingSettings("wlb", 2 * WINDOW, queue_thresholds=(at,)) for at in (300, 600)]
    return Tuning(
        max_delay=0.4,
        tried=tuple(run(setting) for setting in (*held, *queues)),
        tried_base=Baseline(run(PackingSettings("original", WINDOW)), None, RUN.recompute, "h100"),
        chosen=run(held[1], seed=2),
        defaults=(
            run(PackingSettings("wlb", WINDOW), 2),
            run(PackingSettings("hold", 2 * WINDOW), 2),
        ),
        baselines=(
            run(PackingSettings("original", WINDOW), 2),
            run(PackingSettings("fixed-greedy", WINDOW), 2),
        ),
    )


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    save = module.plot.save

    def keep(figure, path):
        save(figure, path)
        figures.append(figure)

    monkeypatch.setattr(module.plot, "save", keep)
    return figures


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_trade_off_marks_the_choice_beside_everything_it_was_chosen_from(tuning, drawn, tmp_path):
    plot_trade_off(tuning, "A corpus", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (figure,) = drawn
    (axes,) = figure.axes
    assert figure.get_suptitle() == "A corpus"
    assert {"original", "recommended", "limit, 0.4 steps"} <= set(legend(figure))
    assert {"default: wlb", "default: hold", "fixed-greedy, 1 batch"} <= set(legend(figure))
    assert "wlb: best of 2 settings tried" in legend(figure)
    assert "simulated" in axes.get_ylabel() and "delay" in axes.get_xlabel()
    points = {c.get_label(): c.get_offsets().tolist() for c in axes.collections}
    chosen, original = tuning.chosen, tuning.original
    assert points["recommended"] == [[chosen.delay_steps, chosen.mfu / original.mfu]]
    assert points["original"] == [[original.delay_steps, 1.0]]
    left, right = axes.get_xlim()
    assert left <= 0 and all(left <= e.delay_steps <= right for e in (chosen, *tuning.defaults))
    title = axes.get_title(loc="left")
    assert title.startswith("recommended: hold, price 0.2, ") and "default" not in title


def test_trade_off_has_no_labels_that_could_lie_on_each_other(tuning, drawn, tmp_path):
    plot_trade_off(tuning, "A corpus", tmp_path / "plot.png")
    (figure,) = drawn
    assert not [text for text in figure.axes[0].texts if text.get_text()]
    boxes = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    assert len(boxes) > 6
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:number])


def test_trade_off_says_where_a_default_is_recommended(tuning, drawn, tmp_path):
    kept = Tuning(
        0.4, tuning.tried, tuning.tried_base, tuning.defaults[1], tuning.defaults,
        tuning.baselines,
    )  # fmt: skip
    plot_trade_off(kept, "A corpus", tmp_path / "plot.png")
    assert "(the default)" in drawn[0].axes[0].get_title(loc="left")


def test_packings_are_drawn_with_their_figures(tuning, drawn, tmp_path):
    shown = [*tuning.baselines, tuning.chosen]
    plot_packings(shown, "Packings", tmp_path / "plot.png")
    (figure,) = drawn
    left, middle, right = figure.axes
    assert [text.get_text() for text in left.get_yticklabels()] == [
        "original", "fixed-greedy, 1 batch", "hold, price 0.2",
    ]  # fmt: skip
    (dots,) = [c for c in left.collections if c.get_label() == "time-weighted mean"]
    assert dots.get_offsets()[:, 0].tolist() == [e.imbalance for e in shown]
    for axes, values in (
        (middle, [e.delay_steps for e in shown]),
        (right, [e.metrics.tokens_cv for e in shown]),
    ):
        assert [bar.get_width() for bar in axes.patches] == values
        assert [text.get_text() for text in axes.texts] == [f"{value:.2f}" for value in values]
    assert "tokens of a step" in right.get_xlabel() and shown[-1].metrics.tokens_cv > 0
