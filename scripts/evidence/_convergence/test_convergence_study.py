"""What ``scripts/evidence/convergence.py`` says of its runs: differences, intervals, page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from _convergence import study
from megatron_wlb.errors import ConfigError


def runs(last: dict[tuple[str, int], float]) -> dict[tuple[str, int], Any]:
    return {
        key: study.Run(
            tokens=[0, 50, 100],
            seconds=[0.0, 1.0, 2.0],
            steps=[0, 5, 10],
            loss=[5.0, loss + 0.5, loss],
            by_length=[[5.0] * 3, [loss + 0.5] * 3, [loss + 0.2, loss, loss - 0.2]],
        )
        for key, loss in last.items()
    }


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
