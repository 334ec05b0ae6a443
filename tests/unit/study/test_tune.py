"""The tuner: within the limit, never worse than the defaults on steps that it has not seen."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cost import DocumentCost, Parallelism
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError, PackingError
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Workload
from megatron_wlb.study import tune as module
from megatron_wlb.study.evaluate import Evaluation, evaluate
from megatron_wlb.study.tune import TOLERANCE, Tuning, candidates, frontier, tune

WINDOW = 2048
COST = DocumentCost(1.0, 0.002, 1.7, 0.0055)
LENGTHS = np.random.default_rng(3).lognormal(5, 1.5, 3000).astype(np.int64).clip(1, WINDOW)


def simplify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few candidates, over few steps."""
    monkeypatch.setattr(module, "THRESHOLDS", (1 / 4, 1 / 2, 3 / 4))
    monkeypatch.setattr(module, "QUEUES", (1, 2))
    monkeypatch.setattr(module, "DELAY_PRICES", (0.04, 0.3, 1.2))
    monkeypatch.setattr(module, "TAUS", (1.0, 1.05))
    monkeypatch.setattr(module, "NUM_REFINED", 1)


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    simplify(monkeypatch)


def halves(lengths=LENGTHS, seed=1, **changes) -> list[Workload]:
    source = LengthSource("made up", np.asarray(lengths))
    values = {"window": WINDOW, "num_micro_batches": 4, "cost": COST, "seed": seed} | changes
    return [Workload(half, **values) for half in source.halves(seed)]


def tuned(works=None, **settings) -> Tuning:
    values = {"max_tokens": 2 * WINDOW, "max_delay": 0.4, "steps": 25, "warm_up": 6}
    return tune(*(works or halves()), **values | settings)


@pytest.fixture(scope="module")
def usual() -> Tuning:
    with pytest.MonkeyPatch.context() as patch:
        simplify(patch)
        return tuned()


@pytest.mark.parametrize(("max_delay", "seed"), [(0.0, 1), (0.15, 2), (0.5, 3), (5.0, 1)])
def test_recommendation_keeps_the_limit_and_is_no_worse_than_the_defaults(
    max_delay: float, seed: int
) -> None:
    works = halves(seed=seed)
    found = tuned(works, max_delay=max_delay)
    assert found.chosen.delay <= max_delay
    for default in found.defaults:
        if default.delay <= max_delay:
            assert found.chosen.efficiency >= default.efficiency
    # Judged on the other half of the documents, as anybody can check.
    again = evaluate(works[1], found.chosen.setting, 25, warm_up=6)
    assert again.metrics == found.chosen.metrics
    for judged in (*found.defaults, found.original):
        assert judged.metrics == evaluate(works[1], judged.setting, 25, warm_up=6).metrics
    assert found.original.metrics != found.tried_original.metrics


def test_default_that_is_better_on_held_out_steps_is_recommended(monkeypatch) -> None:
    """As if all that was found had been luck with the documents that it was found on."""
    works = halves()

    def lucky(on: Workload, setting: PackingSettings, steps: int, **settings: int) -> Evaluation:
        found = evaluate(on, setting, steps, **settings)
        is_default = setting.delay_price is None and not setting.queue_thresholds
        lost = 0.0 if is_default or on is works[0] else 0.3
        return replace(found, efficiency=found.efficiency - lost)

    monkeypatch.setattr(module, "evaluate", lucky)
    found = tuned(works, max_delay=3.0, packings=["hold"])
    assert found.keeps_default and found.chosen.setting == PackingSettings("hold", 2 * WINDOW)


def test_more_delay_buys_no_less_throughput() -> None:
    chosen = [tuned(max_delay=d, packings=["hold"]).chosen for d in (0.0, 0.2, 1.0)]
    assert chosen[0].efficiency < chosen[1].efficiency
    assert chosen[1].efficiency <= chosen[2].efficiency + TOLERANCE


