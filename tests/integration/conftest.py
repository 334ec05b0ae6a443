"""An end for processes that a failed test leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import rank_runs


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    while rank_runs.RUNS:
        run = rank_runs.RUNS.pop()
        if run.poll() is None:
            run.kill()
