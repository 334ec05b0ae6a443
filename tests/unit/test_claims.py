"""Every figure of the README has a claim, a command and a place on a page."""

from __future__ import annotations

import claims
import pytest


def test_claims_are_on_their_pages_and_the_readme_has_no_others() -> None:
    known = claims.read()
    assert claims.wrong(known) == []
    assert claims.PAGE.read_text() == claims.page_of(known)


def test_figures_that_are_nowhere_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = claims.read()
    known[0]["quote"] += " and more"
    known[3]["readme"] = "0.71"
    found = claims.wrong(known)
    assert any(line.startswith("docs/quickstart.md has no ") for line in found)
    assert "README.md has 0.87, which no claim has" in found


def test_numbers_are_those_that_may_be_figures() -> None:
    text = "1.20× (1.11-1.27), 12.9 %, of 123; `--x 44` [page](88.md) PP=4, 16K\n```\n99\n```"
    assert claims.numbers_of(text) == {"1.20", "1.11", "1.27", "12.9", "123", "16K"}
