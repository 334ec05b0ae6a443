"""slime's own tests of its schedule, with ours in its place: SLIME_PATH names a checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLIME = os.environ.get("SLIME_PATH")
pytestmark = pytest.mark.skipif(SLIME is None, reason="SLIME_PATH names no checkout of slime")

PLUGIN = """
import pytest
import slime.utils.dp_schedule as theirs
import megatron_wlb.adapters.slime as ours

called = []

@pytest.fixture(autouse=True)
def planned_by_us(request, monkeypatch):
    def build(*given, **named):
        called.append(request.node.name)
        return ours.build_dp_schedule(*given, **named)
    monkeypatch.setattr(request.module, "build_dp_schedule", build)

def pytest_sessionfinish():
    print(f"ours was called in {len(set(called))} tests")
"""


def test_slime_s_own_tests_pass(tmp_path: Path) -> None:
    (tmp_path / "planned_by_us.py").write_text(PLUGIN)
    paths = os.pathsep.join([str(tmp_path), str(SLIME), str(Path(__file__).parents[2])])
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "planned_by_us", "-p", "no:cacheprovider"),
            *("--rootdir", str(tmp_path), f"{SLIME}/tests/test_dp_schedule.py"),
        ],
        capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "9 passed" in found.stdout and "ours was called in 9 tests" in found.stdout
