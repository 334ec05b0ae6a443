"""Some recipes of Megatron-LM, trained small by ``scripts/run_recipes.py``, against one process.

All of them take half an hour; these differ in what the layout does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.layouts import further

PATH = os.environ.get("MEGATRON_LM_PATH")
SCRIPT = Path(__file__).parents[2] / "scripts" / "run_recipes.py"
RECIPES = {
    # Name: layout, and a flag that the small run keeps.
    "gpt3_mcore_te_tp1_pp4_vp1": ("PP4", "--num-layers-per-virtual-pipeline-stage"),
    "gpt3_mcore_te_tp2_pp1_cp2_nondeterministic": ("TP2 CP2", "--sequence-parallel"),
    "gpt3_mcore_te_tp1_pp1_uniform_full_recompute": ("DP4", "--recompute-granularity"),
}
FURTHER = {
    "gpt3_mcore_te_tp2_pp2": ("TP2 PP2", "--deterministic-mode"),
    "gpt3_mcore_te_tp4_pp1_dist_optimizer_overlap_grad_reduce_param_gather": (
        "TP4", "--overlap-param-gather",
    ),
}  # fmt: skip
DEEPSEEK = "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph"
"""Experts, and a layer that predicts further ahead, in a chunk that has no other layer."""
pytestmark = [pytest.mark.launcher, pytest.mark.checkout]


def run(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(PATH), "--out", str(out), *words],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def outcomes(out: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(out.read_text())["recipes"]
    return found


@pytest.mark.parametrize("recipes", [RECIPES, further(FURTHER)], ids=["some", "further"])
def test_recipes_equal_one_process(recipes: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = run(out, "--only", *recipes)
    found = outcomes(out)
    assert found.keys() == recipes.keys(), done.stderr
    for name, (layout, flag) in recipes.items():
        one = found[name]
        assert one["status"] == "equal", (one["why"], one["tail"])
        assert one["layout"] == layout and flag in one["command"]
        assert len(one["steps"]) == 3
        # It learns, so that a step depends on the gradients of those before.
        assert one["steps"][0]["loss"] != one["steps"][1]["loss"]
    assert done.returncode == 0
    n = len(recipes)
    said = f"{n} of {n} recipes train; {n} are accepted, {n} fit, {n} ran, {n} equal one process"
    assert said in done.stdout


def test_recipe_like_deepseek_equals_one_process(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = run(out, "--kind", "moe", "--only", DEEPSEEK)
    (one,) = outcomes(out).values()
    assert one["status"] == "equal", (done.stderr, one["why"], one["tail"])
    assert one["layout"] == "TP2 PP2" and "Et|(tt|)*6mL" in one["command"]
    assert {"--mtp-num-layers", "--num-experts"} <= {*one["command"]}
    assert one["steps"][0]["loss"] != one["steps"][1]["loss"]


@pytest.mark.parametrize("spoil", ["document", further("weight")])
def test_a_run_that_is_wrong_does_not_equal_one_process(spoil: str, tmp_path: Path) -> None:
    """Negative control: one document is left out of each step, or one weight is another."""
    out = tmp_path / "results.json"
    done = run(out, "--only", "gpt3_mcore_te_tp2_pp2", "--spoil", spoil)
    (one,) = outcomes(out).values()
    assert one["status"] == "unequal", (done.stderr, one["tail"])
    assert [line.partition(" ")[0] for line in one["why"]][:1] == ["step"]
    assert all("other documents" not in line for line in one["why"])
    assert {line.split(":")[0] for line in one["why"]} == {"step 1", "step 2", "step 3"}
    assert done.returncode == 1


def test_a_name_that_no_recipe_has_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path / "results.json", "--only", "no-such")
    assert done.returncode == 2 and done.stderr.startswith("error: --only no-such is no recipe's")
