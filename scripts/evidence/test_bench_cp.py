"""The benchmark runs and says what it should; its figures are not judged here."""

import json

import pytest
from _running import run_script

SHARDINGS = {
    "per-sequence", "per-document", "per-document-remainder", "adaptive", "hybrid", "best-of",
}  # fmt: skip
SMALL = "--device cpu --small --models 70B --windows 32768 --cp 2 4 --micro-batches 2 --repeats 1"


def bench(*arguments):
    return run_script("bench_cp.py", *arguments, OMP_NUM_THREADS="1")


def check(figures):
    """One case, or all of them."""
    for name in ("exact_flop_imbalance", "latency_us", "speedup_over_per_sequence"):
        assert set(figures[name]) == SHARDINGS
    for latency in figures["latency_us"].values():
        assert set(latency) == {"forward", "backward"} and min(latency.values()) > 0
    degrees = figures["exact_flop_imbalance"]
    assert degrees["per-document"] < 1.01 < degrees["per-sequence"]
    total_us = {name: sum(us.values()) for name, us in figures["latency_us"].items()}
    for name, speedup in figures["speedup_over_per_sequence"].items():
        assert speedup == pytest.approx(total_us["per-sequence"] / total_us[name])
        assert total_us["best-of"] <= total_us[name] + 1e-6
    picked = figures["adaptive_picks_winner"]
    assert 0 <= picked <= figures["adaptive_picks_winner_or_within_1_percent"] <= 1
    assert (picked == 1) == (figures["adaptive_loss_max"] == 0)


def test_bench_cp_prints_its_figures(tmp_path):
    plot = tmp_path / "cp.png"
    done = bench(SMALL, "--profile-repeats", "1", "--json", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    check(figures)
    assert [(c["model"], c["window"], c["cp"]) for c in figures["cases"]] == [
        ("70B", 2048, 2),
        ("70B", 2048, 4),
    ]
    for case in figures["cases"]:
        check(case)
        assert case["num_micro_batches"] == 2
    assert figures["profiles"]["70B"]["kernel"] == "torch-cpu"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "per-document-remainder" in done.stderr  # the table


def test_bench_cp_models_full_size_without_measuring():
    done = bench("--modelled", "--models", "7B", "--micro-batches", "3", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [case["window"] for case in figures["cases"]] == 3 * [65536] + 3 * [131072]
    assert figures["profiles"] == {} and not figures["clock"]
    assert "modelled" in done.stderr and "measured" not in done.stderr
    for case in figures["cases"]:
        check(case)
        # What is chosen by the very model that judges it is the best of what is chosen from.
        assert case["adaptive_picks_winner"] == 1
        assert case["predicted_over_measured"] == pytest.approx(1)
        speedup = case["speedup_over_per_sequence"]
        assert speedup["hybrid"] >= speedup["adaptive"] >= speedup["per-document"] > 1


def test_bench_cp_says_what_is_wrong_in_one_line(tmp_path):
    done = bench("--device", "cpu")
    assert (
        done.returncode == 2
        and done.stderr == "error: a CPU would take days at full size; add --small, or --modelled\n"
    )
    done = bench(SMALL, "--profile", "cpu")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --profile cpu has no table of 8/1x32 in float32")
