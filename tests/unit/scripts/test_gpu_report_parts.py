"""What runs and judges the parts of the GPU report."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
import warnings
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


def test_kernel_that_was_not_there_at_first_is_measured_later(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, results = module("kernels"), module("results")
    monkeypatch.setattr(kernels, "WINDOWS", (8192,))
    found = results.Results(tmp_path, "kernels", tiny=True, machine="m")
    found.put("sdpa, tiny", {"obstacle": "no package"})
    kernels.measure(found)
    assert set(found.figures["sdpa, tiny"]) == {"errors"}
    assert kernels.wrong(found.figures) == []


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


def test_waits_of_the_host_are_counted_by_place(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    host, modes = module("host"), []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def train(one: Any, num_steps: int) -> None:
        assert modes == ["warn"] and num_steps == 1
        for _ in range(2):
            warnings.warn(host.SYNCHRONIZES, UserWarning, stacklevel=1)
        warnings.warn("of something else", UserWarning, stacklevel=1)

    monkeypatch.setattr(host.training, "train", train)
    ((place, number),) = host.waits(None).items()
    assert re_place(place) and number == 2
    assert modes == ["warn", "default"]


def re_place(place: str) -> bool:
    name, _, line = place.partition(":")
    return name == "tests/unit/scripts/test_gpu_report_parts.py" and line.isdigit()


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


def test_steps_of_the_launcher_are_told_without_the_first(module: Any) -> None:
    launcher = module("launcher")
    steps = [{"ms": 900.0, "predicted_ms": 1.0, "tokens": 1000}] * launcher.WARM_UP
    steps += [{"ms": ms, "predicted_ms": 95.0, "tokens": 1000} for ms in (90.0, 110.0)]
    alone = [{"ms": 50.0}] * (launcher.WARM_UP + 1)
    figures = {"layers": "those of a test", "uneven documents, slim": steps}
    rows = launcher.lines({**figures, "whole windows, Megatron alone": alone}, None)[-2:]
    assert rows[0] == "| uneven documents, slim | 100 | 90-110 | 10,000 | 0.95 |"
    assert rows[1] == "| whole windows, Megatron alone | 50 | 50-50 |  |  |"
