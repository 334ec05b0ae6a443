"""Every command that advises says the same of one corpus, one recipe and one layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.index import write_index

from megatron_wlb.cli.main import main
from megatron_wlb.cli.plan import HEADROOM

RECIPE = """
TEST_TYPE: release
ENV_VARS:
  NUM_NODES: 2
  GPUS_PER_NODE: 8
MODEL_ARGS:
  --num-layers: 16
  --hidden-size: 2048
  --ffn-hidden-size: 5504
  --num-attention-heads: 16
  --normalization: RMSNorm
  --swiglu: true
  --disable-bias-linear: true
  --untie-embeddings-and-output-weights: true
  --position-embedding-type: rope
  --tensor-model-parallel-size: 2
  --sequence-parallel: true
  --pipeline-model-parallel-size: 4
  --use-distributed-optimizer: true
  --overlap-grad-reduce: true
  --seq-length: 8192
  --max-position-embeddings: 8192
  --micro-batch-size: 1
  --global-batch-size: 16
  --hidden-dropout: 0.0
  --attention-dropout: 0.0
  --bf16: true
  --vocab-size: 1024
  --data-path: corpus
  --split: 100,0,0
  --train-iters: 10
  --lr: 1.0e-4
  --wlb-packing: hold
"""
BOTH = ("corpus", "--model", "recipe.yaml", "--packing", "original,hold", "--steps", "40")
LAYOUT = "--tp-size 2 --cp-size 1 --pp-size 4 --vpp-size 1 --dp-size 2 --recompute none"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lengths = np.random.default_rng(1).lognormal(7.2, 1.7, 3000).astype(int).clip(1, 40_000)
    write_index("corpus", lengths.tolist())
    Path("recipe.yaml").write_text(RECIPE)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_commands_say_the_same_gain(capsys: pytest.CaptureFixture[str]) -> None:
    """They fill queues over 10 to 50 steps before 40 that count, so they see other documents."""
    packed = said(capsys, "pack", *BOTH)["rows"]
    simulated = said(capsys, "simulate", *BOTH, "--num-seeds", "1")["rows"]
    tuned = said(capsys, "tune", *BOTH[:4], "hold", *BOTH[5:])["defaults"]
    layout = ("--num-devices", "16", "--num-micro-batches", "16", *LAYOUT.split())
    planned = said(capsys, "plan", *BOTH, *layout)["ranked"]
    forecast = said(capsys, "recipe", "run", "recipe.yaml", "--dry-run")
    assert all(row["stage_layers"] is None for row in planned)
    (of_plan,) = (
        row["speedup"] for row in planned if (row["packing"], row["max_tokens"]) == ("hold", 16384)
    )
    gains = [packed[1]["work_speedup"], simulated[1]["speedup"], tuned[0]["work_speedup"]]
    gains += [of_plan, forecast["speedup"]]
    assert max(gains) / min(gains) < 1.02, gains
    assert min(gains) > 1.03, gains
    assert {forecast["dp_size"], planned[0]["dp_size"]} == {2}


def test_s_max_is_what_fits_wherever_the_layout_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = RECIPE.replace("16\n  --hidden-size: 2048", "64\n  --hidden-size: 8192")
    text = text.replace("--seq-length: 8192", "--seq-length: 65536")
    Path("recipe.yaml").write_text(text.replace("--max-position-embeddings: 8192", ""))
    given = ("--model", "recipe.yaml", "--dp-size", "16", "--distribution", "reference")
    steps = ("--packing", "original,hold", "--steps", "3", "--hardware", "h200")
    found = {}
    for command in (("pack",), ("simulate", "--num-seeds", "1")):
        rows = said(capsys, *command, *given, *steps)["rows"]
        (found[command[0]],) = (row["max_tokens"] for row in rows if row["packing"] == "hold")
    assert found["pack"] == found["simulate"] and 65536 <= found["pack"] < 2 * 65536


def test_flags_of_a_recipe_count_unless_others_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = "--wlb-max-tokens: 12288\n  --wlb-hardware: a100\n  --wlb-memory-gib: 50\n  --seq-length"
    Path("recipe.yaml").write_text(RECIPE.replace("--seq-length", ours))
    short = ("corpus", "--model", "recipe.yaml", "--packing", "hold", "--steps", "3")
    for command in (("pack",), ("simulate", "--num-seeds", "1")):
        rows = said(capsys, *command, *short)["rows"]
        assert {row["max_tokens"] for row in rows if row["packing"] == "hold"} == {12288}
        rows = said(capsys, *command, *short, "--max-windows", "2")["rows"]
        assert {row["max_tokens"] for row in rows if row["packing"] == "hold"} == {16384}
    layout = ("--num-devices", "16", "--num-micro-batches", "16", *LAYOUT.split())
    others = ("--hardware", "h100-sxm", "--memory-gib", "60")
    for command, share in ((("simulate", *short), 1.0), (("plan", *short, *layout), 1 - HEADROOM)):
        for more, machine, gib in (((), "16 × a100", 50), (others, "16 × h100-sxm", 60)):
            assert main([*command, *more]) == 0
            out = " ".join(capsys.readouterr().out.split())
            assert machine in out and f"{share * gib:.1f} GiB" in out
