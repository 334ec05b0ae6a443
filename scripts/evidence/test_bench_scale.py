"""The script of `docs/results/scale.md` runs, and its figures are what they are called."""

import json
from functools import partial

from _running import run_script

run = partial(run_script, "bench_scale.py")


def test_bench_scale_compares_packings_at_each_size():
    done = run("--small", "--packing", "original,slim", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    cases = [(row["num_devices"], row["packing"]) for row in rows]
    assert cases == [(64, "original"), (64, "slim"), (128, "original"), (128, "slim")]
    for original, slim in (rows[:2], rows[2:]):
        assert original["speed"] == 1 < slim["speed"]
    assert rows[0]["dp_imbalance"] == 1  # one replica
    assert rows[2]["dp_imbalance"] > rows[3]["dp_imbalance"] >= 1
    for row in rows:
        assert min(row["plan_ms"], row["digest_ms"], row["plan_mib"]) > 0
    assert rows[2]["plan_mib"] > 1.2 * rows[0]["plan_mib"]
    assert "simulated" in done.stderr and "measured" in done.stderr


def test_bench_scale_refuses_sizes_that_are_none():
    done = run("--dp-sizes", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --dp-sizes is 0") and done.stderr.count("\n") == 1