def test_thresholds_follow_the_corpus_where_the_defaults_miss_it() -> None:
    """No document reaches the default thresholds, so nothing would be delayed at all."""
    short = np.concatenate([np.full(3000, 40), np.full(120, WINDOW // 3 - 5)])
    cost = DocumentCost(1.0, 0.05, 2.0, 0.13)
    works = halves(short, cost=cost, num_micro_batches=8)
    found = tuned(works, packings=["wlb"], max_delay=3.0)
    (default,) = found.defaults
    assert default.delay == 0
    assert found.chosen.setting.queue_thresholds
    assert found.chosen.efficiency > 1.02 * default.efficiency
    assert not found.keeps_default


def test_smaller_s_max_is_taken_where_it_loses_nothing() -> None:
    equal = np.full(2000, WINDOW // 8)
    found = tuned(halves(equal), packings=["hold"])
    assert found.tuned is not None and found.tuned.setting.max_tokens == WINDOW
    assert found.chosen is found.original  # nothing else is faster, so nothing else is advised
    uneven = tuned(packings=["hold"], max_tokens=2 * WINDOW, max_delay=0.5)
    assert uneven.chosen.setting.max_tokens > WINDOW


def test_no_setting_exceeds_the_s_max_that_memory_allows() -> None:
    found = tuned(max_tokens=int(1.3 * WINDOW))
    everything = [*found.tried, *found.defaults, found.chosen]
    assert max(e.setting.max_tokens for e in everything) == int(1.3 * WINDOW)


def test_limit_that_nothing_keeps_names_the_nearest_setting() -> None:
    with pytest.raises(PackingError, match="no setting of wlb keeps the mean delay within 0 ") as e:
        tuned(packings=["wlb"], max_delay=0.0)
    message = str(e.value)
    nearest = re.search(r"the nearest has ([\d.]+) at imbalance 1\.\d+ \((--wlb-.*)\)", message)
    assert nearest is not None and 0 < float(nearest[1]) < 0.5
    assert "--wlb-queue-thresholds" in nearest[2]
    assert message.endswith("raise --max-delay, or tune hold too") and "\n" not in message


def test_choice_that_breaks_the_limit_on_held_out_steps_is_passed_over() -> None:
    """Held-out documents are more uneven here than those that settings are chosen on."""
    easy, _ = halves(np.concatenate([np.full(4000, 60), np.full(40, WINDOW // 2)]))
    _, hard = halves()
    found = tune(easy, hard, max_tokens=2 * WINDOW, max_delay=0.12, steps=25, packings=["hold"])
    assert found.chosen.delay <= 0.12
    best = max((e for e in found.tried if e.delay <= 0.12), key=lambda e: e.efficiency)
    assert evaluate(hard, best.setting, 25, warm_up=6).delay > 0.12


def test_look_ahead_is_tried_only_where_it_is_allowed(usual: Tuning) -> None:
    assert {e.setting.look_ahead for e in usual.tried} == {0}
    found = tuned(packings=["hold"], look_ahead=3)
    assert {e.setting.look_ahead for e in found.tried} == {0, 3}


def test_pipeline_time_is_what_is_maximised_where_the_layout_is_known() -> None:
    works = halves(layout=Parallelism(dp_size=2, pp_size=2))
    found = tuned(works, packings=["hold"])
    assert found.tuned is not None
    assert found.tuned.efficiency < 0.85 < 1 / found.tuned.imbalance  # with the bubbles
    assert found.tuned.efficiency >= found.defaults[0].efficiency
    # Slices have next to no bubbles, and delay nothing.
    assert found.chosen.setting.name == "slim" and found.chosen.efficiency > found.tuned.efficiency


def test_same_seed_gives_the_same_recommendation(usual: Tuning) -> None:
    first, again = tuned(), usual
    assert first.chosen.setting == again.chosen.setting
    assert [e.metrics for e in first.tried] == [e.metrics for e in again.tried]


def test_progress_ends_with_everything_done() -> None:
    told: list[tuple[int, int]] = []
    tuned(packings=["hold"], steps=3, progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert all(done <= total for done, total in told)


def test_candidates_differ_and_thresholds_ascend() -> None:
    (work, _) = halves()
    found = list(candidates(work, ["wlb", "hold"], 2 * WINDOW, 2))
    assert len(set(found)) == len(found)
    for setting in found:
        assert list(setting.queue_thresholds) == sorted(set(setting.queue_thresholds))
        work.packer(setting)
    tiny = [replace(w, source=LengthSource("tiny", np.array([1, 2, 2]))) for w in halves()]
    for setting in candidates(tiny[0], ["wlb"], 2 * WINDOW, 0):
        tiny[0].packer(setting)


def test_frontier_has_what_nothing_beats(usual: Tuning) -> None:
    found = usual
    front = frontier(found.tried)
    assert [e.delay for e in front] == sorted({e.delay for e in front})
    assert [e.efficiency for e in front] == sorted({e.efficiency for e in front})
    for evaluation in found.tried:
        assert any(
            e.delay <= evaluation.delay and e.efficiency >= evaluation.efficiency for e in front
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packings": ["original"]}, "original has nothing to tune; use wlb or hold"),
        ({"packings": []}, "no packing to tune"),
        ({"max_delay": -0.1}, "--max-delay is -0.1"),
        ({"max_delay": float("nan")}, "--max-delay is nan"),
        ({"look_ahead": -1}, "look_ahead is -1"),
        ({"max_tokens": WINDOW - 1}, "is below the window of 2048"),
    ],
)
def test_what_cannot_be_tuned_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tuned(**settings)


def test_setting_that_holds_nothing_back_is_among_the_candidates() -> None:
    work, _ = halves()
    free = next(s for s in candidates(work, ["hold"], 2 * WINDOW, 0) if s.delay_price == 0)
    assert free == PackingSettings("hold", 2 * WINDOW, tau=4.0, delay_price=0.0, max_step_tokens=0)
    assert evaluate(work, free, 20).delay == 0
