"""The benchmark runs and says what it should; its figures are judged in `test_shaping`."""

import json
from functools import partial

import pytest
from _running import run_script

run = partial(run_script, "bench_shape.py")


def test_bench_shape_prints_its_figures():
    done = run("--num-micro-batches", "8", "--pp", "2", "--dp", "2", "--seeds", "5", "--steps", "3",
               "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["num_micro_batches"], row["pp"], row["vpp"], row["dp"]) == (8, 2, 1, 2)
    assert row["steps"] == 3
    assert row["gain_over_packed"] > 0 and row["worst_step_over_small_ends"] >= 0
    assert "shaped steps, simulated" in done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--num-micro-batches 9 --dp 2", "error: 9 micro-batches do not divide over DP 2"),
        ("--num-micro-batches 6 --pp 4 --vpp 2 --seeds 1", "leave 2"),
        ("--pp 0", "error: --pp is 0; give at least 1"),
        ("--steps 0", "error: --steps is 0; give at least 1"),
    ],
)
def test_bench_shape_refuses_what_cannot_run(words, error):
    done = run(words)
    assert done.returncode == 2
    assert error in done.stderr.splitlines()[-1]
