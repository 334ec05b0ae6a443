"""Several ranks on one GPU: how they are started, shared out, timed and judged."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_wlb.errors import CompatibilityError

TESTS = Path(__file__).parents[2]
FAILS = "import os, time; print('so far'); os.environ['RANK'] == '1' and exit(3); time.sleep(300)"
HANGS = "import os, time\ndef stuck(): time.sleep(300)\nos.environ['RANK'] == '0' or stuck()"
SERVER = """#!/bin/sh
log="$CUDA_MPS_LOG_DIRECTORY"; pipe="$CUDA_MPS_PIPE_DIRECTORY"
[ "$1" = -f ] || { cat > "$log/said.log"; touch "$pipe/quit"; exit; }
echo "sees $CUDA_VISIBLE_DEVICES" > "$log/control.log"
echo $$ > "$STARTED"; touch "$pipe/control"
while [ ! -e "$pipe/quit" ]; do sleep 0.05; done
"""
LOG = """\
 [2026-11-27 10:00:00] iteration  1/ 2 | elapsed time per iteration (ms): 100.0 |
times across ranks (ms):
  forward-backward:
     rank  0: 90.00
     rank  1: 90.00
  forward-compute:
     rank  0: 20.00
     rank  1: 25.50
  backward-compute:
     rank  0: 40.00
     rank  1: 44.50
  optimizer:
     rank  0: 1.00
 [2026-11-27 10:00:01] iteration  2/ 2 | elapsed time per iteration (ms): 50.0 |
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the report, as ``scripts/gpu_report`` sets up the path."""
    for folder in (TESTS / "gpu", TESTS, TESTS.parent / "scripts" / "evidence"):
        monkeypatch.syspath_prepend(str(folder))
    return lambda name: importlib.import_module(f"_gpu_report.{name}")


def test_rank_that_fails_ends_the_others_and_is_named(module: Any, tmp_path: Path) -> None:
    running = module("running")
    with pytest.raises(running.StartedError, match=r"1 of 2 ended with 3:\n.*1.log:\nso far"):
        running.run_together(
            [sys.executable, "-uc", FAILS], running.world(2), tmp_path / "new", 60.0
        )


def test_ranks_that_hang_leave_their_stacks(module: Any, tmp_path: Path) -> None:
    running = module("running")
    with pytest.raises(running.StartedError) as caught:
        running.run_together([sys.executable, "-c", HANGS], running.world(2), tmp_path, 3.0)
    said = str(caught.value)
    assert said.startswith("[1] of 2 did not end within 3 s") and " in stuck" in said


def test_mps_is_a_server_of_our_own_that_ends_with_its_use(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    sharing, started = module("sharing"), tmp_path / "started"
    monkeypatch.setattr(sharing, "MPS_FOLDERS", ())
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("STARTED", str(started))
    if sharing.mps_program() is None:
        with pytest.raises(CompatibilityError, match="no nvidia-cuda-mps-control"):
            sharing.mps(4).__enter__()
    server = tmp_path / sharing.MPS
    server.write_text(SERVER)
    server.chmod(0o755)
    with sharing.mps(4) as own:
        assert own["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
        assert own["CUDA_VISIBLE_DEVICES"] == "0", "the server sees but one, and that is its first"
        assert Path(own["CUDA_MPS_PIPE_DIRECTORY"], "control").exists()
        os.kill(int(started.read_text()), 0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert "sees 2 | quit" in capsys.readouterr().out
    server.write_text("#!/bin/sh\necho no room > $CUDA_MPS_LOG_DIRECTORY/a.log; exit 1")
    with pytest.raises(CompatibilityError, match="does not start: no room"):
        sharing.mps(4).__enter__()


def test_steps_of_a_pipeline_are_read_of_megatrons_log(module: Any) -> None:
    pipeline = module("pipeline")
    metrics = [
        json.dumps({"tokens": 1000, "predicted_ms": 80.0, "tflops_per_device": 2.0, "loss": 1.0}),
        json.dumps({"tokens": 500, "predicted_ms": 40.0, "tflops_per_device": 4.0}),
    ]
    first, second = pipeline.steps_of(LOG, metrics)
    assert first["busy_ms"] == {"0": 60.0, "1": 70.0} and second["busy_ms"] == {}
    assert pipeline.summary([first], 2) == {
        "ms": 100.0, "TFLOP/s": 4.0, "tokens/s": 10000.0, "idle": pytest.approx(0.35),
        "predicted": 0.8,
    }  # fmt: skip
    assert pipeline.summary([first, second], 2)["TFLOP/s"] == pytest.approx(2 * 400 / 150)
    assert [one["ms"] for one in pipeline.steps_of(LOG)] == [100.0, 50.0]
    faster = [one | {"ms": one["ms"] / 2} for one in (first, first)]
    figures = {
        "stages": 2, "warm-up": 1, "original, turn 1": [first, first], "slim, turn 1": faster,
        "slim, turn 2": faster, pipeline.ALONE: 10.0, pipeline.AT_ONCE: 12.0,
        "hold, turn 1": {"obstacle": "0 of 2 ended with 1:\nits log"},
    }  # fmt: skip
    said = pipeline.lines(figures, None)
    assert "| original | 1 | 100 | 4 | 1.00 | 10,000 | 35% | 0.80 |" in said
    assert "| slim | 2 | 50 | 4 | 1.00 | 20,000 | -30% | 1.60 |" in said
    assert "takes 1.20 times what it takes alone" in said[-3]
    assert said[-1] == "- hold, turn 1: 0 of 2 ended with 1:"


def test_passes_are_timed_by_events_that_nobody_waits_for(module: Any) -> None:
    clock: list[str] = []

    class Timer:
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, barrier: bool = False) -> None:
            clock.append(f"{self.name} waits")

    class Event:
        at_ms = 0.0

        def record(self) -> None:
            Event.at_ms += 10.0
            self.own_ms = Event.at_ms

        def synchronize(self) -> None:
            clock.append("once")

        def elapsed_time(self, other: Any) -> float:
            return float(other.own_ms - self.own_ms)

    class Timers:
        def __init__(self) -> None:
            self._timers: dict[str, Any] = {}
            self._dummy_timer = SimpleNamespace(start=lambda barrier=False: None)

        def __call__(self, name: str, log_level: int | None = None) -> Any:
            return self._timers.setdefault(name, megatron.Timer(name))

    megatron = SimpleNamespace(Timer=Timer, Timers=Timers)
    module("staged").install(megatron, Event)
    timers = megatron.Timers()
    passes = timers("forward-compute", log_level=2)
    timers("forward-recv", log_level=2).start()
    timers("forward-backward", log_level=1).start(barrier=True)
    for _ in range(3):
        passes.start()
        passes.stop()
    assert clock == []
    assert passes.elapsed() == pytest.approx(0.03) and clock == ["once"]
    assert passes.elapsed() == 0.0, "it begins anew"
    timers("interval-time", log_level=0).start()
    assert clock[-1] == "interval-time waits" and timers("interval-time").name == "interval-time"
