from __future__ import annotations

import pytest

pytest.importorskip("ortools", reason="OR-tools is not installed: pip install ortools")

from _papers.slimpack_optimum import (
    GAP,
    WINDOW,
    Case,
    bound_us,
    documents_of,
    evenest,
    optimum,
    package,
)

CASE = Case(2, 2, 5)
LENGTHS = (40_000, 17_000, 11_000, 9_000)


def test_documents_fill_the_windows() -> None:
    lengths = documents_of(CASE, 1)
    assert 2 * WINDOW <= sum(lengths) < 3 * WINDOW and max(lengths) <= WINDOW
    assert lengths == sorted(lengths, reverse=True) != documents_of(CASE, 2)


def test_shortest_step_is_between_its_bound_and_the_packages() -> None:
    own = package(CASE, LENGTHS)
    best, shapes = optimum(CASE, LENGTHS, sum(own.chains), own.us)
    assert bound_us(CASE, LENGTHS) < best.us < own.us * (1 - GAP)
    assert shapes > 5 and sum(best.chains) == 5
    again, _ = optimum(CASE, LENGTHS, 5, 2 * own.us)
    assert again.us == pytest.approx(best.us, rel=2 * GAP)


def test_more_units_are_no_slower() -> None:
    own = package(CASE, LENGTHS)
    four, five = (optimum(CASE, LENGTHS, number, 2 * own.us)[0] for number in (4, 5))
    assert five.us < four.us


def test_evenest_units_are_even_and_no_shortest_step() -> None:
    own = package(CASE, LENGTHS)
    even = evenest(CASE, LENGTHS, own.chains)
    best, _ = optimum(CASE, LENGTHS, 5, own.us)
    assert even.heaviest <= own.heaviest
    assert best.us <= even.us * (1 + GAP)
