"""Several ranks on one device for real: over gloo on a CPU, in the tiny form of the report."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PROJECT / "scripts" / "gpu_report"), *arguments], capture_output=True, text=True,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def test_ranks_meet_and_compute_what_one_process_does(tmp_path: Path) -> None:
    given = ("--tiny", "--parts", "probe,ranks", "--out", str(tmp_path), "--limit-s", "600")
    done = report(*given)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("probe: 2 ranks, gloo (", "ranks: TP2 with SP, hold (", "ranks: PP2, slim ("):
        assert f"    {line}" in done.stdout, done.stdout
    probe, ranks = (
        json.loads((tmp_path / f"{name}.json").read_text())["figures"]
        for name in ("probe", "ranks")
    )
    met = probe["2 ranks, gloo"]["ranks"]
    assert len(met) == 2 and met[1]["0.25 MiB is right"] == met[0]["sum is right"] == 1.0
    assert probe["machine"]["NCCL that torch was built with"] == "none: no GPU"
    assert [ranks[name]["differences"] for name in ("TP2 with SP, hold", "PP2, slim")] == [[], []]
    assert "gloo on the CPU, for no GPU is there" in (tmp_path / "gpu.md").read_text()


def test_pipeline_of_a_packing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROJECT / "scripts"))
    folders = PROJECT, PROJECT / "scripts", PROJECT / "tests"  # as scripts/gpu_report has them
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    pipeline, results = (
        importlib.import_module(f"_gpu_report.{name}") for name in ("pipeline", "results")
    )
    monkeypatch.setattr(pipeline, "TINY_RUNS", ("slim, turn 1",))
    found = results.Results(tmp_path, "pipeline", tiny=True, machine="m")
    pipeline.measure(found)
    steps: list[dict[str, Any]] = found.figures["slim, turn 1"]
    assert len(steps) == pipeline.TINY_STEPS, steps
    for step in steps:
        assert step["tokens"] > 0 < step["predicted_ms"] and step["tflops_per_device"] > 0
        assert set(step["busy_ms"]) == {"0", "1"}
        # Ranks note a step's end at moments of their own, far apart on a busy machine.
        assert step["ms"] / 100 < max(step["busy_ms"].values()) < step["ms"] * 2
    (row,) = [line for line in pipeline.lines(found.figures, None) if line.startswith("| slim")]
    assert row.startswith("| slim | 2 | ")
