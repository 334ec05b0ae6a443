"""Plans, and what commands print, are those of ``tests/golden.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator

import golden
import pytest

KEPT = json.loads(golden.FILE.read_text())
ANEW = """\
`python tests/golden.py NAME` prints a case in full, and without a name it writes all of them anew.
A change on purpose is named in its commit, with the cases that it changes"""


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[None]:
    with golden.folder():
        yield


def test_golden_file_has_all_cases_and_no_others() -> None:
    assert [*KEPT] == golden.NAMES, ANEW


@pytest.mark.parametrize("name", golden.RELEASED)
def test_state_of_the_last_release_goes_on(name: str) -> None:
    """No document of before is lost, and none runs twice."""
    kept = json.loads(golden.STATES.read_text())[name]
    waiting, runs = golden.continued(name, kept)
    assert waiting == kept["waiting"]
    every = [*map(tuple, kept["ran"] + runs)]
    assert len({*every}) == len(every)
    arrivals = {arrival for arrival, _ in every}
    assert {*range(1 + max(arrival for arrival, _ in kept["ran"]))} < arrivals


@pytest.mark.parametrize("name", golden.NAMES)
def test_golden_case_is_as_it_was(name: str) -> None:
    """The plans of a run are read back in the middle, from a state as JSON has it."""
    found = golden.line(golden.case(name, resumed=True))
    if found != KEPT.get(name) and name in golden.RUNS:
        straight = golden.line(golden.case(name))
        assert found == straight, "a run that resumes plans otherwise"
    assert found == KEPT.get(name), ANEW
