"""The script that puts samples through the planners of RL trainers, without their checkouts."""

import importlib
import json
from functools import partial

import pytest
from _running import run_script

from megatron_wlb.errors import ConfigError

run = partial(run_script, "arena.py")
SHORT = "--samples 24 --seeds 1 --cap 65536 --json"


def test_ours_is_within_the_cap_and_slices_are_faster_in_a_pipeline():
    rows = json.loads(run(SHORT).stdout)["rows"]
    assert len(rows) == 18 and not any(row["over_cap"] for row in rows)
    by_name = {(row["layout"], row["planner"], row["kernel_us"]): row["ratio"] for row in rows}
    for kernel_us in (5.0, 10.288, 15.0):
        assert by_name["PP 1, DP 8", "ours, whole", kernel_us] == 1
        assert by_name["PP 4, DP 4", "ours, slices", kernel_us] < 0.95


@pytest.mark.parametrize(
    "name", ["slime", "verl", "nemo-rl", "megatron", "prime-rl", "torchtitan", "distca"]
)
def test_a_folder_that_is_no_checkout_is_told(name, tmp_path):
    found = run(f"--{name} {tmp_path}")
    assert found.returncode == 2 and "give a checkout of" in found.stderr


@pytest.mark.parametrize("schedule", [[[[0], [1]]], [[[0, 1], [2]], [[2]]]])
def test_a_schedule_that_loses_or_repeats_a_sample_is_refused(schedule):
    with pytest.raises(ConfigError, match="each of 3 samples once"):
        importlib.import_module("arena").check("theirs", schedule, [5, 6, 7])
