"""What runs and judges the parts of the GPU report."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
TESTS = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the report, as ``scripts/gpu_report`` sets up the path."""
    for folder in (TESTS / "gpu", TESTS):
        monkeypatch.syspath_prepend(str(folder))
    return lambda name: importlib.import_module(f"_gpu_report.{name}")


def test_limit_ends_a_command_and_all_that_it_started(module: Any, tmp_path: Path) -> None:
    """Those in sessions of their own too, as torchrun's workers are, and those that will not."""
    running = module("running")
    running.GRACE_S = 0.5
    script = "trap '' TERM; setsid sleep 300 & echo $!; echo begun; wait; wait; sleep 300"
    start_s = time.monotonic()
    assert running.run_within(["bash", "-c", script], tmp_path / "log", 4.0) is None
    assert time.monotonic() - start_s < 60
    child, begun = (tmp_path / "log").read_text().split()[:2]
    assert begun == "begun"
    gone = not psutil.pid_exists(int(child))
    assert gone or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE
    assert running.run_within(["bash", "-c", "exit 3"], tmp_path / "log", 60.0) == 3


def test_results_of_a_killed_part_are_read_and_gone_on_with(module: Any, tmp_path: Path) -> None:
    results = module("results")
    script = (
        "import sys, time; from pathlib import Path; from _gpu_report.results import Results\n"
        "found = Results(Path(sys.argv[1]), 'kernels', tiny=True, machine='m')\n"
        "found.once('first', lambda: 1); print('ready', flush=True); time.sleep(300)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env={"PYTHONPATH": f"{SCRIPTS}:{SCRIPTS.parent}"},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.kill()
    content = results.read(tmp_path / "kernels.json")
    assert content["status"] == "running" and content["figures"] == {"first": 1}

    again = results.Results(tmp_path, "kernels", tiny=True, machine="m")
    again.once("first", lambda: pytest.fail("it was there"))
    again.once("second", lambda: 2)
    again.end("done")
    assert results.read(tmp_path / "kernels.json")["figures"] == {"first": 1, "second": 2}
    # Another machine's, or another form's, is no beginning of this one.
    for other in ({"tiny": True, "machine": "n"}, {"tiny": False, "machine": "m"}):
        again.end("done")
        assert results.Results(tmp_path, "kernels", **other).figures == {}


def test_kernels_off_by_more_than_bf16_allows_are_wrong(module: Any) -> None:
    kernels = module("kernels")
    found = {
        "a, 7B": {"errors": {"output": 0.9, "dQ": 2.0}},
        "b, 7B": {"errors": {"output": 2.1, "dQ": float("nan")}},
        "c, 7B": {"obstacle": "it is not installed"},
    }
    assert [line.partition(" is ")[0] for line in kernels.wrong(found)] == [
        "b, 7B: the error of output", "b, 7B: the error of dQ",
    ]  # fmt: skip


def test_one_by_one_computes_what_packed_documents_do(module: Any) -> None:
    import torch

    from megatron_wlb.runtime.gpt.attention.kernels import CANDIDATES, Demand, Segments

    wanted = Demand(torch.device("cpu"), torch.float32, 2, 1, 16)
    kernel = CANDIDATES["sdpa"].build(wanted)
    lengths = (5, 1, 30)
    query, key, value = (torch.randn(36, heads, 16) for heads in (2, 1, 1))
    segments = Segments.of(lengths)
    alone = module("kernels").one_by_one(kernel, lengths, wanted.device)
    expected = kernel(query, key, value, segments, 0.2)
    assert torch.allclose(alone(query, key, value, segments, 0.2), expected, atol=1e-6)


def test_busy_time_counts_overlaps_once_and_finds_the_longest_gap(module: Any) -> None:
    covered = module("host").covered
    found = covered([(30.0, 40.0), (0.0, 10.0), (5.0, 12.0), (6.0, 7.0)])
    assert found == {"whole_us": 40.0, "busy_us": 22.0, "spans": 4, "longest_gap_us": 18.0}
    assert covered([])["whole_us"] == 0.0


def test_unknown_parts_are_refused_by_name(module: Any) -> None:
    from megatron_wlb.errors import ConfigError

    parts = module("parts")
    assert [one.name for one in parts.parts_called(["host", "tests"])] == ["tests", "host"]
    assert len(parts.parts_called([])) == len(parts.PARTS)
    with pytest.raises(ConfigError, match="--parts speed: no part; give environment, tests"):
        parts.parts_called(["speed"])
    # A machine that is lent for commands of ten minutes runs each part, and all in an hour.
    assert max(one.limit_s for one in parts.PARTS.values()) < 600
    assert sum(one.limit_s for one in parts.PARTS.values()) <= 55 * 60


def test_parts_load_no_megatron_before_they_choose_a_device() -> None:
    """The CPU's emulation must be there before Megatron is."""
    script = "import sys, _gpu_report.child; sys.exit('megatron.core' in sys.modules)"
    paths = ("", "evidence", "../tests/gpu", "../tests", "..")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": ":".join(str(SCRIPTS / path) for path in paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
