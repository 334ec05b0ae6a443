"""The tests of ``tests/gpu``: what passed, failed and was skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from _gpu_report.drawing import Pictures, table
from _gpu_report.results import Results

TESTS = Path(__file__).parents[2] / "tests" / "gpu"
PROCESSES = 4
"""Most tests wait for a run of their own, which waits for its imports."""
MOST_LETTERS = 600
NO_TESTS_LEFT = pytest.ExitCode.NO_TESTS_COLLECTED


class Recorder:
    """Writes down each test as it ends, beside those that an earlier start ended."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self.outcomes: dict[str, dict[str, str]] = dict(results.figures.get("outcomes", {}))
        self.errors: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}: {_last_line(report)}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return  # the call's outcome counts, unless what is around it is not well
        why = "" if report.passed else _last_line(report)
        self.outcomes[report.nodeid] = {"outcome": report.outcome, "why": why}
        self._results.put("outcomes", self.outcomes)


def _last_line(report: Any) -> str:
    """Why it failed or was skipped, in a line: of a run's output the end says more."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    text = " ".join(text.split())
    return text if len(text) <= MOST_LETTERS else f"{text[:200]} … {text[200 - MOST_LETTERS :]}"


def measure(results: Results) -> None:
    recorder = Recorder(results)
    # pytest-timeout may not be there, and another machine's warnings are no failures.
    own = ["-o", "addopts=--strict-markers", "-p", "no:cacheprovider", "-W", "default", "-q"]
    if find_spec("xdist") is not None and not results.tiny:
        own += ["-n", str(PROCESSES), "--maxschedchunk", "1"]
    own += [f"--deselect={name}" for name in recorder.outcomes]
    code = pytest.main([*own, str(TESTS)], plugins=[recorder])
    results.put("errors", recorder.errors)
    results.put("counts", dict(Counter(one["outcome"] for one in recorder.outcomes.values())))
    if code not in (0, 1, NO_TESTS_LEFT) and not recorder.errors:
        raise RuntimeError(f"pytest ended with {code!r}")


def wrong(figures: Mapping[str, Any]) -> list[str]:
    failed = [
        f"{name}: {one['why']}"
        for name, one in figures.get("outcomes", {}).items()
        if one["outcome"] == "failed"
    ]
    return [*failed, *figures.get("errors", [])]


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    del pictures
    outcomes = figures.get("outcomes", {}).values()
    counts = Counter(one["outcome"] for one in outcomes)
    said = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))
    skipped = Counter(one["why"] for one in outcomes if one["outcome"] == "skipped")
    rows = [[why, str(number)] for why, number in skipped.most_common()]
    failed = [f"- {line}" for line in wrong(figures)]
    return [f"{said}.", "", *failed, *[""] * bool(failed), *table(["skipped, as", "tests"], rows)]
