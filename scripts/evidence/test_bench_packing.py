"""The benchmark runs and says what it should; its figures are not judged here."""

import json
from functools import partial

import pytest
from _running import run_script

run = partial(run_script, "bench_packing.py")
COMMON = {"packing", "num_micro_batches", "max_windows", "documents"}


@pytest.mark.parametrize(
    ("arguments", "columns"),
    [
        (
            ["balance", "--steps", "6", "--num-micro-batches", "4", "--seeds", "7"],
            {"imbalance_mean", "imbalance_time_weighted", "imbalance_p95", "imbalance_worst",
             "delay_mean", "delay_p99", "delay_max", "tokens_cv", "padding"},
        ),
        (
            ["speed", "--repeats", "1", "--num-micro-batches", "4", "--look-ahead", "1",
             "--distribution", "slimpack"],
            {"ms_per_step", "ms_per_step_median", "ms_per_1000", "peak_bytes",
             "documents_per_step"},
        ),
        (
            ["stream", "--documents", "3000", "--num-micro-batches", "4"],
            {"tokens", "lost_tokens", "documents_run", "peak_bytes_first_tenth",
             "peak_bytes_last_tenth", "peak_bytes"},
        ),
    ],
    ids=["balance", "speed", "stream"],
)  # fmt: skip
def test_bench_packing_prints_its_figures(arguments, columns):
    done = run(*arguments, "--packing", "hold", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert rows
    for row in rows:
        assert row.keys() >= COMMON | columns
        assert row["packing"] == "hold"
        assert row.get("lost_tokens", 0) == 0
        assert row["documents"] > 100
    assert "hold" in done.stderr  # the table


def test_bench_packing_draws_growth_over_n(tmp_path):
    plot = tmp_path / "speed.png"
    done = run(
        "speed", "--packing", "hold", "--repeats", 1, "--num-micro-batches", 4, 8,
        "--distribution", "slimpack", "--look-ahead", 0, 1, "--plot", plot, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(done.stdout)["rows"]
    names = [(row["look_ahead"], row["num_micro_batches"]) for row in rows]
    assert names == [(0, 4), (0, 8), (1, 4), (1, 8)]
    assert ["growth" in row for row in rows] == [False, True] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speed.png"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("stream --documents 10 --max-windows 0.5",
         "error: max_tokens (S_max) 65536 is below the window"),
        ("balance --num-micro-batches 5",
         "error: no set-up has such a packing and N; give N of [4, 16, 64]"),
    ],
)  # fmt: skip
def test_bench_packing_says_what_is_wrong_in_one_line(words, error):
    done = run(words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(error)
