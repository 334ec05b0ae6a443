from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from exchange_overlap import WAYS


@pytest.mark.parametrize("stages", [1, 2])
def test_steps_are_timed_each_way_and_give_the_same_losses(stages: int) -> None:
    script = Path(__file__).with_name("exchange_overlap.py")
    command = [sys.executable, script, "--steps", "1", "--stages", str(stages), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert [*found] == [*WAYS]
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found.values())
