"""The benchmark runs and says what it should; its figures are judged in `test_shaping`."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/evidence/bench_shape.py"


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_bench_shape_prints_its_figures():
    done = run("--num-micro-batches", "8", "--pp", "2", "--dp", "2", "--seeds", "5", "--steps", "3",
               "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["num_micro_batches"], row["pp"], row["vpp"], row["dp"]) == (8, 2, 1, 2)
    assert row["steps"] == 3
    assert row["gain_over_packed"] > 0 and row["worst_step_over_small_ends"] >= 0
    assert "shaped steps, simulated" in done.stderr


def test_bench_shape_refuses_what_cannot_run():
    done = run("--num-micro-batches", "9", "--dp", "2")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: 9 micro-batches do not divide over DP 2")
    done = run("--num-micro-batches", "6", "--pp", "4", "--vpp", "2", "--seeds", "1")
    assert done.returncode == 2
    assert "leave 2" in done.stderr
    done = run("--pp", "0")
    assert (done.returncode, done.stderr) == (2, "error: --pp is 0; give at least 1\n")
    done = run("--steps", "0")
    assert (done.returncode, done.stderr) == (2, "error: --steps is 0; give at least 1\n")
