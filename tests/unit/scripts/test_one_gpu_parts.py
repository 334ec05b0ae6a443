"""Several ranks on one GPU: how they are started, shared out, timed and judged."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_wlb.errors import CompatibilityError, ConfigError

TESTS = Path(__file__).parents[2]
SAYS_WHO = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['MORE'])"
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


def test_ranks_are_started_one_by_one_on_one_device(module: Any, tmp_path: Path) -> None:
    running = module("running")
    given = [one | {"MORE": "x"} for one in running.world(3)]
    assert len({one["MASTER_PORT"] for one in given}) == 1
    said = running.run_together([sys.executable, "-c", SAYS_WHO], given, tmp_path, 60.0)
    assert said == ["0 0 x\n", "1 0 x\n", "2 0 x\n"]


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


def test_parts_share_the_time_of_all(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    main, given, now_s = module("__main__"), [], [0.0]

    def run(part: Any, out: Path, *, tiny: bool, limit_s: float) -> str:
        given.append((part.name, limit_s))
        now_s[0] += limit_s - 2
        return "cut off"

    monkeypatch.setattr(main, "run_part", run)
    monkeypatch.setattr(main, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    words = ["gpu_report", "--tiny", "--parts", "probe,ranks,pipeline", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--limit-s", "150"])
    assert main.main() == 0
    # The second has what is left of 150 s; 2 s are too few for the third.
    assert given == [("probe", 120.0), ("ranks", 32.0)]
    assert "pipeline: not started" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*words, "--nccl", str(tmp_path / "libnccl.so.2")])
    with pytest.raises(ConfigError, match=r"is no file; give a libnccl\.so\.2"):
        main.main()


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


def test_ranks_need_a_newer_nccl_than_torch_may_have(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = module("sharing")
    assert sharing.environment(4)["NCCL_MAX_CTAS"] == "2"
    assert "LD_PRELOAD" not in sharing.environment(2)
    monkeypatch.setenv(sharing.NCCL, str(tmp_path / "libnccl.so.2"))
    assert sharing.environment(2)["LD_PRELOAD"] == str(tmp_path / "libnccl.so.2")
    for version, right in (("2.28.9", False), ("", False), ("2.30.7", True), ("3.0.1", True)):
        monkeypatch.setattr(sharing, "nccl_of_ranks", lambda v=version: v)
        with (
            contextlib.nullcontext()
            if right
            else pytest.raises(
                CompatibilityError, match=r"2\.30 or later; give its libnccl.so.2 with --nccl"
            )
        ):
            sharing.check_nccl()


def test_what_ranks_received_wrong_is_told(module: Any) -> None:
    probe = module("probe")
    ranks = [{"sum is right": 1.0, "ring, us": 10.0}, {"sum is right": 0.0, "ring, us": 30.0}]
    queues = {"held up": {"nothing": 0.01}, "waits": {"cudaMalloc": 0.98}}
    figures = {
        "machine": {"MPS": "none"}, "queues, 1 connections": queues,
        probe.TURNS: {"ranks": ranks}, probe.AT_ONCE: {"obstacle": "it\nhangs"},
    }  # fmt: skip
    assert probe.wrong(figures) == [f"{probe.TURNS}, rank 1: sum was received wrong"]
    said = "\n".join(probe.lines(figures, None))
    assert "| 1 | nothing | 1% | no |" in said and "| 1 | cudaMalloc | 98% | yes |" in said
    assert f"| {probe.TURNS} | ring, us | 20 |" in said
    assert f"- {probe.AT_ONCE}: it / hangs" in said


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


def test_ranks_start_anew_after_a_case_that_hangs(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another MPS, and with one hardware queue at the end; the other cases go on."""
    ranks, results = module("ranks"), module("results")
    opened: list[Any] = []

    class Pool:
        def __init__(self, most: int, backend: str = "gloo", own: Any = None) -> None:
            if backend == "nccl":
                opened.append(own)

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    @contextlib.contextmanager
    def mps(num: int) -> Iterator[dict[str, str]]:
        opened.append("MPS")
        yield {"SHARED": str(num)}
        opened.append("ended")

    def judged(run: Any, *given: Any) -> dict[str, Any]:
        if run.args[1] == "hang":
            raise TimeoutError("rank 1 hangs\nin a receive")
        return {"differences": ["step 0"] if run.args[1] == "wrong" else [], "seconds": 1.0}

    runs = {name: SimpleNamespace(args=(None, name)) for name in ("a", "hang", "wrong", "last")}
    monkeypatch.setattr(ranks, "GlooPool", Pool)
    monkeypatch.setattr(ranks, "_judged", judged)
    monkeypatch.setattr(ranks, "_runs", lambda folder: runs)
    monkeypatch.setattr(ranks, "ONE_QUEUE", ("a",))
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ranks.sharing, "check_nccl", lambda: None)
    monkeypatch.setattr(ranks.sharing, "mps", mps)
    found = results.Results(tmp_path, "ranks", tiny=False, machine="m")
    ranks.measure(found)
    assert [one if isinstance(one, str) else one["CUDA_DEVICE_MAX_CONNECTIONS"] for one in opened] \
        == ["MPS", "8", "ended", "MPS", "8", "ended", "MPS", "1", "ended"]  # fmt: skip
    assert opened[1]["SHARED"] == "4" and opened[1]["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert list(found.figures) == ["how", "a", "hang", "wrong", "last", "a, 1 connection"]
    assert ranks.wrong(found.figures) == ["wrong: step 0"]
    said = ranks.lines(found.figures, None)
    assert "| hang | **no result**: rank 1 hangs |  |" in said
    assert "| wrong | **1 differences** | 1.0 |" in said
    # A later start tries again what had no result, and only that.
    runs["hang"].args = (None, "well")
    ranks.measure(found)
    assert found.figures["hang"] == {"differences": [], "seconds": 1.0}
    for value in (2.0, 3.0):
        found.attempt("a number", lambda v=value: v, TimeoutError)
    assert found.figures.pop("a number") == 2.0
    monkeypatch.setattr(ranks.sharing, "check_nccl", _refuse)
    ranks.measure(found)
    assert ranks.lines(found.figures, None) == ["Not run: too old."]


def _refuse() -> None:
    raise CompatibilityError("too old")
