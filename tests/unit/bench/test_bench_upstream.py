"""The script that puts documents through Megatron's packings, with those of the installed core."""

import json
import subprocess
import sys
from pathlib import Path

import megatron.core

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench_upstream.py"
CORE = Path(megatron.core.__file__).parents[2]
"""It has the hybrid scheduler, and no other."""
LAYOUT = [
    "--model",
    "550m",
    "--tp-size",
    "2",
    "--cp-size",
    "2",
    "--dp-size",
    "2",
    "--num-micro-batches",
    "4",
]
SHORT = ("--model", "550m", "--seeds", 1, "--steps", 2, "--warm-up", 2, "--json")


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, words)]
    return subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)


def test_bench_upstream_compares_megatrons_scheduler_with_ours():
    done = run(CORE, *LAYOUT, *SHORT)
    assert done.returncode == 0, done.stderr
    rows = {row["packing"]: row for row in json.loads(done.stdout)["rows"]}
    assert next(iter(rows)) == "original" and rows["original"]["speed"] == 1
    hybrid = rows["hybrid-context-parallel"]
    assert hybrid["delay_steps"] == 0 and hybrid["speed"] > 0 and hybrid["plan_ms"] > 0
    # It runs the same documents in the same time unit: within a few times of ours.
    assert 0.3 < hybrid["tflops"] / rows["slim"]["tflops"] < 1.5


def test_bench_upstream_refuses_a_checkout_without_packings(tmp_path):
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/__init__.py").touch()
    done = run(tmp_path, *LAYOUT, *SHORT)
    assert done.returncode != 0 and "branch main or dev" in done.stderr
    assert "Traceback" not in done.stderr
