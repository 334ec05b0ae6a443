"""What ``scripts/evidence/convergence.py`` says of its runs: differences, intervals, page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from _convergence import study
from megatron_wlb.errors import ConfigError


def runs(last: dict[tuple[str, int], float]) -> dict[tuple[str, int], Any]:
    return {
        key: study.Run(
            tokens=[50, 100, 150],
            seconds=[1.0, 2.0, 3.0],
            steps=[5, 10, 15],
            loss=[5.0, loss + 0.5, loss],
            by_length=[[5.0] * 3, [loss + 0.5] * 3, [loss + 0.2, loss, loss - 0.2]],
        )
        for key, loss in last.items()
    }


def test_looks_are_of_what_was_noted_between_them(tmp_path: Path) -> None:
    metrics, notes = tmp_path / "metrics", tmp_path / "notes"
    steps = [{"tokens": 10 + step, "step_ms": 500.0} for step in range(4)]
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    # Two micro-batches an evaluation; after two looks Megatron's own at the end.
    evaluations = [[[0, 2], [10.0, 8.0], [5, 8]], [[1], [6.0], [2]]]
    halved = [[numbers, [one / 2 for one in sums], n] for numbers, sums, n in evaluations]
    written = [*evaluations, *halved, *halved]
    notes.write_text("".join(json.dumps(line) + "\n" for line in written))
    run = study.Run.of(metrics, notes, np.array([6, 300, 2000]), 2)
    assert (run.tokens, run.seconds, run.steps) == ([21, 46], [1.0, 2.0], [2, 4])
    assert run.loss == [24 / 15, 12 / 15]
    assert run.by_length == [[2.0, 3.0, 1.0], [1.0, 1.5, 0.5]]
    run.write(tmp_path / "run.json")
    assert study.Run.read(tmp_path / "run.json") == run
    early = run.until(1.5)
    assert (early.tokens, early.seconds, early.steps) == ([21, 34], [1.0, 1.5], [2, 3])
    assert early.loss[-1] == pytest.approx(18 / 15)
    assert early.by_length[-1] == pytest.approx([1.5, 2.25, 0.75])
    notes.write_text("".join(json.dumps(line) + "\n" for line in written[:4]))
    uneven = study.Run.of(metrics, notes, np.array([6, 300, 2000]), 3)
    assert uneven.steps == [3, 4] and uneven.loss == run.loss
    with pytest.raises(ConfigError, match=r"took 2 s .* compared after 2\.5 s; give more --tokens"):
        run.until(2.5)


def test_differences_are_taken_seed_by_seed() -> None:
    # Seeds differ by 1, the packings by 0.1 in each: the interval is of the latter.
    last = {("original", s): 2.0 + s for s in (1, 2, 3)}
    last |= {("hold", 1): 3.09, ("hold", 2): 4.10, ("hold", 3): 5.11}
    found = study.Study(runs(last))
    figures = found.summary()["packings"]["hold"]["at the end"]
    assert figures["loss"] == pytest.approx(4.1)
    assert figures["difference"] == pytest.approx(0.1)
    assert figures["interval"] == pytest.approx(4.303 * 0.01 / math.sqrt(3))
    assert found.spread(study.COLUMNS["at the end"]) == pytest.approx(1.0)
    assert found.difference("hold", study.COLUMNS["long documents"]).mean == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.10, 0.11, 0.12), "learns less"),
        ((-0.10, -0.11, -0.12), "learns more"),
        ((0.10, -0.11, 0.12), "no difference seen"),
        ((0.10,), "no difference seen"),  # one seed says nothing
    ],
)
def test_verdict_is_of_the_interval(values: tuple[float, ...], verdict: str) -> None:
    assert study.Difference.of(list(values)).verdict == verdict


def test_page_takes_the_table_between_its_marks(tmp_path: Path) -> None:
    last = {("original", 1): 2.0, ("original", 2): 2.2, ("slim", 1): 2.1, ("slim", 2): 2.3}
    found = study.Study(runs(last))
    page, picture = tmp_path / "page.md", tmp_path / "images/learning.png"
    picture.parent.mkdir()
    page.write_text("Before\n<!-- 100 -->old<!-- end of 100 -->\nAfter\n")
    found.draw(picture)
    found.write(page, picture, "100")
    text = page.read_text()
    assert text.startswith("Before\n<!-- 100 -->") and text.endswith("<!-- end of 100 -->\nAfter\n")
    assert "old" not in text and "(images/learning.png)" in text
    assert "| slim | 2 | 2.2000 | +0.1000 ± 0.0000 |" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no place for this study; add <!-- 200 -->"):
        found.write(page, picture, "200")


def test_study_without_original_is_refused() -> None:
    with pytest.raises(ConfigError, match="no run is of original, with which all are compared"):
        study.Study(runs({("hold", 1): 2.0}))


def test_packing_is_compared_by_the_seeds_that_it_ran_with() -> None:
    last = {("original", 1): 2.0, ("original", 2): 2.2, ("hold", 2): 2.3, ("hold", 3): 9.0}
    found = study.Study(runs(last | {("slim", 3): 2.0}))
    assert found.packings == ["original", "hold"]
    assert found.difference("hold", study.COLUMNS["at the end"]).mean == pytest.approx(0.1)
    assert [row[1] for row in found.rows()] == ["2", "1"]


def test_runs_beside_a_page_are_there_again(tmp_path: Path) -> None:
    found = study.Study(runs({("original", 1): 2.0, ("fixed-greedy:8", 12): 2.2}))
    path = tmp_path / "learning-100.json"
    assert study.kept(path) == {}
    found.keep(path)
    assert study.kept(path) == found.runs
    path.write_text(path.read_text().replace("original 1", "original"))
    with pytest.raises(ConfigError, match="original is no packing and seed"):
        study.kept(path)
