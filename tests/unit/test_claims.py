"""Every figure of the README has a claim, a command and a place on a page."""

from __future__ import annotations

import re
from pathlib import Path

import claims
import pytest


def test_claims_are_on_their_pages_and_the_readme_has_no_others() -> None:
    known = claims.read()
    assert claims.wrong(known) == []
    assert claims.PAGE.read_text() == claims.page_of(known)


def test_figures_that_are_nowhere_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = claims.read()
    known[0]["quote"] += " and more"
    known[3]["figure"] += " and 77.5 %"
    known[4]["readme"] = "0.37"
    found = claims.wrong(known)
    assert any(line.startswith("docs/results/quickstart.md has no ") for line in found)
    assert any(
        line.startswith("77.5 is in no quote of docs/results/quickstart.md") for line in found
    )
    assert "README.md has 0.81, which no claim has" in found


def test_commands_are_numbered_and_figures_taken_by_hand_are_listed() -> None:
    one = {"claim": "a", "figure": "1", "spread": "none", "kind": "counted", "date": "2026-01-02",
           "command": "scripts/a", "page": "a.md", "quote": "1"}  # fmt: skip
    page = claims.page_of([one, one | {"claim": "b", "command": claims.NO_COMMAND}])
    assert "| a | 1 | none | counted | 2026-01-02 | 1 | [a.md](a.md) |" in page
    assert "| b | 1 | none | counted | 2026-01-02 | none | [a.md](a.md) |" in page
    assert page.endswith("1. `scripts/a`\n\n## Taken by hand\n\n"
                         "No command is kept for these:\n\n- b\n")  # fmt: skip


def test_numbers_are_those_that_may_be_figures() -> None:
    text = "1.20× (1.11-1.27), 12.9 %, of 123; `--x 44` [page](88.md) PP=4, 16K\n```\n99\n```"
    assert claims.numbers_of(text) == {"1.20", "1.11", "1.27", "12.9", "123", "16K"}


NO_FIGURES = {
    "context-parallelism.md": "0.01 2.2 2.7 5.1 8.0",  # a limit, a section, versions
    "flags.md": "0.15 0.45 1.05",  # defaults
    "installing.md": "0.2 0.20 0.7 2.10 2.13 2.7 26.06 26.10",  # versions, sizes of downloads
    "limits.md": "0.20 2.18 2.9",
    "megatron-lm.md": "0.20 1.08 1.31",  # a version, an example of a line
    "models.md": "0.15",
    "recipes.md": "0.1 0.20",
    "reliability.md": "0.3 0.7",  # measured there
    "samples.md": "0.7 0.9",
}
"""Numbers of the pages that say no result."""


@pytest.mark.parametrize("page", sorted((claims.ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_a_figure_on_two_pages_is_one(page: Path) -> None:
    """What a page says of results stands on one of the pages of results that it names."""
    text, known = page.read_text(), set(NO_FIGURES.get(page.name, "").split())
    for name in {*re.findall(r"results/([\w-]+\.md)", text)}:
        known |= claims.numbers_of((page.parent / "results" / name).read_text())
    for claim in claims.read():
        if claim["page"] == f"../{page.name}":
            known |= claims.numbers_of(f"{claim['quote']} {claim['figure']}")
    figures = {n for n in claims.numbers_of(text) if re.fullmatch(r"\d+\.\d+", n)}
    assert figures <= known, f"{sorted(figures - known)} stand on no page of results that it names"
