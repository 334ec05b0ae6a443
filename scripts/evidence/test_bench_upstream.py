"""The script that puts documents through Megatron's packings, with those of the installed core."""

import importlib
import json
from functools import partial
from pathlib import Path

import megatron.core
import numpy as np
import pytest
from _running import run_script

from megatron_wlb.cost import Execution, Parallelism, load_hardware
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.models import load_model
from megatron_wlb.planning.run import Run

run = partial(run_script, "bench_upstream.py")
CORE = Path(megatron.core.__file__).parents[2]
"""It has the hybrid scheduler, and no other."""
LAYOUT = "--model 550m --tp-size 2 --cp-size 2 --dp-size 2 --num-micro-batches 4"
SHORT = "--seeds 1 --steps 2 --warm-up 2 --json"


@pytest.fixture
def bench():
    return importlib.import_module("bench_upstream")


def test_a_rank_runs_its_share_padded_and_the_slowest_tells(bench):
    layout = Parallelism(2, 2, 1, dp_size=2, sequence_parallel=True)
    run = Run(load_model("550m"), Execution(layout), load_hardware("h100-sxm"), 4096, 4)
    clock, lengths = bench.Clock(run), [97, 64, 3000]
    assert clock._padded(bench.Part((0, 1), 1), lengths) == [98, 64]  # TP alone
    assert clock._padded(bench.Part((0, 1), 2), lengths) == [104, 64]  # two chunks a rank
    ranks = [[bench.Part((0,), 1), bench.Part((1,), 1)], [bench.Part((2,), 2)]]
    times = [
        np.sum([clock.stages(1).times_us([[n]]).sum() for n in (98, 64)]),
        clock.stages(2).times_us([[3000]]).sum(),
    ]
    assert times[0] != times[1] and clock.of_parts(ranks, lengths) == pytest.approx(max(times))
    assert clock.stages(2).times_us([[3000]]).sum() < clock.stages(1).times_us([[3000]]).sum()
    assert clock.longest(ranks, lengths) == 1500


@pytest.mark.parametrize("ranks", [[[(0,), (1,)], []], [[(0,), (1,), (2,)], [(2,)]]])
def test_a_schedule_that_loses_or_repeats_a_document_is_refused(bench, ranks):
    parts = [[bench.Part(documents, 1) for documents in own] for own in ranks]
    with pytest.raises(ConfigError, match="1 of 3 documents not once"):
        bench.check("theirs", parts, 3)
    whole = [[bench.Part((0, 1), 1)], [bench.Part((2,), 1)]]
    bench.check("theirs", whole, 3)


def test_bench_upstream_compares_megatrons_scheduler_with_ours():
    done = run(CORE, LAYOUT, SHORT)
    assert done.returncode == 0, done.stderr
    rows = {row["packing"]: row for row in json.loads(done.stdout)["rows"]}
    assert next(iter(rows)) == "original" and rows["original"]["speed"] == pytest.approx(1)
    hybrid = rows["hybrid-context-parallel"]
    assert hybrid["delay_steps"] == 0 and hybrid["speed"] > 0 and hybrid["plan_ms"] > 0
    # Work is counted alike for all, so rates are as speeds.
    for row in rows.values():
        rate = row["speed"] * rows["original"]["tflops"]
        assert row["tflops"] == pytest.approx(rate, rel=1e-9)


def test_bench_upstream_refuses_a_checkout_without_packings(tmp_path):
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/__init__.py").touch()
    done = run(tmp_path, LAYOUT, SHORT)
    assert done.returncode != 0 and "branch main or dev" in done.stderr
    assert "Traceback" not in done.stderr
