"""Faults that strike a run: the others end and say why, and a resumed run is as if nothing was.

The long form, of every fault and layout, is ``scripts/evidence/fault_matrix.py``.
"""

from __future__ import annotations

import re

import pytest
from fault_runs import Bench, attempt
from helpers.layouts import further

pytestmark = pytest.mark.launcher


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    ("case", "outcome", "said"),
    [
        (
            "kill-backward",
            "resumed equal",
            r"error.*: another rank ended or stopped \(.*\): step \d: .*micro-batch \d of \d, chunk"
            r" \d, in .*, which waits for rank \d; start the run again",
        ),
        further(
            "stop-forward",
            "resumed equal",
            r"error.*: nothing has moved for \d+ s since step \d: .*micro-batch \d of \d, chunk \d,"
            r" in .*, which waits for rank \d; look at the machine of the rank",
        ),
        further(
            "two-runs-metrics", "refused clearly", r"--wlb-metrics \S+ is in use by another run"
        ),
    ],
)
def test_fault_ends_a_run_that_then_goes_on_alike(
    case: str, outcome: str, said: str, bench: Bench
) -> None:
    done = attempt(bench, case, "pp2", seed=1)
    assert done.outcome == outcome, done
    assert any(re.search(said, line) for line in done.said), done.said


@pytest.mark.long
def test_full_disk_is_one_line(bench: Bench) -> None:
    done = attempt(bench, "full-write", "dp2", seed=1)
    assert done.outcome == "resumed equal", done
    assert re.search(r"error.*: cannot save iteration \d+ to run: .*; free some room", done.said[0])
